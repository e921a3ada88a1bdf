"""Decode attention on an sm_90 GPU where the staged tests do not reach: a model's shapes, many splits, graphs.

Run by ``make gpu-test``. Results are compared with float64 attention over the same bits, on the GPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.errors import relative

import hipforge
from hipforge import devices
from hipforge.ops.decode_attention import decode_attention_fp8
from hipforge.ops.decode_attention.kernels import BLOCKS_N, HEAD_DIMS, WAVES
from hipforge.ops.reference.attention import paged_attention

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or devices.current().arch_of() != "sm_90", reason="needs an sm_90 GPU"
)

# The output's rounding to bf16 is 1.7e-3 of its norm, that of float16 weights 2e-4, of bf16 weights 1e-3.
BOUND = {"fp8": 2.2e-3, "half": 3.5e-3}


def operands(batch, kv_heads, group, d, keys, kind="fp8", page_size=64, seed=0):
    """q, caches whose pages are in random order, tables, and scales of fp8 per KV head."""
    torch.manual_seed(seed)
    pages = -(-keys // page_size)
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    q = torch.randn(batch, 1, kv_heads * group, d, device="cuda").bfloat16()
    k, v = (torch.randn(batch * pages, page_size, kv_heads, d, device="cuda").to(dtype) for _ in range(2))
    tables = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    scales = (0.5 + torch.rand(2, kv_heads, device="cuda")) if kind == "fp8" else torch.ones(2, 1, device="cuda")
    return q, k, v, tables, scales[0], scales[1]


def check(parts, seqlens, kind="fp8", scale=None, **options):
    q, k, v, tables, k_scale, v_scale = parts
    got, lse = decode_attention_fp8(q, k, v, tables, seqlens, k_scale, v_scale, scale, return_lse=True, **options)
    sides = (x.double() * factor.double().view(-1, 1) for x, factor in ((k, k_scale), (v, v_scale)))
    want, want_lse = paged_attention(q.double(), *sides, tables, seqlens, scale, True)
    error = relative(got, want)
    assert error < BOUND[kind], (options, error)
    seen = want_lse > -torch.inf
    assert torch.equal(seen, lse > -torch.inf)
    assert (lse.double() - want_lse)[seen].abs().max() < 1e-4
    return got


def lengths(*values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_decode_step_of_32_heads_over_2048_keys(batch, kv_heads):
    parts = operands(batch, kv_heads, 32 // kv_heads, 128, 2048)
    assert hipforge.explain(decode_attention_fp8, *parts[:4], lengths(*[2048] * batch)).path == "kernel"
    check(parts, lengths(*[2048] * batch))
    check(parts, torch.randint(0, 2049, (batch,), device="cuda", dtype=torch.int32) if batch > 1 else lengths(1777))


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["fp8", "half"])
def test_every_configuration_over_ragged_lengths(kind, d):
    parts, seqlens = operands(4, 2, 5, d, 1500, kind, 16), lengths(1500, 1, 0, 777)
    blocks = [{"block_n": block_n} for block_n in BLOCKS_N] if kind == "fp8" else [{}]
    for block, waves, split_k in itertools.product(blocks, WAVES, (1, 3, 16, 37, 64)):
        if d == 256 and kind == "fp8" and waves == 1:
            continue
        check(parts, seqlens, kind, force_kernel_config={**block, "waves": waves, "split_k": split_k})


@pytest.mark.parametrize("group", [1, 7, 8, 9, 16, 33])
def test_groups_of_query_heads(group):
    check(operands(3, 2, group, 128, 700), lengths(700, 350, 16))


@pytest.mark.parametrize("split_k", [None, 1, 100, 512])
def test_a_long_sequence_keeps_its_sum(split_k):
    parts = operands(1, 2, 8, 128, 100_000)
    check(parts, lengths(99_999), scale=0.01, split_k=split_k)  # weights of like size: all keys count


def test_results_do_not_change_from_run_to_run():
    parts, seqlens = operands(8, 8, 4, 128, 2048), lengths(*range(1, 2048, 256))
    for split_k in (None, 5, 40):
        first = check(parts, seqlens, split_k=split_k)
        for _ in range(20):
            assert torch.equal(check(parts, seqlens, split_k=split_k), first)


def test_a_captured_call_follows_the_lengths():
    parts, seqlens = operands(4, 4, 8, 128, 2048), lengths(64, 64, 64, 64)
    out, lse = torch.empty_like(parts[0]), torch.empty(4, 32, 1, device="cuda")
    given = {"out": out, "lse_out": lse, "split_k": 20}
    decode_attention_fp8(*parts[:4], seqlens, *parts[4:], **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention_fp8(*parts[:4], seqlens, *parts[4:], **given)
    for values in ((2048, 5, 0, 900), (1, 2, 3, 2000)):
        seqlens.copy_(lengths(*values))
        graph.replay()
        assert torch.equal(out, check(parts, seqlens, split_k=20))
