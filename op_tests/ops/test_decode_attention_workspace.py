"""Decode attention in memory that the caller gives: the same bits, and nothing beyond it."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_cases import ARCH, case, expanded, lengths, packed_case

from hipforge.errors import GuardError
from hipforge.ops.decode_attention import attention_workspace_size, decode_attention_fp8, decode_attention_splitk
from hipforge.ops.decode_attention.kernels import STREAM_ARCH

pytestmark = pytest.mark.usefixtures("every_checker")


def nans(count):
    """Bytes whose floats are NaN: what a kernel reads before it writes shows."""
    return torch.full((count,), 255, dtype=torch.uint8)


@pytest.mark.parametrize("split_k", [1, 3, 21])
@pytest.mark.parametrize("half", [False, True], ids=["fp8", "half"])
def test_a_workspace_of_exactly_the_size_gives_the_same_bits(split_k, half):
    q, k, v = case(2, 3, 1, 2, 64, 150)
    if half:
        k, v = k.bfloat16(), v.bfloat16()
    given = {"return_lse": True, "split_k": split_k}
    want = decode_attention_fp8(q, k, v, None, lengths(150, 20), **given)
    size = attention_workspace_size(decode_attention_fp8, q, k, v, None, lengths(150, 20), **given)
    assert size == (0 if split_k == 1 else 4 * split_k * (2 * 3 * 2 * 64 + 2 * 3 * 2))
    workspace = nans(size + 64)
    got = decode_attention_fp8(q, k, v, None, lengths(150, 20), workspace=workspace[:size], **given)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(workspace[size:], nans(64))
    in_one_launch = 16 if ARCH == STREAM_ARCH else 1  # splits that need no memory in between; of even numbers more
    assert split_k <= in_one_launch or workspace[:size].view(torch.float32).isfinite().any()


def test_the_packed_layout_takes_one_too():
    q, (k, k_rows), (v, v_rows) = packed_case(2, 1, 1, 3, 64, 80, seed=1)
    sides = [expanded(x.flatten(0, 1).unsqueeze(0), 3) for x in (k, v, k_rows, v_rows)]
    want = decode_attention_splitk(q, *sides, lengths(80, 33), split_k=2)
    size = attention_workspace_size(decode_attention_splitk, q, *sides, lengths(80, 33), split_k=2)
    got = decode_attention_splitk(q, *sides, lengths(80, 33), split_k=2, workspace=nans(size))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_size_is_that_of_what_is_decided():
    q, k, v = case(1, 1, 1, 8, 64, 8192)
    chosen = attention_workspace_size(decode_attention_fp8, q, k, v, None, lengths(8192))
    assert chosen % (4 * 8 * 65) == 0 and chosen // (4 * 8 * 65) > 1
    windowed = attention_workspace_size(decode_attention_fp8, q, k, v, None, lengths(8192), window=128)
    assert windowed < chosen
    q, k, v = case(1, 1, 1, 8, 12, 64)
    assert attention_workspace_size(decode_attention_fp8, q, k, v, None, lengths(64)) == 0  # torch computes it


@pytest.mark.parametrize(
    ("workspace", "message"),
    [
        (nans(4 * 3 * 2 * 65 - 1), "workspace must have at least 1560 bytes for split_k=3.*; got 1559"),
        (torch.zeros(2000), "workspace must be uint8.*; got float32"),
        (nans(2000).view(2, 1000), r"workspace must be \[bytes\]"),
        (nans(4000)[::2], "workspace must be contiguous"),
        (nans(2000)[3:], "start at a multiple of 16 bytes"),
    ],
)
def test_a_workspace_that_does_not_do_is_refused(workspace, message):
    q, k, v = case(1, 1, 1, 2, 64, 100)
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(q, k, v, None, lengths(100), split_k=3, workspace=workspace)


def test_other_functions_have_no_size():
    with pytest.raises(GuardError, match="attention must be decode_attention_fp8 or decode_attention_splitk"):
        attention_workspace_size(math.sqrt, 2.0)
