"""Decode attention over pages of any size and heads of 16 to 512; test_decode_attention_kinds has those of whole tiles,
and what is alike for both.

Few cases cover each property: a kernel is one code for all head dimensions and page sizes, which meet their borders in
the lists below. D ends inside a lane's 16 bytes (72, 104), between lanes (80, 96, 112), with a part of 128 columns
(384, 512), or inside the second one (136, 160); pages have one key, a part of a tile, or a tile and a half.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.attention_caches import Cache, case
from helpers.attention_cases import FP8, lengths, rng

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention import family, kernels
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8
from hipforge.ops.reference.fp8_static import to_fp8_static

pytestmark = pytest.mark.gfx942("(float64 and (72 or 512 or int4)) or leaks or quantising or own_keys")

BF16, F16 = torch.bfloat16, torch.float16
KERNEL = "decode_attention_gathered"


@pytest.fixture(autouse=True)
def every_checker():
    with emulator.options(checks="all"):
        yield


def found(cache, q, seqlens, **options):
    """How a call over a cache of one scale is decided."""
    return hipforge.explain(decode_attention_fp8, q, *cache.sides, cache.tables, seqlens, **options)


@pytest.mark.parametrize(
    ("kind", "d", "page_size", "dtype", "mq", "split_k"),
    [
        ("fp8", 72, 1, BF16, 1, 3), ("fp8", 104, 24, F16, 3, 1), ("fp8", 136, 2, F16, 1, 1),
        ("fp8", 512, 8, BF16, 2, 2),
        ("rows", 72, 24, F16, 3, 2), ("rows", 160, 1, BF16, 1, 1), ("rows", 384, 2, BF16, 2, 1),
        ("half", 72, 1, F16, 2, 2), ("half", 96, 2, BF16, 1, 1), ("half", 160, 8, F16, 3, 1),
        ("half", 512, 24, BF16, 1, 3),
        ("fp8", 128, 1, BF16, 1, 1), ("half", 64, 2, BF16, 2, 1), ("rows", 256, 1, F16, 1, 2),
        ("half", 16, 0, F16, 1, 1),
        ("int4", 80, 1, F16, 2, 2), ("int4", 160, 24, BF16, 1, 1), ("int4", 512, 2, BF16, 1, 2),
    ],
)  # fmt: skip
def test_heads_and_pages_against_float64(kind, d, page_size, dtype, mq, split_k):
    """Slots past a sequence's length are NaN, entries past its pages no page at all."""
    q, dense = case(kind, 2, mq, 2, 3, d, 70, d, dtype, 2)
    cache = dense.paged(page_size) if page_size else dense
    if kind in ("fp8", "half"):
        cache = replace(cache, scales=tuple(map(torch.tensor, ((0.5, 0.25), (2.0, 0.125)))))
        assert found(cache, q, lengths(70, 37)).kernel == KERNEL
    got = cache.attend(q, lengths(70, 37), split_k=split_k)
    assert got[0].dtype == dtype and got[0].shape == q.shape
    replace(dense, scales=cache.scales).check(q, lengths(70, 37), got)


@pytest.mark.parametrize("d", [80, 160])
def test_a_page_size_changes_no_bit(d):
    q, dense = case("half", 2, 2, 1, 2, d, 70, d)
    want = dense.attend(q, lengths(70, 33), split_k=2)
    for page_size in (1, 2, 8, 24, 16):
        got = dense.paged(page_size).attend(q, lengths(70, 33), split_k=2)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("waves", [1, 2, 4])
