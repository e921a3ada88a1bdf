"""Numbers past the ranges of float32 and float16: refused, or saturated where a row must still be stored."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.rope_cases import case
from stress import calls
from stress.case import Op

import hipforge
from hipforge import GuardError
from hipforge.ops import reference
from hipforge.ops.core.fp8 import fp8_dtypes

OPS = {op.name: op for op in calls.OPS if op.call is None}


def floats(op: Op) -> list[str]:
    """The parameters that are numbers, or may be."""
    parameters = inspect.signature(getattr(hipforge, op.name)).parameters
    return [name for name, each in parameters.items() if "float" in str(each.annotation) or each.annotation == "Scale"]


WITH_FLOATS = [name for name, op in OPS.items() if floats(op)]


def called(name: str, **changed: object) -> Any:
    return calls.function_of(OPS[name])(**{**calls.good_arguments(OPS[name]), **changed})


@pytest.mark.parametrize("op", WITH_FLOATS)
def test_what_is_no_number_or_past_float32_is_refused_under_its_name(op: str, path: str) -> None:
    for name in floats(OPS[op]):
        for wrong in (1e39, 10**300, -1e39, "2.5", [1], {"a": 1}, 1j, torch.zeros(3)):
            with pytest.raises(GuardError, match=name):
                called(op, **{name: wrong})


@pytest.mark.parametrize("op", WITH_FLOATS)
@pytest.mark.parametrize("number", (2**70, -(2**70)))
def test_an_integer_past_int64_is_the_float_that_it_equals(op: str, number: int, path: str) -> None:
    def ended(value: float) -> Any:
        try:
            result = called(op, **{name: value})
        except GuardError as error:
            return str(error).partition("; got")[0]
        return [part.float().nan_to_num(7.0) for part in calls.results(result) if part is not None]

    for name in floats(OPS[op]):
        as_float, as_integer = ended(float(number)), ended(number)
        assert type(as_float) is type(as_integer)
        assert all(one == other if isinstance(one, str) else torch.equal(one, other)
                   for one, other in zip(as_float, as_integer, strict=True)), name  # fmt: skip


@pytest.mark.parametrize("op", ["rms_norm", "residual_rms"])
def test_a_number_that_would_become_zero_is_refused(op: str, path: str) -> None:
    with pytest.raises(GuardError, match=r"weight_offset must be 0 or at least 1\.4e-45, as float32; got -5e-324"):
        called(op, weight_offset=-5e-324)
    with pytest.raises(GuardError, match=r"epsilon must be 0 or at least 1\.4e-45, as float32; got 1e-50"):
        called(op, epsilon=1e-50)
    called(op, epsilon=0.0)


ROWS = {
    "all alike": [1e38] * 64,
    "a mean past float16": [1e5] * 32 + [1.5e5] * 32,
    "below it": [-3e5] * 64,
    "one huge": [3e38] + [0.0] * 63,
    "both signs": [1e36, -1e36] * 32,
}


@pytest.mark.parametrize("name", ROWS)
def test_the_shift_of_a_row_saturates(name: str, path: str) -> None:
    row = torch.tensor(ROWS[name]).bfloat16()
    words, shifts = reference.quantize_kv_fp8(row[None])
    assert reference.dequantize_kv_fp8(words, shifts).isfinite().all()
    for groups in (1, 2, 8):
        packed = reference.quantize_kv_int4(row[None], groups)
        assert reference.dequantize_kv_int4(packed, groups).isfinite().all()
    for storage, groups in (("rows", None), ("int4", 1), ("int4", 8)):
        given = case(storage, dim=64, dtype=torch.bfloat16, **({} if groups is None else {"groups": groups}))
        v = row.expand_as(given.v).contiguous()
        hipforge.rope_and_cache(*given.tensors()[:2], v, *given.tensors()[3:], **given.options)
        token = int((given.slots >= 0).nonzero()[0])
        slot = int(given.slots[token])
        page, place = slot // given.v_cache.shape[1], slot % given.v_cache.shape[1]
        stored = given.v_cache[page, place]
        if groups is None:
            codes, word = reference.quantize_kv_fp8(v[token], fp8_dtypes("cpu")[0])
            assert torch.equal(given.options["v_scale_shift"][page, place], word)
            assert torch.equal(stored.view(torch.uint8), codes.view(torch.uint8))
        else:
            assert torch.equal(stored, reference.quantize_kv_int4(v[token], groups))


def test_scales_are_one_or_one_per_head_on_every_path(path: str) -> None:
    given = case("fp8")
    with pytest.raises(GuardError, match="scale must"):
        hipforge.rope_and_cache(*given.tensors(), **{**given.options, "v_scale": torch.ones(3)})
