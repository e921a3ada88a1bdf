"""Sinks, sliding window and soft cap of decode attention over fp8 caches, on both architectures.

Bounds are those of attention_cases; data that must come out exactly is compared bit for bit. Over the other kinds of
caches they are in test_decode_attention_kinds, all three together; in torch among the draws of _witness.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_cases import FP8, NAN_CODE, case, check, lengths, paged, rng

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8

pytestmark = [
    pytest.mark.gfx942("counts_once or zeros or leak or exact or read or capped or no_key"),
    pytest.mark.usefixtures("every_checker"),
]


def run_and_check(q, k, v, seqlens, **options):
    """The op's result, against float64 over the same bits."""
    out, lse = decode_attention_fp8(q, k, v, None, seqlens, return_lse=True, **options)
    given = {name: options.get(name) for name in ("sinks", "window", "softcap")}
    check(q, k.double(), v.double(), seqlens, out, lse, options.get("scale", q.shape[-1] ** -0.5), **given)
    return out, lse


# --- sinks


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize(("mq", "split_k"), [(1, 1), (1, 5), (4, 1), (4, 3)])
def test_a_sink_counts_once_whatever_the_splits(d, mq, split_k):
    q, k, v = case(2, mq, 2, 3, d, 120, seed=d + mq)
    sinks = torch.linspace(-6, 8, 6)
    run_and_check(q, k, v, lengths(120, 33), sinks=sinks, split_k=split_k)


@pytest.mark.parametrize(("count", "split_k"), [(1, 1), (3, 1), (127, 1), (1, 4)])
def test_a_sink_as_large_as_every_score_is_one_key_of_zeros(count, split_k):
    """All scores 0: count keys and a sink of 0 weigh the same, so a power of two of them is exact."""
    q, k, _ = case(1, 1, 1, 2, 64, 128)
    v = torch.randint(-8, 9, (1, 128, 1, 64), generator=rng(1)).float().to(FP8)
    out, lse = decode_attention_fp8(
        q * 0, k, v, None, lengths(count), return_lse=True, sinks=torch.zeros(2), split_k=split_k
    )
    assert torch.equal(out[0, 0], (v[0, :count, 0].float().sum(0) / (count + 1)).bfloat16().expand(2, 64))
    assert (lse - math.log(count + 1)).abs().max() < 1e-6


def test_a_sink_of_minus_infinity_changes_no_bit_and_an_overwhelming_one_takes_all():
    q, k, v = case(2, 2, 1, 4, 64, 90)
    for split_k in (1, 3):
        plain = decode_attention_fp8(q, k, v, None, lengths(90, 2), return_lse=True, split_k=split_k)
        sinks = torch.tensor([-math.inf, 200.0, -200.0, -math.inf])
        got = decode_attention_fp8(q, k, v, None, lengths(90, 2), return_lse=True, split_k=split_k, sinks=sinks)
        same = [0, 2, 3]
        assert torch.equal(got[0][:, :, same], plain[0][:, :, same]) and torch.equal(got[1][:, same], plain[1][:, same])
        assert not got[0][:, :, 1].any() and ((got[1][:, 1] - 200.0).abs() < 1e-4).all()


@pytest.mark.parametrize("split_k", [1, 2])
def test_a_row_that_sees_no_key_has_its_sink_as_log_sum_exp(split_k):
    q, k, v = case(2, 3, 1, 2, 64, 40)
    k.view(torch.uint8)[1], v.view(torch.uint8)[1] = NAN_CODE, NAN_CODE
    sinks = torch.tensor([0.75, -3.0])
    out, lse = decode_attention_fp8(
        q, k, v, None, lengths(40, 0), 1.0, torch.tensor([math.nan]), return_lse=True, sinks=sinks, split_k=split_k
    )
    assert not out[1].any() and ((lse[1] - sinks.view(2, 1)).abs() < 1e-6).all()


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "of_each_head"])
def test_tables_without_a_page_hold_no_key_whatever_the_lengths_say(own, split_k):
    q, k, v = case(2, 1, 1, 2, 64, 48)
    sinks, shape = torch.tensor([0.75, -3.0]), (2, 1) if own else (2,)
    for length in (0, 7):
        out, lse = decode_attention_fp8(
            q, k, v, torch.empty(*shape, 0, dtype=torch.int32), torch.full(shape, length, dtype=torch.int32),
            return_lse=True, sinks=sinks, split_k=split_k,
        )  # fmt: skip
        assert not out.any() and ((lse - sinks.view(1, 2, 1)).abs() < 1e-6).all()


# --- window


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 100, 128, 1000])
@pytest.mark.parametrize(("mq", "split_k"), [(1, 1), (1, 3), (5, 1), (16, 2)])
def test_windows_around_tiles_and_blocks(window, mq, split_k):
    q, k, v = case(3, mq, 1, 2, 64, 200, seed=window + mq)
    run_and_check(q, k, v, lengths(200, 131, 7), window=window, split_k=split_k)


@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("waves", [2, 4])
def test_windows_where_waves_share_the_keys(d, waves):
    q, k, v = case(2, 3, 2, 2, d, 300, seed=d)
    for block_n, split_k, window in ((64, 1, 130), (16, 3, 47), (32, 2, 250)):
        forced = {"block_n": block_n, "waves": waves, "split_k": split_k}
        results = []
        for order in ("forward", "reverse", "random"):
            with emulator.options(checks="all", wave_order=order):
                results.append(run_and_check(q, k, v, lengths(300, 90), window=window, force_kernel_config=forced))
        assert all(torch.equal(a, b) for one in results[1:] for a, b in zip(one, results[0], strict=True))


