"""RoPE and the cache write on the emulated architecture: bit for bit where operations are exact, bounded where not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers.fused_fp8_cases import U, assert_between, assert_same, normal
from helpers.rope_cases import FP8, MAX_POS, angles, case, expected

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import rope_and_cache as op
from hipforge.ops.reference import dequantize_kv_fp8
from hipforge.ops.reference.rope import rotate, scaled_norm
from hipforge.ops.rope_and_cache import rope_and_cache

pytestmark = pytest.mark.gfx942

LARGEST = torch.finfo(FP8).max
DTYPES = [torch.float16, torch.bfloat16]
STORAGES = ["half", "fp8", "rows", "int4"]


def run(given, **more):
    """The op on copies: (q, what is written)."""
    given = given.copy()
    q = rope_and_cache(*given.tensors(), **{**given.options, **more})
    return q, given.written()


def check(given, **more):
    """Bit for bit the reference."""
    q, written = run(given, **more)
    want_q, want = expected(given)
    assert_same(q, want_q)
    for got, exact in zip(written, want, strict=True):
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


def test_positions_and_slots_are_read_early_only_where_that_is_promised(monkeypatch):
    seen = []
    real = op.rope_and_cache_out
    monkeypatch.setattr(op, "rope_and_cache_out", lambda *given: (seen.append(given[-2:]), real(*given)))
    given = case("half")
    check(given)
    for promised in ({}, {"new_keys": 1}):
        with hipforge.programmatic_launch(**promised):
            check(given)
    assert seen == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_and_quarter_turns_are_exact(dtype, storage, style):
    """Sums of integers are exact in any order, so that every kind of cache must match bit for bit."""
    check(case(storage, dtype, exact=True, style=style))


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize("angle_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dim", "rotary_dim"),
    [(8, 8), (16, 4), (64, 64), (64, 20), (80, 32), (128, 64), (128, 6), (192, 192), (256, 128), (512, 512), (72, 72)],
)
def test_a_rotation_has_the_roundings_of_the_reference(dim, rotary_dim, angle_dtype, style):
    # Rows of a cache are multiples of 16 bytes: fp8 needs D % 16, 16-bit elements D % 8.
    check(case("half", dim=dim, rotary_dim=rotary_dim, angle_dtype=angle_dtype, style=style, q_heads=9, kv_heads=3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", ["number", "one", "per_head", "zero"])
def test_fp8_by_static_scales_saturates_and_rounds_as_the_reference(scales, dtype):
    given = {
        "number": (0.02, 0.013), "one": (torch.tensor([0.02]), torch.tensor([1e-4])), "zero": (0.0, torch.zeros(1)),
        "per_head": (torch.tensor([0.5, 0.01, 3.0]), torch.tensor([1e-3, 0.01, float("inf")])),
    }[scales]  # fmt: skip
    check(case("fp8", dtype, kv_heads=3, k_scale=given[0], v_scale=given[1]))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_int4_rows_are_those_of_the_reference(dim, groups):
    check(case("int4", dim=dim, groups=groups, q_heads=1, kv_heads=5))


def test_int4_of_equal_wide_and_nan_groups():
    given = case("int4", torch.float16, groups=2)
    given.v[0] = 3.5
    given.v[1, :, :64], given.v[1, 0, 3], given.v[1, 0, 4] = 0.0, 65504.0, -65504.0
    given.v[2, 1, 70] = float("nan")
    check(given)


def test_words_of_rows_bound_the_mean_and_fix_the_codes():
    given = case("rows", tokens=5, kv_heads=4, dim=256)
    _, (k_cache, v_cache, k_words, v_words) = run(given)
    stored = (rotate(given.k, given.cos_sin, given.positions, False), given.v)
    place = given.slots // 16, given.slots % 16
    for x, cache, words in zip(stored, (k_cache, v_cache), (k_words, v_words), strict=True):
        halves = words[place].unsqueeze(-1).view(torch.float16).float()
        scale, shift = halves[..., :1], halves[..., 1:]
        rows = x.float()
        # The sum has 7 additions in a lane and 5 levels over lanes, then a division: 13 roundings of the sum of
        # magnitudes at most, and one to float16.
        mean = rows.double().mean(-1, keepdim=True)
        slack = 13 * U * rows.abs().double().mean(-1, keepdim=True)
        assert bool((shift.double() >= (mean - slack).half().double()).all())
        assert bool((shift.double() <= (mean + slack).half().double()).all())
        centred = rows - shift
        assert torch.equal(scale, (centred.abs().amax(-1, keepdim=True) / LARGEST).half().float())
        want = (centred / scale).clamp(-LARGEST, LARGEST).to(FP8)
        assert torch.equal(cache[place].view(torch.uint8), want.view(torch.uint8))
        # Half a step of the format near its largest value: 2^-4 of the row's range; and float16's of the mean.
        back = dequantize_kv_fp8(cache[place].view(torch.uint8).view(torch.int32), words[place], FP8)
        assert bool(((back - rows).abs() <= 2.0**-4 * centred.abs().amax(-1, keepdim=True) + 1e-6).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("storage", ["half", "fp8", "rows"])
def test_non_finite_elements_stay_in_their_head(storage, bad):
    given = case(storage, exact=True)
    for x in (given.q, given.k, given.v):
        x[1, 1, 5] = bad
    q, written = run(given)
    want_q, want = expected(given)
    assert_same(q, want_q)
    place = given.slots // 16, given.slots % 16
    for got, exact in zip(written, want, strict=True):
        if got.dtype == torch.int32:  # a NaN's payload is not fixed
            got, exact = (x[place].unsqueeze(-1).view(torch.float16).float() for x in (got, exact))
            assert torch.equal(got.isnan(), exact.isnan()) and torch.equal(got.nan_to_num(7), exact.nan_to_num(7))
        else:
            assert_same(got[place].to(torch.float32).bfloat16(), exact[place].to(torch.float32).bfloat16())


def test_rows_of_equal_elements_are_their_shift():
    given = case("rows", exact=True)
    given.v[:] = torch.arange(6).view(3, 2, 1).bfloat16()
    check(given)


def norm_ends(x, epsilon, weight, offset):
    """The norm with either end of the factor's error interval."""
    dim = x.shape[-1]
    # Roundings on a sum's longest path: 8 elements of a lane, up to 6 levels over lanes, the division, epsilon; the
    # root halves them, the instruction is within one unit in the last place (2 U), and the product rounds once more.
    relative = ((8 + 6 + 2) / 2 + 3) * U
    wide = x.double()
    exact = (wide.square().mean(-1, keepdim=True) + float(torch.tensor(epsilon))).rsqrt()
    ends = []
    for end in (exact * (1 - relative), exact * (1 + relative)):
        ends.append(scaled_norm(x.float() * end.float(), weight, offset))
    assert dim == weight.numel()
    return ends


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_per_head_lies_between_the_ends_of_its_factor(dtype, dim, offset, style):
    weights = {"q_weight": normal((dim,), dtype, 5), "k_weight": normal((dim,), dtype, 6)}
    given = case(
        "half", dtype, dim=dim, rotary_dim=dim // 2, style=style, epsilon=1e-5, weight_offset=offset, **weights
    )
    q, (k_cache, v_cache) = run(given)
    place = given.slots // 16, given.slots % 16
    for x, got, weight in ((given.q, q, "q_weight"), (given.k, k_cache[place], "k_weight")):
        ends = norm_ends(x, 1e-5, weights[weight], offset)
        # A rotated element grows or falls with each of its two inputs: the extremes are among the four corners.
        pairs = rotary_partners(dim // 2, style)
        corners = []
        for own, other in itertools.product(ends, ends):
            for positive in (True, False):  # an input that stands at both places of its pair keeps one end
                mixed = own.clone()
                mixed[..., pairs[positive]] = other[..., pairs[positive]]
                corners.append(rotate(mixed, given.cos_sin, given.positions, style == "interleaved"))
        low = torch.stack([corner.float() for corner in corners]).amin(0).to(dtype)
        high = torch.stack([corner.float() for corner in corners]).amax(0).to(dtype)
        # The interval's relative width is 22 U, 16-bit steps are 2^13 U at least: 0.6 % of the elements are open after
        # the norm's two roundings, and a rotation has two such inputs.
        assert_between(got, low, high, 0.97)
    assert_same(v_cache[place], given.v)


def rotary_partners(width, style):
    """For True the first, for False the second elements of all pairs."""
    first = torch.arange(0, width, 2) if style == "interleaved" else torch.arange(width // 2)
    return {True: first, False: first + (1 if style == "interleaved" else width // 2)}


def test_a_norm_of_powers_of_two_is_exact():
    """Every head has mean square 4, whose root is exact, as are all products with these weights and quarter turns."""
    dtype, dim = torch.bfloat16, 128
    given = case("fp8", dtype, exact=True)
    for x in (given.q, given.k):
        x.copy_(torch.where(x > 0, 2.0, -2.0))
    weight = torch.exp2(torch.arange(dim) % 5 - 2.0).to(dtype)
    for offset in (0.0, 1.0):
        given.options.update(q_weight=weight, k_weight=weight, epsilon=0.0, weight_offset=offset)
        check(given)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_keeps_the_sign_of_zero(dtype, offset):
    # Compilers may fold a product and its rounding to half into an fma that loses the sign of -0.
    given = case("half", dtype, rotary_dim=64, q_weight=torch.ones(128).to(dtype), epsilon=1e-5, weight_offset=offset)
    given.q[..., 64::2] = -0.0
    q, _ = run(given)
    zeros = q[..., 64::2]
    assert bool((zeros == 0).all()) and bool(zeros.signbit().all())


def test_only_the_normalised_projection_is_normalised():
    weight = torch.full((128,), 2.0, dtype=torch.bfloat16)
    given = case("half", exact=True)
    given.q.copy_(torch.where(given.q > 0, 2.0, -2.0))
    given.options.update(q_weight=weight, epsilon=0.0)
    check(given)


@pytest.mark.parametrize("storage", STORAGES)
def test_tokens_without_a_slot_are_rotated_and_not_stored(storage):
    given = case(storage, tokens=6, exact=True)
    given.slots[torch.tensor([0, 3, 4])] = torch.tensor([-1, 48, 2**40])
    check(given)
    _, written = run(given)
    kept = given.slots[torch.tensor([1, 2, 5])]
    for got, before in zip(written, given.written(), strict=True):
        untouched = torch.ones(48, dtype=torch.bool)
        untouched[kept] = False
        assert torch.equal(
            got.flatten(0, 1)[untouched].view(torch.uint8), before.flatten(0, 1)[untouched].view(torch.uint8)
        )
    nothing = case(storage, tokens=2, exact=True)
    nothing.slots[:] = -1
    check(nothing)


def test_a_position_outside_the_table_gives_nan_and_reads_nothing():
    given = case("half", rotary_dim=64, tokens=4)
    given.positions = torch.tensor([0, -1, MAX_POS, MAX_POS - 1])
    q, (k_cache, _) = run(given)
    assert bool(q[1:3, :, :64].isnan().all()) and bool(q[::3].isfinite().all())
    assert torch.equal(q[..., 64:], given.q[..., 64:])
    want, (stored, _) = expected(given)
    assert_same(q, want)
    assert_same(k_cache, stored)


def test_int32_and_int64_positions_are_one():
    given = case(exact=True)
    check(replace(given, positions=given.positions.int()))


def test_q_is_written_in_place_or_where_asked():
    given = case(exact=True).copy()
    want, _ = expected(given)
    before = given.q.clone()
    out = torch.empty_like(given.q)
    assert rope_and_cache(*given.tensors(), **given.options, q_out=out) is out
    assert_same(out, want)
    assert_same(given.q, before)
    assert rope_and_cache(*given.tensors(), **given.options) is given.q
    assert_same(given.q, want)


def test_slices_of_one_projection_are_written_in_place():
    whole = normal((5, 8, 128), torch.bfloat16, 3)
    given = case(tokens=5)
    given.q, given.k, given.v = whole.split((4, 2, 2), dim=1)
    want_q, want = expected(given)
    k, v = given.k.clone(), given.v.clone()
    rope_and_cache(*given.tensors(), **given.options)
    assert_same(whole[:, :4], want_q)
    assert_same(whole[:, 4:6], k)
    assert_same(whole[:, 6:], v)
    for got, exact in zip(given.written(), want, strict=True):
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("layout", ["heads_first", "pairs_of_pages", "pairs_of_slots"])
def test_caches_of_other_strides(layout):
    given = case("fp8", exact=True)
    pages, page_size, heads, dim = given.k_cache.shape

    def empty(*shape):
        return torch.full(shape, 0x5A, dtype=torch.uint8).view(FP8)

    if layout == "heads_first":
        k_cache, v_cache = (empty(pages, heads, page_size, dim).transpose(1, 2) for _ in "kv")
    elif layout == "pairs_of_pages":
        k_cache, v_cache = empty(pages, 2, page_size, heads, dim).unbind(1)
    else:
        k_cache, v_cache = empty(pages, page_size, 2, heads, dim).unbind(2)
    want_q, want = expected(given)
    q = rope_and_cache(given.q.clone(), *given.tensors()[1:5], k_cache, v_cache, given.slots, **given.options)
    assert_same(q, want_q)
    for got, exact in zip((k_cache, v_cache), want, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), exact.view(torch.uint8))


def test_heads_off_sixteen_bytes_take_narrow_accesses():
    given = case("fp8", exact=True)
    for name in "qkv":
        x = getattr(given, name)
        shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        setattr(given, name, shifted.copy_(x))
    out = torch.empty(given.q.numel() + 1, dtype=given.q.dtype)[1:].view(given.q.shape)
    want, _ = expected(given)
    assert_same(run(given, q_out=out)[0], want)


def test_uint8_caches_hold_the_same_bits():
    given = case("fp8", exact=True)
    _, want = expected(given)
    given.k_cache, given.v_cache = given.k_cache.view(torch.uint8), given.v_cache.view(torch.uint8)
    _, written = run(given)
    for got, exact in zip(written, want, strict=True):
        assert torch.equal(got, exact.view(torch.uint8))


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_wave_order_changes_nothing(order):
    with emulator.options(checks="all", wave_order=order, check_global_races=True):
        check(case("fp8", exact=True, tokens=9, q_heads=16, kv_heads=4))


def test_many_tokens_share_work_groups():
    check(case("rows", exact=True, tokens=200, q_heads=24, kv_heads=5, pages=16, dim=64))


def test_no_tokens_launch_nothing():
    with emulator.counters() as counted:
        run(case(tokens=0))
    assert counted.launches == 0


def test_elements_are_moved_once_and_in_one_launch():
    given = case("fp8", tokens=8, q_heads=8, kv_heads=4, fused=False)
    q_out = torch.empty_like(given.q)
    with emulator.counters() as counted:
        run(given, q_out=q_out)
    assert counted.launches == 1 and counted.scratch_bytes == 0
    for name, tensor in (("q", given.q), ("k", given.k), ("v", given.v)):
        assert (counted.tensors[name].loaded, counted.tensors[name].stored) == (tensor.nbytes, 0)
    assert (counted.tensors["q_out"].loaded, counted.tensors["q_out"].stored) == (0, q_out.nbytes)
    for name, tensor in (("k_cache", given.k), ("v_cache", given.v)):
        assert (counted.tensors[name].loaded, counted.tensors[name].stored) == (0, tensor.numel())
    # The caches get their own lines, q and the tables are read once: at most 5 % over that, in arguments and scales.
    rows = given.positions.unique().numel() * given.cos_sin.shape[1] * 4
    least = given.q.nbytes * 2 + given.k.nbytes * 3 + rows + given.positions.nbytes + given.slots.nbytes
    assert least <= counted.unique_bytes <= 1.05 * least


@pytest.mark.parametrize("storage", ["fp8", "rows"])
def test_decode_attention_reads_what_was_written(storage):
    """Keys written token by token through page tables, against attention over the same values kept aside."""
    dim, kv_heads, page_size, length = 64, 2, 16, 23
    given = case(storage, exact=True, tokens=length, q_heads=4, kv_heads=kv_heads, dim=dim, page_size=page_size)
    if storage == "fp8":
        given.options.update(k_scale=0.5, v_scale=torch.tensor([0.25, 1.0]))
    tables = torch.tensor([[2, 0]], dtype=torch.int32)
    key = torch.arange(length)
    given.slots = tables[0].long()[key // page_size] * page_size + key % page_size
    given.positions = key
    q = rope_and_cache(*given.tensors(), **given.options)[-1:].unsqueeze(0)
    seqlens = torch.tensor([length], dtype=torch.int32)
    if storage == "fp8":
        out = hipforge.decode_attention_fp8(
            q, given.k_cache, given.v_cache, tables, seqlens, given.options["k_scale"], given.options["v_scale"]
        )
    else:
        packed = []
        for cache, words in ((given.k_cache, "k_scale_shift"), (given.v_cache, "v_scale_shift")):
            flat = cache.view(torch.int32).flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, 2, -1)
            packed.append((flat, given.options[words].flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, 2)))
        (k, k_words), (v, v_words) = packed
        grouped = q.view(1, 1, kv_heads, 2, dim)
        out, _ = hipforge.decode_attention_splitk(grouped, k, v, k_words, v_words, seqlens, tables, page_size)
        out = out.view(q.shape)
    keys = rotate(given.k, given.cos_sin, given.positions, False)
    # Integers up to 12 are e4m3 values times these scales; rows lose half a step of 2^-4 of their range.
    want = hipforge.ops.reference.decode_attention(q.view(1, 1, kv_heads, 2, dim), keys[None], given.v[None], seqlens)[
        0
    ].view(out.shape)
    error = (out.double() - want).norm() / want.norm()  # of what the cache keeps too: not told as the kernel's
    # fp8: weights and result in bfloat16, 2^-8 each at most. rows: fp8 steps, 2^-4 / sqrt(3) per element at most.
    assert error < (2.0**-7 if storage == "fp8" else 2.0**-4)


def test_refusals_name_argument_value_and_rule():
    def refused(match, given=None, **changes):
        given = case() if given is None else given
        fields = {name: changes.pop(name) for name in tuple(changes) if hasattr(given, name)}
        with pytest.raises(GuardError, match=match):
            run(replace(given, **fields), **changes)

    good = case()
    refused(r"q must be \[T, Hq, D\]; got .*\[3, 512\]", q=good.q.reshape(3, 512))
    refused(r"q must be float16 or bfloat16.*; got float32", q=good.q.float())
    refused(r"k must be .*\[3, 2, 128\] \(T and D of q\); got .*\[2, 2, 128\]", k=good.k[:2])
    refused(r"k must be bfloat16.*; got float16", k=good.k.half())
    refused(r"v must be .*\[3, 2, 128\] \(that of k\)", v=good.v[:, :1])
    wide = torch.zeros(3, 4, 256, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(GuardError, match="q must have its last dimension contiguous; got stride 2"):
        rope_and_cache(wide, *good.tensors()[1:], **good.options, q_out=good.q)
    refused("D must be a multiple of 8, at most 512; got 12", case("half", dim=12, rotary_dim=4))
    refused("D must be a multiple of 8, at most 512; got 520", case("half", dim=520, rotary_dim=8))
    refused(r"style must be one of 'neox', 'interleaved'; got 'gptj'", style="gptj")
    refused("rotary_dim must be the columns of cos_sin, 128; got 64", rotary_dim=64)
    refused("must be even, 2 to D = 128; got 127", cos_sin=good.cos_sin[:, :127])
    refused("must be even, 2 to D = 128; got 130", cos_sin=angles(130))
    refused("cos_sin must be contiguous", cos_sin=angles(256)[:, ::2])
    refused(r"cos_sin must be float32 or bfloat16.*; got float16", cos_sin=good.cos_sin.half())
    refused(r"positions must be int32 or int64.*; got int16", positions=good.positions.short())
    refused(r"positions must be .*\[3\]", positions=good.positions[:2])
    refused(r"slot_mapping must be int64.*; got int32", slots=good.slots.int())
    refused("slot_mapping must be contiguous int64", slots=good.slots.repeat_interleave(2)[::2])
    refused(r"a norm over the whole projection \(as in MiniMax-M2\)", q_weight=torch.ones(512).bfloat16())
    refused(r"k_weight must be .*\[128\]", k_weight=torch.ones(64).bfloat16())
    refused(r"q_weight must be bfloat16.*; got float32", q_weight=torch.ones(128))
    for epsilon in (-1e-6, math.nan, math.inf):
        refused("epsilon must be finite and at least 0; got", epsilon=epsilon)
    refused("weight_offset must be finite; got", weight_offset=math.inf)
    words = torch.zeros(3, 16, 2, dtype=torch.int32)
    one_kind = "an fp8 cache takes exactly one kind of scale"
    refused(one_kind + ".*got k_scale, v_scale, k_scale_shift", k_scale_shift=words)
    refused(one_kind + ".*got none", k_scale=None, v_scale=None)
    refused(one_kind + ".*got v_scale$", k_scale=None)
    refused(r"a cache of q's dtype takes no scale; got k_scale", case("half"), k_scale=1.0)
    refused("takes num_groups and no other scale; got k_scale, num_groups", case("int4"), k_scale=1.0)
    refused("num_groups must be one of 1, 2, 4, 8; got 3", case("int4", groups=3))
    refused("D must be a power of two with at least 8 elements in each of 2 groups", case("int4", dim=192, groups=2))
    refused(r"k_cache must be .*\[3, 16, 2, 128\] \(Hkv and D of k\)", k_cache=good.k_cache[..., :64])
    refused(r"v_cache must be .*.*that of k_cache", v_cache=good.v_cache[:2])
    refused("k_cache must have strides that are multiples of 16 bytes; got 24 along axis 2", case("fp8", dim=24))
    other = torch.float8_e4m3fnuz if FP8 is torch.float8_e4m3fn else torch.float8_e4m3fn
    refused("k_cache must be float8", k_cache=good.k_cache.view(other), v_cache=good.v_cache.view(other))
    refused(r"k_scale must be float32, one element or \[2\]", k_scale=torch.ones(3))
    rows = case("rows")
    refused(r"k_scale_shift must be .*\[3, 16, 2\]", rows, k_scale_shift=words[:2])
    with pytest.raises(GuardError, match="k_cache must not be expanded"):
        k_cache = good.k_cache[:1].expand(3, -1, -1, -1)
        rope_and_cache(*good.tensors()[:5], k_cache, good.v_cache, good.slots, **good.options)


def test_shifts_that_are_written_twice_are_refused():
    rows = case("rows")
    shared = rows.options["k_scale_shift"]
    with pytest.raises(GuardError, match="k_scale_shift is written and must not share memory with v_scale_shift"):
        rope_and_cache(*rows.tensors(), k_scale_shift=shared, v_scale_shift=shared)


def test_explain_names_the_kernel_and_the_other_paths(monkeypatch):
    given = case()
    shown = hipforge.explain("rope_and_cache", *given.tensors(), **given.options)
    assert (shown.path, shown.kernel, set(shown.refused)) == ("kernel", "rope_and_cache", {"triton", "torch"})
    with pytest.raises(GuardError, match="an fp8 cache takes exactly one kind of scale"):
        hipforge.explain(rope_and_cache, *given.tensors())


def test_a_table_without_positions_makes_what_is_rotated_nan() -> None:
    x = torch.ones(2, 1, 64)
    turned = rotate(x, torch.zeros(0, 32), torch.zeros(2, dtype=torch.int64), False)
    assert turned[..., :32].isnan().all() and turned[..., 32:].eq(1).all()
