"""Child process of test_tracing.py: compiles, exports or loads every op as the first thing that happens to it.

    python trace_every_op.py compile dynamic|default
    python trace_every_op.py export|export-strict DIR
    python trace_every_op.py load DIR
    python trace_every_op.py opcheck

Prints one line of JSON per op: its name, how many graphs it took, and what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import hipforge
from helpers.op_calls import CALLS, K
from hipforge.cli.operands import normal

FIRST = 7  # no other dimension of any call has this size: torch takes equal sizes for the same symbol
BATCHES = (FIRST, 3, 8, 1)
OUTSIDE = 70  # of the envelope of ops that may return None
CHECKED: set[str] = set()


def flat(result: Any) -> tuple[torch.Tensor, ...]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return tuple(part for part in parts if part is not None)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().view(torch.uint8)


def same(got: Any, want: Any) -> bool:
    ours, theirs = flat(got), flat(want)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def first_chain() -> None:
    """Compile two ops, of which one takes what the other gives, before anything else has happened to either."""
    weight = [CALLS["mxfp8_gemv"].constants[name] for name in ("wq", "w_scale")]
    chain = lambda x: hipforge.mxfp8_gemv(*hipforge.swiglu_mxfp8(x), *weight)
    traced = torch.compile(chain, backend="eager", fullgraph=True, dynamic=True)
    for batch in (7, 3, 12):
        x = normal(batch, 2 * K, seed=0)
        assert same(traced(x), chain(x)), f"another result for a batch of {batch}"


def compiled(name: str, dynamic: bool | None) -> dict[str, Any]:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    call = CALLS[name]
    torch._dynamo.reset()
    traced = torch.compile(call.run, backend=count, fullgraph=True, dynamic=dynamic)
    per_batch = {}
    for batch in (*BATCHES, *((OUTSIDE,) if call.guarded else ())):
        got = traced(**call.make(batch))
        assert same(got, call.run(**call.make(batch))), f"another result for a batch of {batch}"
        per_batch[batch] = len(graphs)
    return {"graphs": per_batch}


class Wrapped(torch.nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, given: dict[str, torch.Tensor]) -> Any:
        return self.run(**given)


def batch_dimensions(make: Callable[[int], dict[str, torch.Tensor]]) -> dict[str, dict[int, Any]]:
    """The dimensions that differ between two batches are dynamic."""
    dim = torch.export.Dim("batch", min=2, max=64)
    small, large = make(FIRST), make(FIRST + 4)
    return {
        name: {
            axis: dim * (size // FIRST) if size > FIRST else dim
            for axis, (size, other) in enumerate(zip(tensor.shape, large[name].shape, strict=True))
            if size != other
        }
        for name, tensor in small.items()
    }


def exported(name: str, folder: Path, strict: bool) -> dict[str, Any]:
    call = CALLS[name]
    dynamic = None if call.guarded else ({**batch_dimensions(call.make)},)
    program = torch.export.export(Wrapped(call.run), (call.make(FIRST),), dynamic_shapes=dynamic, strict=strict)
    torch.export.save(program, folder / f"{name}.pt2")
    return {}


def loaded(name: str, folder: Path) -> dict[str, Any]:
    call = CALLS[name]
    program = torch.export.load(folder / f"{name}.pt2").module()
    for batch in (FIRST,) if call.guarded else (FIRST, 3, 8):
        assert same(program(call.make(batch)), call.run(**call.make(batch))), f"another result for a batch of {batch}"
    return {}


def copied(value: Any) -> Any:
    """A copy that later calls do not write; expanded tensors, which ops only read, are not copied."""
    return value.clone() if torch.is_tensor(value) and 0 not in value.stride() else value


def checked(name: str) -> dict[str, Any]:
    """Run torch's own checks on each operator that the call of an op reaches, with the arguments that reach it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "hipforge":
                self.calls.append((func, tuple(map(copied, args)), {n: copied(v) for n, v in (kwargs or {}).items()}))
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        CALLS[name].run(**CALLS[name].make(FIRST))
    found = {}
    for func, args, kwargs in seen.calls:
        if str(func) not in CHECKED:  # ops share operators, and a layer is made of several
            CHECKED.add(str(func))
            found[str(func)] = torch.library.opcheck(func, args, kwargs, raise_exception=False)
    return {"operators": {op: {test: str(said)[:300] for test, said in tests.items()} for op, tests in found.items()}}


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "load":
        hipforge.register_operators()
    if what == "compile":
        first_chain()
    for name in CALLS:
        try:
            if what == "compile":
                said = compiled(name, True if rest[0] == "dynamic" else None)
            elif what in ("export", "export-strict"):
                said = exported(name, Path(rest[0]), what == "export-strict")
            elif what == "load":
                said = loaded(name, Path(rest[0]))
            else:
                said = checked(name)
        except Exception:
            said = {"error": traceback.format_exc()[-1500:]}
        print(json.dumps({"op": name, **said}), flush=True)


if __name__ == "__main__":
    main()
