"""A call of every public op for any batch size: what tests of tracing, export and capture run through.

They are the calls that ``hipforge profile`` makes, whose first number is the batch: tensors whose size depends on it
are inputs, all else is constant. Slots are sorted in the call, since their number is no multiple of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import hipforge
from hipforge import ops
from hipforge.cli.operands import e4m3
from hipforge.cli.profile_subjects import SUBJECTS

K = 256
SIZES = {"N": 64, "K": K, "C": K, "D": 64, "V": 40, "E": 4, "TOPK": 2, "MKV": 300, "HQ": 8, "HKV": 2, "G": 4}
SLOTS = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
ADDED_TO = (
    "residual_rms", "residual_rms_fp8_dynamic", "residual_rms_mxfp8", "all_reduce_residual_rms",
    "all_reduce_residual_rms_mxfp8",
)  # fmt: skip


class Call(NamedTuple):
    """``make(batch)`` gives the tensors by name; ``run(**tensors)`` calls the op on fresh copies of what it writes.

    ``guarded``: the op may return None, so that a traced graph depends on the batch.
    """

    make: Callable[[int], dict[str, torch.Tensor]]
    run: Callable[..., Any]
    constants: dict[str, Any]
    guarded: bool = False


def arguments(op: str, batch: int) -> dict[str, Any]:
    """The arguments of a call by name."""
    subject = SUBJECTS[op]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        call = subject.call(batch, *(SIZES[name] for name in subject.shape[1:]))
    return inspect.signature(getattr(hipforge, op)).bind(*call.args, **call.keywords).arguments


def _call(op: str) -> Call:
    three, five = arguments(op, 3), arguments(op, 5)
    inputs = [name for name, value in three.items() if torch.is_tensor(value) and value.shape != five[name].shape]
    constants = {name: value for name, value in three.items() if name not in inputs}
    grouped = SLOTS[0] in three

    def make(batch: int) -> dict[str, torch.Tensor]:
        given = arguments(op, batch)
        made = {name: given[name] for name in inputs if name not in SLOTS}
        if grouped:
            draws = torch.rand(batch, SIZES["E"], generator=torch.Generator().manual_seed(5))
            made["ids"] = draws.topk(SIZES["TOPK"], dim=1).indices.int()
        return made

    def run(**given: torch.Tensor) -> Any:
        given = {**constants, **given}
        if grouped:
            ids = given.pop("ids")
            slots = hipforge.moe_align_block_size(ids, constants["block_m"], SIZES["E"])
            given.update(zip(SLOTS, slots, strict=True), num_valid_tokens=ids.numel())
        if op in ADDED_TO:
            given["residual"] = given["residual"].clone()
        if op == "rope_and_cache":
            caches = given["k_cache"].clone(), given["v_cache"].clone()
            given.update(k_cache=caches[0], v_cache=caches[1], q_out=torch.empty_like(given["q"]))
            return hipforge.rope_and_cache(**given), *caches
        result = getattr(hipforge, op)(**given)
        return tuple(result) if isinstance(result, tuple) else result  # no named tuple, which torch cannot export

    guarded = str(inspect.signature(getattr(hipforge, op)).return_annotation).endswith("| None")
    return Call(make, run, constants, guarded)


CALLS = {op: _call(op) for op in ops.public_names() if op in SUBJECTS}
_W = e4m3(64, K, seed=12, scale=0.2)
CALLS["scaled_mm"] = Call(
    lambda batch: {"a": e4m3(batch, K, seed=0, scale=0.2)},
    lambda a: hipforge.scaled_mm(a, _W.t(), torch.ones(1), torch.ones(1)),
    {},
)
