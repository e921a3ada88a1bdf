"""Norms and SwiGLU with fp8 scales that the launch chooses, beside the quantiser's own definition, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference.fp8 import quantize_fp8
from hipforge.ops.reference.swiglu import swiglu

pytestmark = pytest.mark.gfx942

FP8 = fp8_dtypes("cpu")[0]
FORMS = (("rows", False), ("blocks", False), ("blocks", True))
# Less than a block, whole and short last blocks, odd, more than work-groups keep in registers (one of these is odd).
COLUMNS = (8, 128, 200, 333, 4096, 17000, 17001)

TRACED = {
    "rms_norm_fp8_dynamic": (lambda batch: {"x": normal(batch, 256)}, lambda x: norm(x, out_format="blocks")),
    "residual_rms_fp8_dynamic": (
        lambda batch: {"x": normal(batch, 256), "residual": normal(batch, 256, seed=1)},
        lambda x, residual: hipforge.residual_rms_fp8_dynamic(x, residual.clone(), WEIGHTS[:256], 1e-5),
    ),
    "swiglu_fp8_dynamic": (lambda batch: {"x": normal(batch, 256)}, lambda x: hipforge.swiglu_fp8_dynamic(x)),
}


def normal(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + columns)).to(dtype)


WEIGHTS = normal(1, 17001).flatten()


def norm(x: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return hipforge.rms_norm_fp8_dynamic(x, WEIGHTS[: x.shape[1]].to(x.dtype), 1e-5, **given)


def same(got: tuple[torch.Tensor, ...], y: torch.Tensor, out_format: str, e8m0: bool) -> None:
    q, scales = quantize_fp8(y, FP8, out_format, e8m0)
    assert torch.equal(got[1].nan_to_num(-1.0), scales.nan_to_num(-1.0)) and got[1].dtype == scales.dtype
    assert torch.equal(got[0].view(torch.uint8), q.view(torch.uint8))


@pytest.mark.parametrize(("out_format", "e8m0"), FORMS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scalar", (False, True))
def test_the_norm_is_the_16_bit_one_and_the_quantiser(out_format: str, e8m0: bool, columns: int, scalar: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x, residual = normal(3, columns, dtype), normal(3, columns, dtype, seed=1)
        weight, want_residual, also = WEIGHTS[:columns].to(dtype), residual.clone(), torch.empty_like(x)
        y, _ = hipforge.residual_rms(x, want_residual, weight, 1e-5)
        with emulator.options(checks="all", wave_order="random"):
            *got, given = hipforge.residual_rms_fp8_dynamic(
                x, residual, weight, 1e-5, None, scalar, out_format=out_format, e8m0=e8m0, also_out=also
            )
        assert given is residual
        assert torch.equal(residual, want_residual) and torch.equal(also, y)
        same(tuple(got), y, out_format, e8m0)


@pytest.mark.parametrize(("out_format", "e8m0"), FORMS)
def test_a_norm_without_residual_may_have_an_offset(out_format: str, e8m0: bool) -> None:
    x = normal(2, 200)
    got = norm(x, out_format=out_format, e8m0=e8m0, weight_offset=1.0)
    same(got, hipforge.rms_norm(x, WEIGHTS[:200], 1e-5, weight_offset=1.0), out_format, e8m0)


@pytest.mark.parametrize(("out_format", "e8m0"), FORMS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_swiglu_is_quantised_from_float32(
    out_format: str, e8m0: bool, columns: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Gates of 32 and more, whose sigmoid is 1, so that y is an exact product."""
    gate, up = normal(3, columns, dtype).abs() + 32, normal(3, columns, dtype, seed=1)
    parts = torch.stack((gate, up), 2).flatten(1) if interleaved else torch.cat((gate, up), 1)
    for scalar in (False, True):
        buffer = torch.ones(3, 5).to(dtype)
        with emulator.options(checks="all", wave_order="random"):
            got = hipforge.swiglu_fp8_dynamic(
                parts, buffer, out_format=out_format, e8m0=e8m0, interleaved=interleaved, force_scalar=scalar
            )
        assert not buffer.any()
        same(got, gate.float() * up.float(), out_format, e8m0)