def test_waves_and_splits_over_lengths_around_blocks(waves):
    for d, own in ((40, waves), (136, max(waves, 2)), (264, 3)):
        q, cache = case("fp8", 4, 1, 1, 2, d, 65, seed=waves)
        seqlens = lengths(65, 0, 1, 32)
        got = cache.paged(1).attend(q, seqlens, force_kernel_config={"waves": own, "split_k": 1 + waves // 2})
        cache.check(q, seqlens, got)
        assert not got[0][1].any() and (got[1][1] == -math.inf).all()


@pytest.mark.parametrize(("kind", "d"), [("fp8", 72), ("rows", 160), ("half", 96), ("int4", 72)])
def test_a_hidden_key_leaks_nothing(kind, d):
    """The last key is NaN, which only the last token sees."""
    q, dense = case(kind, 1, 3, 1, 2, d, 50, d, num_groups=1)
    clean = dense.paged(2).attend(q, lengths(50), split_k=2)
    got = dense.spoil((slice(None), 49)).paged(2).attend(q, lengths(50), split_k=2)
    assert torch.equal(got[0][:, :2], clean[0][:, :2]) and torch.equal(got[1][..., :2], clean[1][..., :2])
    assert got[0][:, 2].isnan().all()


def test_an_infinite_score_hides_its_key_alone():
    """The first columns of a row stand in for those past D, where q is 0."""
    q, cache = case("half", 1, 1, 1, 2, 72, 20, 5)
    q[..., 0] = 1.0
    cache.sides[0][0, 7, 0, 0] = -math.inf
    got = cache.attend(q, lengths(20))
    others = [key for key in range(20) if key != 7]
    Cache("half", tuple(side[:, others] for side in cache.sides)).check(q, lengths(19), got)


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("d", [72, 96, 160])
def test_codes_and_scales_are_those_of_the_quantising_ops(d, split_k):
    q, cache = case("fp8", 2, 1, 2, 4, d, 40, d)
    operands, seqlens = (q, *cache.sides, None), lengths(40, 33)
    configuration = found(cache, q, seqlens, split_k=split_k).configuration
    one, wide = torch.ones(1), torch.full(q.shape, math.nan)
    kernels.run_decode_attention(*operands, seqlens, one, one, scale=d**-0.5, configuration=configuration, out=wide)
    assert torch.equal(wide.bfloat16(), decode_attention_fp8(*operands, seqlens, split_k=split_k))
    codes, scales = decode_attention_fp8(*operands, seqlens, split_k=split_k, out_format="mxfp8")
    want, want_scales = hipforge.mxfp8_quantize(wide.view(2, 8 * d))
    assert torch.equal(codes.view(torch.uint8).view(2, -1), want.view(torch.uint8)) and torch.equal(scales, want_scales)
    codes = decode_attention_fp8(*operands, seqlens, split_k=split_k, out_scale=torch.tensor([0.003]))
    assert torch.equal(codes.view(torch.uint8), to_fp8_static(wide, torch.tensor([0.003]), FP8).view(torch.uint8))


def test_each_kv_head_may_have_own_keys():
    q, cache = case("half", 1, 1, 2, 2, 80, 40, 3)
    tables = torch.randperm(40, generator=rng(4))[:24].view(1, 2, 12).int()
    own = lengths(12, 7).view(1, 2)
    pages = [side[0].unsqueeze(1) for side in cache.sides]  # of one key
    out = decode_attention_fp8(q, *pages, tables, own)
    for head in range(2):
        keys = tables[0, head, : int(own[0, head])].long()
        alone = Cache("half", tuple(side[:, keys, head : head + 1].contiguous() for side in cache.sides))
        rows = slice(2 * head, 2 * head + 2)
        got = decode_attention_fp8(q[:, :, rows].contiguous(), *alone.sides, None, lengths(len(keys)), return_lse=True)
        alone.check(q[:, :, rows].contiguous(), lengths(len(keys)), (out[:, :, rows], got[1]))


def test_bytes_of_the_cache_are_read_once():
    for kind, d in (("fp8", 72), ("half", 160)):
        q, cache = case(kind, 2, 1, 2, 4, d, 96)
        with emulator.counters() as counted:
            cache.paged(1).attend(q, lengths(96, 40), split_k=2)
        for name in ("k", "v"):
            assert counted.tensors[name].unique_loaded == (96 + 40) * 2 * d * (2 if kind == "half" else 1)


def test_what_each_architecture_takes(monkeypatch):
    q, cache = case("fp8", 1, 1, 1, 2, 96, 16)
    assert found(cache, q, lengths(16)).kernel == KERNEL
    for d in (12, 520):
        narrow, other = case("fp8", 1, 1, 1, 2, d, 16, num_groups=1)
        told = found(other, narrow, lengths(16))
        assert told.path == "torch" and f"D must be a multiple of 8 from 16 to 512; got {d}" in told.refused["kernel"]
    monkeypatch.setattr(family, "target_of", lambda device: ("sm_90", 132))
    sizes = family.problem_of(q, cache.sides[0], None)
    assert family.family_of(sizes, None) is family.FAMILY
    assert "D must be one of 64, 128, 192, 256; got 96" in family.FAMILY.envelope(sizes, "sm_90")
    paged = family.problem_of(torch.zeros(1, 1, 2, 64).half(), torch.zeros(4, 1, 1, 64).half(), torch.zeros(1, 4).int())
    assert family.family_of(paged, None) is family.HALF_FAMILY
    assert "page_size must be a multiple of 16" in family.HALF_FAMILY.envelope(paged, "sm_90")


@pytest.mark.parametrize(
    ("d", "config", "message"),
    [
        (96, {"waves": 3}, "waves of 1 or 2 or 4 at D=96; got waves=3"),
        (160, {"waves": 1}, "waves of 2 or 4 at D=160"),
        (512, {"waves": 2}, "waves of 4 at D=512"),
        (96, {"block_n": 32}, "force_kernel_config has waves, split_k for gathered; got 'block_n'"),
    ],
)
def test_refusals_name_argument_value_and_rule(d, config, message):
    q, cache = case("half", 1, 1, 1, 2, d, 16)
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(q, *cache.sides, None, lengths(16), force_kernel_config=config)


def test_strides_that_are_no_multiple_of_8_bytes_are_refused():
    q, _ = case("fp8", 1, 1, 1, 2, 72, 1)
    k = torch.zeros(1, 16, 1, 76).to(FP8)[..., :72]
    with pytest.raises(GuardError, match="k must have strides that are multiples of 8 bytes; got 76"):
        decode_attention_fp8(q, k, k, None, lengths(16))
