"""One token's experts on an sm_90 GPU: the norm with its router, and products that choose their experts.

Run by ``make gpu-test``. Each is held to the launches that it replaces, bit for bit, and so to their tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hipforge
from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.mxfp8_grouped_gemm import token
from hipforge.ops.norm_router import residual_rms_mxfp8_router

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or devices.current().arch_of() != "sm_90", reason="needs an sm_90 GPU"
)
EPSILON = 1e-5


def drawn(*size: int, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device="cuda") * spread).bfloat16()


def experts(count: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = hipforge.mxfp8_quantize(drawn(count * n, k, spread=k**-0.5))
    return q.view(count, n, k), scale.view(count, n, -1)


@pytest.mark.parametrize(
    "tokens, hidden, count",
    [
        *((tokens, *of) for tokens in (1, 7) for of in ((2048, 128), (2880, 32), (4096, 130), (32, 5), (2080, 1))),
        (16, 6144, 128), (2, 8192, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset, biased", [(0.0, False), (1.0, True)])
def test_a_norm_and_its_router_are_those_of_two_launches(
    tokens: int, hidden: int, count: int, dtype: torch.dtype, offset: float, biased: bool
) -> None:
    torch.manual_seed(hidden)
    x, residual, weight = drawn(tokens, hidden), drawn(tokens, hidden, spread=3.0), drawn(hidden)
    router = drawn(count, hidden, spread=0.1).to(dtype)
    bias = torch.randn(count, device="cuda") if biased else None
    kept, y = residual.clone(), torch.empty_like(x)
    q, scale, _ = hipforge.residual_rms_mxfp8(x, kept, weight, EPSILON, weight_offset=offset, also_out=y)
    call = (x, residual, weight, EPSILON, router, bias)
    assert hipforge.explain(residual_rms_mxfp8_router, *call, weight_offset=offset).path == "kernel"
    before = residual.clone()
    got = residual_rms_mxfp8_router(*call, weight_offset=offset)
    want = hipforge.router_gemm(y, router, bias), kept, q, scale
    assert torch.equal(residual, before)
    assert all(torch.equal(*(one.view(torch.uint8) for one in pair)) for pair in zip(got, want, strict=True))


def test_what_is_not_one_launch_is_two() -> None:
    x, weight, router = drawn(17, 256), drawn(256), drawn(16, 256)
    call = x, drawn(17, 256), weight, EPSILON, router
    assert hipforge.explain(residual_rms_mxfp8_router, *call).kernel == "residual_rms_mxfp8, router_gemm"
    logits, total, q, _ = residual_rms_mxfp8_router(*call)
    assert logits.shape == (17, 16) and total.shape == q.shape == x.shape


def special(logits: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "ties":
        return logits.mul(2).round().div(2)
    if kind == "rare":
        logits[0, ::7], logits[0, 1::11], logits[0, 2::13] = torch.nan, torch.inf, -torch.inf
    if kind == "all":
        logits.fill_(torch.nan)
    return logits


# (experts of the router, k, scoring, whether there is a bias, shared experts, renormalize)
CHOICES = [
    (128, 8, "softmax", False, 0, True), (16, 4, "softmax", False, 1, False), (300, 10, "softmax", False, 0, True),
    (512, 16, "sigmoid", True, 2, True), (33, 1, "sigmoid", False, 0, False), (8, 8, "softmax", False, 0, True),
]  # fmt: skip


# of each choice small products with every kind of logits, and those of a model's size of its own choice
CHOOSING = [
    *((of, kind, 256, 128) for of in CHOICES for kind in ("plain", "ties", "rare", "all")),
    *((CHOICES[0], kind, 2048, 768) for kind in ("plain", "ties", "rare")),
]


@pytest.mark.parametrize(("of", "kind", "hidden", "width"), CHOOSING, ids=str)
def test_products_that_choose_take_the_experts_of_topk_gating(of: Any, kind: str, hidden: int, width: int) -> None:
    count, k, scoring, biased, shared, renormalize = of
    torch.manual_seed(count)
    logits = special(torch.randn(1, count, device="cuda"), kind)
    bias = torch.randn(count, device="cuda") if biased else None
    scale = 2.5
    weights, ids = hipforge.topk_gating(
        logits, k, scoring=scoring, bias=bias, renormalize=renormalize, scale=scale, shared_experts=shared
    )
    w1, w2 = experts(count + shared, 2 * width, hidden), experts(count + shared, hidden, width)
    xq = hipforge.mxfp8_quantize(drawn(1, hidden))
    assert token.choice_refusal(hidden, width, scoring, biased) is None
    choice = token.Choice(logits, k, scoring, bias, renormalize, scale, shared)
    for given in ({}, {"alpha": 1.702, "beta": 1.0, "limit": 2.0}):
        inner = token.token_gate_up(*xq, *w1, ids[0], **given)
        assert torch.equal(token.token_gate_up(*xq, *w1, choice, **given), inner)
        total = token.token_down(inner, *w2, ids[0], weights[0])
        assert torch.equal(token.token_down(inner, *w2, choice).view(torch.int16), total.view(torch.int16))


def test_a_choice_that_the_entries_do_not_take_is_refused() -> None:
    w, xq, logits = experts(4, 64, 128), hipforge.mxfp8_quantize(drawn(1, 128)), torch.randn(1, 4, device="cuda")
    for wrong, why in (
        (token.Choice(logits, 5), "k must be 1 to 16 and at most the experts, 4; got 5"),
        (token.Choice(logits, 2, shared_experts=1), "the experts of the logits and the shared ones, 5; got 4"),
        (token.Choice(logits[:, :2], 1), "the shared ones, 2; got 4"),
        (token.Choice(logits, 2, bias=logits[0]), "needs sigmoid scores"),
        (token.Choice(logits, 2, scale=torch.inf), "scale must be finite"),
        (token.Choice(logits.double(), 2), "logits must be"),
    ):
        with pytest.raises(GuardError, match=why):
            token.token_gate_up(*xq, *w, wrong)


def test_layers_that_start_early_wait_for_what_the_launch_before_writes() -> None:
    """Norm and router, gate and up, down, layer after layer in a graph: each replay as ordinary launches."""
    torch.manual_seed(1)
    hidden, width, count, layers, k = 1024, 512, 64, 6, 8
    router = [drawn(count, hidden, spread=0.1) for _ in range(layers)]
    w1 = [experts(count, 2 * width, hidden) for _ in range(layers)]
    w2 = [experts(count, hidden, width) for _ in range(layers)]
    norm, start = drawn(hidden), (drawn(1, hidden), drawn(1, hidden))
    logits = torch.empty(1, count, device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        x, stream = start
        for layer in range(layers):
            _, stream, q, scale = residual_rms_mxfp8_router(x, stream, norm, EPSILON, router[layer], out=logits)
            choice = token.Choice(logits, k)
            inner = token.token_gate_up(q, scale, *w1[layer], choice)
            x = token.token_down(inner, *w2[layer], choice)
        return x, stream

    want = run()
    graph = torch.cuda.CUDAGraph()
    with hipforge.programmatic_launch(), torch.cuda.graph(graph):
        got = run()
    for _ in range(100):
        logits.fill_(torch.nan)
        for one in got:
            one.zero_()
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
