"""SwiGLU + FP8 on the emulated architecture: exact where the operations are, bounded where they are not."""

from __future__ import annotations

import pytest
import torch
from helpers.fused_fp8_cases import U, assert_between, assert_same, normal, wrong_width

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.fp8_linear import fp8_dtypes
from hipforge.ops.reference.fp8_static import inverse_scale
from hipforge.ops.reference.swiglu import LOG2_E
from hipforge.ops.swiglu_fp8 import swiglu_fp8, swiglu_fp8_out

pytestmark = pytest.mark.gfx942

FP8 = fp8_dtypes("cpu")[0]
LARGEST = torch.finfo(FP8).max
DTYPES = [torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")
# (rows, d): odd counts of chunks, one and several work-groups, chunks that end inside a row, no multiple of 8.
SHAPES = [(1, 1), (3, 8), (2, 24), (3, 37), (4, 128), (5, 520), (1, 4097), (2, 4096), (3, 6656)]


def problem(rows, d, dtype, seed=0, scale=2.0):
    return normal((rows, 2 * d), dtype, seed, scale)


def relative_error(gate_up, alpha=1.0, beta=0.0, limit=None, interleaved=False):
    """The exact y in float64, and by how much the kernel's (as float32) may differ, relatively."""
    x = gate_up.double()
    gate, up = (x[:, 0::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    constant = float(torch.tensor(alpha * LOG2_E))
    exact = gate / (1 + torch.exp2(-gate * constant)) * (up + beta)
    # The product g alpha log2 e is rounded once, which changes the power relatively by ln 2 |g| alpha log2 e U =
    # |alpha g| U; the instruction is within one unit in the last place, 2 U. Of that the sum 1 + power keeps the share
    # sigmoid(-alpha g). The two sums, the quotient and up to two products round once each; the exact value becomes
    # float32 before the cast: one more, and one for second order. Where |g| U reaches 1/2 the power is 0 or infinite
    # whatever its last bits.
    power = alpha * gate
    return exact, (((power.abs() * 1.001 + 2) * torch.sigmoid(-power) + 7) * U).clamp(max=0.5)


def ends(gate_up, scale, fp8_max, **parameters):
    """The codes at the two ends of what the roundings and the exponential's error allow."""
    exact, relative = relative_error(gate_up, **parameters)
    limit = LARGEST if fp8_max is None else fp8_max
    scaled = exact * inverse_scale(scale).double()
    return [(scaled * side).float().clamp(-limit, limit).to(FP8) for side in (1 - relative, 1 + relative)]


def check(gate_up, scale, *, next_buffer=None, scalar=False, fp8_max=None, **parameters):
    q = swiglu_fp8(gate_up, scale, next_buffer, force_scalar=scalar, fp8_max=fp8_max, **parameters)
    one, other = ends(gate_up, scale, fp8_max, **parameters)
    # The interval is at most 2 * 20 U = 2.4e-6 wide against steps of at least 2^-4: a share of 4e-5 is open; and small
    # cases are one element away from their share, hence the count.
    assert_between(q, one, other, 1 - (0.001 + 2 / q.numel()))
    if next_buffer is not None:
        assert not next_buffer.view(torch.int16).any()
    return q


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_lie_between_the_ends(shape, dtype, scalar):
    with emulator.options(checks="all"):
        check(problem(*shape, dtype), torch.tensor([0.017]), scalar=scalar)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_without_a_rounding_are_exact(dtype):
    """A gate of 0 gives 0; one of 32 or more gives the gate itself, since 1 + 2^(-46) is 1 in fp32."""
    up = torch.exp2(torch.arange(256) % 9 - 4.0)
    gate = torch.where(torch.arange(256) % 3 == 0, 0.0, torch.where(torch.arange(256) % 3 == 1, 32.0, 64.0))
    gate_up = torch.cat([gate, up]).to(dtype)[None]
    assert_same(swiglu_fp8(gate_up, torch.tensor([8.0])), (gate * up / 8).clamp(max=LARGEST).to(FP8)[None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gate(dtype):
    """All 65536 bit patterns as gates, up 1, so that the code is silu's own."""
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    finite = torch.where(gate.float().isfinite(), gate, torch.zeros_like(gate)).view(128, 512)
    check(torch.cat([finite, torch.ones_like(finite)], dim=1), torch.tensor([0.5]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_quotient_is_not_a_product_with_a_reciprocal(dtype):
    """1 + 2^127 and a little more have subnormal reciprocals, which the instruction flushes; the quotient is normal."""
    gate = torch.linspace(-88.0, -88.35, 64)
    gate_up = torch.cat([gate, torch.full((64,), 1024.0)]).to(dtype)[None]
    q = check(gate_up, torch.tensor([2.0**-112]))
    assert bool((q.float() < -1).all())


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_and_ups_that_are_not_finite(dtype, scalar):
    gate = torch.tensor([INF, INF, INF, -INF, -INF, NAN, 1.0, 0.0, -100.0, -1.0])
    up = torch.tensor([2.0, -2.0, 0.0, 1.0, 0.0, 1.0, NAN, INF, 1.0, -INF])
    want = torch.tensor([LARGEST, -LARGEST, NAN, NAN, NAN, NAN, NAN, NAN, -0.0, LARGEST])
    gate, up, want = (x.repeat(8) for x in (gate, up, want))
    got = swiglu_fp8(torch.cat([gate, up]).to(dtype)[None], torch.tensor([1.0]), force_scalar=scalar)
    assert_same(got, want.to(FP8)[None])


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("buffer_cols", [0, 1, 32, 57, 1024])
def test_next_buffer_is_zeroed_and_nothing_around_it(buffer_cols, scalar):
    rows = 3
    storage = torch.full((rows * buffer_cols + 64,), 1.0, dtype=torch.float16)
    buffer = storage[8 : 8 + rows * buffer_cols].view(rows, buffer_cols)
    check(problem(rows, 64, torch.float16), torch.tensor([0.02]), next_buffer=buffer, scalar=scalar)
    assert bool((storage[:8] == 1).all()) and bool((storage[8 + rows * buffer_cols :] == 1).all())


def test_unaligned_data_takes_the_scalar_path():
    gate_up = problem(2, 64, torch.float16)
    shifted = torch.empty(gate_up.numel() + 1, dtype=torch.float16)[1:].view(gate_up.shape).copy_(gate_up)
    with emulator.counters() as counted:
        got = swiglu_fp8(shifted, torch.tensor([0.02]))
    assert counted.count("global_store_byte") > 0
    assert_same(got, swiglu_fp8(gate_up, torch.tensor([0.02])))


@pytest.mark.parametrize("fp8_max", [None, 224.0, 1.0])
def test_codes_saturate(fp8_max):
    q = check(problem(2, 256, torch.float16), torch.tensor([1e-3]), fp8_max=fp8_max)
    assert q.float().abs().max() == (fp8_max or LARGEST)


def test_scales_that_are_not_ordinary():
    gate_up = problem(2, 64, torch.float16)
    one = check(gate_up, torch.tensor([1.0]))
    for zero in (0.0, -0.0):
        assert_same(swiglu_fp8(gate_up, torch.tensor([zero])), one)
    assert not swiglu_fp8(gate_up, torch.tensor([INF])).float().any()
    assert bool(swiglu_fp8(gate_up, torch.tensor([NAN])).float().isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "d"), [(4, 8192), (3, 6656), (3, 2056)])
def test_bytes_moved_are_the_least_possible(rows, d, dtype):
    gate_up = problem(rows, d, dtype)
    buffer = torch.ones(rows, 64, dtype=dtype)
    with emulator.counters() as counted:
        swiglu_fp8(gate_up, torch.tensor([0.02]), buffer)
    assert counted.launches == 1
    tensors = counted.tensors
    assert (tensors["gate_up"].loaded, tensors["gate_up"].stored) == (4 * rows * d, 0)
    assert (tensors["out"].loaded, tensors["out"].stored) == (0, rows * d)
    assert (tensors["next_buffer"].loaded, tensors["next_buffer"].stored) == (0, 2 * buffer.numel())
    least = 5 * rows * d + 2 * buffer.numel()  # the scale and the arguments are the rest
    assert least <= counted.unique_bytes <= 1.02 * least
    # The only narrower access: the last chunk of a result that is not a multiple of 16 codes.
    assert wrong_width(counted.by_mnemonic) == (["global_store_dwordx2"] if rows * d // 8 % 2 else [])
    assert counted.scratch_bytes == 0


def test_refusals_name_argument_value_and_rule():
    gate_up, scale = problem(2, 32, torch.float16), torch.tensor([1.0])
    other = torch.float8_e4m3fnuz if FP8 is torch.float8_e4m3fn else torch.float8_e4m3fn
    with pytest.raises(GuardError, match=r"gate_up must be float16 or bfloat16; got float32"):
        swiglu_fp8(gate_up.float(), scale)
    with pytest.raises(GuardError, match=r"gate_up must be \[rows, 2 d\]; got .*\[2, 63\]"):
        swiglu_fp8(gate_up[:, :63].contiguous(), scale)
    with pytest.raises(GuardError, match=r"gate_up must be \[rows, 2 d\]; got .*\[64\]"):
        swiglu_fp8(gate_up[0], scale)
    with pytest.raises(GuardError, match="gate_up must be contiguous"):
        swiglu_fp8(gate_up[:, ::2], scale)
    with pytest.raises(GuardError, match="d at least 1"):
        swiglu_fp8(gate_up[:, :0].contiguous(), scale)
    with pytest.raises(GuardError, match=r"scale must be one float32; got float16 \[1\]"):
        swiglu_fp8(gate_up, scale.half())
    for fp8_max in (0.0, -1.0, 2 * LARGEST, NAN):
        with pytest.raises(GuardError, match=f"fp8_max must be above 0 and at most {LARGEST:g}"):
            swiglu_fp8(gate_up, scale, fp8_max=fp8_max)
    with pytest.raises(GuardError, match=r"next_buffer must be contiguous float16 or bfloat16 \[2, buffer_cols\]"):
        swiglu_fp8(gate_up, scale, torch.empty(3, 8, dtype=torch.float16))
    with pytest.raises(GuardError, match="next_buffer is written and must not share memory with gate_up"):
        swiglu_fp8(gate_up, scale, gate_up)
    with pytest.raises(GuardError, match="out must be contiguous"):
        options = 1.0, 0.0, INF, False, False, False
        swiglu_fp8_out(torch.empty(2, 32, dtype=other), None, gate_up, scale, LARGEST, *options)


@pytest.mark.full
@pytest.mark.parametrize("d", [8, 24, 128, 512, 4096, 8192])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_the_whole_grid_of_decode_shapes(rows, d):
    buffer_cols = (0, 32, 57, 1024)[(rows + d // 8) % 4]
    buffer = torch.ones(rows, buffer_cols, dtype=torch.float16)
    for scalar in (False, True) if rows * d <= 1 << 17 else (False,):
        check(problem(rows, d, torch.float16, scale=1.0), torch.tensor([1.7]), next_buffer=buffer, scalar=scalar)
