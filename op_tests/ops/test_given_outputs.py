"""What an op is given to write into: that object comes back, whatever the types of its inputs, and not a view of it."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from stress import calls
from stress.case import Arguments, Op, Rng
from stress.mutations import Subclass

import hipforge
from hipforge import GuardError

# The names under which ops take memory for their results, in the order of the results.
OUTS = ("out", "q_out", "output", "lse_out", "scale_out", "ids_out")


def _parameters(op: Op) -> set[str]:
    return set(inspect.signature(getattr(hipforge, op.name)).parameters)


OPS = {
    op.name: op
    for op in calls.OPS
    if op.call is None and op.name != "moe_align_block_size" and _parameters(op) & set(OUTS)
}


def _call(op: Op, arguments: Arguments) -> tuple[torch.Tensor, ...]:
    every_result = {"return_lse": True, "out_format": "mxfp8"}
    free = [name for name in every_result if name in _parameters(op) and not arguments.get(name)]
    result = getattr(hipforge, op.name)(**{**arguments, **{name: every_result[name] for name in free}})
    return () if result is None else result if isinstance(result, tuple) else (result,)


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(part.double().nan_to_num(nan=1e99) for part in (one, other)))


@pytest.mark.parametrize("name", OPS)
def test_it_comes_back_itself_whatever_the_inputs_are(name: str, path: str) -> None:
    op = OPS[name]
    for number in range(100):  # until a call has rows and a result
        arguments = {key: value for key, value in op.make(Rng(7, number)).items() if key not in OUTS}
        inputs = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
        unwritten = arguments.get("cu_seqlens_q") is not None or arguments.get("uncovered") == "undefined"
        usual = arguments[inputs[0]].numel() and not unwritten and arguments.get("out_scale") is None
        results = _call(op, copy.deepcopy(arguments)) if usual else ()
        if results:
            break
    none_in_torch = ("mxfp8_gemm", "grouped_gemm_mxfp8", "grouped_gemm_fp8", "grouped_gemm_mxfp4", "fp8_gemm")
    assert results or (path == "torch" and (name in none_in_torch or name.startswith("all_reduce")))
    wanted = [out for out in OUTS if out in _parameters(op)]
    for changed in (None, *inputs):
        given = copy.deepcopy(arguments)
        if changed is not None:
            given[changed] = given[changed].as_subclass(Subclass)
        outs = {out: torch.zeros_like(result) for out, result in zip(wanted, results, strict=False)}
        for out, result, want in zip(outs, _call(op, {**given, **outs}), results, strict=False):
            assert result is outs[out], f"{out} with a subclass for {changed}"
            assert result.dtype == want.dtype and same_numbers(result, want), out


def test_memory_that_several_elements_share_is_not_written(path: str) -> None:
    x, weight = torch.ones(3, 64).half(), torch.ones(64).half()
    one = torch.zeros(1, 64).half()
    with pytest.raises(GuardError, match="residual"):
        hipforge.residual_rms_mxfp8(x, one.expand(3, 64), weight, 1e-5)
    heads, positions = torch.ones(3, 1, 64).half(), torch.arange(3)
    rotation, cache = torch.ones(8, 64), torch.zeros(2, 16, 1, 64).half()
    rest = heads, heads.clone(), rotation, positions
    for name, given in {
        "q_out": {"q_out": one[None].expand(3, 1, 64)},
        "k_cache": {"k_cache": cache[:, :1].expand(2, 16, 1, 64)},
        "v_cache": {"v_cache": cache[:1].expand(2, 16, 1, 64)},
    }.items():
        caches = {"k_cache": cache, "v_cache": cache.clone(), "slot_mapping": positions, "q_out": None}
        with pytest.raises(GuardError, match=f"{name} .*must not be expanded: its rows share memory"):
            hipforge.rope_and_cache(heads.clone(), *rest, **{**caches, **given})
    assert not one.any() and not cache.any()


@pytest.mark.parametrize(
    "bad",
    [
        {"scale_tensor": torch.ones(2, dtype=torch.int64)},
        {"out": torch.empty(3, 64, dtype=torch.float16)},
        {"also_out": torch.empty(3, 64, dtype=torch.float16)},
        {"weight": torch.ones(63, dtype=torch.float16)},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_a_refused_call_leaves_the_residual_alone(bad: dict[str, torch.Tensor], path: str) -> None:
    residual = torch.full((2, 64), 2.0).half()
    given = {"weight": torch.ones(64).half(), "epsilon": 1e-6, "scale_tensor": torch.ones(1), **bad}
    with pytest.raises(GuardError):
        hipforge.residual_rms(torch.ones(2, 64).half(), residual, **given)
    assert residual.eq(2).all()
