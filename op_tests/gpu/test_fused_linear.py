"""Products that make their activations, and attention that asks for its keys early, on an sm_90 GPU.

Run by ``make gpu-test``. A product is held to the two launches that it replaces, bit for bit, and so to their tests.
"""

from __future__ import annotations

import pytest
import torch
from helpers.errors import relative

import hipforge
from hipforge import devices
from hipforge.errors import GuardError
from hipforge.nn import PagedKVCache
from hipforge.ops.core.dispatch import Explanation
from hipforge.ops.fused_linear import residual_rms_mxfp8_linear, swiglu_mxfp8_linear
from hipforge.ops.mxfp8_gemm import mxfp8_row_stream
from hipforge.ops.mxfp8_gemm.kernels.row_stream_made import mxfp8_row_stream_norm_out, mxfp8_row_stream_swiglu_out
from hipforge.ops.mxfp8_grouped_gemm.token import makes_swiglu, token_down, token_gate_up
from hipforge.ops.reference import dequantize_mxfp8

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or devices.current().arch_of() != "sm_90", reason="needs an sm_90 GPU"
)
EPSILON = 1e-5


def drawn(*size: int, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device="cuda") * spread).bfloat16()


def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return hipforge.mxfp8_quantize(drawn(n, k, spread=k**-0.5))


def by_a_launch_of_its_own(q: torch.Tensor, scale: torch.Tensor, *by: torch.Tensor, told: Explanation) -> torch.Tensor:
    assert told.path == "kernel" and told.configuration
    return mxfp8_row_stream(q, scale, *by, rows=8, **told.configuration)


NORMS = [(1, 6144, 4096), (2, 1000, 4096), (2, 257, 2048), (1, 640, 8192), (1, 1283, 6144), (2, 96, 128)]


