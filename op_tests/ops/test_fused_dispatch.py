"""Ops whose kernel takes every call: what explain says, and what torch.compile and autograd see of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.op_calls import arguments

import hipforge
from hipforge import devices, emulator, ops
from hipforge.errors import GuardError
from hipforge.ops.core import dispatch, fp8
from hipforge.ops.core.dispatch import explain

pytestmark = pytest.mark.gfx942("no_rows")

OPS = (
    "fp8_quant_tensorwise", "residual_rms", "residual_rms_mxfp8", "rms_norm", "rms_norm_fp8", "rms_norm_mxfp8",
    "mxfp8_quantize", "mxfp4_quantize", "swiglu_fp8", "swiglu_mxfp8",
)  # fmt: skip


def given(op: str) -> dict[str, Any]:
    return arguments(op, 4)


@pytest.mark.parametrize("op", OPS)
def test_explain_says_that_the_kernel_runs_or_that_the_reference_does(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = explain(op, **given(op))
    assert (shown.path, shown.kernel, set(shown.refused)) == ("kernel", op, {"torch"})
    monkeypatch.setattr(devices, "current", lambda: devices.Device("reference", None))
    shown = explain(getattr(hipforge, op), **given(op))
    assert shown.path == "torch" and "HIPFORGE_DEVICE=reference" in shown.refused["kernel"]


@pytest.mark.skipif(torch.version.hip is not None, reason="a torch for AMD GPUs has no NVIDIA devices")
def test_tensors_on_an_nvidia_device_are_planned_for_torch_whatever_runs_kernels() -> None:
    decision = dispatch.plan_kernel("swiglu_fp8", torch.device("cuda:0"))
    assert decision.accepted is not None and decision.accepted.path == "torch"
    assert decision.refused[0].reason == "the tensors are on an NVIDIA device"


@pytest.mark.parametrize("op", OPS)
def test_an_op_whose_tensors_are_where_no_kernel_runs_takes_torch(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = given(op)
    want = getattr(hipforge, op)(**given(op))
    elsewhere = dispatch.Refused("kernel", "the tensors are on an NVIDIA device")
    monkeypatch.setattr(dispatch, "target_of", lambda device: elsewhere)
    dispatch.clear_decisions()
    try:
        with emulator.counters() as counted:
            got = getattr(hipforge, op)(**copies)
        assert explain(op, **copies).path == "torch"
    finally:
        monkeypatch.undo()
        dispatch.clear_decisions()
    assert counted.launches == 0
    for part, expected in zip(_parts(got), _parts(want), strict=True):
        # The kernels' sums and roots differ from torch's in the last place: a rounding or two of 256 bytes.
        assert (part.flatten().view(torch.uint8) != expected.flatten().view(torch.uint8)).sum() <= 4


def _parts(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in (result if isinstance(result, tuple) else (result,)) if x is not None)


@pytest.mark.parametrize("op", OPS)
def test_explain_refuses_what_the_op_refuses(op: str) -> None:
    first, value = next(iter(given(op).items()))
    wrong = {**given(op), first: value.to(torch.int32)}
    with pytest.raises(GuardError) as said:
        explain(op, **wrong)
    with pytest.raises(GuardError) as raised:
        getattr(hipforge, op)(**wrong)
    assert str(said.value) == str(raised.value)


@pytest.mark.parametrize("op", OPS)
def test_tracing_gives_no_warning(op: str) -> None:
    torch._dynamo.reset()
    fp8._dtypes_of.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(getattr(hipforge, op), backend="eager", fullgraph=True)(**given(op))


@pytest.mark.parametrize("op", ["residual_rms", "residual_rms_mxfp8"])
def test_a_backward_that_needs_the_overwritten_residual_is_refused(op: str) -> None:
    made = given(op)
    weight = torch.ones_like(made["residual"], requires_grad=True)
    product = (weight * made["residual"]).sum()  # saves residual for weight's gradient
    getattr(hipforge, op)(**made)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():  # whose tensors count no versions
        getattr(hipforge, op)(**given(op))


@pytest.mark.parametrize("op", OPS[1:])
def test_no_rows_launch_nothing(op: str) -> None:
    made = given(op)
    none = {name: x[:0] if isinstance(x, torch.Tensor) and x.dim() == 2 else x for name, x in made.items()}
    with emulator.counters() as counted:
        found = _parts(getattr(hipforge, op)(**none))
    shapes = [(0, *part.shape[1:]) for part in _parts(getattr(hipforge, op)(**made))]
    assert [part.shape for part in found] == shapes and counted.launches == 0


def test_every_family_is_an_attribute_of_ops() -> None:
    families = [name for name in dir(ops) if not name.startswith("_")]
    for name in ("rmsnorm_fp8", "swiglu_fp8", "skinny_gemm_fp8", "decode_attention_fp8"):
        assert name in families
    homes = {module.rpartition(".")[2] for module in hipforge._LAZY.values() if module.startswith("hipforge.ops.")}
    assert homes - {"dispatch", "invariance", "programmatic", "warmup"} <= set(families)  # these are of ops.core
