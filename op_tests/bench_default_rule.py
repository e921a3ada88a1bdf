"""What a GEMM's default rule loses against the best configuration, both modelled.

    python op_tests/bench_default_rule.py [--op mxfp8_gemm | mxfp4_gemm] [-m M ...] [--shapes N,K ...]

Without arguments: the MX-FP8 GEMM's rule for up to 64 rows at the 15 shapes of MiniMax-M3 with M = 1 to 64, about half
an hour. A ratio of 1 means that no configuration of the kernels that the rule chooses from is faster.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("HIPFORGE_DEVICE", "emulator")
os.environ.setdefault("HIPFORGE_EMULATE", "gfx950")

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from hipforge import archs
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.kernel import best
from hipforge.ops.mxfp4_gemm.kernels import KERNELS as MXFP4_KERNELS
from hipforge.ops.mxfp8_gemm.kernels import GEMV, KERNELS, MFMA
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, Cell, cells, parse_shape
from hipforge.tuning.families.mxfp4_gemm import TUNER as MXFP4
from hipforge.tuning.families.mxfp8_gemm import TUNER as MXFP8
from hipforge.tuning.shortlist import modelled_on_operands

ARCH = "gfx950"
CU_COUNT = archs.get(ARCH).cu_count


@dataclass(frozen=True)
class Rule:
    """A default rule: its tuner, itself, and the kernels that it chooses from."""

    tuner: Any
    choose: Callable[[Cell], Choice]
    kernels: frozenset[str]


RULES = {
    "mxfp8_gemm": Rule(
        MXFP8,
        lambda cell: best(KERNELS, cell, ARCH, CU_COUNT),
        frozenset(kernel.name for kernel in KERNELS if kernel not in (GEMV, MFMA)),
    ),
    "mxfp4_gemm": Rule(
        MXFP4,
        lambda cell: best(MXFP4_KERNELS, cell, ARCH, CU_COUNT),
        frozenset(kernel.name for kernel in MXFP4_KERNELS),
    ),
}


def regret(rule: Rule, cell: Cell) -> float:
    """Return the modelled time of the rule's choice over that of the fastest configuration; prints both."""
    modelled = modelled_on_operands(rule.tuner, cell, ARCH)
    chosen = rule.choose(cell)
    tried = [one for one in rule.tuner.candidates(cell, ARCH) if one.kernel in rule.kernels and one != chosen]
    us = modelled(chosen, cell, ARCH)[0]
    others = [(modelled(one, cell, ARCH)[0], str(one)) for one in tried]
    best, name = min([*others, (us, str(chosen))])
    print(f"{cell}: {chosen} {us:.2f} us, best {name} {best:.2f} us, ratio {us / best:.3f}", flush=True)
    return us / best


def main() -> None:
    """Print a line for each cell and the mean and largest ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=sorted(RULES), default="mxfp8_gemm", help="whose rule")
    parser.add_argument("-m", type=int, action="append", help="M; may be repeated")
    parser.add_argument("--shapes", action="append", help="N,K; may be repeated")
    given = parser.parse_args()
    shapes = [parse_shape(text) for text in given.shapes] if given.shapes else MINIMAX_M3
    found = [regret(RULES[given.op], cell) for cell in cells(shapes, given.m or DECODE_M)]
    print(json.dumps({"cells": len(found), "mean_ratio": round(mean(found), 4), "largest_ratio": round(max(found), 4)}))


if __name__ == "__main__":
    main()
