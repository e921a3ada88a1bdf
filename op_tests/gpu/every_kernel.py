"""Calls every op with kernels of sm_90 at small shapes, for each dtype, form and configuration.

What ``sanitize.py`` runs, one part in each process:

    PYTHONPATH=src HIPFORGE_DEVICE=cuda python op_tests/gpu/every_kernel.py [--missing] [--seconds N] [PART...]

With ``--missing`` it ends with an error that names the kernels of the modules which no call has launched.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from helpers.peer_parts import deliver

import hipforge
from gpu import (
    record,
    test_fp8_skinny_gemm,
    test_mxfp4_gemm,
    test_mxfp4_grouped_gemm,
    test_mxfp8_gemm,
    test_mxfp8_grouped_gemm,
)
from hipforge.jit import demangle, obtain
from hipforge.nn import Peers
from hipforge.ops import summed_linear
from hipforge.ops.argmax import argmax_of_ranks
from hipforge.ops.decode_attention.kernels import HEAD_DIMS
from hipforge.ops.mxfp8_gemm.kernels import row_stream_made
from hipforge.ops.mxfp8_gemm.kernels.half_tiles import HALF_TILES
from hipforge.ops.mxfp8_gemm.kernels.ring_tiles import RING_TILES
from hipforge.ops.mxfp8_grouped_gemm import token
from hipforge.ops.mxfp8_grouped_gemm.kernels import pass_stream, row_stream, tile_stream, tiles
from hipforge.ops.norm_router import residual_rms_mxfp8_router
from hipforge.ops.reference import quantize_kv_int4
from hipforge.ops.reference.attention import quantize_kv_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = (torch.float16, torch.bfloat16)
FORMS: tuple[dict[str, Any], ...] = ({}, {"out_format": "blocks"}, {"out_format": "blocks", "e8m0": True})


def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def in_sixteens(x: torch.Tensor) -> torch.Tensor:
    """Return x in an allocation of whole 16 bytes.

    The row stream's last copy of scales reads fewer than 16 bytes (``cp.async`` with a size); memcheck counts all.
    """
    whole = torch.zeros(-(-x.nbytes // 16) * 16, dtype=torch.uint8, device=x.device)
    return whole[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def norms(dtype: torch.dtype) -> None:
    scale = torch.full((), 0.5, device=DEVICE)
    # The last two exceed shared memory, and with them SwiGLU has enough elements for large blocks.
    for columns in (64, 96, 4096 + 8, 17, 17000, 17001, 131072, 131073):
        x, weight = rows(dtype, 5, columns), rows(dtype, columns)
        hipforge.rms_norm(x, weight, 1e-6)
        hipforge.rms_norm_fp8(x, weight, 1e-6, scale, also_out=torch.empty_like(x))
        hipforge.residual_rms(x, x.clone(), weight, 1e-6, scale)
        if columns % 32 == 0:
            for each in (x, rows(dtype, 5 * columns + 1)[1:].view(5, -1)):
                hipforge.rms_norm_mxfp8(each, weight, 1e-6)
            hipforge.residual_rms_mxfp8(x, x.clone(), weight, 1e-6)
        for form in FORMS:
            hipforge.rms_norm_fp8_dynamic(x, weight, 1e-6, **form)
            hipforge.residual_rms_fp8_dynamic(x, x.clone(), weight, 1e-6, also_out=torch.empty_like(x), **form)
        for interleaved in (False, True):
            gate_up = rows(dtype, 5, 2 * columns)
            hipforge.swiglu_fp8(gate_up, scale, interleaved=interleaved)
            if columns % 32 == 0:
                unaligned = rows(dtype, 10 * columns + 1)[1:].view(5, -1)
                for each in (gate_up, unaligned):
                    hipforge.swiglu_mxfp8(each, interleaved=interleaved, alpha=1.7, beta=1.0, limit=7.0)
            for form in FORMS:
                hipforge.swiglu_fp8_dynamic(gate_up, interleaved=interleaved, **form)


def sums(dtype: torch.dtype) -> None:
    """Calls of one rank, for which the others' parts are there already."""
    for ranks, columns in itertools.product((1, 2, 3, 4, 5, 8), (96, 4096, 8192, 16384)):
        parts, weight = [rows(dtype, 2, columns) for _ in range(ranks)], rows(dtype, columns)
        own = Peers.on_one_device(ranks, 3, columns, DEVICE)[ranks // 2]
        norms = hipforge.all_reduce_residual_rms, hipforge.all_reduce_residual_rms_mxfp8
        for number, op in enumerate((hipforge.all_reduce, *norms), 1):
            for sender, part in enumerate(parts):
                if sender != own.rank:
                    deliver(own, sender, part, number)
            more = () if op is hipforge.all_reduce else (parts[0].clone(), weight, 1e-6)
            op(parts[own.rank], *more, *own)


def quantisers(dtype: torch.dtype) -> None:
    for transpose, codes in itertools.product((False, True), (torch.float8_e4m3fn, torch.float8_e5m2)):
        hipforge.fp8_quant_tensorwise(rows(dtype, 70, 130), codes, transpose=transpose)
    for columns in (192, 8192 + 64, 20000):
        x = rows(dtype, 16, columns)
        hipforge.mxfp8_quantize(x)
        hipforge.fp8_quant_rows(x)
        hipforge.fp8_quant_blocks(x)
        hipforge.mxfp4_quantize(x)
    for given in ({}, {"shuffled": True}):
        hipforge.mxfp4_quantize(rows(dtype, 16, 192), **given)


def routing(dtype: torch.dtype) -> None:
    for experts in (8, 64, 128, 200, 512):
        for tokens in (9, 300):
            logits = rows(dtype, tokens, experts)
            weights, ids = hipforge.topk_gating(logits, 4)
            bias = torch.randn(experts, device=DEVICE)
            hipforge.topk_gating(logits, 4, scoring="sigmoid", bias=bias, groups=4, topk_groups=2)
            hipforge.moe_align_block_size(ids, 16, experts)
            for columns in (264, 263):
                hipforge.moe_combine(rows(dtype, tokens * 4, columns), weights, ids, top_k=4)
    for tokens in (1, 7, 40, 140, 300):
        for columns in (5, 1003, 40001):
            hipforge.argmax(rows(dtype, tokens, columns))
            argmax_of_ranks(rows(dtype, tokens, columns), Peers.alone(tokens, 8, DEVICE))
        for weight in (torch.float32, torch.bfloat16):
            hipforge.router_gemm(rows(dtype, tokens, 520), rows(weight, 30, 520))


def rotation(dtype: torch.dtype) -> None:
    for dim in (64, 128, 256):
        q, k, v = rows(dtype, 6, 4, dim), rows(dtype, 6, 2, dim), rows(dtype, 6, 2, dim)
        positions = torch.arange(6, device=DEVICE)
        slots = torch.tensor([0, 5, -1, 17, 30, 31], device=DEVICE)
        for style, turned in (("neox", dim), ("neox", dim // 2), ("interleaved", dim), ("interleaved", dim // 2)):
            angles = torch.randn(32, turned, device=DEVICE)
            store = partial(hipforge.rope_and_cache, q, k, v, angles, positions)
            caches = [torch.zeros(2, 16, 2, dim, device=DEVICE, dtype=dtype) for _ in range(2)]
            store(*caches, slots, style=style, q_weight=rows(dtype, dim))
            for kind in (dtype, torch.float8_e4m3fn):
                index = {"index_q": rows(dtype, 6, 4, dim), "index_k": rows(dtype, 6, 1, dim)}
                index_cache = torch.zeros(2, 16, dim, device=DEVICE).to(kind)
                store(*caches, slots, style=style, **index, index_cache=index_cache)
            codes = [cache.to(torch.float8_e4m3fn) for cache in caches]
            store(*codes, slots, style=style, k_scale=0.5, v_scale=0.5)
            words = [torch.zeros(2, 16, 2, device=DEVICE, dtype=torch.int32) for _ in range(2)]
            store(*codes, slots, style=style, k_scale_shift=words[0], v_scale_shift=words[1])
            packed = [torch.zeros(2, 16, 2, 4 + dim // 8, device=DEVICE, dtype=torch.int32) for _ in range(2)]
            store(*packed, slots, style=style, num_groups=4)


def products() -> None:
    for n, k in ((200, 640), (77, 288)):
        w, w_scale = hipforge.mxfp8_quantize(rows(torch.bfloat16, n, k))
        w_scale = in_sixteens(w_scale)
        for m in (1, 3, 8, 13, 20, 33, 70, 200):
            hipforge.mxfp8_linear(*hipforge.mxfp8_quantize(rows(torch.bfloat16, m, k)), w, w_scale)
        w, w_scale = hipforge.mxfp4_quantize(rows(torch.bfloat16, n, k))
        w_scale = in_sixteens(w_scale)
        b, scale = rows(torch.float32, n, k).to(torch.float8_e4m3fn).t(), torch.ones(1, device=DEVICE)
        for m in (1, 9, 20):
            x = rows(torch.bfloat16, m, k)
            hipforge.mxfp4_linear(*hipforge.mxfp4_quantize(x), w, w_scale)
            hipforge.mxfp4_linear(x, None, w, w_scale)
            hipforge.skinny_gemm(x.to(torch.float8_e4m3fn), b, scale)


def configurations(kernel: str, **chosen: int) -> None:
    """Every configuration of a dense kernel that has the values of ``chosen``; with a bias and without, any K."""
    shapes = [((13, 200, 1024), None), ((3, 77, 288), rows(torch.bfloat16, 77))]
    if kernel == "row_stream":  # up to 4 rows have a kernel of their own
        shapes += [((7, 77, 288), None), ((3, 200, 1024), None)]
    for shape, bias in shapes:
        *others, w_scale = test_mxfp8_gemm.operands(*shape)
        for _ in test_mxfp8_gemm.runs(kernel, [*others, in_sixteens(w_scale)], bias, **chosen):
            pass


def ring_tiles(tile: int) -> None:
    """Every configuration of a tile; rows that one block of threads reads in two turns, and in more than it keeps."""
    configurations("ring_tiles", tile=tile)
    for k in (16384, 32768):
        test_mxfp8_gemm.mxfp8_ring_tiles(*test_mxfp8_gemm.operands(2, 16, k), tile=tile, k_splits=8, shared=1)


def half_tiles(tile: int) -> None:
    """Every configuration of a tile; scales that f16 holds beside each other, and others."""
    configurations("half_tiles", tile=tile)
    x, xs, w, ws = test_mxfp8_gemm.operands(70, 130, 1024)
    xs[3, 5] = ws[100, 9] = 70
    for _ in test_mxfp8_gemm.runs("half_tiles", [x, xs, w, in_sixteens(ws)], tile=tile):
        pass


def ends(configurations: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return the first and the last configuration of each kernel: racecheck keeps 0.4 GB for each launch."""
    of_kernel = itertools.groupby(configurations, lambda given: (given["rows"], given["tiles"]))
    return [one for _, group in of_kernel for own in (list(group),) for one in (own[0], own[-1])]


def mxfp4(bits: int) -> None:
    """Every MXFP4 kernel for activations of so many bits, with the fewest and the most that share K."""
    for shape, high in (((13, 200, 1024), 140), ((3, 77, 288), 129)):  # scales that are usual, and others
        *others, w_scale = test_mxfp4_gemm.operands(bits, *shape, 118, high)
        for _ in test_mxfp4_gemm.runs([*others, in_sixteens(w_scale)], ends):
            pass


def skinny() -> None:
    """Every configuration of the skinny fp8 kernel, written and added."""
    for shape in ((13, 200, 1024), (3, 77, 288)):
        parts = test_fp8_skinny_gemm.operands(*shape)
        for output in (None, rows(torch.float16, *shape[:2])):
            for _ in test_fp8_skinny_gemm.runs(*parts, output):
                pass


def made() -> None:
    """Every configuration of the products that make their activations, every one of one token's experts and router."""
    weight, w = rows(torch.bfloat16, 512), hipforge.mxfp8_quantize(rows(torch.bfloat16, 77, 512))
    experts = [part.view(7, 11, -1) for part in w]
    ids, routing = torch.tensor([6, 0, 2], device=DEVICE, dtype=torch.int32), torch.rand(3, device=DEVICE)
    for sharers in (1, 2, 4):
        end = row_stream_made.TILES, sharers, 7, False
        for m in (1, 2):
            x, out = rows(torch.bfloat16, m, 512), rows(torch.bfloat16, m, 77)
            parts = out, torch.empty_like(x), x, x.clone(), weight
            row_stream_made.mxfp8_row_stream_norm_out(*parts, *w, None, 1e-6, 0.0, *end)
            gate_up = rows(torch.bfloat16, m, 1024)
            row_stream_made.mxfp8_row_stream_swiglu_out(out, gate_up, *w, None, 1.0, 0.0, torch.inf, *end)
        for m in (1, 5):
            x, out = rows(torch.bfloat16, m, 512), rows(torch.bfloat16, m, 77)
            row_stream_made.mxfp8_row_copied_out(out, *hipforge.mxfp8_quantize(x), *w, None, *end)
        for tiles_of_w in token.TILES:
            end = tiles_of_w, sharers, 7, False
            x, out = hipforge.mxfp8_quantize(rows(torch.bfloat16, 1, 512)), rows(torch.bfloat16, 3, 11)
            token.mxfp8_token_gate_up_out(out, *x, *experts, ids, *end)
            gate_up, out = rows(torch.bfloat16, 3, 1024), rows(torch.bfloat16, 1, 11)
            token.mxfp8_token_down_out(out, gate_up, *experts, ids, routing, 1.0, 0.0, torch.inf, *end)
    logits, choice = torch.randn(1, 6, device=DEVICE), (2, 1, False, True, 1.0)
    for k, sharers in ((128, 1), (512, 2), (768, 2), (1024, 4), (3072, 8), (4096, 16)):
        end = sharers, 7, False
        n = 16 * 7 * 4  # four tiles of a block: more than the ring of a team has under way
        experts = [part.view(7, n, -1) for part in hipforge.mxfp8_quantize(rows(torch.bfloat16, 7 * n, k))]
        x, inner = hipforge.mxfp8_quantize(rows(torch.bfloat16, 1, k)), rows(torch.float32, 3, n // 2)
        plain = 1.0, 0.0, torch.inf
        token.mxfp8_token_gate_up_passes_out(inner, *x, *experts, ids, *plain, *end)
        token.mxfp8_token_choose_gate_up_out(inner, ids, *x, *experts, logits, None, *plain, *choice, *end)
        out = rows(torch.bfloat16, 1, n)
        for given in (rows(torch.bfloat16, 3, 2 * k), rows(torch.float32, 3, k)):
            token.mxfp8_token_down_passes_out(out, given, *experts, ids, routing, *plain, *end)
        token.mxfp8_token_choose_down_out(out, given, *experts, ids, logits, None, *choice, *end)
    for hidden in (1024, 3072):
        x, router, weight = (rows(torch.bfloat16, *size, hidden) for size in ((1,), (9,), ()))
        for w in (router, router.float()):
            residual_rms_mxfp8_router(x, x.clone(), weight, 1e-6, w)


def made_of_sums() -> None:
    """The products around a sum over GPUs, of one rank."""
    w, square = (hipforge.mxfp8_quantize(rows(torch.bfloat16, n, 512)) for n in (77, 512))
    for m in (1, 2):
        own = Peers.on_one_device(1, m, 512, DEVICE)[0]
        residual, weight = rows(torch.bfloat16, m, 512), rows(torch.bfloat16, 512)
        for bias in (None, weight):
            x = hipforge.mxfp8_quantize(rows(torch.bfloat16, m, 512))
            summed_linear.send_mxfp8_linear(*x, *square, own, bias)
            summed_linear.send_swiglu_mxfp8_linear(rows(torch.bfloat16, m, 1024), *square, own, bias)
            summed_linear.summed_rms_mxfp8_linear(own, residual, weight, 1e-6, *w)


def experts() -> None:
    hidden, inner, count = 256, 128, 8
    first, second = rows(torch.bfloat16, count * 2 * inner, hidden), rows(torch.bfloat16, count * hidden, inner)
    w1, w2 = hipforge.mxfp8_quantize(first), hipforge.mxfp8_quantize(second)
    weights = [part.view(count, -1, part.shape[1]) for part in (*w1, *w2)]
    for tokens in (1, 5, 40, 300):
        chosen = hipforge.topk_gating(rows(torch.float32, tokens, count), 2)
        hipforge.fused_moe_mxfp8(rows(torch.bfloat16, tokens, hidden), *weights, *chosen)


def grouped_calls(
    shapes: Sequence[tuple[int, ...]], configurations: Sequence[dict[str, int]]
) -> Iterator[tuple[Any, ...]]:
    """Run configurations of grouped kernels; yield the operands of gate and up with SwiGLU, both layouts of rows."""
    for of in (test_mxfp8_grouped_gemm.case(*shape) for shape in shapes):
        bias, weights = torch.randn(of.w.shape[:2], device=DEVICE), torch.rand(of.slots, device=DEVICE)
        for given in ((None, None), (bias, weights)):
            for _ in test_mxfp8_grouped_gemm.runs(of, *given, configurations):
                pass
        n, k = of.w.shape[1:]
        sizes = len(of.w), n, k, of.slots, of.a.shape[0], of.a_div, of.block_m
        out = torch.empty(of.slots, n // 2, device=DEVICE, dtype=torch.float8_e4m3fn)
        scales = torch.empty(of.slots, n // 64, device=DEVICE, dtype=torch.uint8)
        for interleaved in (False, True):
            yield out, scales, *of.operands, bias, *sizes, 1.702, 1.0, 7.0, interleaved


def grouped() -> None:
    """Every configuration of the grouped kernels but one, and of those with SwiGLU."""
    kernels = test_mxfp8_grouped_gemm
    shapes = (5, 3, 7, 192, 1024), (40, 2, 3, 64, 288), (5, 2, 3, 64, 3072)
    for operands in grouped_calls(shapes, (*kernels.PASSES, *kernels.STREAMS, *kernels.TILED)):
        k = operands[4].shape[-1]
        for count in row_stream.ROWS:
            row_stream.launch_gate_up(*operands, rows=count, blocks=132)
        for slots in tiles.SLOTS:
            tiles.launch_gate_up(*operands, slots=slots)
        for count in row_stream.SHARERS:
            if count >= pass_stream.GATE_UP_SHARERS and pass_stream.steps_refusal(k, count) is None:
                pass_stream.launch_gate_up(*operands, sharers=count, blocks=132)


def tile_stream_calls() -> None:
    """Every configuration of the grouped kernel that streams tiles, with groups of each number of columns."""
    shapes = (5, 3, 7, 192, 1024), (150, 2, 3, 64, 256), (40, 2, 2, 64, 640, 2, 16)
    for operands in grouped_calls(shapes, test_mxfp8_grouped_gemm.TILES_STREAMED):
        for slots in tile_stream.SLOTS:
            tile_stream.launch_gate_up(*operands, slots=slots, blocks=7)


def grouped4() -> None:
    """Every configuration of the grouped MXFP4 kernels, in one launch and in several."""
    for shape in ((5, 3, 7, 192, 1024), (5, 2, 3, 64, 2880), (40, 2, 3, 64, 288), (9000, 2, 3, 64, 96)):
        of = test_mxfp4_grouped_gemm.case4(*shape)
        bias, weights = torch.randn(of.w.shape[:2], device=DEVICE), torch.rand(of.slots, device=DEVICE)
        for given in ((None, None), (bias, weights)):
            for _ in test_mxfp4_grouped_gemm.runs(of, *given):
                pass
        for interleaved in (False, True):
            for _ in test_mxfp4_grouped_gemm.gate_ups(of, bias, (1.702, 1.0, 7.0, interleaved)):
                pass


def attention(dtype: torch.dtype, half: torch.dtype) -> None:
    """Attention of queries in ``half`` over a cache of a dtype: fp8 (uint8: fp8 rows with words), 16 bits, int4."""
    pages, page, heads = 12, 16, 2
    tables = torch.randperm(pages, device=DEVICE).int().view(3, 4)
    lengths = torch.tensor([1, page + 3, 4 * page - 1], device=DEVICE, dtype=torch.int32)
    for dim in HEAD_DIMS:
        values = [torch.randn(pages, page, heads, dim, device=DEVICE) for _ in range(2)]
        for group in (1, 8, 12):
            q = rows(half, 3, 1, heads * group, dim)
            if dtype in (torch.uint8, torch.int32):
                _packed(q, values, group, lengths, tables, page, groups=4 if dtype == torch.int32 else None)
                continue
            caches = [value.to(dtype) for value in values]
            for split in (None, 3, 17):  # the last is more than a cluster has blocks
                hipforge.decode_attention_fp8(q, *caches, tables, lengths, split_k=split, return_lse=True)
            hipforge.decode_attention_fp8(q, *caches, tables, lengths, out_format="mxfp8")
            sinks = torch.randn(heads * group, device=DEVICE)
            hipforge.decode_attention_fp8(q, *caches, tables, lengths, sinks=sinks, window=20, softcap=30.0)


def _packed(
    q: torch.Tensor, values: list[torch.Tensor], group: int, lengths: torch.Tensor, tables: torch.Tensor, page: int,
    groups: int | None,
) -> None:  # fmt: skip
    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, group, *x.shape[3:])

    if groups is None:
        (k, k_words), (v, v_words) = (map(wide, quantize_kv_fp8(value)) for value in values)
    else:
        k, v = (wide(quantize_kv_int4(value, groups)) for value in values)
        k_words = v_words = None
    q = q.view(1, len(q), -1, group, q.shape[-1])
    for split in (None, 3, 17):
        hipforge.decode_attention_splitk(
            q, k, v, k_words, v_words, lengths, tables, page, split_k=split, num_groups=groups
        )


def parts() -> dict[str, Callable[[], None]]:
    """Return what there is to run, by name; each takes a process of its own."""
    found: dict[str, Callable[[], None]] = {"products": products, "made": made, "experts": experts}
    found |= {"grouped": grouped, "grouped4": grouped4, "tile_stream": tile_stream_calls}
    found |= {"made_of_sums": made_of_sums}
    found |= {f"ring_tiles-{tile}": partial(ring_tiles, tile) for tile in RING_TILES.parameters["tile"]}
    found |= {f"half_tiles-{tile}": partial(half_tiles, tile) for tile in HALF_TILES.parameters["tile"]}
    found |= {kernel: partial(configurations, kernel) for kernel in ("row_stream", "span_tiles")} | {"skinny": skinny}
    found |= {f"mxfp4-{bits}": partial(mxfp4, bits) for bits in (4, 16)}
    for dtype in (*HALVES, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for call in (quantisers, routing):
            found[f"{call.__name__}-{name}"] = partial(call, dtype)
        if dtype == torch.float32:
            continue
        for call in (norms, sums, rotation):
            found[f"{call.__name__}-{name}"] = partial(call, dtype)
        caches = {"fp8": torch.float8_e4m3fn, "rows": torch.uint8, "half": dtype, "int4": torch.int32}
        found |= {f"attention-{name}-{kind}": partial(attention, cache, dtype) for kind, cache in caches.items()}
    return found


def missing(launched: set[str]) -> list[str]:
    """Return the kernels of the modules of this GPU's architecture that are not among ``launched``."""
    known = {
        demangle._demangled(symbol) or symbol: name
        for request in record.requests()
        for symbol, name in (
            (symbol, f"{request.module} {demangle.short_name(symbol)}")
            for symbol in obtain.module(request).entry.manifest.kernels
        )
    }
    sys.stdout.write(f"{len(known.keys() & launched)} of {len(known)} kernels launched\n")
    return sorted(name for symbol, name in known.items() if symbol not in launched)


def main() -> int:
    """Call what the command line names, or everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--missing", action="store_true", help="name the kernels that were not launched")
    parser.add_argument("--seconds", type=float, help="end after so long, and say in which call")
    options = parser.parse_args()
    if options.seconds:
        faulthandler.dump_traceback_later(options.seconds, exit=True)
    torch.manual_seed(0)
    known = parts()
    activities = [torch.profiler.ProfilerActivity.CUDA] if DEVICE == "cuda" else []
    with torch.profiler.profile(activities=activities) if options.missing else contextlib.nullcontext() as profile:
        for name in options.parts or known:
            began = time.monotonic()
            known[name]()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            sys.stdout.write(f"{name}: {time.monotonic() - began:.1f} s\n")
            sys.stdout.flush()
    not_launched = [] if profile is None else missing({event.key for event in profile.key_averages()})
    sys.stdout.writelines(f"not launched: {name}\n" for name in not_launched)
    return int(bool(not_launched))


if __name__ == "__main__":
    sys.exit(main())
