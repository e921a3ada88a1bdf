"""``hipforge explain``: which path an op takes at a shape, and why not the others; nothing is built or run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hipforge import shapes
from hipforge.cli.profile_subjects import SUBJECTS, call_of, subject_command

if TYPE_CHECKING:
    from hipforge.ops.core.dispatch import Explanation


@subject_command("explain")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(op: str, shape: str, arch: str | None, as_json: bool) -> None:
    """Say which kernel and configuration OP takes at SHAPE, where that comes from, and why not another path."""
    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    found = _products(op, shape) if op in PRODUCTS else {f"{op} {shape}": _explained(op, shape)}
    if as_json:
        told = [{"call": title, **asdict(_plain(each))} for title, each in found.items()]
        click.echo(json.dumps(told if len(told) > 1 else told[0], indent=1, default=str))
        return
    for title, each in found.items():
        if len(found) > 1:
            click.echo(f"{title}:")
        click.echo(str(each))


def _explained(op: str, shape: str, *, weighted: bool = False) -> Explanation:
    """Ask about tensors without data: only shapes, dtypes and devices decide."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hipforge.ops.core.dispatch import explain

    with FakeTensorMode():
        call = call_of(op, shape)
        if SUBJECTS[op].own:
            return _of_own(op, call)
        more = {"mul_weight_by": torch.ones(call.keywords["num_valid_tokens"])} if weighted else {}
        return explain(call.func, *call.args, **call.keywords, **more)


def _of_own(op: str, call: partial[Any]) -> Explanation:
    """Return which ops of the library ``torch.ops.hipforge`` a call of one's own makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from hipforge.ops.core.dispatch import Explanation

    made: dict[str, None] = {}

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "hipforge":
                made[func.overloadpacket.__name__] = None
            return func(*args, **(kwargs or {}))

    with Listening():
        call()
    return Explanation(
        op, "kernel" if made else "torch", ", ".join(made) or None, {}, "an op of your own takes the path that it is "
        "written to take", None, None, {},
    )  # fmt: skip


PRODUCTS = {
    "fused_moe_fp8": "grouped_fp8_linear",
    "fused_moe_mxfp4": "grouped_mxfp4_linear",
    "fused_moe_mxfp8": "grouped_mxfp8_linear",
}
"""The op of the two grouped products of a MoE layer."""


def _products(op: str, shape: str) -> dict[str, Explanation]:
    """Return what is decided of a MoE layer: its two grouped products; all else of it runs wherever they do."""
    subject = SUBJECTS[op]
    tokens, n, k, experts, top_k = shapes.parse(shape, subject.shape, subject.example)
    gate_up, down = (tokens, 2 * n, k, experts, top_k), (tokens * top_k, k, n, experts, 1)
    return {
        f"{name} {','.join(map(str, part))}": _explained(PRODUCTS[op], ",".join(map(str, part)), weighted=part is down)
        for name, part in (("gate and up", gate_up), ("down", down))
    }


def _plain(found: Explanation) -> Explanation:
    """Return the explanation with ordinary dictionaries, which asdict can copy."""
    row = None if found.row is None else dict(found.row)
    return replace(found, configuration=dict(found.configuration), row=row, refused=dict(found.refused))
