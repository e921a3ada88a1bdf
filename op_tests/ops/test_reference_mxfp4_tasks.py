"""The MXFP4 GEMM task: its shapes, tolerances and shuffled inputs, by the reference alone."""

import pytest
import torch

from hipforge.ops.reference import (
    dequantize_mxfp4,
    mxfp4_mm,
    mxfp4_mm_packed,
    quantize_mxfp4,
    shuffle_scale,
    shuffle_weight,
    unshuffle_scale,
    unshuffle_weight,
)

# (m, n, k, seed)
TASKS = [(8, 2112, 7168, 124), (16, 3072, 1536, 6635), (64, 3072, 1536, 45), (256, 2880, 512, 78)]


def inputs(m, n, k, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator, dtype=torch.bfloat16)
    return a, torch.randn(n, k, generator=generator, dtype=torch.bfloat16)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_task_shapes_match_a_float64_product_of_the_same_bits(task):
    a, b = inputs(*task)
    got = mxfp4_mm(a, b)
    assert got.dtype == torch.bfloat16 and got.shape == (task[0], task[1])
    a64, b64 = (dequantize_mxfp4(*quantize_mxfp4(t), torch.float64) for t in (a, b))
    expected = a64 @ b64.T
    # The task's own tolerance, then what one bf16 rounding and k float32 additions allow.
    torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-2)
    magnitude = a64.abs() @ b64.abs().T
    assert ((got.double() - expected).abs() <= 2**-8 * expected.abs() + task[2] * 2**-24 * magnitude).all()


@pytest.mark.parametrize("task", TASKS[1:3], ids=str)
def test_shuffled_inputs_hold_the_same_numbers(task):
    a, b = inputs(*task)
    bq, b_scale = quantize_mxfp4(b)
    shuffled, shuffled_scale = shuffle_weight(bq), shuffle_scale(b_scale)
    assert not torch.equal(shuffled, bq)
    back = unshuffle_weight(shuffled), unshuffle_scale(shuffled_scale, *b_scale.shape)
    assert torch.equal(mxfp4_mm_packed(*quantize_mxfp4(a), *back), mxfp4_mm(a, b))


def test_nan_and_infinity_stand_where_the_tasks_want_them():
    a, b = inputs(4, 32, 64, 0)
    a[1, 3] = float("inf")
    a[2, 40] = float("nan")
    # "even" saturates such an element at 6 * 2^127: its row is finite or infinite, never NaN from the quantiser.
    assert not dequantize_mxfp4(*quantize_mxfp4(a), torch.float64).isnan().any()
    # Modes that mark the block as NaN make the whole row NaN and no other.
    nan = mxfp4_mm(a, b, mode="round_up").isnan()
    assert nan[1:3].all() and not nan[0].any() and not nan[3].any()


def test_the_legacy_rounding_is_another_format_not_a_detail():
    a, b = inputs(64, 256, 1536, 45)
    rne, half_up = mxfp4_mm(a, b).double(), mxfp4_mm(a, b, rounding="half_up").double()
    # Ties differ in 0.66 % of codes; the products differ by 5 %, far past the tasks' 1e-2.
    assert 0.03 < (rne - half_up).norm() / rne.norm() < 0.08
    outside = (rne - half_up).abs() > 1e-2 + 1e-2 * half_up.abs()
    assert outside.double().mean() > 0.8
    codes = [quantize_mxfp4(torch.cat((a, b)), rounding=rounding)[0] for rounding in ("rne", "half_up")]
    assert 0.01 < (codes[0] != codes[1]).double().mean() < 0.02  # two codes per byte
