"""The choice of experts on the emulated architecture: ids exactly, weights within the error of exp."""

from __future__ import annotations

import pytest
import torch
from helpers.gating_cases import assert_weights, by_hand, rng, well_apart
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.reference import topk_gating as reference
from hipforge.ops.topk_gating import topk_gating

pytestmark = pytest.mark.gfx942

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


SCORINGS = ["softmax", "sigmoid"]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 1, 1), (3, 4, 4), (2, 8, 2), (5, 60, 6), (4, 64, 8), (3, 128, 4), (2, 129, 5), (2, 256, 8), (2, 512, 16)],
)
def test_the_best_experts_and_their_weights(tokens, experts, k, dtype, scoring):
    logits = well_apart((tokens, experts), 0, dtype)
    for renormalize, scale in ((True, 1.0), (False, 1.0), (True, 2.5)):
        weights, ids = topk_gating(logits, k, scoring=scoring, renormalize=renormalize, scale=scale)
        want, want_ids = reference(logits, k, scoring=scoring, renormalize=renormalize, scale=scale)
        assert ids.dtype == torch.int32 and torch.equal(ids, want_ids)
        assert_weights(weights, want)
        if dtype == torch.float32:
            assert torch.equal(ids, by_hand(logits, k))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    ("experts", "groups", "topk_groups", "k"),
    [(256, 8, 4, 8), (64, 1, 1, 6), (60, 6, 2, 7), (512, 512, 20, 16), (128, 128, 3, 3), (96, 3, 1, 16), (8, 2, 2, 8)],
)
@pytest.mark.parametrize("biased", [False, True])
def test_groups_keep_the_best_ones_alone(experts, groups, topk_groups, k, biased, scoring):
    logits = well_apart((4, experts), 3)
    # Steps of 1 / experts: no two sums of score and bias meet within a rounding, almost surely; by_hand would tell.
    bias = torch.randperm(experts, generator=rng(1)).float() / experts if biased else None
    options = {"scoring": scoring, "bias": bias, "groups": groups, "topk_groups": topk_groups}
    weights, ids = topk_gating(logits, k, **options)
    want, want_ids = reference(logits, k, **options)
    assert torch.equal(ids, want_ids)
    assert torch.equal(ids, by_hand(logits, k, bias, groups, topk_groups, scoring))
    assert_weights(weights, want)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_bias_takes_part_in_the_choice_and_not_in_the_weight(scoring):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    weights, ids = topk_gating(logits, 2, scoring=scoring, bias=bias, renormalize=False)
    assert ids.tolist() == [[3, 0]]
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, -1)
    assert_weights(weights, scores[:, [3, 0]])


def test_a_dropped_group_is_worth_less_than_any_bias():
    """Its experts are -inf, not 0: all biased scores of the kept group are negative."""
    logits = torch.zeros(1, 8)
    bias = torch.tensor([-5.0, -5.0, -5.0, -5.0, -9.0, -9.0, -9.0, -9.0])
    _, ids = topk_gating(logits, 4, scoring="sigmoid", bias=bias, groups=2, topk_groups=1)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_groups_are_compared_by_two_with_a_bias_and_by_one_without():
    logits = torch.tensor([[3.0, -9.0, -9.0, 2.0, 2.0, -9.0]])
    options = {"scoring": "sigmoid", "groups": 2, "topk_groups": 1}
    assert topk_gating(logits, 1, **options)[1].tolist() == [[0]]
    assert topk_gating(logits, 1, **options, bias=torch.zeros(6))[1].tolist() == [[3]]


def test_ties_go_to_the_lower_index():
    for experts in (5, 64, 130, 512):
        k = min(experts, 16)
        weights, ids = topk_gating(torch.zeros(2, experts), k)
        assert ids.tolist() == [list(range(k))] * 2
        assert bool((weights == weights[0, 0]).all())
    logits = torch.tensor([[1.0, 0.0, -0.0, 1.0, 0.0, -INF, 1.0, -INF]])
    assert topk_gating(logits, 8)[1].tolist() == [[0, 3, 6, 1, 2, 4, 5, 7]]
    groups = topk_gating(torch.zeros(1, 512), 16, groups=32, topk_groups=2, bias=torch.zeros(512))[1]
    assert groups.tolist() == [list(range(16))]


