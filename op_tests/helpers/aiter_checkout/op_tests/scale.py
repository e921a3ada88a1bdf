"""A test file in the form of aiter's: its arguments are the cases to run."""

import os
import sys

import csrc.kernels as kernels  # a folder without __init__.py, as aiter's is: another csrc would win
import torch
from aiter import fail_hard, scale, unbuilt
from aiter.test_common import benchmark, checkAllclose, run_perftest

assert "aiter_checkout" in kernels.__path__[0]


def test_scale(rows: int, beyond: int = 0, wrong: float = 0.0) -> None:
    x = torch.arange(rows * 100, dtype=torch.float32, device="cuda").view(rows, 100)
    assert x.is_cuda and x.device.index == 0 and torch.cuda.is_available()
    out = torch.empty_like(x)
    run_perftest(scale, 2.0, x, out, None, beyond, num_iters=3)
    host = x.cpu()
    for sent in (host.cuda(), host.to("cuda"), host.to(device=x.device)):
        sent.fill_(-1.0)
    assert host.min() >= 0
    x.zero_()
    checkAllclose(out, 2 * host + wrong)


def test_uncovered() -> None:
    torch.cuda.CUDAGraph()


def test_aborts() -> None:
    fail_hard(torch.ones(1, device="cuda"))


def test_unbuilt() -> None:
    unbuilt(torch.ones(1, device="cuda"))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        assert gradient.is_cuda
        return torch.full((3,), 2.0, device="cuda") * gradient


def test_generator() -> None:
    generator = torch.cuda.default_generators[0]
    torch.manual_seed(7)
    assert (generator.initial_seed(), generator.get_offset(), torch.cuda.initial_seed()) == (7, 0, 7)
    generator.set_offset(8)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(5)
    assert (generator.initial_seed(), generator.get_offset()) == (5, 0)
    torch.cuda.set_rng_state(state)
    assert generator.get_offset() == 8 and torch.equal(torch.rand(3, device="cuda"), drawn)
    try:
        generator.set_offset(6)
    except RuntimeError as error:
        assert "multiple of 4" in str(error)
    else:
        raise AssertionError("an offset of 6 was taken")


def test_backward() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    _Doubled.apply(x).backward(torch.ones(3, device="cuda"))
    (again,) = torch.autograd.grad(_Doubled.apply(x).sum(), x)
    assert x.grad.tolist() == again.tolist() == [2.0, 2.0, 2.0]


@benchmark()
def measure(rows: int) -> dict[str, int]:
    assert rows > 0
    return {"rows": rows}


def table(*all_rows: int) -> None:
    for rows in all_rows:
        measured = measure(rows)
        measured["speedup"] = measured["rows"] / 2


def ends() -> None:
    os.abort()


for case in sys.argv[1:]:
    eval(case)
