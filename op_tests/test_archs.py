"""What is stated about each architecture, compared with what LLVM and torch say."""

from __future__ import annotations

import doctest

import pytest

from hipforge import archs
from hipforge.errors import ConfigError


def test_the_example_of_the_docstring_holds():
    assert doctest.testmod(archs).failed == 0
    assert doctest.testmod(archs).attempted == 2


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_the_fp8_formats_are_dtypes_of_torch_of_one_kind(arch):
    import torch

    info = archs.get(arch)
    four, five = getattr(torch, info.fp8_e4m3), getattr(torch, info.fp8_e5m2)
    assert (torch.finfo(four).bits, torch.finfo(five).bits) == (8, 8)
    # e4m3fn reaches 448 and has a negative zero; e4m3fnuz reaches 240 and reads its byte as NaN.
    assert torch.finfo(four).max == (240 if info.fp8_fnuz else 448)
    byte = torch.tensor([0x80], dtype=torch.uint8)
    assert bool(byte.view(four).float().isnan()) == bool(byte.view(five).float().isnan()) == info.fp8_fnuz


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_lds_is_a_whole_number_of_granules(arch):
    info = archs.get(arch)
    assert info.lds_bytes % info.lds_granule_bytes == 0


def test_features_after_the_name_are_ignored_and_an_unknown_name_is_refused():
    assert archs.get("gfx942:sramecc+:xnack-") is archs.ARCHS["gfx942"]
    with pytest.raises(ConfigError, match="unknown architecture 'gfx1100'; known: gfx950, gfx942"):
        archs.get("gfx1100")