@pytest.mark.parametrize("window", [1, 16, 33])
def test_keys_before_the_window_leak_nothing(window):
    q, k, v = case(1, 4, 1, 3, 64, 100, seed=window)
    clean = decode_attention_fp8(q, k, v, None, lengths(100), return_lse=True, window=window, split_k=2)
    first = 100 - 3 - window  # of the first token's keys
    k.view(torch.uint8)[0, :first], v.view(torch.uint8)[0, :first] = NAN_CODE, NAN_CODE
    got = decode_attention_fp8(q, k, v, None, lengths(100), return_lse=True, window=window, split_k=2)
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])
    v.view(torch.uint8)[0, first, 0, 9] = NAN_CODE  # which the first token alone sees
    got = decode_attention_fp8(q, k, v, None, lengths(100), return_lse=True, window=window, split_k=2)
    assert torch.equal(got[0][:, 1:], clean[0][:, 1:]) and got[0][0, 0, :, 9].isnan().all()
    assert torch.equal(got[1], clean[1])


@pytest.mark.parametrize("window", [1, 3])
def test_equal_scores_give_the_exact_mean_of_the_window(window):
    q, k, _ = case(1, 2, 1, 2, 64, 70)
    v = torch.randint(-8, 9, (1, 70, 1, 64), generator=rng(2)).float().to(FP8)
    out, lse = decode_attention_fp8(q * 0, k, v, None, lengths(70), return_lse=True, window=window + 1, split_k=1)
    for token in range(2):
        mean = v[0, 69 - window + token - 1 : 69 + token, 0].float().sum(0) / (window + 1)
        assert torch.equal(out[0, token], mean.bfloat16().expand(2, 64))
    assert (lse - math.log(window + 1)).abs().max() < 1e-6


@pytest.mark.parametrize(("mq", "window", "tiles"), [(1, 64, 4), (1, 65, 5), (4, 64, 5), (1, 1, 1)])
def test_pages_before_the_window_are_not_read(mq, window, tiles):
    q, k, v = case(2, mq, 1, 2, 64, 512)
    (k_pages, tables), (v_pages, _) = paged(k, 16), paged(v, 16)
    tables[:, : 32 - tiles] = 2**31 - 1  # never to be read
    with emulator.counters() as counted:
        out, lse = decode_attention_fp8(
            q, k_pages, v_pages, tables, lengths(512, 512), return_lse=True, window=window, split_k=2
        )
    read = 2 * tiles * 16 * 64
    assert counted.tensors["k"].loaded == read and counted.tensors["v"].loaded == read
    check(q, k.double(), v.double(), lengths(512, 512), out, lse, 64**-0.5, window=window)


def test_splits_are_chosen_for_the_keys_of_the_window():
    q, k, v = case(1, 1, 1, 8, 64, 8192)
    told = hipforge.explain(decode_attention_fp8, q, k, v, None, lengths(8192), window=128)
    short = hipforge.explain(decode_attention_fp8, q, k[:, :128], v[:, :128], None, lengths(128))
    assert told.path == "kernel" and told.configuration == short.configuration


# --- soft cap


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0, 1e4])
@pytest.mark.parametrize(("d", "mq"), [(64, 1), (128, 3), (256, 1)])
def test_capped_scores(softcap, d, mq):
    q, k, v = case(2, mq, 1, 3, d, 100, seed=d)
    run_and_check(q * 4, k, v, lengths(100, 41), softcap=softcap, split_k=2)


def test_a_cap_is_reached_by_infinite_scores_and_keeps_zero():
    k = torch.zeros(1, 3, 1, 64)
    k[0, 0], k[0, 1] = 200.0, -200.0
    v = torch.zeros(1, 3, 1, 64)
    v[0, 0], v[0, 2] = 1.0, 2.0
    q = torch.full((1, 1, 1, 64), 1e20).bfloat16()
    out, lse = decode_attention_fp8(
        q, k.to(FP8), v.to(FP8), None, lengths(3), scale=1e20, softcap=math.log(4.0), return_lse=True, split_k=1
    )
    # Weights 4, 1/4 and 1.
    assert (out.float() - (4 + 2) / 5.25).abs().max() <= 2.0**-8 * 6 / 5.25
    assert (lse - math.log(5.25)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"window": 2.5}, "window must be an int; got float 2.5"),
        ({"window": 8, "causal": False}, "a window needs causal=True"),
        ({"softcap": 0.0}, "softcap must be positive and finite, or None; got 0.0"),
        ({"softcap": math.inf}, "softcap must be positive and finite"),
        ({"softcap": math.nan}, "softcap must be positive and finite"),
        ({"sinks": torch.zeros(3)}, r"sinks must be .*\[2\] \(one per query head\)"),
        ({"sinks": torch.zeros(2).half()}, "sinks must be float32"),
    ],
)
def test_refusals_name_argument_value_and_rule(change, message):
    q, k, v = case(1, 1, 1, 2, 64, 32)
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(q, k, v, None, lengths(32), **change)
