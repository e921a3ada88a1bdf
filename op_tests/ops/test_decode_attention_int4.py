"""int4 caches of decode attention: the quantiser, refusals, long sequences; see test_decode_attention_kinds."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_caches import case
from helpers.attention_cases import lengths, rng

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention_fp8 import decode_attention_splitk
from hipforge.ops.reference.attention import dequantize_kv_int4, quantize_kv_int4

pytestmark = pytest.mark.usefixtures("every_checker")

BF16, F16 = torch.bfloat16, torch.float16


# --- the quantiser


@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_elements_on_the_grid_come_back_exactly(num_groups):
    codes = torch.randint(0, 16, (5, 3, num_groups, 64 // num_groups), generator=rng(num_groups))
    codes[..., 0], codes[..., 1] = 0, 15
    scale = 2.0 ** torch.randint(-6, 4, (5, 3, num_groups, 1), generator=rng(1))
    shift = torch.randint(-8, 9, scale.shape, generator=rng(2)) * scale
    x = (codes * scale + shift).flatten(-2)
    rows = quantize_kv_int4(x, num_groups)
    assert rows.dtype == torch.int32 and rows.shape == (5, 3, num_groups + 8)
    assert torch.equal(dequantize_kv_int4(rows, num_groups, torch.float32), x)
    assert torch.equal(quantize_kv_int4(dequantize_kv_int4(rows, num_groups, torch.float32), num_groups), rows)


def test_the_layout_of_a_row():
    x = torch.cat((torch.arange(8.0) * 2 + 1, torch.arange(8.0))).clamp(max=15)  # 1 .. 15 and 0 .. 7
    rows = quantize_kv_int4(x, 2)
    scales = torch.tensor([14 / 15, 1.0, 7 / 15, 0.0]).half()  # scale low, shift high
    assert torch.equal(rows[:2], scales.view(torch.int32))
    for g in range(2):
        scale, shift = scales[2 * g : 2 * g + 2].float()
        for j in range(8):
            want = min(math.floor((x[8 * g + j] - shift) / scale + 0.5), 15)
            assert (rows[2 + g].item() >> (4 * j)) & 15 == want


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_quantisation_is_off_by_half_a_step(num_groups, dtype):
    """And by what float16 does to scale (2^-11 of 15 steps) and shift (2^-11 of it)."""
    x = (torch.randn(50, 128, generator=rng(3)) * 3 + 1).to(dtype)
    back = dequantize_kv_int4(quantize_kv_int4(x, num_groups), num_groups)
    groups = x.double().unflatten(-1, (num_groups, -1))
    least, largest = groups.aminmax(dim=-1, keepdim=True)
    bound = (largest - least) / 15 * (0.5 + 15 * 2.0**-11 + 1e-4) + least.abs() * 2.0**-11
    assert ((back.unflatten(-1, (num_groups, -1)) - groups).abs() <= bound).all()


def test_groups_of_equal_values_keep_their_value():
    x = torch.tensor([0.0, -3.5, 2.0**-24, 1.0]).repeat_interleave(16)
    x[-1] = 1.0 + 2.0**-23  # a range below float16's smallest scale
    back = dequantize_kv_int4(quantize_kv_int4(x, 4), 4)
    assert torch.equal(back, torch.tensor([0.0, -3.5, 2.0**-24, 1.0], dtype=torch.float64).repeat_interleave(16))


# --- the kernel


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 3}, "num_groups must be one of 1, 2, 4, 8; got 3"),
        ({"num_groups": 2}, "k must be .*; got int32"),
        ({"num_groups": None}, "must be given for an fp8 cache"),
        ({"k_scale_shift": torch.zeros(1, 1, 1, 2, dtype=torch.int32)}, "must be None with num_groups"),
        ({"split_k": 513}, "split_k must be 1 to 512; got 513"),
        ({"force_kernel_config": {"waves": 3}}, "waves must be 1, 2 or 4; got 3"),
        ({"force_kernel_config": {"block_n": 16}}, "waves, split_k for int4; got 'block_n'"),
        ({"page_size": 16}, "belong together"),
        ({"seqlens": torch.tensor([3])}, "int32"),
    ],
)
def test_refusals_name_argument_value_and_rule(change, message):
    q, cache = case("int4", 1, 1, 1, 2, 64, 32, num_groups=1)
    k, v, *_ = cache.operands(q)
    given = {"k_scale_shift": None, "v_scale_shift": None, "seqlens": lengths(32), "num_groups": 1, **change}
    with pytest.raises(GuardError, match=message):
        decode_attention_splitk(q.view(1, 1, 1, 2, 64), k, v, **given)


@pytest.mark.full
@pytest.mark.parametrize("keys", [2048, 4096])
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_long_sequences(keys, num_groups, dtype):
    q, cache = case("int4", 3, 1, 2, 8, 128, keys, keys, dtype, num_groups)
    seqlens = lengths(keys, keys // 3, 0)
    with emulator.options(checks="off"):
        got = cache.paged(64).attend(q, seqlens)
    cache.check(q, seqlens, got)
