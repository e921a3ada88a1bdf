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
    "negative bytes": (lambda: torch._neg_view(torch.ones(3, dtype=torch.uint8)), "has its negative bit set"),
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


# ---- memory that is written ------------------------------------------------------------------------------------------

POOL = torch.arange(64)
SHARED = {
    # name: (what is written, another argument, whether they may share a byte)
    "one and the same": (POOL[:8], POOL[:8], False),
    "a later start": (POOL[:8], POOL[4:12], True),
    "another dtype": (POOL[:8], POOL[:8].view(torch.int32), True),
    "end to end": (POOL[:8], POOL[8:16], False),
    "alternating rows": (POOL.view(8, 8)[::2], POOL.view(8, 8)[1::2], False),
    "halves of rows": (POOL.view(8, 8)[:, :4], POOL.view(8, 8)[:, 4:], False),
    "halves and a column more": (POOL.view(8, 8)[:, :4], POOL.view(8, 8)[:, 3:7], True),
    "layers of one pool": (POOL.view(4, 2, 8)[:, 0], POOL.view(4, 2, 8)[:, 1], False),
    "transposed": (POOL.view(8, 8)[:4], POOL.view(8, 8).t()[:4], True),
    "nothing": (POOL[:0], POOL, False),
    "an expanded one": (POOL.view(8, 8)[1:3], POOL[8:9].expand(3, 8), True),
}


@pytest.mark.parametrize("case", SHARED)
def test_what_is_written_is_apart_from_every_other_argument(bound, case):
    written, other, shared = SHARED[case]
    assert tensors.may_share(written, other) == (shared or case == "one and the same")
    call, counts = bound(count_extents, mutates=("out", "x")), torch.zeros(8, dtype=torch.int64)
    call(counts, None, other)
    if shared:
        with pytest.raises(GuardError, match="count_extents: x is written and must not share memory with y"):
            call(counts, written, other)
    else:
        call(counts, written, other)
    bound(count_extents)(counts, written, other)  # both are read


def test_two_written_arguments_are_never_the_same_view(bound):
    call = bound(count_extents, mutates=("out", "x", "y"))
    with pytest.raises(GuardError, match="count_extents: x is written and must not share memory with y"):
        call(torch.zeros(8, dtype=torch.int64), POOL[:8], POOL[:8])


@pytest.mark.parametrize(
    "written", [torch.zeros(4).expand(3, 4), torch.zeros(16).as_strided((3, 4), (2, 1)), torch.zeros(4)[:1].expand(2)]
)
def test_what_is_written_does_not_meet_itself(bound, written):
    counts = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(GuardError, match="x is written and must not be expanded: its rows share memory; pass a clone"):
        bound(count_extents, mutates=("out", "x"))(counts, written, None)
    bound(count_extents)(counts, written, None)  # it is read
    bound(count_extents, mutates=("out", "x"))(counts, torch.zeros(4, 3).t()[::2], None)


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