@pytest.mark.parametrize(("out_format", "e8m0"), FORMS)
def test_each_op_is_one_launch(out_format: str, e8m0: bool) -> None:
    x = normal(2, 512)
    for call in (norm, hipforge.swiglu_fp8_dynamic):
        with emulator.counters() as counted:
            call(x, out_format=out_format, e8m0=e8m0)
        assert counted.launches == 1


def test_swiglu_has_its_parameters() -> None:
    x = normal(3, 512)
    model = {"alpha": 1.702, "beta": 1.0, "limit": 0.5}
    q, scales = hipforge.swiglu_fp8_dynamic(x, **model)
    want, _ = hipforge.swiglu_mxfp8(x, **model)[0], None
    y = swiglu(x, **model)
    assert want.shape == q.shape
    assert ((q.float() * scales[:, None] - y).abs() <= y.abs() / 15 + scales[:, None]).all()
    plain = swiglu(x)
    assert not ((q.float() * scales[:, None] - plain).abs() <= plain.abs() / 15 + scales[:, None]).all()


@pytest.mark.parametrize(("out_format", "e8m0"), FORMS)
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_what_is_not_finite_spoils_its_row_or_block(out_format: str, e8m0: bool, bad: float) -> None:
    gate_up = torch.cat((torch.full((2, 300), 32.0), torch.ones(2, 300)), 1).bfloat16()
    gate_up[1, 300 + 140] = bad
    got = hipforge.swiglu_fp8_dynamic(gate_up, out_format=out_format, e8m0=e8m0)
    same(got, gate_up[:, :300].float() * gate_up[:, 300:].float(), out_format, e8m0)
    spoilt = got[1] == 255 if e8m0 else got[1].isnan()
    assert spoilt.nonzero().tolist() == ([[1]] if out_format == "rows" else [[1, 1]])
    zeros = hipforge.swiglu_fp8_dynamic(torch.zeros(1, 256).bfloat16(), out_format=out_format, e8m0=e8m0)
    assert not zeros[0].view(torch.uint8).any() and (zeros[1] == (127 if e8m0 else 1.0)).all()


def test_outputs_may_be_given_and_empty_batches_launch_nothing() -> None:
    x, out, scales = normal(2, 256), torch.empty(2, 256).to(FP8), torch.empty(2, 2)
    got = norm(x, out_format="blocks", out=out, scale_out=scales)
    assert got[0] is out and got[1] is scales
    with emulator.counters() as counted:
        assert norm(x[:0])[1].shape == (0,) and hipforge.swiglu_fp8_dynamic(x[:0])[0].shape == (0, 128)
    assert not counted.launches


def test_forms_and_outputs_that_do_not_exist_are_refused(path: str) -> None:
    x = normal(2, 256)
    for call in (norm, hipforge.swiglu_fp8_dynamic):
        with pytest.raises(GuardError, match="out_format must be one of 'rows', 'blocks'; got 'mx'"):
            call(x, out_format="mx")
        with pytest.raises(GuardError, match="e8m0 scales are for"):
            call(x, e8m0=True)
        with pytest.raises(GuardError, match=r"scale"):
            call(x, scale_out=torch.empty(3))
        with pytest.raises(GuardError, match=r"scale_out must"):
            call(x, out_format="blocks", e8m0=True, scale_out=torch.empty(2, 2))


@pytest.mark.parametrize("out_format", ("rows", "blocks"))
def test_rows_without_a_column_are_refused_on_both_paths(out_format: str, path: str) -> None:
    none = torch.ones(3, 0, dtype=torch.bfloat16)
    for call in (lambda: hipforge.swiglu_fp8_dynamic(none, out_format=out_format),
                 lambda: hipforge.rms_norm_fp8_dynamic(none, none[0], 1e-5, out_format=out_format)):  # fmt: skip
        with pytest.raises(GuardError):
            call()
