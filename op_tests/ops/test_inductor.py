"""Ops and layers under torch.compile's default backend: what is written into a part of a tensor lands there.

With static and with dynamic sizes, since the offset of a view is a number in the one case and an expression in the
other. Every function runs eagerly on copies of the same tensors first; results and all its arguments must then be the
same bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.op_calls import CALLS
from helpers.op_calls import K as WIDTH

import hipforge
from hipforge import emulator
from hipforge.cli.operands import normal
from hipforge.nn import CacheStep, MXFP8Linear, MXFP8MoE, PagedKVCache
from hipforge.nn.moe import Routing
from hipforge.ops.core.fp8 import fp8_dtypes

# Where a view lies does not depend on the architecture: there the fp8 of a cache and of layers is what differs.
pytestmark = pytest.mark.gfx942("paged_cache_given-None or layers")

D, HEADS, KV_HEADS, PAGE = 64, 4, 2, 16
WEIGHT, ONE = normal(WIDTH, seed=11), torch.ones(1)
EXPERT_WEIGHTS = [CALLS["fused_moe_mxfp8"].constants[name] for name in ("w1", "w1_scale", "w2", "w2_scale")]
COS_SIN = torch.randn(64, D, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Nothing is taken from torch's caches on disk: a graph that was compiled without this package's help is wrong."""
    import torch._inductor.config as config

    torch._dynamo.reset()
    # Torch's own kernels need no vector instructions here, whose headers take most of their compile time.
    caches_off = config.patch({"force_disable_caches": True, "compile_threads": 1, "cpp.simdlen": 1})
    with caches_off, emulator.options(checks="memory"), torch.no_grad():
        yield


def copied(value: Any) -> Any:
    return value.view(torch.uint8).clone().view(value.dtype) if isinstance(value, torch.Tensor) else value


def same(got: Any, want: Any) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def check(
    function: Callable[..., tuple[torch.Tensor, ...]], make: Callable[[int], list[Any]], dynamic: bool | None
) -> None:
    """Run with two sizes: with ``dynamic`` None the first makes a static graph and the second a dynamic one."""
    compiled = torch.compile(function, dynamic=dynamic, fullgraph=True)
    for size in (4, 6):
        given = make(size)
        ours, theirs = [copied(each) for each in given], [copied(each) for each in given]
        want = function(*theirs)
        got = compiled(*ours)
        pairs = itertools.chain(zip(got, want, strict=True), zip(ours, theirs, strict=True))
        wrong = [index for index, (a, b) in enumerate(pairs) if isinstance(a, torch.Tensor) and not same(a, b)]
        assert not wrong, (size, wrong)
        changed = [index for index, (a, b) in enumerate(zip(theirs, given, strict=True)) if not same(a, b)]
        assert changed, "nothing was written"


def e4m3(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8).view(fp8_dtypes("cpu")[0])


