"""fp8_matmul against its definition in float64, and its gradients against bfloat16's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import hipforge
from hipforge.errors import GuardError
from hipforge.integrations.nanochat import fp8_matmul

pytestmark = pytest.mark.gfx942("definition or exact")

E4M3, E5M2 = hipforge.ops.core.fp8.fp8_dtypes("cpu")


def rounded(x, dtype):
    """The definition, written in float64 and independent of the package: one scale, clamp, cast, and back."""
    limit = torch.finfo(dtype).max
    scale = (limit / max(x.double().abs().max().item(), 1e-12)) if x.numel() else 1.0
    scale = torch.tensor(scale, dtype=torch.float64).float()
    codes = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return codes.double() * scale.reciprocal().double()


def within(got, left, right, steps):
    """got is left @ right up to so many roundings to bfloat16 and to float32 sums, which are 2^-24 a term."""
    want = left @ right
    bound = steps * 2.0**-8 * want.abs() + (left.shape[1] + 4) * 2.0**-24 * (left.abs() @ right.abs())
    return bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 48), (2, 3, 2, 64), (5, 40), (1, 24)])
@pytest.mark.parametrize("outputs", [32, 20])
def test_the_three_products_are_those_of_the_definition(shape, outputs):
    torch.manual_seed(0)
    x = torch.randn(shape).bfloat16().requires_grad_()
    w = torch.randn(outputs, shape[-1], requires_grad=True)
    y = fp8_matmul(x, w)
    gradient = torch.randn(y.shape).bfloat16()
    y.backward(gradient)

    rows, flat = x.detach().reshape(-1, shape[-1]), gradient.reshape(-1, outputs)
    x8, w8, g8 = rounded(rows, E4M3), rounded(w.detach(), E4M3), rounded(flat, E5M2)
    # Where a dimension is not a multiple of 16 the product is rounded to bfloat16 once more, before its scales.
    assert y.shape == (*shape[:-1], outputs) and y.dtype == torch.bfloat16
    assert within(y.detach().reshape(-1, outputs), x8, w8.t(), 2)
    assert x.grad.dtype == torch.bfloat16 and within(x.grad.reshape(rows.shape), g8, w8, 2)
    assert w.grad.dtype == torch.float32 and within(w.grad, g8.t(), x8, 1)


def test_powers_of_two_are_exact():
    torch.manual_seed(0)
    x, w = (2.0 ** torch.randint(-2, 1, shape) for shape in ((16, 16), (32, 16)))
    # A largest element that is the format's limit over a power of two makes the scale a power of two.
    limit = torch.finfo(E4M3).max
    x[0, 0] = w[0, 0] = limit / 2.0 ** math.floor(math.log2(limit))
    y = fp8_matmul(x, w, compute_dtype=torch.float32)
    assert torch.equal(y, x @ w.t())


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def gradients(product, x, w, gradient_of):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = product(x, w)
    y.backward(gradient_of(y.detach()))
    return x.grad, w.grad


def in_bf16(x, w):
    return functional.linear(x.bfloat16(), w.bfloat16())


def test_gradients_of_a_squared_loss_are_within_five_percent_of_bf16():
    torch.manual_seed(0)
    x, w = torch.randn(512, 128), torch.randn(512, 128)
    found, wanted = (gradients(product, x, w, lambda y: y) for product in (fp8_matmul, in_bf16))
    # A Gaussian in e4m3 is off by a = 2.7 % in the root mean square and in e5m2 by 5.3 %. For the loss y^2 / 2 the
    # gradient of x is x w^T w: 512 terms of variance 128 with the mean 512 x, a norm of sqrt(512^2 + 512 * 128) = 572.
    # Its terms are off by 5.3 % for the gradient of y in e5m2, by a for w, and by sqrt(2) a for y itself, which the
    # forward pass computed in FP8: 7 % * sqrt(512 * 128) / 572 = 3.1 %. The part of y's error that is x's does not
    # average out over the terms: a * 512 / 572 = 2.4 %. Together 3.9 %; the gradient of w is the same with x for w.
    for got, want in zip(found, wanted, strict=True):
        assert relative(got, want) < 5e-2


def test_gradients_of_noise_are_off_by_what_the_formats_lose():
    torch.manual_seed(0)
    x, w = torch.randn(512, 128), torch.randn(512, 128)
    noise = torch.randn(512, 512).bfloat16()
    found, wanted = (gradients(product, x, w, lambda y: noise) for product in (fp8_matmul, in_bf16))
    for got, want in zip(found, wanted, strict=True):
        # sqrt(5.3^2 + 2.7^2) = 5.9 %, as above with nothing that adds up.
        assert 5e-2 < relative(got, want) < 6.5e-2


def test_a_frozen_weight_gets_no_gradient_and_a_frozen_input_neither():
    x, w = torch.ones(16, 16, requires_grad=True), torch.ones(16, 16)
    fp8_matmul(x, w).sum().backward()
    assert w.grad is None and x.grad is not None
    w = nn.Parameter(w)
    fp8_matmul(x.detach(), w).sum().backward()
    assert torch.equal(w.grad, torch.full((16, 16), 16.0))


def test_an_empty_batch_and_zeros_have_gradients_of_zero():
    for x in (torch.zeros(0, 16), torch.zeros(3, 16)):
        w = torch.randn(32, 16, requires_grad=True)
        y = fp8_matmul(x, w)
        assert torch.equal(y, torch.zeros(len(x), 32).bfloat16())
        y.sum().backward()
        assert torch.equal(w.grad, torch.zeros(32, 16))


def test_one_compiled_graph_gives_what_eager_gives():
    torch.manual_seed(0)
    x, w = torch.randn(32, 64).bfloat16(), torch.randn(48, 64)

    def step(product):
        return gradients(product, x, w, lambda y: 2 * y)

    compiled = torch.compile(fp8_matmul, backend="aot_eager", fullgraph=True)
    for got, want in zip(step(compiled), step(fp8_matmul), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4, 16), torch.ones(8, 32)), r"x must have last dimension K=32.*got shape \(4, 16\)"),
        ((torch.tensor(1.0), torch.ones(8, 32)), r"got shape \(\)"),
        ((torch.ones(4, 16), torch.ones(16)), r"w must be .*\[N, K\]"),
        ((torch.ones(4, 16, dtype=torch.int8), torch.ones(8, 16)), r"x must be floating point; got int8"),
        ((torch.ones(4, 16), torch.ones(8, 16, dtype=torch.int8)), r"w must be floating point; got int8"),
        (([1.0], torch.ones(8, 16)), "x must be a torch.Tensor"),
    ],
)
def test_wrong_operands_are_refused_by_name(arguments, message):
    with pytest.raises(GuardError, match=message):
        fp8_matmul(*arguments)


def test_another_compute_dtype_is_refused():
    with pytest.raises(GuardError, match=r"compute_dtype must be one of .*torch\.float64"):
        fp8_matmul(torch.ones(4, 16), torch.ones(8, 16), compute_dtype=torch.float64)