@pytest.mark.parametrize("m, n, k", NORMS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_and_its_product_are_those_of_two_launches(m: int, n: int, k: int, offset: float) -> None:
    torch.manual_seed(m * n)
    x, residual, weight, bias = drawn(m, k), drawn(m, k, spread=3.0), drawn(k), drawn(n)
    by = (*weights(n, k), bias)
    call = (x, residual, weight, EPSILON, *by)
    kept = residual.clone()
    got, total = residual_rms_mxfp8_linear(*call, weight_offset=offset)
    assert torch.equal(residual, kept)
    q, scale, _ = hipforge.residual_rms_mxfp8(x, kept, weight, EPSILON, weight_offset=offset)
    assert torch.equal(total, kept)
    told = hipforge.explain(residual_rms_mxfp8_linear, *call, weight_offset=offset)
    assert torch.equal(got, by_a_launch_of_its_own(q, scale, *by, told=told))


@pytest.mark.parametrize("m, n, k", [(1, 4096, 14336), (2, 1000, 4096), (2, 96, 128), (1, 2048, 768)])
@pytest.mark.parametrize("activation", [{}, {"alpha": 1.702, "beta": 1.0, "limit": 2.0}])
def test_swiglu_and_its_product_are_those_of_two_launches(m: int, n: int, k: int, activation: dict[str, float]) -> None:
    torch.manual_seed(m * n)
    gate_up, by = drawn(m, 2 * k, spread=2.0), (*weights(n, k), drawn(n))
    got = swiglu_mxfp8_linear(gate_up, *by, **activation)
    q, scale = hipforge.swiglu_mxfp8(gate_up, **activation)
    told = hipforge.explain(swiglu_mxfp8_linear, gate_up, *by, **activation)
    assert torch.equal(got, by_a_launch_of_its_own(q, scale, *by, told=told))


def test_what_is_not_one_launch_is_two() -> None:
    x, weight = drawn(9, 256), drawn(256)
    by = weights(64, 256)
    assert (
        hipforge.explain(residual_rms_mxfp8_linear, x, x, weight, EPSILON, *by).kernel
        == "residual_rms_mxfp8, mxfp8_linear"
    )
    got, total = residual_rms_mxfp8_linear(x, drawn(9, 256), weight, EPSILON, *by)
    assert got.shape == (9, 64) and total.shape == x.shape
    gate_up = drawn(1, 512)
    assert hipforge.explain(swiglu_mxfp8_linear, gate_up, *by, interleaved=True).kernel == "swiglu_mxfp8, mxfp8_linear"
    q, scale = hipforge.swiglu_mxfp8(gate_up, interleaved=True)
    assert torch.equal(swiglu_mxfp8_linear(gate_up, *by, interleaved=True), hipforge.mxfp8_linear(q, scale, *by))


def test_what_the_entries_do_not_take_is_refused_before_a_launch() -> None:
    x, weight, by = drawn(1, 256), drawn(256), weights(64, 256)
    out, total = drawn(1, 64), drawn(1, 256)
    end = None, EPSILON, 0.0, 2, 2, 64, False
    with pytest.raises(GuardError, match="sum_out is written and must not share memory with residual"):
        mxfp8_row_stream_norm_out(out, total, x, total, weight, *by, *end)
    with pytest.raises(GuardError, match="columns of a row must be at most 2; got M = 3"):
        mxfp8_row_stream_norm_out(drawn(3, 64), drawn(3, 256), drawn(3, 256), drawn(3, 256), weight, *by, *end)
    with pytest.raises(GuardError, match="K must be a positive multiple of 128"):
        mxfp8_row_stream_norm_out(out, drawn(1, 96), drawn(1, 96), drawn(1, 96), drawn(96), *weights(64, 96), *end)
    with pytest.raises(GuardError, match=r"must have 2 K = 512 columns"):
        mxfp8_row_stream_swiglu_out(out, x, *by, None, 1.0, 0.0, torch.inf, 2, 2, 64, False)
    with pytest.raises(GuardError, match="give more blocks or fewer rows of X"):
        wide = drawn(4, 65536), *weights(64, 32768)
        mxfp8_row_stream_swiglu_out(drawn(4, 64), *wide, None, 1.0, 0.0, torch.inf, 2, 2, 64, False)


@pytest.mark.parametrize(
    "hidden, inner, rare",
    [
        (2048, 768, 0), (2048, 768, 70), (128, 128, 0), (384, 640, 0), (4096, 512, 70), (6144, 256, 0), (7168, 256, 70),
        (512, 1536, 0), (256, 2048, 70), (512, 4608, 70), (512, 4096, 0),
    ],
)  # fmt: skip
def test_the_experts_of_one_token_are_within_the_rounding_of_float64(hidden: int, inner: int, rare: int) -> None:
    """Gate and up, and the weighted sum, which is rounded once: 1.7e-3; with ``rare`` W's scale bytes are below 64."""
    torch.manual_seed(5)
    experts, slots = 16, 8
    w1, w1_scale = (of.view(experts, 2 * inner, -1) for of in weights(experts * 2 * inner, hidden))
    w2, w2_scale = (of.view(experts, hidden, -1) for of in weights(experts * hidden, inner))
    xq, x_scale = hipforge.mxfp8_quantize(drawn(1, hidden))
    w1_scale, w2_scale, x_scale = w1_scale - rare, w2_scale - rare, x_scale + rare
    assert rare == 0 or int(w1_scale.max()) < 64
    for ids in (torch.randperm(experts)[:slots], torch.tensor([15, 0, 15, 1, 0, 7, 8, 14]), torch.tensor([3])):
        ids = ids.int().cuda()
        exact = dequantize_mxfp8(xq, x_scale, torch.float64)
        each = dequantize_mxfp8(w1.view(-1, hidden), w1_scale.view(-1, hidden // 32), torch.float64).view(w1.shape)
        products = torch.einsum("k,snk->sn", exact[0], each[ids.long()])
        each = dequantize_mxfp8(w2.view(-1, inner), w2_scale.view(-1, inner // 32), torch.float64).view(w2.shape)
        routing = torch.rand(len(ids), device="cuda")
        for given in ({}, {"alpha": 1.702, "beta": 1.0, "limit": 2.0}):
            middle = token_gate_up(xq, x_scale, w1, w1_scale, ids, **given)
            if makes_swiglu(hidden, inner):
                assert relative(middle, swiglu(products, **given)) < 4e-3  # of gate and up rounded to bfloat16: 2.5e-3
                q, scale = hipforge.mxfp8_quantize(middle)
            else:
                assert relative(middle, products) < 2e-3
                q, scale = hipforge.swiglu_mxfp8(middle, **given)
            rows = dequantize_mxfp8(q, scale, torch.float64)
            want = torch.einsum("s,sk,snk->n", routing.double(), rows, each[ids.long()])
            assert relative(token_down(middle, w2, w2_scale, ids, routing, **given)[0], want) < 2e-3


def swiglu(gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float = torch.inf) -> torch.Tensor:
    gate, up = gate_up.chunk(2, 1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


@pytest.mark.parametrize("batch, keys", [(1, 2048), (1, 65), (8, 700), (2, 64)])
def test_layers_that_start_early_wait_for_what_the_launch_before_writes(batch: int, keys: int) -> None:
    """Norm and qkv, rope and store, attention, o_proj, SwiGLU and down in a graph: each replay as ordinary launches."""
    torch.manual_seed(keys)
    hidden, heads, kv_heads, dim, layers = 1024, 8, 2, 128, 4
    cache = PagedKVCache(layers, batch * (keys // 64 + 1), 64, kv_heads, dim, torch.device("cuda"))
    step = cache.extend(range(batch), keys)
    for pages in (cache.k, cache.v):
        pages.copy_(torch.randn(pages.shape, device="cuda").to(pages.dtype))
    position, slot = (of.view(batch, -1)[:, -1].contiguous() for of in (step.positions, step.slot_mapping))
    last = type(step)(1, position, slot, step.block_tables, step.seqlens)
    cos_sin, norm = torch.randn(keys, dim, device="cuda"), drawn(hidden)
    qkv = [weights((heads + 2 * kv_heads) * dim, hidden) for _ in range(layers)]
    out = [weights(2 * hidden, heads * dim) for _ in range(layers)]
    down = [weights(hidden, hidden) for _ in range(layers)]
    start = drawn(batch, hidden), drawn(batch, hidden)

    def run() -> tuple[torch.Tensor, ...]:
        x, stream = start
        for layer in range(layers):
            y, stream = residual_rms_mxfp8_linear(x, stream, norm, EPSILON, *qkv[layer])
            q, k, v = y.view(batch, -1, dim).split((heads, kv_heads, kv_heads), 1)
            turned = cache.rope_and_store(layer, q, k, v, cos_sin, last, q_out=torch.empty_like(q))
            attended, scale = cache.attend(layer, turned, last, out_format="mxfp8")
            gate_up = hipforge.mxfp8_linear(attended.view(batch, -1), scale, *out[layer])
            x = swiglu_mxfp8_linear(gate_up, *down[layer])
        return x, stream

    want = run()
    graph = torch.cuda.CUDAGraph()
    with hipforge.programmatic_launch(new_keys=1), torch.cuda.graph(graph):
        got = run()
    for _ in range(50):
        for layer in range(layers):  # the new keys are those that the replay stores
            for pages in (cache.k, cache.v):
                flat = pages[layer].view(torch.uint8).view(-1, kv_heads, dim)
                flat[last.slot_mapping] = 0x7F
        for one in got:
            one.zero_()
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
