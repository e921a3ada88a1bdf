"""Tensors that are not what their data pointer, shape and strides say: refused by name, before any kernel runs."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers.abi_module import count_extents, describe, with_stream

from hipforge.errors import GuardError
from hipforge.jit.call import tensors


def freed(start: int = 0) -> torch.Tensor:
    x = torch.zeros(8)
    view = x[start:]
    x.untyped_storage().resize_(0)
    return view


def shrunk(to_bytes: int, transpose: bool = False) -> torch.Tensor:
    x = torch.zeros(4, 2)
    view = x.t() if transpose else x
    x.untyped_storage().resize_(to_bytes)
    return view


STORAGE = {
    "freed": (lambda: freed(), "reaches byte 32 of a storage of 0 bytes"),
    "freed behind an offset": (lambda: freed(3), "reaches byte 32 of a storage of 0 bytes"),
    "one byte short": (lambda: shrunk(31), "reaches byte 32 of a storage of 31 bytes"),
    "a transposed view": (lambda: shrunk(28, transpose=True), "reaches byte 32 of a storage of 28 bytes"),
    "zeros without storage": (lambda: torch._efficientzerotensor(3), "is a tensor of zeros without storage"),
}
SIGNS = {
    "negative view": (lambda: torch._neg_view(torch.ones(3)), "has its negative bit set.*pass resolve_neg"),
    "imaginary part of a conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "has its negative bit"),
    "negative bfloat16": (lambda: torch._neg_view(torch.ones(3, dtype=torch.bfloat16)), "has its negative bit set"),
}


@pytest.mark.parametrize("target", ["host", "emulator"])
@pytest.mark.parametrize("case", [*STORAGE, *SIGNS])
def test_what_no_kernel_could_read_rightly_is_refused(bound, target, case):
    make, words = {**STORAGE, **SIGNS}[case]
    with pytest.raises(GuardError, match=rf"describe: argument 'x' {words}"):
        bound(describe, target)(torch.zeros(32, dtype=torch.int64), make())
    with pytest.raises(GuardError, match=rf"with_stream: argument 'out' {words}"):
        bound(with_stream, target)(make())


@pytest.mark.parametrize("case", STORAGE)
def test_the_emulators_launch_refuses_them_too(case):
    from hipforge.emulator import launching

    make, words = STORAGE[case]
    with pytest.raises(GuardError, match=rf"k, argument x: it {words}"):
        launching._extent("k, argument x", "x", make())


def test_storage_that_is_larger_or_exactly_as_large_is_taken(bound):
    facts = torch.zeros(32, dtype=torch.int64)
    for x in (shrunk(32), torch.zeros(100)[3:7], torch.zeros(0), freed(8), torch.zeros(1).expand(5, 6)):
        bound(describe)(facts, x)
        assert facts[4] == x.numel()


def test_resolved_signs_are_taken_and_read_with_them(bound):
    x = torch._neg_view(torch.ones(3)).resolve_neg()
    facts = torch.zeros(32, dtype=torch.int64)
    bound(describe)(facts, x)
    assert facts[2] == x.data_ptr() and x.tolist() == [-1, -1, -1]


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(tensors, "_warned", set())


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "requires grad" in record.getMessage()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_input_that_requires_grad_is_detached_with_one_warning(bound, caplog, dtype):
    caplog.set_level(logging.WARNING, logger="hipforge")
    facts, weight = torch.zeros(32, dtype=torch.int64), torch.ones(3, dtype=dtype, requires_grad=True)
    call = bound(describe)
    call(facts, weight)
    call(facts, weight)
    (said,) = warnings_of(caplog)
    assert said.startswith("describe: argument 'x' requires grad, but the op has no backward")


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_without_recording_nothing_is_said_and_anything_may_be_written(bound, caplog, quiet):
    caplog.set_level(logging.WARNING, logger="hipforge")
    leaf = torch.ones(4, requires_grad=True)
    with quiet():
        bound(describe)(torch.zeros(32, dtype=torch.int64), leaf)
        bound(count_extents, mutates=("out", "x"))(torch.zeros(8, dtype=torch.int64), leaf, None)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("leaf", [True, False])
def test_writing_into_a_tensor_that_requires_grad_is_refused(bound, leaf):
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(GuardError, match="argument 'x' is written and requires grad, which autograd would not see"):
        bound(count_extents, mutates=("out", "x"))(torch.zeros(8, dtype=torch.int64), x if leaf else x * 2, None)