def norms(
    x: torch.Tensor, wide: torch.Tensor, small: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Part 0 of each stack is never written; parts are taken by an index, a slice and a chunk."""
    y, _ = hipforge.residual_rms(x, wide[1], WEIGHT, 1e-6, out=wide[2])
    hipforge.residual_rms(x, wide[1], WEIGHT, 1e-6, ONE, out=small[1], also_out=wide[3])
    hipforge.residual_rms_mxfp8(x, wide[4:5][0], WEIGHT, 1e-6, out=small[2], scale_out=scales[1])
    hipforge.rms_norm(x, WEIGHT, 1e-6, out=wide.chunk(6)[5][0])
    q, scale = hipforge.mxfp8_quantize(x, out=small[3], scale_out=scales[2])
    return y + 1, scale + 1, q.view(torch.uint8) + 1


def norms_given(size: int) -> list[torch.Tensor]:
    stack = torch.stack([normal(size, WIDTH, seed=seed) for seed in range(6)])
    return [normal(size, WIDTH, seed=9), stack, e4m3(5, size, WIDTH), torch.zeros(3, size, WIDTH // 32).byte()]


def products(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, wide: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor]:
    router = WEIGHT[None].expand(8, -1).float().contiguous()
    chosen = hipforge.router_gemm(x, router, out=logits[1])
    weights, experts = hipforge.topk_gating(chosen, 2, out=logits[2][:, :2].view(-1, 2).contiguous(), ids_out=ids[1])
    experts = experts % EXPERT_WEIGHTS[0].shape[0]
    hipforge.fused_moe_mxfp8(x, *EXPERT_WEIGHTS, weights, experts, out=wide[1])
    rows = torch.ones(WIDTH, WIDTH, dtype=torch.uint8).view(q.dtype)
    y = hipforge.mxfp8_linear(q, scale, rows, torch.full((WIDTH, WIDTH // 32), 127).byte(), out=wide[2])
    return (y * 2,)


def products_given(size: int) -> list[torch.Tensor]:
    q, scale = hipforge.mxfp8_quantize(normal(size, WIDTH, seed=5))
    wide = torch.stack([normal(size, WIDTH, seed=seed) for seed in range(3)])
    x, logits = normal(size, WIDTH, seed=0), torch.zeros(3, size, 8)
    return [x, q, scale, wide, logits, torch.zeros(2, size, 2, dtype=torch.int32)]


def one_allocation(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, where: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """K and V of every layer in one tensor, and q rotated in place after a part of it was copied."""
    before = q[:, :1].clone()
    for layer in (1, 2):
        hipforge.rope_and_cache(q, k, v, COS_SIN, where, kv[layer, 0], kv[layer, 1], where, k_scale=1.0, v_scale=1.0)
    return before, q + 1


def heads(size: int) -> list[torch.Tensor]:
    counts = (HEADS, KV_HEADS, KV_HEADS)
    return [normal(size, count, D, seed=seed) for seed, count in enumerate(counts)]


def one_allocation_given(size: int) -> list[torch.Tensor]:
    return [*heads(size), e4m3(3, 2, size, PAGE, KV_HEADS, D), torch.arange(size)]


def paged_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *held: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two layers of nn.PagedKVCache: each writes and reads its own pages."""
    cache = PagedKVCache.__new__(PagedKVCache)
    cache.k, cache.v, cache.k_scale, cache.v_scale, cache.page_size = *held[:4], PAGE
    step = CacheStep(1, *held[4:])
    found = []
    for layer in range(2):
        rotated = cache.rope_and_store(layer, q + layer, k + layer, v - layer, COS_SIN, step)
        found.append(cache.attend(layer, rotated, step))
    return found[0], found[1]


def paged_cache_given(size: int) -> list[torch.Tensor]:
    cache = PagedKVCache(2, 2 * size, PAGE, KV_HEADS, D)
    step = cache.extend(list(range(size)), 1)
    places = [step.positions, step.slot_mapping, step.block_tables, step.seqlens]
    return [*heads(size), cache.k, cache.v, cache.k_scale, cache.v_scale, *places]


@pytest.mark.parametrize(
    ("function", "make", "dynamic"),
    (
        (norms, norms_given, None),
        (products, products_given, None),
        (one_allocation, one_allocation_given, None),
        (paged_cache, paged_cache_given, None),
        (paged_cache, paged_cache_given, True),
    ),
)
def test_a_written_view_keeps_its_place_in_its_storage(function: Any, make: Any, dynamic: bool | None) -> None:
    check(function, make, dynamic)


@pytest.mark.full
def test_a_written_view_keeps_its_place_in_a_package_that_is_compiled_ahead(tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
            y, _ = hipforge.residual_rms(x, stack[1], WEIGHT, 1e-6)
            return y + 1

    def given(size: int) -> list[torch.Tensor]:
        return [normal(size, WIDTH, seed=1), torch.stack([normal(size, WIDTH, seed=seed) for seed in (2, 3, 4)])]

    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Layer(), tuple(given(4)), dynamic_shapes=({0: rows}, {1: rows}))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    for size in (4, 6):
        ours, theirs = given(size), given(size)
        assert same(compiled(*ours), Layer()(*theirs))
        assert all(map(same, ours, theirs)) and not same(ours[1], given(size)[1])


def test_layers_give_what_they_give_eagerly() -> None:
    linear = MXFP8Linear.from_linear(torch.nn.Linear(WIDTH, WIDTH).bfloat16())
    w1, s1, w2, s2 = EXPERT_WEIGHTS
    moe = MXFP8MoE((w1, s1), (w2, s2), normal(4, WIDTH, seed=13), Routing(2), correction_bias=torch.arange(4.0))

    def both(x: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor]:
        return (moe(linear(x), out=into[1]) + 1,)

    check(both, lambda size: [normal(size, WIDTH, seed=0), torch.zeros(2, size, WIDTH).bfloat16()], None)


def test_a_float_that_changes_from_call_to_call_is_compiled_once() -> None:
    """A number that is a constant of the graph would make one for each; the second graph is that of any number."""
    given, cache = heads(2), e4m3(2, 1, 8, KV_HEADS, D)
    x, where = normal(2, WIDTH, seed=3), torch.arange(2)

    def every_op(n: float) -> tuple[torch.Tensor, ...]:
        k_cache, v_cache = cache.clone()
        rotated = hipforge.rope_and_cache(
            *given, COS_SIN, where, k_cache, v_cache, where, q_weight=WEIGHT[:D], epsilon=n, weight_offset=n, k_scale=n,
            v_scale=2 * n, q_out=torch.empty_like(given[0]),
        )  # fmt: skip
        normed = hipforge.rms_norm(x, WEIGHT, n, weight_offset=2 * n)
        activated, scale = hipforge.swiglu_mxfp8(x, alpha=n)
        weights, ids = hipforge.topk_gating(x, 2, scale=n)
        return rotated, k_cache.float(), v_cache.float(), normed, activated.float(), scale, weights, ids

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(every_op, fullgraph=True)
    for n in (0.1, 0.11, 0.12, 0.13):
        assert all(map(same, compiled(n), every_op(n)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
