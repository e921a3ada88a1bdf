"""What the MX-FP8 GEMM's default rule for up to 64 rows loses against the best configuration, both modelled.

    python op_tests/bench_default_rule.py [-m M ...] [--shapes N,K ...]

Without arguments: the 15 shapes of MiniMax-M3 with M = 1 to 64, about half an hour. A ratio of 1 means that no
configuration of the kernels that the rule chooses from is faster.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("HIPFORGE_DEVICE", "emulator")
os.environ.setdefault("HIPFORGE_EMULATE", "gfx950")

from statistics import mean

from hipforge import archs
from hipforge.ops.mxfp8_dense import few_rows, tile_kernel
from hipforge.ops.mxfp8_dense.tuner import TUNER, WAVE_LOOP
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, Cell, cells, parse_shape
from hipforge.tuning.shortlist import modelled_on_operands

ARCH = "gfx950"


def regret(cell: Cell) -> float:
    """Return the modelled time of the rule's choice over that of the fastest configuration; prints both."""
    modelled = modelled_on_operands(TUNER, cell, ARCH)
    chosen = few_rows.default_choice(cell.m, cell.n, cell.k, archs.get(ARCH).cu_count)
    kernels = {*WAVE_LOOP, tile_kernel.KERNEL}
    tried = [one for one in TUNER.candidates(cell, ARCH) if one.kernel in kernels and one != chosen]
    us = modelled(chosen, cell, ARCH)[0]
    others = [(modelled(one, cell, ARCH)[0], str(one)) for one in tried]
    best, name = min([*others, (us, str(chosen))])
    print(f"{cell}: {chosen} {us:.2f} us, best {name} {best:.2f} us, ratio {us / best:.3f}", flush=True)
    return us / best


def main() -> None:
    """Print a line for each cell and the mean and largest ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", type=int, action="append", help="M; may be repeated")
    parser.add_argument("--shapes", action="append", help="N,K; may be repeated")
    given = parser.parse_args()
    shapes = [parse_shape(text) for text in given.shapes] if given.shapes else MINIMAX_M3
    found = [regret(cell) for cell in cells(shapes, given.m or DECODE_M)]
    print(json.dumps({"cells": len(found), "mean_ratio": round(mean(found), 4), "largest_ratio": round(max(found), 4)}))


if __name__ == "__main__":
    main()
