"""Which path an op with a kernel for every AMD architecture takes: it follows the device of the tensors."""

from __future__ import annotations

from types import MappingProxyType

import torch

from hipforge import devices
from hipforge.ops.core import dispatch
from hipforge.ops.core.dispatch import Accepted, Decision, Refused
from hipforge.ops.triton.mxfp8_dot_scaled import unavailable


def plan_by_device(
    op: str, device: torch.device, kernel_refusal: str | None = None, triton_refusal: str | None = None
) -> Decision:
    """Return the decision of a total op: the HIP kernel, else Triton on another GPU, else torch.

    Args:
        op: the op's name.
        device: where its tensors are.
        kernel_refusal: why the HIP kernel does not take the call, or None.
        triton_refusal: why the Triton kernel does not take it, or None.

    Raises:
        GuardError: the tensors are where no kernel runs, though moving them would help.
    """
    target = dispatch.target_of(device)
    why_not_kernel = target.reason if isinstance(target, Refused) else kernel_refusal
    if why_not_kernel is None:
        taken = Accepted("kernel", op, MappingProxyType({}), "the kernel runs on this device")
        unused = "the kernel takes this call"
        return Decision(taken, (Refused("triton", unused), Refused("torch", unused)))
    kernel = Refused("kernel", why_not_kernel)
    disabled = why_not_kernel if devices.current().kind == "reference" else None
    why_not_triton = unavailable(device) or disabled or triton_refusal
    if why_not_triton is None:
        taken = Accepted("triton", op, MappingProxyType({}), "Triton runs on this device")
        return Decision(taken, (kernel, Refused("torch", "Triton runs on this device")))
    reason = "neither the kernel nor Triton applies"
    return Decision(Accepted("torch", op, MappingProxyType({}), reason), (kernel, Refused("triton", why_not_triton)))


# torch.compile runs this while it traces and keeps the answer as a constant of the graph.
plan_by_device._dynamo_marked_constant = True  # type: ignore[attr-defined]
