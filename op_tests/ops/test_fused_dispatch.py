"""Ops whose kernel takes every call: what explain says, and what torch.compile and autograd see of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hipforge
from hipforge import devices, emulator, ops
from hipforge.errors import GuardError
from hipforge.ops.core import dispatch, fp8
from hipforge.ops.core.dispatch import explain


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


pytestmark = pytest.mark.gfx942("no_rows")

CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "fp8_quant_tensorwise": lambda: (_normal(4, 64),),
    "residual_rms": lambda: (_normal(4, 64), _normal(4, 64), _normal(64), 1e-5, torch.ones(1)),
    "residual_rms_mxfp8": lambda: (_normal(4, 64), _normal(4, 64), _normal(64), 1e-5),
    "rms_norm": lambda: (_normal(4, 64), _normal(64), 1e-5),
    "rms_norm_fp8": lambda: (_normal(4, 64), _normal(64), 1e-5, torch.ones(1)),
    "rms_norm_mxfp8": lambda: (_normal(4, 64), _normal(64), 1e-5),
    "mxfp8_quantize": lambda: (_normal(4, 64),),
    "mxfp4_quantize": lambda: (_normal(4, 64),),
    "swiglu_fp8": lambda: (_normal(4, 64), torch.ones(1)),
    "swiglu_mxfp8": lambda: (_normal(4, 64),),
}


@pytest.mark.parametrize("op", CALLS)
def test_explain_says_that_the_kernel_runs_or_that_the_reference_does(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = explain(op, *CALLS[op]())
    assert (shown.path, shown.kernel, set(shown.refused)) == ("kernel", op, {"torch"})
    monkeypatch.setattr(devices, "current", lambda: devices.Device("reference", None))
    shown = explain(getattr(hipforge, op), *CALLS[op]())
    assert shown.path == "torch" and "HIPFORGE_DEVICE=reference" in shown.refused["kernel"]


@pytest.mark.skipif(torch.version.hip is not None, reason="a torch for AMD GPUs has no NVIDIA devices")
def test_tensors_on_an_nvidia_device_are_planned_for_torch_whatever_runs_kernels() -> None:
    decision = dispatch.plan_kernel("swiglu_fp8", torch.device("cuda:0"))
    assert decision.accepted is not None and decision.accepted.path == "torch"
    assert decision.refused[0].reason == "the tensors are on an NVIDIA device"


@pytest.mark.parametrize("op", CALLS)
def test_an_op_whose_tensors_are_where_no_kernel_runs_takes_torch(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = CALLS[op]()
    copies = tuple(part.clone() if torch.is_tensor(part) else part for part in arguments)
    want = getattr(hipforge, op)(*arguments)
    elsewhere = dispatch.Refused("kernel", "the tensors are on an NVIDIA device")
    monkeypatch.setattr(dispatch, "target_of", lambda device: elsewhere)
    dispatch.clear_decisions()
    try:
        with emulator.counters() as counted:
            got = getattr(hipforge, op)(*copies)
        assert explain(op, *copies).path == "torch"
    finally:
        monkeypatch.undo()
        dispatch.clear_decisions()
    assert counted.launches == 0
    for part, expected in zip(_parts(got), _parts(want), strict=True):
        # The kernels' sums and roots differ from torch's in the last place: a rounding or two of 256 bytes.
        assert (part.flatten().view(torch.uint8) != expected.flatten().view(torch.uint8)).sum() <= 4


def _parts(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in (result if isinstance(result, tuple) else (result,)) if x is not None)


@pytest.mark.parametrize("op", CALLS)
def test_explain_refuses_what_the_op_refuses(op: str) -> None:
    with pytest.raises(GuardError) as said:
        explain(op, *(argument.to(torch.int32) for argument in CALLS[op]()[:1]), *CALLS[op]()[1:])
    with pytest.raises(GuardError) as raised:
        getattr(hipforge, op)(*(argument.to(torch.int32) for argument in CALLS[op]()[:1]), *CALLS[op]()[1:])
    assert str(said.value) == str(raised.value)


@pytest.mark.parametrize("op", CALLS)
def test_tracing_gives_no_warning(op: str) -> None:
    torch._dynamo.reset()
    fp8._dtypes_of.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(getattr(hipforge, op), backend="eager", fullgraph=True)(*CALLS[op]())


@pytest.mark.parametrize("op", ["residual_rms", "residual_rms_mxfp8"])
def test_a_backward_that_needs_the_overwritten_residual_is_refused(op: str) -> None:
    weight = torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)
    input, residual, *rest = CALLS[op]()
    product = (weight * residual).sum()  # saves residual for weight's gradient
    getattr(hipforge, op)(input, residual, *rest)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():  # whose tensors count no versions
        getattr(hipforge, op)(*(part.clone() if torch.is_tensor(part) else part for part in CALLS[op]()))


@pytest.mark.parametrize("op", sorted(CALLS.keys() - {"fp8_quant_tensorwise"}))
def test_no_rows_launch_nothing(op: str) -> None:
    arguments = CALLS[op]()
    rows = len(arguments[0])
    none = [x[:0] if isinstance(x, torch.Tensor) and x.dim() == 2 and len(x) == rows else x for x in arguments]
    with emulator.counters() as counted:
        found = _parts(getattr(hipforge, op)(*none))
    shapes = [(0, *part.shape[1:]) for part in _parts(getattr(hipforge, op)(*arguments))]
    assert [part.shape for part in found] == shapes and counted.launches == 0


def test_every_family_is_an_attribute_of_ops() -> None:
    families = [name for name in dir(ops) if not name.startswith("_")]
    for name in ("rmsnorm_fp8", "swiglu_fp8", "skinny_gemm_fp8", "decode_attention_fp8"):
        assert name in families
    homes = {module.rpartition(".")[2] for module in hipforge._LAZY.values() if module.startswith("hipforge.ops.")}
    assert homes - {"dispatch", "invariance", "programmatic", "warmup"} <= set(families)  # these are of ops.core