def test_logits_whose_scores_round_to_one_number_keep_their_order():
    logits = torch.tensor([[40.0, 60.0, 50.0, -200.0, -150.0]])
    assert topk_gating(logits, 5, scoring="sigmoid")[1].tolist() == [[1, 2, 0, 4, 3]]
    assert topk_gating(logits, 5)[1].tolist() == [[1, 2, 0, 4, 3]]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [None, 4])
def test_nan_logits_sort_last_and_ids_stay_distinct(scoring, biased, groups):
    logits = well_apart((6, 64), 5)
    logits[0, :] = NAN
    logits[1, torch.randperm(64, generator=rng(0))[:50]] = NAN
    logits[2, 3], logits[2, 9] = NAN, -INF
    logits[3, 16:] = NAN
    logits[4, 7] = -NAN
    options = {"scoring": scoring, "bias": torch.zeros(64) if biased else None}
    if groups:
        options.update(groups=groups, topk_groups=2)
    for k in (2, 16):
        weights, ids = topk_gating(logits, k, renormalize=False, **options)
        want, want_ids = reference(logits, k, renormalize=False, **options)
        assert torch.equal(ids, want_ids)
        assert_weights(weights, want)
        assert all(len(set(row)) == k for row in ids.tolist())
        if not groups:
            assert torch.equal(ids, by_hand(logits, k)) or biased
        assert bool(weights[0].isnan().all()) and not bool(weights[2].isnan().any())


def test_infinite_logits():
    logits = torch.tensor([[0.0, INF, 1.0, INF], [-INF, -INF, -INF, -INF], [-INF, 3.0, -INF, -INF]])
    weights, ids = topk_gating(logits, 2, renormalize=False)
    assert ids.tolist() == [[1, 3], [0, 1], [1, 0]]
    assert weights.tolist() == [[0.5, 0.5], [0.25, 0.25], [1.0, 0.0]]
    assert torch.equal(weights, reference(logits, 2, renormalize=False)[0])


def test_scores_that_are_powers_of_two_are_exact():
    """Equal logits of a power-of-two number of experts: every operation is exact."""
    weights, _ = topk_gating(torch.zeros(3, 256), 8, renormalize=False, scale=4.0)
    assert torch.equal(weights, torch.full((3, 8), 4.0 / 256))
    weights, _ = topk_gating(torch.zeros(3, 256), 8, scoring="sigmoid", renormalize=False)
    assert torch.equal(weights, torch.full((3, 8), 0.5))
    weights, _ = topk_gating(torch.zeros(3, 256), 8, scoring="sigmoid")
    assert torch.equal(weights, torch.full((3, 8), 0.125))


def test_weights_of_zero_renormalise_to_zero():
    weights, _ = topk_gating(torch.full((1, 8), -200.0), 2, scoring="sigmoid")
    assert torch.equal(weights, torch.zeros(1, 2))


def test_shared_experts_follow_with_weight_one():
    logits = well_apart((3, 60), 2)
    weights, ids = topk_gating(logits, 4, shared_experts=3, scale=2.5)
    plain, plain_ids = topk_gating(logits, 4, scale=2.5)
    assert torch.equal(ids[:, :4], plain_ids) and torch.equal(weights[:, :4], plain)
    assert ids[:, 4:].tolist() == [[60, 61, 62]] * 3 and bool((weights[:, 4:] == 1).all())
    assert topk_gating(logits, 16, shared_experts=16)[1].shape == (3, 32)


