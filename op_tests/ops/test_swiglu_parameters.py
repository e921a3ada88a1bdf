"""SwiGLU with the parameters of real models: clamps, alpha, beta, interleaved columns; fp8 and MX-FP8 results."""

from __future__ import annotations

import pytest
import torch
from helpers.fused_fp8_cases import assert_same, normal, wrong_width

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.swiglu_fp8 import swiglu_fp8, swiglu_mxfp8

from .test_fused_mxfp8 import assert_mx_between
from .test_swiglu_fp8 import DTYPES, FP8, INF, LARGEST, NAN, check, relative_error

pytestmark = pytest.mark.gfx942

MINIMAX = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
PARAMETERS = [MINIMAX, {**MINIMAX, "interleaved": True}, {"limit": 2.0}, {"alpha": 1.702}, {"beta": -0.5}]
NAMES = ["minimax", "gpt_oss", "limit", "alpha", "beta"]


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parameters", PARAMETERS, ids=NAMES)
def test_codes_lie_between_the_ends(parameters, dtype, scalar):
    # Gates and ups reach 16, so that clamps act; an odd number of chunks ends inside a pair of lanes.
    gate_up, buffer = normal((3, 2 * 544), dtype, 0, 4.0), torch.ones(3, 57, dtype=dtype)
    with emulator.options(checks="all"):
        check(gate_up, torch.tensor([0.3]), next_buffer=buffer, scalar=scalar, **parameters)
        got = swiglu_mxfp8(gate_up, force_scalar=scalar, **parameters)
    exact, relative = relative_error(gate_up, **parameters)
    ends = ((exact * side).float() for side in (1 - relative, 1 + relative))
    assert_mx_between(got, *(reference.quantize_mxfp8(y, FP8) for y in ends))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_exact(dtype, interleaved):
    """Gates of 32 or more, after the clamp at 64, are silu's own result; so y = g (u + 3), a small integer."""
    gate = torch.tensor([0.0, 32.0, 64.0, 65.0, 1000.0]).repeat(64)
    up = torch.arange(320) % 201 - 100.0
    y = gate.clamp(max=64) * (up.clamp(-64, 64) + 3)
    columns = torch.stack([gate, up], dim=1).flatten() if interleaved else torch.cat([gate, up])
    gate_up = columns.to(dtype)[None]
    parameters = {"beta": 3.0, "limit": 64.0, "interleaved": interleaved}
    q = swiglu_fp8(gate_up, torch.tensor([32.0]), **parameters)
    assert_same(q, (y / 32).clamp(-LARGEST, LARGEST).to(FP8)[None])
    q, scales = swiglu_mxfp8(gate_up, **parameters)
    want_q, want_scales = reference.quantize_mxfp8(y[None], FP8)
    assert torch.equal(scales, want_scales)
    assert_same(q, want_q)


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_passes_the_clamps_and_infinities_stop_at_them(dtype, scalar):
    gate = torch.tensor([NAN, 1.0, 64.0, INF, INF, INF, -INF, 64.0])
    up = torch.tensor([1.0, NAN, INF, 2.0, -INF, 0.0, 1.0, -2.0])
    want = torch.tensor([NAN, NAN, 1024.0, 64.0, -1024.0, 0.0, NAN, -64.0])  # g = 32, the limit, is its own silu
    gate, up, want = (x.repeat(8) for x in (gate, up, want))
    gate_up = torch.cat([gate, up]).to(dtype)[None]
    got = swiglu_fp8(gate_up, torch.tensor([64.0]), limit=32.0, force_scalar=scalar)
    assert_same(got, (want / 64).to(FP8)[None])
    q, scales = swiglu_mxfp8(gate_up, limit=32.0, force_scalar=scalar)
    assert scales.tolist() == [[255, 255]] and bool(q.float().isnan().all())


@pytest.mark.parametrize("parameters", [{}, {"limit": 4.0}], ids=["plain", "limit"])
def test_a_negative_zero_keeps_its_sign_without_beta(parameters):
    gate_up = torch.cat([torch.full((32,), 2.0), torch.full((32,), -0.0)]).half()[None]
    q = swiglu_fp8(gate_up, torch.ones(1), **parameters)
    assert torch.equal(q.view(torch.uint8), torch.full((1, 32), -0.0).to(FP8).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interleaved_columns_give_the_same_bits(dtype):
    gate_up = normal((3, 1088), dtype, 0, 4.0)
    together = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1)
    scale = torch.tensor([0.3])
    want = swiglu_fp8(gate_up, scale, **MINIMAX)
    for shifted in (False, True):  # off 16 bytes: the scalar path
        x = torch.empty(together.numel() + 1, dtype=dtype)[shifted : together.numel() + shifted].view(together.shape)
        assert_same(swiglu_fp8(x.copy_(together), scale, **MINIMAX, interleaved=True), want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_bytes_moved_are_the_least_possible(interleaved):
    gate_up = normal((3, 4096), torch.bfloat16)
    with emulator.counters() as counted:
        swiglu_mxfp8(gate_up, **MINIMAX, interleaved=interleaved)
    n = gate_up.numel() // 2
    tensors = counted.tensors
    assert counted.launches == 1
    assert (tensors["gate_up"].loaded, tensors["out"].stored, tensors["block_scales"].stored) == (4 * n, n, n // 32)
    assert 5 * n + n // 32 <= counted.unique_bytes <= 1.02 * (5 * n + n // 32)
    assert wrong_width(counted.by_mnemonic) == ["global_store_byte"]  # the scales
    assert counted.scratch_bytes == 0


def test_refusals_name_argument_value_and_rule():
    gate_up, scale = normal((2, 128), torch.float16), torch.ones(1)
    for limit in (0.0, -7.0, INF, NAN):
        said = f"limit must be positive and finite, or None for no clamp; got {limit}"
        with pytest.raises(GuardError, match=said):
            swiglu_fp8(gate_up, scale, limit=limit)
        with pytest.raises(GuardError, match=said):
            swiglu_mxfp8(gate_up, limit=limit)
    for name in ("alpha", "beta"):
        for value in (INF, NAN):
            with pytest.raises(GuardError, match=f"{name} must be finite; got {value}"):
                swiglu_fp8(gate_up, scale, **{name: value})
    with pytest.raises(GuardError, match=r"out must be contiguous float8_e4m3fn(uz)? \[2, 64\].*; got .* \[2, 32\]"):
        swiglu_fp8(gate_up, scale, out=torch.empty(2, 32, dtype=FP8))
    inside = gate_up.view(FP8)[0, :128].view(2, 64)
    with pytest.raises(GuardError, match="out is written and must not share memory with gate_up"):
        swiglu_fp8(gate_up, scale, out=inside)
    with pytest.raises(GuardError, match="scale_out is written and must not share memory with gate_up"):
        swiglu_mxfp8(gate_up, scale_out=gate_up.view(torch.uint8)[0, :4].view(2, 2))
    out = torch.empty(2, 64, dtype=FP8)
    with pytest.raises(GuardError, match="out is written and must not share memory with scale_out"):
        swiglu_mxfp8(gate_up, out=out, scale_out=out.view(torch.uint8)[0, :4].view(2, 2))
    with pytest.raises(GuardError, match="out is written and must not share memory with scale"):
        swiglu_fp8(gate_up, out.view(torch.float32)[0, :1], out=out)
