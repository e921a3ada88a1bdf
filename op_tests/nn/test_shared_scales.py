"""hipforge.weights.share_scales: the same values but for a bounded rounding, in fewer scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hipforge import weights
from hipforge.errors import GuardError
from hipforge.ops.reference import dequantize_mxfp8, quantize_mxfp8

N = 5


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantize_mxfp8(codes, scales, torch.float64)


def spans(scales: torch.Tensor, blocks: int) -> torch.Tensor:
    """How many scales each span of so many blocks has, at most."""
    whole = scales[:, : scales.shape[1] // blocks * blocks].unflatten(1, (-1, blocks))
    return (whole != whole[..., :1]).any(-1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 12), st.integers(0, 2**31))
def test_no_value_is_off_by_more_than_a_2048th_of_its_block(blocks: int, spread: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (N, 32 * blocks), generator=generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[0] = 0
    scales = torch.randint(127 - spread, 128, (N, blocks), generator=generator).to(torch.uint8)
    before, after = values(codes, scales), values(*weights.share_scales(codes, scales))
    largest = before.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert ((after - before).unflatten(1, (-1, 32)).abs() <= largest * 2**-11).all()


def test_a_weight_as_quantisers_make_it_has_one_scale_a_row() -> None:
    codes, scales = quantize_mxfp8(torch.randn(N, 1024, generator=torch.Generator().manual_seed(0)))
    shared = weights.share_scales(codes, scales)
    assert spans(scales, 32).all() and not spans(shared[1], 32).any()
    assert shared[0].dtype == codes.dtype and shared[1].dtype == scales.dtype
    assert (values(*shared) - values(codes, scales)).abs().max() <= values(codes, scales).abs().max() * 2**-11


@pytest.mark.parametrize(("place", "several"), [(0, 4), (5, 4), (31, 4)])
def test_a_block_that_is_too_large_keeps_its_scale_and_its_neighbours_theirs(place: int, several: int) -> None:
    codes = torch.full((1, 32 * 36), 256.0).to(torch.float8_e4m3fn)
    scales = torch.full((1, 36), 120, dtype=torch.uint8)
    scales[0, place] = 140
    shared_codes, shared = weights.share_scales(codes, scales)
    assert torch.equal(shared, scales) and torch.equal(shared_codes.view(torch.uint8), codes.view(torch.uint8))
    scales[0, (place + 8) % 36] = 118  # in another quarter
    shared = weights.share_scales(codes, scales)[1]
    assert spans(shared, several).sum() == 1 and shared[0, (place + 8) % 36] == 120


def test_nan_codes_zeros_and_the_scale_255_stay() -> None:
    codes = torch.full((3, 128), 448.0).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, 3], codes.view(torch.uint8)[1] = 0x7F, 0
    scales = torch.tensor([[120, 121, 121, 121], [3, 250, 7, 9], [120, 255, 121, 121]], dtype=torch.uint8)
    shared_codes, shared = weights.share_scales(codes, scales)
    assert torch.equal(shared_codes[[0, 2]].view(torch.uint8), codes[[0, 2]].view(torch.uint8))
    assert torch.equal(shared[[0, 2]], scales[[0, 2]])
    assert shared[1].tolist() == [127] * 4 and (shared_codes[1].float() == 0).all()


def test_bad_operands_are_named() -> None:
    codes, scales = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(GuardError, match="payload"):
        weights.share_scales(codes.float(), scales)
    with pytest.raises(GuardError, match="scale must be"):
        weights.share_scales(codes, scales[:, :1])
    with pytest.raises(GuardError, match="multiple of 32"):
        weights.share_scales(codes[:, :40], scales)
