"""The dense MX-FP8 kernels of sm_90 in every configuration, beside float64. Run by ``make gpu-test``."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.errors import relative

import hipforge
from hipforge import devices, weights
from hipforge.errors import GuardError
from hipforge.ops.core.row_stream import SHARERS, TILES, warps
from hipforge.ops.core.tiles import tile_number
from hipforge.ops.mxfp8_gemm import (
    mxfp8_half_tiles,
    mxfp8_ring_tiles,
    mxfp8_ring_tiles_out,
    mxfp8_row_copied,
    mxfp8_row_stream,
    mxfp8_span_tiles,
)
from hipforge.ops.mxfp8_gemm.kernels import row_stream_made
from hipforge.ops.mxfp8_gemm.kernels.half_tiles import HALF_TILES
from hipforge.ops.mxfp8_gemm.kernels.ring_tiles import RING_TILES, workspace_bytes
from hipforge.ops.mxfp8_gemm.kernels.row_stream import ROWS
from hipforge.ops.mxfp8_gemm.kernels.span_tiles import SPAN, SPAN_TILES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or devices.current().arch_of() != "sm_90", reason="needs an sm_90 GPU"
)

# float32 sums and one rounding to bf16 give 1.7e-3; a wrong scale byte in one block of a K of 6,144 gives over 1e-2.
BOUND = 3e-3

STREAMS = [
    {"rows": rows, "tiles": tiles, "sharers": sharers}
    for rows, tiles, sharers in itertools.product(ROWS, TILES, SHARERS)
    if sharers <= warps(rows, tiles)
]
RINGS = [
    {"tile": tile, "k_splits": splits, "shared": shared}
    for tile, splits, shared in itertools.product(RING_TILES.parameters["tile"], (1, 3, 8), (0, 1))
]
SPANS = [
    {"rows": rows, "k_splits": splits}
    for rows, splits in itertools.product(SPAN_TILES.parameters["rows"], (1, 2, 3, 8))
]
HALVES = [
    {"tile": tile, "k_splits": splits}
    for tile, splits in itertools.product(HALF_TILES.parameters["tile"], (1, 2, 3, 8))
]
# (M, N, K): one of everything; odd sizes; K of no whole step, shorter and longer than one; several passes and rounds;
# more tiles than teams, which share the last ones.
SHAPES = [
    (1, 1, 32),
    (3, 77, 2880),
    (8, 1000, 4160),
    (5, 4800, 1024),
    (2, 77, 16384),
    (13, 2304, 6144),
    (20, 300, 96),
    (32, 640, 2048),
    (70, 513, 1024),
    (300, 700, 1120),
    (1100, 2000, 384),
    (33, 200, 4608),
    (260, 700, 1536),
]


def operands(m: int, n: int, k: int, low: int = 118, high: int = 136) -> list[torch.Tensor]:
    def payload(rows: int) -> torch.Tensor:
        return (torch.randn(rows, k, device="cuda") * 2).to(torch.float8_e4m3fn)

    def scales(rows: int) -> torch.Tensor:
        return torch.randint(low, high, (rows, k // 32), device="cuda", dtype=torch.uint8)

    return [payload(m), scales(m), payload(n), scales(n)]


def values(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    powers = torch.exp2(scales.double() - 127).masked_fill(scales == 255, float("nan"))
    return payload.view(torch.float8_e4m3fn).double() * powers.repeat_interleave(32, 1)


def exact(xq, xs, wq, ws, bias=None) -> torch.Tensor:
    product = values(xq, xs) @ values(wq, ws).T
    return product if bias is None else product + bias.double()


def runs(kernel, parts, bias=None, **chosen):
    """Every configuration of a kernel that takes the shape and has the values of ``chosen``, with its result."""
    n, k = parts[2].shape
    if kernel == "row_stream":
        for given in STREAMS:
            if given["tiles"] != 3 or k % 128 == 0:
                yield given, mxfp8_row_stream(*parts, bias, **given, blocks=min(n, 132))
    elif kernel == "row_copied":
        m = len(parts[0])
        if row_stream_made.copied_refusal(m, n, k) is None:
            for sharers in SHARERS:
                given = {"tiles": row_stream_made.TILES, "sharers": sharers, "blocks": min(n, 132)}
                yield given, mxfp8_row_copied(*parts, bias, **given)
    elif kernel == "span_tiles":
        for given in SPANS:
            if k % SPAN == 0 and given["k_splits"] <= k // SPAN:
                yield given, mxfp8_span_tiles(*parts, bias, **given)
    elif kernel == "half_tiles":
        for given in HALVES:
            if k % SPAN == 0 and given["k_splits"] <= k // 128 and chosen.items() <= given.items():
                yield given, mxfp8_half_tiles(*parts, bias, **given)
    else:
        for given in RINGS:
            if given["k_splits"] <= -(-k // 128) and chosen.items() <= given.items():
                yield given, mxfp8_ring_tiles(*parts, bias, **given)


of_every_kernel = pytest.mark.parametrize(
    "kernel", ["row_stream", "row_copied", "span_tiles", "half_tiles", "ring_tiles"]
)


@of_every_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_every_configuration_is_within_the_bound_of_float64(kernel, shape) -> None:
    parts, bias = operands(*shape), torch.randn(shape[1], device="cuda").bfloat16()
    want = exact(*parts, bias)
    # A single result may be the small difference of large terms: it is judged by their size.
    size = want if want.numel() > 1 else values(*parts[:2]).abs() @ values(*parts[2:]).abs().T + bias.double().abs()
    for given, got in runs(kernel, parts, bias):
        assert (got.double() - want).norm() < BOUND * size.norm(), given


def with_ratios(scales: torch.Tensor, blocks: int, most: int) -> torch.Tensor:
    """Scales of which ``blocks`` neighbours are one, and the others at most 2^``most`` smaller."""
    groups = torch.randint(126 - most, 127, (len(scales), -(-scales.shape[1] // blocks)), device="cuda")
    return groups.repeat_interleave(blocks, 1)[:, : scales.shape[1]].to(torch.uint8)


@pytest.mark.parametrize("tile", RING_TILES.parameters["tile"])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(("blocks", "most"), [(1, 2), (1, 7), (4, 2), (4, 20), (16, 20), (1, 60)])
def test_rows_whose_scales_are_one_for_a_part_of_k(tile, shared, blocks, most) -> None:
    parts = operands(150, 300, 2880)
    for payload, scales in (parts[:2], parts[2:]):
        payload[:, ::32] = 448.0  # a block has a large code, so that all that lie near enough take one scale
        scales.copy_(with_ratios(scales, blocks, most))
    got = mxfp8_ring_tiles(*parts, tile=tile, k_splits=2, shared=shared)
    assert relative(got, exact(*parts)) < BOUND


@pytest.mark.parametrize("k", [1024, 2880])
def test_a_weight_shared_before_gives_the_bits_of_one_that_the_call_shares(k) -> None:
    x, xs, w, ws = operands(200, 300, k)
    w[:, ::32] = 448.0
    ws.copy_(with_ratios(ws, 1, 5))
    before = mxfp8_ring_tiles(x, xs, *weights.share_scales(w, ws))
    assert torch.equal(before, mxfp8_ring_tiles(x, xs, w, ws, shared=1))


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("tile", RING_TILES.parameters["tile"])
def test_a_weight_that_the_call_shares_is_read_when_it_is_there(tile, splits) -> None:
    """The workspace starts as codes that are NaN. Rows are long and few: tiles start on multiprocessors without one."""
    m, n, k = 16, 64, 1 << 17
    parts, out = operands(m, n, k), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    want = exact(*parts)
    for _ in range(10):
        workspace = torch.full((workspace_bytes(m, n, k, tile, 1, splits),), 0x7F, dtype=torch.uint8, device="cuda")
        mxfp8_ring_tiles_out(out, *parts, None, workspace, tile, splits, 1, False)
        assert relative(out, want) < BOUND


@pytest.mark.parametrize("shared", [0, 1])
def test_a_large_block_hides_no_small_one(shared) -> None:
    # What is far below the largest block of its row is all that counts: W is zero where X is large, and X where W is.
    x, xs, w, ws = operands(40, 256, 2048, 120, 121)
    xs[:, 7], ws[:, 30] = 146, 158
    w[:, 7 * 32 : 8 * 32], x[:, 30 * 32 : 31 * 32] = 0, 0
    want = exact(x, xs, w, ws)
    for tile in RING_TILES.parameters["tile"]:
        assert relative(mxfp8_ring_tiles(x, xs, w, ws, tile=tile, shared=shared), want) < BOUND, tile
    for given, got in runs("half_tiles", [x, xs, w, ws]):
        assert relative(got, want) < BOUND, given


@pytest.mark.parametrize("below", [21, 22, 23, 24, 40, 100])
def test_blocks_far_below_the_largest_of_their_row_count_in_full(below) -> None:
    # From 22 on f16 does not hold a block beside the largest one, which is zeros here in the other operand.
    x, xs, w, ws = operands(140, 300, 1024, 127, 128)
    xs[5, 3:] -= below
    ws[::7, 20:] -= below
    w[:, : 3 * 32] = 0  # what is left of row 5 of X is small
    xs[9], x.view(torch.uint8)[9] = 0, 0  # zeros take any scale
    xs[11, 2], x.view(torch.uint8)[11, 64:96] = 0, 0
    want = exact(x, xs, w, ws)
    for given, got in runs("half_tiles", [x, xs, w, ws]):
        for part in (slice(5, 6), slice(0, 5), slice(6, 140)):
            assert relative(got[part], want[part]) < BOUND, given


def test_many_marked_steps_share_a_mark_and_each_counts_once() -> None:
    x, xs, w, ws = operands(3, 20, 128 * 132, 127, 128)
    xs[1, 7::61] -= 30
    w[:, : 6 * 32] = 0
    want = exact(x, xs, w, ws)
    for given, got in runs("half_tiles", [x, xs, w, ws]):
        assert relative(got, want) < BOUND, given


def test_a_code_that_sharing_rounds_is_off_by_a_2048th_of_its_block() -> None:
    # A column of W picks one element of X: block 0 is 2^7 above block 1, whose codes span e4m3.
    k = 128
    x = torch.zeros(64, k, device="cuda")
    x[:, :32] = 448.0
    codes = x.to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[:, 32:64] = (torch.arange(64 * 32, device="cuda").view(64, 32) % 0x78).to(torch.uint8)
    codes[:, 32] = 448.0
    xs = torch.full((64, 4), 127, dtype=torch.uint8, device="cuda")
    xs[:, 1] = 120
    w = torch.eye(k, device="cuda").to(torch.float8_e4m3fn)
    ws = torch.full((k, 4), 127, dtype=torch.uint8, device="cuda")
    want = values(codes, xs)
    got = mxfp8_ring_tiles(codes, xs, w, ws, tile=tile_number((64, 128))).double()
    off = (got - want).abs()[:, 32:64]
    largest = 448 * 2.0**-7
    assert off.max() <= largest * 2**-11
    assert off.max() > largest * 2**-13  # codes below 2 were rounded: the case is what it says
    assert torch.equal(got[:, :32], want[:, :32])


@of_every_kernel
@pytest.mark.parametrize("k", [128, 1024, 2880])
def test_integers_are_exact(kernel, k) -> None:
    # Sums below 2^8 are integers that bf16 holds: 8 products of up to 16 in each row.
    parts = operands(9, 40, k)
    for payload, scales in (parts[:2], parts[2:]):
        payload.copy_(torch.zeros_like(payload, dtype=torch.float32).to(payload.dtype))
        place = torch.randperm(k, device="cuda")[:8]
        payload.view(torch.uint8)[:, place] = torch.randint(-4, 5, (len(payload), 8), device="cuda").float().to(
            payload.dtype).view(torch.uint8)  # fmt: skip
        scales.fill_(127)
    want = exact(*parts)
    for given, got in runs(kernel, parts):
        assert torch.equal(got.double(), want), given


@of_every_kernel
def test_every_scale_byte_counts_and_255_is_nan(kernel) -> None:
    # A scale and its inverse: the products of the factors are finite, whatever either is alone.
    parts = operands(8, 256, 512)
    byte = torch.arange(256, dtype=torch.uint8, device="cuda")
    parts[3].copy_(byte[:, None].expand(256, 16))
    for x_byte in (0, 1, 63, 64, 127, 190, 191, 192, 254, 255):
        parts[1].fill_(x_byte)
        want = exact(*parts)
        # Where the sum of the terms' sizes overflows, a partial sum may, to infinity or to the NaN of two; below bf16's
        # range results lose bits.
        size = values(*parts[:2]).abs() @ values(*parts[2:]).abs().T
        known = want.isnan() | (size < 3e38)
        fits = (size < 3e38) & (want.abs() > 1e-36)
        for given, got in runs(kernel, parts):
            assert torch.equal(got.isnan()[known], want.isnan()[known]), (given, x_byte)
            if bool(fits.any()):
                assert relative(got[fits], want[fits]) < BOUND, (given, x_byte)


@of_every_kernel
def test_a_nan_element_is_a_nan_of_its_row_or_column_alone(kernel) -> None:
    parts = operands(20, 96, 512)
    parts[0].view(torch.uint8)[7, 300] = 0x7F
    parts[2].view(torch.uint8)[50, 5] = 0xFF
    want = torch.zeros(20, 96, dtype=torch.bool, device="cuda")
    want[7] = want[:, 50] = True
    for given, got in runs(kernel, parts):
        assert torch.equal(got.isnan(), want), given


@of_every_kernel
def test_results_do_not_change_from_run_to_run(kernel) -> None:
    parts = operands(16, 2304, 6144)
    first = list(runs(kernel, parts))
    for (given, one), (_, other) in zip(first, runs(kernel, parts), strict=True):
        assert torch.equal(one, other), given


@pytest.mark.parametrize("wide", [False, True], ids=["scales in range", "a scale that a step treats with care"])
def test_a_row_does_not_depend_on_its_batch_where_that_is_asked_for(wide) -> None:
    parts = operands(300, 2304, 6144)
    if wide:
        parts[1][299, 7] = 0
    with hipforge.batch_invariant():
        whole = hipforge.mxfp8_linear(*parts)
        for m in (1, 17, 64, 65, 299):
            assert torch.equal(hipforge.mxfp8_linear(parts[0][:m], parts[1][:m], *parts[2:]), whole[:m]), m


@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 33, 64, 65, 257, 1000, 8192])
def test_the_public_ops_take_every_m_by_a_kernel(m) -> None:
    parts = operands(m, 768, 1056)
    assert hipforge.explain(hipforge.mxfp8_linear, *parts).path == "kernel"
    want = exact(*parts)
    assert relative(hipforge.mxfp8_linear(*parts), want) < BOUND
    got = hipforge.mxfp8_gemv(*parts)
    assert (got is None) == (m > 16)
    assert got is None or relative(got, want) < BOUND


def test_views_off_a_boundary_and_with_gaps_are_copied() -> None:
    parts = operands(4, 200, 640)
    want = hipforge.mxfp8_linear(*parts)
    memory = torch.zeros(200 * 640 + 1, dtype=torch.uint8, device="cuda")
    off = memory[1:].view(200, 640)
    off.copy_(parts[2].view(torch.uint8))
    wide = torch.zeros(4, 1280, dtype=torch.uint8, device="cuda")[:, ::2]
    wide.copy_(parts[0].view(torch.uint8))
    assert torch.equal(hipforge.mxfp8_linear(wide, parts[1], off, parts[3]), want)


@pytest.mark.parametrize("m", [4, 40, 300])  # the row stream, tiles of spans, tiles in a ring
def test_a_chain_of_programmatic_launches_waits_for_its_activations(m) -> None:
    weights = [operands(1, 2048, 2048)[2:] for _ in range(6)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for wq, ws in weights:
            x = hipforge.mxfp8_linear(*hipforge.mxfp8_quantize(x), wq, ws) * 2**-6
        return x

    x = torch.randn(m, 2048, device="cuda").bfloat16()
    want = chain(x)
    for _ in range(50):
        with hipforge.programmatic_launch():
            assert torch.equal(chain(x), want)
    graph = torch.cuda.CUDAGraph()
    with hipforge.programmatic_launch(), torch.cuda.graph(graph):
        got = chain(x)
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_what_a_kernel_does_not_take_is_refused_before_a_launch() -> None:
    parts = operands(1, 64, 2880)
    with pytest.raises(GuardError, match="tiles = 3 needs K % 128 == 0"):
        mxfp8_row_stream(*parts, rows=8, tiles=3, sharers=1, blocks=64)
    with pytest.raises(GuardError, match="blocks must be between 1 and N = 64; got 132"):
        mxfp8_row_stream(*parts, blocks=132)
    with pytest.raises(GuardError, match="give more blocks"):
        mxfp8_row_stream(*operands(1, 4096, 4096), blocks=1)
    with pytest.raises(GuardError, match="workspace must have at least 9472 bytes; got 16"):
        out = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
        small = torch.empty(16, dtype=torch.uint8, device="cuda")
        mxfp8_ring_tiles_out(out, *operands(64, 64, 128), None, small, 64128, 1, 0, False)
    with pytest.raises(GuardError, match=r"k_splits must be 1 to 8 and at most ceil\(K / 128\) = 1; got 2"):
        mxfp8_ring_tiles(*operands(1, 64, 96), tile=64128, k_splits=2)
    with pytest.raises(GuardError, match="K must be a multiple of 512 up to 16777216; got 2880"):
        mxfp8_span_tiles(*parts)
    with pytest.raises(GuardError, match="K must be a multiple of 512 up to 16777216; got 2880"):
        mxfp8_half_tiles(*parts)
    with pytest.raises(GuardError, match="k_splits must be 1 to 8 and at most K / 128 = 4; got 5"):
        mxfp8_half_tiles(*operands(1, 64, 512), k_splits=5)
    with pytest.raises(GuardError, match="sharers must be a power of two up to 8; got 16"):
        mxfp8_row_stream(*parts, rows=32, tiles=2, sharers=16, blocks=64)
