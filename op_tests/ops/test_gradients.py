"""What ops do with tensors that require grad: results are detached, said once per op, eagerly and compiled."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.op_calls import ADDED_TO, CALLS

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.jit.call import tensors
from hipforge.ops.core import dispatch

REFUSAL = "argument 'residual' is written and requires grad"


def requiring_grad(name: str) -> dict[str, torch.Tensor]:
    """The op's inputs; those whose dtype can have a gradient require one."""
    made = CALLS[name].make(3)
    wide = (torch.float32, torch.bfloat16, torch.float16)
    return {each: tensor.requires_grad_() if tensor.dtype in wide else tensor for each, tensor in made.items()}


WITH_GRADIENTS = [name for name in CALLS if any(tensor.requires_grad for tensor in requiring_grad(name).values())]


def attached(results: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def test_enough_ops_take_tensors_that_can_require_grad() -> None:
    assert len(WITH_GRADIENTS) >= 15


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_results_are_detached_and_it_is_said_once(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensors, "_warned", set())
    torch._dynamo.reset()
    run = torch.compile(CALLS[name].run, backend="aot_eager", fullgraph=True) if compiled else CALLS[name].run
    given = requiring_grad(name)
    if name in ADDED_TO:
        with pytest.raises(Exception, match=REFUSAL) as caught:
            run(**given)
        assert compiled or isinstance(caught.value, GuardError)
        given["residual"] = given["residual"].detach()
    with caplog.at_level(logging.WARNING, "hipforge"):
        assert not attached(run(**given))
        said = [record.getMessage() for record in caplog.records if "requires grad" in record.getMessage()]
        assert not attached(run(**given))
    assert all("but the op has no backward: its result is detached" in text for text in said)
    assert len({text.split(":")[0] for text in said}) == len(said) or compiled
    repeated = [record.getMessage() for record in caplog.records if "requires grad" in record.getMessage()]
    # moe_align_block_size reads none of the weights; each launch of a composed op is an op of its own
    assert (len(said) == len(repeated) > 0) == (name not in ("moe_align_block_size",))
    caplog.clear()
    with torch.no_grad():
        run(**given)
    assert not [record for record in caplog.records if "requires grad" in record.getMessage()]


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_results_that_torch_computes_are_detached_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = requiring_grad(name)
    monkeypatch.setattr(devices, "current", lambda: devices.Device("reference", None))
    dispatch.clear_decisions()
    if name in ADDED_TO and not name.startswith("all_reduce"):  # which torch computes none of
        with pytest.raises(GuardError, match=REFUSAL):
            CALLS[name].run(**given)
        given["residual"] = given["residual"].detach()
    assert not attached(CALLS[name].run(**given))
    dispatch.clear_decisions()
