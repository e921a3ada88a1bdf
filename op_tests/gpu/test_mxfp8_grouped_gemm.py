"""The grouped MX-FP8 kernels of sm_90 in every configuration, beside float64. Run by ``make gpu-test``."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from helpers.errors import relative

import hipforge
from gpu.test_mxfp8_gemm import BOUND, values
from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8
from hipforge.ops.mxfp8_grouped_gemm import (
    mxfp8_grouped_pass_stream,
    mxfp8_grouped_row_stream,
    mxfp8_grouped_tile_stream,
    mxfp8_grouped_tiles,
)
from hipforge.ops.mxfp8_grouped_gemm.kernels import BY_NAME, pass_stream, row_stream, tile_stream, tiles
from hipforge.ops.mxfp8_grouped_gemm.kernels.row_stream import ROWS, SHARERS, WARPS
from hipforge.ops.mxfp8_grouped_gemm.kernels.tiles import SLOTS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or devices.current().arch_of() != "sm_90", reason="needs an sm_90 GPU"
)

STREAMS = [{"rows": rows, "sharers": sharers, "blocks": 132} for rows, sharers in itertools.product(ROWS, SHARERS)]
TILED = [{"slots": slots} for slots in SLOTS]
PASSES = [{"sharers": sharers, "blocks": 132} for sharers in SHARERS]
TILES_STREAMED = [{"slots": slots, "blocks": 132} for slots in tile_stream.SLOTS]
EVERY = *PASSES, *STREAMS, *TILED, *TILES_STREAMED


class Case(NamedTuple):
    """Operands of one grouped GEMM."""

    a: torch.Tensor
    a_scale: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor
    indices: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    slots: int
    a_div: int
    block_m: int

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.a, self.a_scale, self.w, self.w_scale, *self.indices


def payload(*shape: int) -> torch.Tensor:
    made = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
    for rows in made.view(-1, shape[-1]).split(1 << 14):  # other processes want memory too
        rows.copy_(torch.randn(rows.shape, device="cuda") * 2)
    return made


def scales(*shape: int, low: int = 118, high: int = 136) -> torch.Tensor:
    return torch.randint(low, high, shape, device="cuda", dtype=torch.uint8)


def case(tokens: int, top_k: int, experts: int, n: int, k: int, a_div: int | None = None, block_m: int = 64) -> Case:
    torch.manual_seed(tokens * 1000 + k)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
    slots, a_div = tokens * top_k, a_div or top_k
    rows = -(-slots // a_div)
    indices = hipforge.moe_align_block_size(ids, block_m, experts)
    return Case(
        payload(rows, k), scales(rows, k // 32), payload(experts, n, k), scales(experts, n, k // 32),
        indices, ids.flatten(), slots, a_div, block_m,
    )  # fmt: skip


def exact(of: Case, bias: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The product in float64, an expert at a time; slots without an expert here are zero."""
    out = torch.zeros(of.slots, of.w.shape[1], dtype=torch.float64, device="cuda")
    rows = values(of.a, of.a_scale)
    for expert in of.ids.unique().tolist():
        if not 0 <= expert < len(of.w):
            continue
        mine = (of.ids == expert).nonzero().flatten()
        product = rows[mine // of.a_div] @ values(of.w[expert], of.w_scale[expert]).T
        product = product if bias is None else product + bias[expert].double()
        out[mine] = product if weights is None else product * weights[mine, None].double()
    return out


def runs(of: Case, bias=None, weights=None, configurations=EVERY):
    """Every configuration that takes the shape, with its result, which starts as NaN."""
    key = of.slots, *of.w.shape[1:], of.a_div, int(weights is not None)
    for given in configurations:
        if BY_NAME[kernel_of(given).__name__].needs(given, key, "sm_90") is not None:
            continue
        out = torch.full((of.slots, of.w.shape[1]), float("nan"), device="cuda", dtype=torch.bfloat16)
        yield given, kernel_of(given)(*of.operands, out, of.slots, of.a_div, of.block_m, weights, bias, **given)


def kernel_of(given):
    """The raw op of a configuration."""
    if "slots" in given:
        return mxfp8_grouped_tile_stream if "blocks" in given else mxfp8_grouped_tiles
    return mxfp8_grouped_row_stream if "rows" in given else mxfp8_grouped_pass_stream


# (tokens, choices, experts, N, K): few and many slots of an expert; odd sizes; K of no whole step.
CASES = [
    (1, 8, 128, 1536, 2048), (3, 2, 5, 77, 2880), (16, 4, 32, 1000, 96), (40, 4, 6, 130, 1056), (64, 8, 16, 512, 768),
    (200, 2, 3, 48, 512), (200, 3, 4, 144, 1024, 3, 128), (100, 2, 5, 64, 384, 2, 16),
    (1200, 2, 5, 48, 256, 2, 4), (5, 3, 7, 80, 4096), (3, 8, 11, 192, 3072), (20, 4, 9, 48, 6144),
    (4, 8, 20, 256, 1536), (2, 2, 4, 32, 128),
]  # fmt: skip


@pytest.mark.parametrize("shape", CASES)
def test_every_configuration_is_within_the_bound_of_float64(shape) -> None:
    of = case(*shape)
    bias = torch.randn(of.w.shape[:2], device="cuda")
    weights = torch.rand(of.slots, device="cuda")
    for extra in ((None, None), (bias, weights)):
        want = exact(of, *extra)
        for given, got in runs(of, *extra):
            assert relative(got, want) < BOUND, given


# The tuned table's and those of Qwen3-30B-A3B (tokens, choices, experts, N, K, slots of an activation row).
MODELS = [
    (4, 4, 128, 1536, 6144, 4), (8, 1, 128, 6144, 768, 1), (4, 4, 32, 768, 6144, 4), (16, 4, 128, 1536, 6144, 4),
    (1, 8, 128, 1536, 2048, 8), (1, 8, 128, 2048, 768, 1), (8, 8, 128, 1536, 2048, 8), (8, 8, 128, 2048, 768, 1),
    (64, 8, 128, 1536, 2048, 8), (300, 8, 128, 2048, 768, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape", MODELS)
def test_the_public_op_takes_the_shapes_of_models_by_a_kernel(shape) -> None:
    of = case(*shape)
    weights = torch.rand(of.slots, device="cuda") if of.a_div == 1 else None
    given = *of.operands, of.slots, of.block_m, of.a_div, weights
    assert hipforge.explain(hipforge.grouped_mxfp8_linear, *given).path == "kernel"
    assert relative(hipforge.grouped_mxfp8_linear(*given), exact(of, weights=weights)) < BOUND


GATE_UPS = [
    (1, 8, 128, 1536, 2048), (5, 3, 7, 192, 2880), (64, 4, 8, 128, 768), (150, 2, 3, 192, 640), (3, 4, 6, 128, 4096),
    (9, 4, 5, 64, 3072),
]  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", GATE_UPS)
def test_gate_and_up_with_their_epilogue_are_those_of_two_launches(shape, interleaved) -> None:
    of = case(*shape)
    parts = of._replace(
        w_scale=scales(*of.w_scale.shape, low=110, high=122), a_scale=scales(*of.a_scale.shape, low=118, high=124)
    )
    bias = torch.randn(parts.w.shape[:2], device="cuda")
    experts, n, k = parts.w.shape
    sizes = experts, n, k, parts.slots, parts.a.shape[0], parts.a_div, parts.block_m
    for bias, alpha, beta, limit in ((None, 1.0, 0.0, None), (torch.randn(experts, n, device="cuda"), 1.702, 1.0, 7.0)):
        for given, out in runs(parts, bias):
            if "rows" in given and given["sharers"] != WARPS // 4:
                continue
            if "sharers" in given and given["sharers"] < pass_stream.GATE_UP_SHARERS:
                continue
            want_q, want_scales = hipforge.swiglu_mxfp8(
                out, alpha=alpha, beta=beta, limit=limit, interleaved=interleaved
            )
            q, q_scales = torch.empty_like(want_q), torch.empty_like(want_scales)
            operands = *parts.operands, bias, *sizes, alpha, beta, float("inf") if limit is None else limit, interleaved
            if "rows" in given:
                row_stream.launch_gate_up(q, q_scales, *operands, rows=given["rows"], blocks=given["blocks"])
            else:
                of_kernel = pass_stream if "slots" not in given else tile_stream if "blocks" in given else tiles
                of_kernel.launch_gate_up(q, q_scales, *operands, **given)
            assert torch.equal(q_scales, want_scales), given
            assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8)), given
    taken = hipforge.explain(grouped_swiglu_mxfp8, *parts.operands, parts.slots, parts.block_m, parts.a_div)
    assert taken.path == "kernel" and "gate_up" in taken.kernel


@pytest.mark.parametrize("k", [2880, 768, 4096])
def test_integers_are_exact(k: int) -> None:
    of = case(9, 2, 4, 48, k, block_m=16)
    for elements in (of.a, of.w):
        small = torch.randint(-1, 2, elements.shape, device="cuda") * (torch.rand(elements.shape, device="cuda") < 0.02)
        elements.copy_(small.to(torch.float8_e4m3fn))
    ones = of._replace(a_scale=torch.full_like(of.a_scale, 127), w_scale=torch.full_like(of.w_scale, 127))
    want = exact(ones)
    for given, got in runs(ones):
        assert torch.equal(got.double(), want), given


def test_every_scale_byte_counts_and_255_is_nan() -> None:
    of = case(4, 1, 2, 256, 512)
    of.w_scale.copy_(torch.arange(256, dtype=torch.uint8, device="cuda")[None, :, None].expand(of.w_scale.shape))
    for x_byte in (0, 1, 63, 64, 127, 190, 191, 192, 254, 255):
        of.a_scale.fill_(x_byte)
        want = exact(of)
        # Where the sum of the terms' sizes overflows, a partial sum may; below bf16's range results lose bits.
        size = exact(of._replace(a=of.a.float().abs().to(of.a.dtype), w=of.w.float().abs().to(of.w.dtype)))
        known = want.isnan() | (size < 3e38)
        fits = (size < 3e38) & (want.abs() > 1e-36)
        for given, got in runs(of):
            assert torch.equal(got.isnan()[known], want.isnan()[known]), (given, x_byte)
            assert not bool(fits.any()) or relative(got[fits], want[fits]) < BOUND, (given, x_byte)


def test_padding_skipped_tiles_and_entries_past_the_end_write_nothing() -> None:
    experts, n, k, block_m, slots = 4, 96, 256, 8, 12
    # Slots anywhere in a tile; a tile of none; experts that are not here; tiles past the end, one with a slot.
    tiles = [[5, -1, 99, 2, 12, 12, 0, 12], [12] * 8, [7, 8, 12, 12, 9, 12, 12, 12], [1, 3, 12, 12, 12, 12, 12, 12],
             [4, 12, 12, 12, 12, 12, 12, 6], [10, 11, 12, 12, 12, 12, 12, 12]]  # fmt: skip
    of_tile = [2, 1, -1, 4, 0, 3]
    sorted_ids = torch.tensor(tiles, dtype=torch.int32, device="cuda").flatten()
    expert_ids = torch.tensor(of_tile, dtype=torch.int32, device="cuda")
    padded = torch.tensor([5 * block_m], dtype=torch.int32, device="cuda")
    ids = torch.full((slots,), -1, device="cuda")
    for tile in (0, 4):
        for slot in tiles[tile]:
            if 0 <= slot < slots:
                ids[slot] = of_tile[tile]
    of = Case(payload(slots, k), scales(slots, k // 32), payload(experts, n, k), scales(experts, n, k // 32),
              (sorted_ids, expert_ids, padded), ids, slots, 1, block_m)  # fmt: skip
    want = exact(of)
    for given, got in runs(of):
        assert torch.equal(got.isnan().all(1), ids < 0), given
        assert relative(got[ids >= 0], want[ids >= 0]) < BOUND, given
    for none in (0, -5):
        padded.fill_(none)
        for given, got in runs(of):
            assert bool(got.isnan().all()), given


def test_an_expert_map_leaves_experts_of_other_ranks_out() -> None:
    tokens, top_k, width, inner, everywhere, here = 6, 4, 256, 128, 16, 5
    expert_map = torch.full((everywhere,), -1, dtype=torch.int32, device="cuda")
    expert_map[[3, 4, 8, 11, 15]] = torch.arange(here, dtype=torch.int32, device="cuda")
    w1 = hipforge.mxfp8_quantize(torch.randn(everywhere * 2 * inner, width, device="cuda") / 16)
    w2 = hipforge.mxfp8_quantize(torch.randn(everywhere * width, inner, device="cuda") / 12)
    whole = [part.view(everywhere, -1, part.shape[1]) for part in (*w1, *w2)]
    local = [part[expert_map >= 0] for part in whole]
    weights, ids = hipforge.topk_gating(torch.randn(tokens, everywhere, device="cuda"), top_k)
    x = torch.randn(tokens, width, device="cuda")
    want = hipforge.fused_moe_mxfp8(x, *whole, torch.where(expert_map[ids.long()] >= 0, weights, 0.0), ids)
    got = hipforge.fused_moe_mxfp8(x, *local, weights, ids, expert_map)
    assert relative(got, want.double()) < 1e-6


def test_results_do_not_change_from_run_to_run() -> None:
    of = case(16, 8, 64, 768, 2048)
    first = list(runs(of))
    for (given, one), (_, other) in zip(first, runs(of), strict=True):
        assert torch.equal(one, other), given


def hold_layers_in_a_graph_to_those_one_by_one(quantise, moe) -> None:
    """Layers of a kind of weights, in a graph of programmatic launches."""
    tokens, top_k, width, inner, experts = 4, 4, 512, 256, 32
    w1 = quantise(torch.randn(experts * 2 * inner, width, device="cuda") / 22)
    w2 = quantise(torch.randn(experts * width, inner, device="cuda") / 16)
    parts = [part.view(experts, -1, part.shape[1]) for part in (*w1, *w2)]
    x, logits = torch.randn(tokens, width, device="cuda").bfloat16(), torch.randn(tokens, experts, device="cuda")

    def layers() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = moe(y, *parts, *hipforge.topk_gating(logits, top_k)) * 4
        return y

    want = layers()
    graph = torch.cuda.CUDAGraph()
    with hipforge.programmatic_launch(), torch.cuda.graph(graph):
        got = layers()
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_a_layer_in_a_graph_of_programmatic_launches() -> None:
    hold_layers_in_a_graph_to_those_one_by_one(hipforge.mxfp8_quantize, hipforge.fused_moe_mxfp8)


def test_what_a_kernel_does_not_take_is_refused_before_a_launch() -> None:
    of = case(1, 1, 2, 64, 256)
    out = torch.empty(1, 64, device="cuda", dtype=torch.bfloat16)
    sizes = of.slots, of.a_div, of.block_m
    with pytest.raises(GuardError, match="sharers must be 1, 2, 4, 8 or 16; got 3"):
        mxfp8_grouped_row_stream(*of.operands, out, *sizes, rows=8, sharers=3)
    with pytest.raises(GuardError, match="N must be a multiple of 16; got 24"):
        odd = case(1, 1, 2, 24, 256)
        mxfp8_grouped_pass_stream(*odd.operands, out, *sizes)
    for k, sharers, match in (
        (2880, 16, "K must be a multiple of 128 up to 4096; got 2880"),
        (4352, 16, "K must be a multiple of 128 up to 4096; got 4352"),
        (1024, 2, "more than 3: give more sharers"),
    ):
        with pytest.raises(GuardError, match=match):
            mxfp8_grouped_pass_stream(*case(1, 1, 2, 64, k).operands, out, *sizes, sharers=sharers)
    with pytest.raises(GuardError, match="X of 48 slots with K = 4096 leaves no room for W"):
        mxfp8_grouped_tile_stream(*case(1, 1, 2, 64, 4096).operands, out, *sizes, slots=48)
    for kernel in (mxfp8_grouped_pass_stream, mxfp8_grouped_row_stream, mxfp8_grouped_tile_stream, mxfp8_grouped_tiles):
        with pytest.raises(GuardError, match="out has 32 elements; 1 slots of N = 64 columns need 64"):
            kernel(*of.operands, out[:, :32].contiguous(), *sizes)