def test_rows_with_a_stride_and_results_where_asked():
    wide = well_apart((4, 100), 1)
    logits = wide[:, 20:84]
    out = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.int32)
    weights, ids = topk_gating(logits, 6, out=out[0], ids_out=out[1])
    assert weights is out[0] and ids is out[1]
    assert torch.equal(ids, by_hand(logits, 6))
    assert topk_gating(logits[:0], 6)[1].shape == (0, 6)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    tokens=strategies.integers(1, 3), experts=strategies.integers(1, 140), data=strategies.data(),
    biased=strategies.booleans(), scoring=strategies.sampled_from(SCORINGS),
)  # fmt: skip
def test_few_values_with_many_ties_nans_and_infinities(tokens, experts, data, biased, scoring):
    seed = data.draw(strategies.integers(0, 2**31))
    values = torch.tensor([0.0, -0.0, 1.0, -2.0, 30.0, NAN, -INF])
    logits = values[torch.randint(0, len(values), (tokens, experts), generator=rng(seed))]
    groups = data.draw(strategies.sampled_from([g for g in range(1, experts + 1) if experts % g == 0]))
    topk_groups = data.draw(strategies.integers(1, groups))
    k = data.draw(strategies.integers(1, min(16, experts // groups * topk_groups)))
    # Multiples of 4: sums of a score and a bias tie only where both do.
    bias = torch.randint(-2, 3, (experts,), generator=rng(seed + 1)) * 4.0 if biased else None
    options = {"scoring": scoring, "bias": bias, "groups": groups, "topk_groups": topk_groups}
    weights, ids = topk_gating(logits, k, **options)
    want, want_ids = reference(logits, k, **options)
    if not (
        biased and groups > 1
    ):  # the sum of two scores rounds: the groups may be equal for one and not for the other
        assert torch.equal(ids, want_ids)
        assert_weights(weights, want)
    assert all(len(set(row)) == k and min(row) >= 0 and max(row) < experts for row in ids.tolist())
    assert all(len({e // (experts // groups) for e in row}) <= topk_groups for row in ids.tolist())


def test_logits_are_read_once_in_one_launch():
    logits = well_apart((32, 256), 0)
    with emulator.counters() as counted:
        topk_gating(logits, 8, scoring="sigmoid", bias=torch.zeros(256), groups=8, topk_groups=4)
    assert counted.launches == 1 and counted.scratch_bytes == 0
    assert counted.tensors["logits"].loaded == logits.nbytes
    assert counted.tensors["weights"].stored == counted.tensors["ids"].stored == 32 * 8 * 4


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_wave_order_changes_nothing(order):
    logits = well_apart((9, 96), 4)
    with emulator.options(checks="all", wave_order=order, check_global_races=True):
        ids = topk_gating(logits, 8, groups=3, topk_groups=2)[1]
    assert torch.equal(ids, by_hand(logits, 8, groups=3, topk_groups=2))


def test_refusals_name_argument_value_and_rule():
    logits = torch.zeros(2, 64)
    for changes, message in (
        ({"logits": logits[0]}, r"logits must be \[T, E\]; got .*\[64\]"),
        ({"logits": logits.double()}, r"logits must be .*got float64"),
        ({"logits": torch.zeros(2, 513)}, "logits must have 1 to 512 experts; got 513"),
        ({"logits": torch.zeros(2, 0)}, "logits must have 1 to 512 experts; got 0"),
        ({"logits": torch.zeros(64, 2).t()}, r"logits must be \[T, E\] with contiguous rows"),
        ({"k": 0}, "k must be 1 to 16 and at most the experts in the kept groups, 64; got 0"),
        ({"k": 17}, "k must be 1 to 16 .*got 17"),
        ({"k": 5, "groups": 16, "topk_groups": 1}, "at most the experts in the kept groups, 4; got 5"),
        ({"k": 2.0}, "k must be an int; got float"),
        ({"scoring": "tanh"}, "scoring must be one of 'softmax', 'sigmoid'; got 'tanh'"),
        ({"bias": torch.zeros(63)}, r"bias must be .*\[64\]"),
        ({"bias": torch.zeros(64).half()}, r"bias must be float32"),
        ({"groups": 5, "topk_groups": 1}, "groups must divide the number of experts, 64; got 5"),
        ({"groups": 0, "topk_groups": 1}, "groups must be at least 1; got 0"),
        ({"groups": 4}, "groups and topk_groups belong together; got 4 and None"),
        ({"groups": 4, "topk_groups": 5}, "topk_groups must be 1 to groups = 4; got 5"),
        ({"shared_experts": -1}, "shared_experts must be 0 to 16; got -1"),
        ({"scale": INF}, "scale must be finite; got inf"),
        ({"ids_out": torch.zeros(2, 2)}, r"out must be int32"),
        ({"out": torch.zeros(2, 3)}, r"out must be .*\[2, 2\]"),
        ({"out": torch.zeros(2, 4)[:, ::2]}, "out must be contiguous"),
    ):
        arguments = {"logits": logits, "k": 2, **changes}
        with pytest.raises(GuardError, match=message):
            topk_gating(arguments.pop("logits"), arguments.pop("k"), **arguments)


def test_explain_names_the_kernel_and_the_other_paths():
    shown = hipforge.explain("topk_gating", torch.zeros(2, 8), 2)
    assert (shown.path, shown.kernel, set(shown.refused)) == ("kernel", "topk_gating", {"triton", "torch"})


def test_a_float_is_refused_after_the_equal_int_was_decided() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    hipforge.topk_gating(logits, 2)
    with pytest.raises(GuardError, match="k must be an int; got float"):
        hipforge.topk_gating(logits, 2.0)
