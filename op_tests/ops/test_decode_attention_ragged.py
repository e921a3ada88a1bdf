"""Decode attention of sequences with unequally many query tokens: the bits of one dense call per sequence."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from helpers.attention_caches import KINDS, holding
from helpers.attention_cases import FP8, NAN_CODE, case, check, lengths, paged, rng

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention import attention_workspace_size
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8

pytestmark = [
    pytest.mark.gfx942("(of_its_own and (64 or fp8)) or exact or tiles or read or unwritten or leak"),
    pytest.mark.usefixtures("every_checker"),
]

COUNTS = (3, 0, 1, 5, 2)
LENGTHS = (70, 40, 33, 2, 0)  # of the five tokens of the fourth sequence three see no key, of the last one's none
KEYS = 70


def starts_of(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def ragged_case(counts, kv_heads, group, d, keys, seed=0, dtype=FP8):
    """q [tokens, Hq, D] and caches [B, Mkv, Hkv, D]."""
    q, k, v = case(1, sum(counts), kv_heads, group, d, 1, seed)
    k, v = (torch.randn(len(counts), keys, kv_heads, d, generator=rng(seed + i)).to(dtype) for i in (1, 2))
    return q[0], k, v


def one_by_one(attend, q, counts):
    """(out [tokens, ...], log-sum-exp [Hq, tokens], what else there is) of ``attend(b, q [1, count, Hq, D])``."""
    parts = []
    for b, (first, count) in enumerate(zip(starts_of(counts).tolist(), counts, strict=False)):
        if count:
            out, lse, *rest = attend(b, q[None, first : first + count])
            parts.append((out[0], lse[0].t(), *rest))
    out, lse, *rest = (
        torch.cat([x.view(torch.uint8) if x.dtype == FP8 else x for x in each]) for each in zip(*parts, strict=True)
    )
    return out, lse.t(), *rest


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.view(torch.uint8) if one.dtype == FP8 else one, other)


@pytest.mark.parametrize(
    ("cache", "d", "page_size"),
    [*product(KINDS, [64, 128, 192, 256], [None]), *product(["fp8", "rows", "half"], [80], [1])],
)
@pytest.mark.parametrize("split_k", [1, 3])
def test_each_sequence_has_the_bits_of_a_call_of_its_own(cache, d, page_size, split_k):
    q, k, v = ragged_case(COUNTS, 2, 3, d, KEYS, seed=d, dtype=torch.float32)
    stored = holding(cache, k, v)
    whole = stored.paged(page_size) if page_size else stored
    ragged = {"cu_seqlens_q": starts_of(COUNTS), "max_seqlen_q": 5 if split_k == 1 else 16, "split_k": split_k}
    for options in ({}, {"out_format": "mxfp8"}):
        got = whole.attend(q, lengths(*LENGTHS), **ragged, **options)
        assert got[0].shape == q.shape and got[1].shape == (6, 11)
        given = {"split_k": split_k, **options}

        def alone(b, q, given=given):
            return stored.part(slice(b, b + 1)).attend(q, lengths(LENGTHS[b]), **given)

        same(got, one_by_one(alone, q, COUNTS))
    blind = slice(4, 7)  # the first three of five tokens over two keys
    out, lse, *_ = whole.attend(q, lengths(*LENGTHS), **ragged)
    assert not out[blind].any() and (lse[:, blind] == -math.inf).all() and lse[:, 7:9].isfinite().all()


@pytest.mark.parametrize("cache", ["fp8", "half"])
def test_rows_over_several_tiles_and_waves(cache):
    """Nine heads to a KV head and up to 16 tokens: 144 rows, of which a sequence has the first ones."""
    counts = (16, 1, 7)
    q, k, v = ragged_case(counts, 1, 9, 64, 150, seed=3, dtype=FP8 if cache == "fp8" else torch.bfloat16)
    seqlens = lengths(150, 80, 9)
    for waves, order in ((1, "forward"), (2, "reverse"), (4, "random")):
        forced = {"force_kernel_config": {"waves": waves, "split_k": 2}, "return_lse": True}
        with emulator.options(checks="all", wave_order=order):
            got = decode_attention_fp8(
                q, k, v, None, seqlens, cu_seqlens_q=starts_of(counts), max_seqlen_q=16, **forced
            )

        def alone(b, q, forced=forced):
            return decode_attention_fp8(q, k[b : b + 1], v[b : b + 1], None, seqlens[b : b + 1], **forced)

        want = one_by_one(alone, q, counts)
        same(got, want)


def test_equal_scores_give_each_token_the_exact_mean_of_its_keys():
    counts, keys = (2, 1), (2, 4)
    q, k, _ = ragged_case(counts, 1, 2, 64, 4)
    v = torch.randint(-8, 9, (2, 4, 1, 64), generator=rng(2)).float().to(FP8)
    out, lse = decode_attention_fp8(
        q * 0, k, v, None, lengths(*keys), cu_seqlens_q=starts_of(counts), max_seqlen_q=2, split_k=1, return_lse=True
    )
    for token, (sequence, count) in enumerate(((0, 1), (0, 2), (1, 4))):  # powers of two: the mean is exact in bfloat16
        assert torch.equal(out[token], v[sequence, :count, 0].float().mean(0).bfloat16().expand(2, 64))
        assert (lse[:, token] - math.log(count)).abs().max() < 1e-6


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize(
    "options", [{"window": 20}, {"softcap": 3.0}, {"sinks": torch.linspace(-2, 3, 6)}, {"causal": False}]
)
def test_options_apply_to_each_sequence(options, split_k):
    q, k, v = ragged_case(COUNTS, 2, 3, 64, KEYS, seed=5)
    seqlens = lengths(*LENGTHS)
    out, lse = decode_attention_fp8(
        q,
        k,
        v,
        None,
        seqlens,
        cu_seqlens_q=starts_of(COUNTS),
        max_seqlen_q=5,
        return_lse=True,
        split_k=split_k,
        **options,
    )
    for b, count in enumerate(COUNTS):
        rows, one = slice(sum(COUNTS[:b]), sum(COUNTS[: b + 1])), slice(b, b + 1)
        if count:
            got = out[None, rows], lse[None, :, rows]
            check(q[None, rows], k[one].double(), v[one].double(), seqlens[one], *got, 64**-0.5, **options)
    if "sinks" in options:
        assert (lse[:, 4] - options["sinks"]).abs().max() < 1e-6 and not out[4].any()


def test_pages_of_what_no_token_sees_are_not_read():
    """A sequence without tokens reads nothing, and one with a single token no more than its own window."""
    counts = (4, 0, 1)
    q, k, v = ragged_case(counts, 1, 2, 64, 256)
    (k_pages, tables), (v_pages, _) = paged(k, 16), paged(v, 16)
    tables[0, : 16 - 5], tables[1], tables[2, : 16 - 4] = (2**31 - 1,) * 3
    given = {"cu_seqlens_q": starts_of(counts), "max_seqlen_q": 4, "window": 64, "return_lse": True}
    with emulator.counters() as counted:
        out, lse = decode_attention_fp8(q, k_pages, v_pages, tables, lengths(256, 256, 256), split_k=2, **given)
    assert counted.tensors["k"].loaded == counted.tensors["v"].loaded == (5 + 4) * 16 * 64
    want = decode_attention_fp8(q, k, v, None, lengths(256, 256, 256), split_k=2, **given)
    same((out, lse), want)


@pytest.mark.parametrize("split_k", [1, 2])
def test_tokens_after_the_last_one_stay_unwritten(split_k):
    counts, spare = (2, 1), 3
    q, k, v = ragged_case((*counts, spare), 1, 2, 64, 30)
    k, v = k[:2], v[:2]
    out, lse = torch.full((6, 2, 64), 7.0).to(FP8), torch.full((2, 6), 7.0)
    scales = torch.full((6, 4), 7, dtype=torch.uint8)
    given = {"cu_seqlens_q": starts_of(counts), "max_seqlen_q": 2, "out_format": "mxfp8", "split_k": split_k}
    decode_attention_fp8(
        q, k, v, None, lengths(30, 8), return_lse=True, out=out, lse_out=lse, scale_out=scales, **given
    )
    assert (out[3:].float() == 7).all() and (lse[:, 3:] == 7).all() and (scales[3:] == 7).all()
    want = decode_attention_fp8(q[:3], k, v, None, lengths(30, 8), return_lse=True, **given)
    same((out[:3], lse[:, :3], scales[:3]), [want[0].view(torch.uint8), *want[1:]])


def test_the_workspace_is_for_the_tokens_that_there_are():
    q, k, v = ragged_case(COUNTS, 1, 2, 64, KEYS)
    given = {"cu_seqlens_q": starts_of(COUNTS), "max_seqlen_q": 16, "split_k": 3}
    size = attention_workspace_size(decode_attention_fp8, q, k, v, None, lengths(*LENGTHS), **given)
    assert size == 4 * 3 * 11 * 2 * (64 + 1)
    workspace = torch.full((size,), 255, dtype=torch.uint8)
    got = decode_attention_fp8(q, k, v, None, lengths(*LENGTHS), workspace=workspace, return_lse=True, **given)
    same(got, decode_attention_fp8(q, k, v, None, lengths(*LENGTHS), return_lse=True, **given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seqlen_q": None}, "max_seqlen_q must be given with cu_seqlens_q"),
        ({"cu_seqlens_q": None}, "max_seqlen_q is for cu_seqlens_q, which is None; got max_seqlen_q=2"),
        ({"max_seqlen_q": 17}, "max_seqlen_q must be 1 to 16 query tokens per sequence; got 17"),
        ({"max_seqlen_q": 2.5}, "max_seqlen_q must be an int; got float 2.5"),
        (
            {"max_seqlen_q": 1},
            "max_seqlen_q must be at least the tokens of every sequence; got 1, but sequence 1 .* has 2",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 1, 3])}, "cu_seqlens_q must be int32"),
        ({"cu_seqlens_q": lengths(0, 3)}, r"cu_seqlens_q must be .*\[3\] \(the first token of each sequence"),
        ({"cu_seqlens_q": lengths(0, 2, 1)}, r"cu_seqlens_q must begin with 0, not fall, .* got \[0, 2, 1\]"),
        ({"cu_seqlens_q": lengths(1, 1, 3)}, "cu_seqlens_q must begin with 0"),
        ({"cu_seqlens_q": lengths(0, 2, 4)}, r"end at no more than the 3 tokens of q; got \[0, 2, 4\]"),
    ],
)
@pytest.mark.parametrize("half", [False, True], ids=["fp8", "half"])
def test_refusals_name_argument_value_and_rule(change, message, half):
    q, k, v = ragged_case((1, 2), 1, 2, 64, 32, dtype=torch.bfloat16 if half else FP8)
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(
            q, k, v, None, lengths(32, 3), **{"cu_seqlens_q": lengths(0, 1, 3), "max_seqlen_q": 2, **change}
        )


def test_q_of_the_other_rank_is_refused():
    q, k, v = ragged_case((1, 2), 1, 2, 64, 32)
    with pytest.raises(GuardError, match=r"q must be \[tokens, Hq, D\] with cu_seqlens_q"):
        decode_attention_fp8(q[None], k, v, None, lengths(32, 3), cu_seqlens_q=lengths(0, 1, 3), max_seqlen_q=2)
    with pytest.raises(GuardError, match=r"q must be \[B, Mq, Hq, D\]"):
        decode_attention_fp8(q, k, v, None, lengths(32, 3))


def test_lists_of_keys_of_each_kv_head_are_refused():
    q, k, v = ragged_case((1, 2), 1, 2, 64, 32)
    tables, each = torch.zeros(2, 1, 1, dtype=torch.int32), lengths(32, 3)[:, None]
    with pytest.raises(GuardError, match="cu_seqlens_q must not be given with block_tables of 3 dimensions"):
        decode_attention_fp8(q, k, v, tables, each, cu_seqlens_q=lengths(0, 1, 3), max_seqlen_q=2)


def test_a_page_that_a_token_needs_is_checked():
    q, k, v = ragged_case((1, 2), 1, 2, 64, 32)
    (k_pages, tables), (v_pages, _) = paged(k, 16), paged(v, 16)
    tables[1, 1] = 99
    with pytest.raises(GuardError, match=r"block_tables\[1, 1\] is page 99"):
        decode_attention_fp8(
            q, k_pages, v_pages, tables, lengths(32, 20), cu_seqlens_q=lengths(0, 1, 3), max_seqlen_q=2
        )


def test_hidden_keys_of_a_sequence_leak_nothing():
    counts = (1, 3)
    q, k, v = ragged_case(counts, 1, 2, 64, 40)
    given = {"cu_seqlens_q": starts_of(counts), "max_seqlen_q": 3, "split_k": 2}
    clean = decode_attention_fp8(q, k, v, None, lengths(40, 33), **given)
    for x in (k, v):
        x.view(torch.uint8)[1, 33:] = NAN_CODE
    v.view(torch.uint8)[1, 32] = NAN_CODE  # which the last token alone sees
    got = decode_attention_fp8(q, k, v, None, lengths(40, 33), **given)
    assert torch.equal(got[:3], clean[:3]) and got[3].isnan().all()
