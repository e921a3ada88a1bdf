"""Decode attention over caches of q's own dtype: what they have alone; see test_decode_attention_kinds."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_caches import Cache
from helpers.attention_cases import lengths, rng

from hipforge.errors import GuardError
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8

pytestmark = [pytest.mark.gfx942("leaks or far_below"), pytest.mark.usefixtures("every_checker")]

BF16, F16 = torch.bfloat16, torch.float16


def case(batch, mq, kv_heads, group, d, keys, dtype=BF16, seed=0):
    g = rng(seed)
    q = torch.randn(batch, mq, kv_heads * group, d, generator=g).to(dtype)
    return q, *(torch.randn(batch, keys, kv_heads, d, generator=g).to(dtype) for _ in range(2))


def test_float16_weights_keep_their_bits_far_below_the_largest():
    """A key 2^-20 as heavy as the largest, with 2^15 as value: without the factor its weight would be subnormal."""
    k = torch.zeros(1, 2, 1, 64)
    k[0, 1, 0, 0] = -20.0 * math.log(2.0)
    v = torch.zeros(1, 2, 1, 64)
    v[0, 1] = 32768.0
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 1.0
    q, k, v = q.half(), k.half(), v.half()
    out, lse = decode_attention_fp8(q, k, v, None, lengths(2), return_lse=True, scale=1.0, split_k=1)
    Cache("half", (k, v)).check(q, lengths(2), (out, lse), 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_a_hidden_key_leaks_nothing(d, value, dtype):
    q, k, v = case(1, 4, 1, 3, d, 80, dtype, seed=d)
    clean = decode_attention_fp8(q, k, v, None, lengths(70), return_lse=True, split_k=2)
    for column in (1, d - 2):
        spoiled = v.clone()
        spoiled[0, 68, 0, column] = value
        out, lse = decode_attention_fp8(q, k, spoiled, None, lengths(70), return_lse=True, split_k=2)
        wrong = ~out.isfinite()
        assert wrong[0, 2:, :, column].all() and wrong.sum() == 2 * 3
        assert torch.equal(out.masked_fill(wrong, 0), clean[0].masked_fill(wrong, 0)) and torch.equal(lse, clean[1])
    k[0, 69] = math.nan
    out, lse = decode_attention_fp8(q, k, v, None, lengths(70), return_lse=True, split_k=2)
    assert torch.equal(out[:, :3], clean[0][:, :3]) and out[:, 3].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": torch.zeros(1, 32, 1, 64).half()}, "k_cache must be .*bfloat16 .*; got float16"),
        ({"v_cache": torch.zeros(1, 32, 1, 64).half()}, "v_cache must be bfloat16.*; got float16"),
        ({"force_kernel_config": {"block_n": 32}}, "force_kernel_config has waves, split_k for half; got 'block_n'"),
        ({"k_scale": torch.ones(3)}, "one per KV head"),
    ],
)
def test_refusals_name_argument_value_and_rule(change, message):
    q, k, v = case(1, 1, 1, 2, 64, 32)
    given = {"k_cache": k, "v_cache": v, "block_tables": None, "seqlens": lengths(32), **change}
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(q, **given)
