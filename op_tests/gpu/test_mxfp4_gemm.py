"""The MXFP4 kernel of sm_90 in every configuration, activations of 4 and 16 bits, beside float64: ``make gpu-test``."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.errors import relative

import hipforge
from gpu.test_mxfp8_gemm import BOUND
from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.core.row_stream import SHARERS, TILES, warps
from hipforge.ops.mxfp4_gemm import run_mxfp4_code_stream, run_mxfp4_row_stream
from hipforge.ops.mxfp4_gemm.kernels import CODE_STREAM, code_stream
from hipforge.ops.mxfp4_gemm.kernels.row_stream import ROWS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or devices.current().arch_of() != "sm_90", reason="needs an sm_90 GPU"
)

STREAMS = [
    {"rows": rows, "tiles": tiles, "sharers": sharers}
    for rows, tiles, sharers in itertools.product(ROWS, TILES, SHARERS)
    if sharers <= warps(rows, tiles)
]
CODE_STREAMS = [
    {"rows": rows, "tiles": tiles, "sharers": sharers, "splits": splits}
    for rows, tiles, sharers, splits in itertools.product(ROWS, code_stream.TILES, SHARERS, code_stream.SPLITS)
    if rows == 8 or splits < 8 or sharers == 2  # as many as are needed to see each value with others
]
# (M, N, K): one of everything; odd sizes; K of no whole line, shorter and longer than one; several passes and rounds.
SHAPES = [
    (1, 1, 32),
    (3, 77, 2880),
    (8, 1000, 4160),
    (13, 2304, 6144),
    (16, 300, 96),
    (20, 640, 2048),
    (40, 513, 1120),
]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
of_both = pytest.mark.parametrize("bits", [4, 16])


def matrix(rows: int, k: int, low: int, high: int) -> list[torch.Tensor]:
    """Return random codes and their scales."""
    codes = torch.randint(0, 256, (rows, k // 2), device="cuda", dtype=torch.uint8)
    return [codes, torch.randint(low, high, (rows, k // 32), device="cuda", dtype=torch.uint8)]


def operands(bits: int, m: int, n: int, k: int, low: int = 118, high: int = 129) -> list[torch.Tensor | None]:
    """Return x, its scales or None, w and its scales; by default in the range that the kernel takes at once."""
    x = matrix(m, k, low, high) if bits == 4 else [torch.randn(m, k, device="cuda").bfloat16(), None]
    return [*x, *matrix(n, k, low, high)]


def values(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return codes.double()
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    powers = torch.exp2(scales.double() - 127).masked_fill(scales == 255, float("nan"))
    return E2M1.to(codes.device)[pairs.long()] * powers.repeat_interleave(32, 1)


def exact(parts: list[torch.Tensor]) -> torch.Tensor:
    return values(*parts[:2]) @ values(*parts[2:]).T


def runs(parts: list[torch.Tensor], chosen=list):
    """Every configuration of both kernels, or those of each that ``chosen`` returns, with its result."""
    n, k = len(parts[2]), 2 * parts[2].shape[1]
    for given in chosen(STREAMS):
        if given["tiles"] == 3 and k % 128:
            continue
        yield given, run_mxfp4_row_stream(*parts, **given, blocks=min(n, 132))
    for given in chosen(CODE_STREAMS):
        whole = {**given, "blocks": code_stream.blocks_for(n, given["splits"], 132)}
        if CODE_STREAM.refusal(whole, (len(parts[0]), n, k), "sm_90") is None:
            yield given, run_mxfp4_code_stream(*parts, **whole)


@of_both
@pytest.mark.parametrize("shape", SHAPES)
def test_every_configuration_is_within_the_bound_of_float64(bits, shape) -> None:
    for low, high in ((118, 129), (118, 136)):  # scales of W above 128 are applied to sums
        parts = operands(bits, *shape, low, high)
        want = exact(parts)
        bound = BOUND if want.numel() > 1 else 2.0**-8  # half a unit of one number alone
        for given, got in runs(parts):
            assert relative(got, want) < bound, (given, high)


@of_both
@pytest.mark.parametrize("k", [128, 2880])
def test_every_code_and_integers_are_exact(bits, k) -> None:
    # A row of X has one element that is not zero, another code in each: every result is one product, of at most 6 bits.
    parts = operands(bits, 16, 40, k)
    parts[3].fill_(127)
    place = torch.randint(0, k // 2, (16,), device="cuda")
    parts[0].zero_()
    for row in range(16):
        if bits == 4:
            parts[1][row].fill_(127)
            parts[0][row, place[row]] = row
        else:
            parts[0][row, 2 * place[row]] = E2M1[row].item()
    want = exact(parts)
    for given, got in runs(parts):
        assert torch.equal(got.double(), want), given


@of_both
def test_every_scale_byte_counts_and_255_is_nan(bits) -> None:
    # A scale and its inverse: the products of the factors are finite, whatever either is alone.
    parts = operands(bits, 8, 256, 512)
    byte = torch.arange(256, dtype=torch.uint8, device="cuda")
    parts[3].copy_(byte[:, None].expand(256, 16))
    for x_byte in (0, 1, 95, 96, 127, 159, 160, 192, 254, 255) if bits == 4 else (0,):
        if bits == 4:
            parts[1].fill_(x_byte)
        want = exact(parts)
        # Where the sum of the terms' sizes overflows, a partial sum may; below bf16's range results lose bits.
        size = values(*parts[:2]).abs() @ values(*parts[2:]).abs().T
        known = want.isnan() | (size < 3e38)
        fits = (size < 3e38) & (want.abs() > 1e-36)
        for given, got in runs(parts):
            assert torch.equal(got.isnan()[known], want.isnan()[known]), (given, x_byte)
            if bool(fits.any()):
                assert relative(got[fits], want[fits]) < BOUND, (given, x_byte)


def test_a_nan_scale_of_x_is_a_nan_of_its_row_alone_and_neighbours_keep_their_bits() -> None:
    parts = operands(4, 16, 96, 512)
    first = list(runs(parts))
    parts[1][7, 3], parts[1][9, 15] = 255, 20
    want = torch.zeros(16, 96, dtype=torch.bool, device="cuda")
    want[7] = True
    for (given, before), (_, got) in zip(first, runs(parts), strict=True):
        assert torch.equal(got.isnan(), want), given
        others = [row for row in range(16) if row not in (7, 9)]
        assert torch.equal(got[others], before[others]), given
    parts[1][7, 3] = 127
    for given, got in runs(parts):
        assert relative(got, exact(parts)) < BOUND, given


@of_both
def test_results_do_not_change_from_run_to_run(bits) -> None:
    parts = operands(bits, 16, 2304, 6144)
    first = list(runs(parts))
    for (given, one), (_, other) in zip(first, runs(parts), strict=True):
        assert torch.equal(one, other), given


@of_both
@pytest.mark.parametrize("wide", [False, True], ids=["scales in range", "scales that a step treats with care"])
def test_a_row_does_not_depend_on_its_batch_where_that_is_asked_for(bits, wide) -> None:
    parts = operands(bits, 70, 2304, 6144)
    if wide:
        parts[3][5, 7] = 140
        if bits == 4:
            parts[1][69, 7] = 0

    def of(m: int) -> torch.Tensor:
        return hipforge.mxfp4_linear(parts[0][:m], None if bits == 16 else parts[1][:m], *parts[2:])

    with hipforge.batch_invariant():
        whole = of(70)
        for m in (1, 8, 9, 16, 17, 69):
            assert torch.equal(of(m), whole[:m]), m


@of_both
@pytest.mark.parametrize("m", [1, 2, 8, 9, 16, 17, 64, 257])
def test_the_public_ops_take_every_m_by_the_kernel(bits, m) -> None:
    parts = operands(bits, m, 768, 1056)
    assert hipforge.explain(hipforge.mxfp4_linear, *parts).path == "kernel"
    want = exact(parts)
    bias = torch.randn(768, device="cuda").bfloat16()
    assert relative(hipforge.mxfp4_linear(*parts), want) < BOUND
    assert torch.equal(hipforge.mxfp4_linear(*parts, bias), hipforge.mxfp4_gemm(*parts) + bias)


def test_views_off_a_boundary_and_with_gaps_are_copied() -> None:
    parts = operands(4, 4, 200, 640)
    want = hipforge.mxfp4_linear(*parts)
    off = torch.zeros(200 * 320 + 1, dtype=torch.uint8, device="cuda")[1:].view(200, 320)
    off.copy_(parts[2])
    wide = torch.zeros(4, 640, dtype=torch.uint8, device="cuda")[:, ::2]
    wide.copy_(parts[0])
    assert torch.equal(hipforge.mxfp4_linear(wide, parts[1], off, parts[3]), want)


def test_shuffled_weights_are_left_to_torch_which_says_so() -> None:
    parts = operands(4, 4, 64, 256)
    from hipforge.ops.reference import shuffle_scale, shuffle_weight

    shuffled = shuffle_weight(parts[2].cpu()).cuda(), shuffle_scale(parts[3].cpu()).cuda()
    assert hipforge.mxfp4_gemm(*parts[:2], *shuffled, shuffled=True) is None
    found = hipforge.explain(hipforge.mxfp4_gemm, *parts[:2], *shuffled, shuffled=True)
    assert "sm_90 reads plain ones" in found.reason
    assert relative(hipforge.mxfp4_linear(*parts[:2], *shuffled, shuffled=True), exact(parts)) < BOUND


def test_a_chain_of_programmatic_launches_waits_for_its_activations() -> None:
    weights = [operands(16, 1, 2048, 2048)[2:] for _ in range(6)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for wq, ws in weights:
            x = hipforge.mxfp4_linear(x, None, wq, ws) * 2**-6
        return x

    x = torch.randn(4, 2048, device="cuda").bfloat16()
    want = chain(x)
    for _ in range(50):
        with hipforge.programmatic_launch():
            assert torch.equal(chain(x), want)


def test_what_the_kernel_does_not_take_is_refused_before_a_launch() -> None:
    parts = operands(4, 1, 64, 2880)
    with pytest.raises(GuardError, match="blocks must be between 1 and N = 64; got 132"):
        run_mxfp4_row_stream(*parts, blocks=132)
    with pytest.raises(GuardError, match="tiles = 3 needs K % 128 == 0"):
        run_mxfp4_row_stream(*parts, tiles=3, blocks=64)
    with pytest.raises(GuardError, match="give more blocks"):
        run_mxfp4_row_stream(*operands(4, 1, 4096, 4096), blocks=1)
    with pytest.raises(GuardError, match="sharers must be a power of two up to 8; got 16"):
        run_mxfp4_row_stream(*parts, tiles=4, sharers=16, blocks=64)


def test_what_the_kernel_that_makes_x_f16_does_not_take_is_refused_before_a_launch() -> None:
    parts = operands(16, 1, 64, 2880)
    with pytest.raises(GuardError, match="splits must be 1, 2, 4 or 8, at most one for each 128 k; got 4 with K = 256"):
        run_mxfp4_code_stream(*operands(16, 1, 64, 256), splits=4, blocks=16)
    with pytest.raises(GuardError, match="tiles must be 2, 3 or 4; got 1"):
        run_mxfp4_code_stream(*parts, tiles=1, blocks=64)
    with pytest.raises(GuardError, match="give more blocks, more splits or fewer rows of X"):
        run_mxfp4_code_stream(*operands(16, 1, 4096, 4096), blocks=1)


def test_rows_of_x_far_from_their_first_values_are_right_and_leave_their_neighbours_alone() -> None:
    parts = operands(16, 16, 96, 2048)
    streams = [given for given in CODE_STREAMS if given["tiles"] == 2]
    run = lambda given: run_mxfp4_code_stream(*parts, **given, blocks=code_stream.blocks_for(96, given["splits"], 132))
    before = [run(given) for given in streams]
    x = parts[0]
    x[3, 700], x[5, :64], x[7, 1999], x[9, 5], x[10, 77], x[11] = 3e5, 0, 1e30, float("inf"), float("nan"), 0
    x[6] *= 2.0**-100
    want = exact(parts)
    for given, former in zip(streams, before, strict=True):
        got = run(given)
        for row in (3, 5, 6, 7):
            assert relative(got[row], want[row]) < 2 * BOUND, (given, row)  # the errors of a row alone average less
        assert not got[11].any(), given
        assert torch.equal(got[9].isnan(), want[9].isnan()) and bool((got[9].isinf() | got[9].isnan()).all()), given
        assert bool(got[10].isnan().all()), given
        others = [row for row in range(16) if row not in (3, 5, 6, 7, 9, 10, 11)]
        assert torch.equal(got[others], former[others]), given


# The scales of a row of X: of most blocks, of blocks 3, 4 and 17, and which blocks are zeros of either sign.
FAR: dict[str, tuple[int, tuple[int, int, int], list[int]]] = {
    "as usual": (120, (121, 119, 122), []),
    "around the first": (113, (104, 128, 120), []),
    "2^35 apart": (60, (95, 60, 70), []),
    "2^36 apart": (95, (59, 95, 70), []),
    "the first the least": (20, (230, 100, 200), []),
    "as far as they are": (127, (0, 240, 254), []),
    "a NaN": (20, (230, 255, 100), []),
    "zeros alone": (20, (230, 100, 200), list(range(65))),
    "zeros at first": (0, (120, 121, 122), [0]),
    "zeros where they are far": (120, (254, 0, 121), [3, 4]),
}


@pytest.mark.parametrize("names", [[*FAR], ["2^36 apart"], [*FAR][2:5]], ids=["all", "one", "three"])
@pytest.mark.parametrize("byte", [127, 140, 90])
def test_blocks_of_x_whose_scales_are_far_apart_are_exact_and_leave_other_rows_alone(names, byte: int) -> None:
    parts = operands(4, len(names), 96, 2080, 119, 122)  # 65 blocks, the last in a step of its own
    xq, xs, wq, ws = parts
    # A row of W sees blocks of one scale, so that the others cannot hide what is lost of it; every sixth sees all.
    for column in range(96):
        seen = [(0, 1, 2), (3,), (4,), (17,), (64,), range(65)][column % 6]
        for block in range(65):
            if block not in seen:
                wq[column, 16 * block : 16 * block + 16] = 0
    ws[:, 4::5], ws[5:, 3] = byte, byte  # 127: as usual; others are summed with care
    before = [got[0].clone() for _, got in runs(parts)]
    for row, name in enumerate(names):
        if name == "as usual":
            continue
        xs[row], others, zeros = FAR[name][0], FAR[name][1], FAR[name][2]
        xs[row, [3, 4, 17]] = torch.tensor(others, dtype=torch.uint8, device="cuda")
        for block in zeros:
            xq[row, 16 * block : 16 * block + 16] &= 0x88
    want, size = exact(parts), values(*parts[:2]).abs() @ values(*parts[2:]).abs().T
    known = want.isnan() | (size == 0) | ((size > 1e-34) & (size < 3e38))
    assert bool(known.sum(0).bool().all()) and known.double().mean() > 0.8
    bound = 2.0**-8 * want.abs()  # the rounding to bf16
    bound[:, 5::6] += 2.0**-16 * size[:, 5::6]  # and of the sums of blocks of several scales
    for (given, got), former in zip(runs(parts), before, strict=True):
        assert torch.equal(got.isnan()[known], want.isnan()[known]), given
        wrong = known & ~want.isnan() & ~((got.double() - want).abs() <= bound)
        assert not bool(wrong.any()), (given, [names[row] for row in wrong.any(1).nonzero().flatten().tolist()])
        if names[0] == "as usual":
            assert torch.equal(got[0], former), given


@of_both
def test_eight_and_sixteen_rows_at_once_have_the_same_bits(bits) -> None:
    parts = operands(bits, 16, 300, 2080)
    if bits == 4:
        parts[1][3, 7], parts[1][12, 9] = 20, 230
    for given in CODE_STREAMS:
        if given["rows"] == 16:
            blocks = code_stream.blocks_for(300, given["splits"], 132)
            whole, halves = (run_mxfp4_code_stream(*parts, **{**given, "rows": rows}, blocks=blocks) for rows in ROWS)
            assert torch.equal(whole, halves), given
