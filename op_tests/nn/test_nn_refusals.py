"""hipforge.nn: what is refused by name, where it was taken for something else or failed later or in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hipforge
from hipforge.errors import GuardError, OutOfMemoryError
from hipforge.nn import (
    FP8Experts,
    MXFP4Experts,
    MXFP8Experts,
    MXFP8Linear,
    MXFP8MoE,
    PagedKVCache,
    SparseBlocks,
    convert_to_fp8,
    convert_to_mxfp8,
)
from hipforge.nn.experts import Experts
from hipforge.nn.moe import Routing

pytestmark = pytest.mark.gfx942("not without_kernels")

STEP_TENSORS = {name: torch.ones(4, heads, 64).bfloat16() for name, heads in {"q": 4, "index_q": 2}.items()}


@pytest.mark.parametrize(
    ("given", "message"),
    (
        ({"out": torch.empty(3, 4, 64).bfloat16()}, r"out must be \[4, 4, 64\]"),
        ({"out": "memory"}, "out must be a torch.Tensor; got str"),
        ({"scale_out": torch.empty(4, 8, dtype=torch.uint8)}, "scale_out takes the scales of out_format='mxfp8'"),
        ({"blocks": SparseBlocks(topk=1)}, "got blocks and no index_q"),
        ({"blocks": 3, "index_q": STEP_TENSORS["index_q"]}, "blocks must be SparseBlocks; got 3"),
        ({"index_q": torch.zeros(3)}, r"index_q must be \[4, 2, 64\]"),
        ({"index_q": "a"}, "index_q must be a torch.Tensor; got str"),
        (
            {"index_q": STEP_TENSORS["index_q"], "blocks": SparseBlocks(block_size=16)},
            "block_size of blocks must be a multiple of the page size, 32; got 16",
        ),
    ),
)
def test_what_a_short_sequence_needs_not_is_refused_all_the_same(given: dict[str, Any], message: str) -> None:
    """So that nothing that a step of two keys takes fails, or means something else, in a step of thousands."""
    cache = PagedKVCache(1, 8, 32, 2, 64, index_dtype=torch.bfloat16)
    step = cache.extend([1, 2], 2)
    with pytest.raises(GuardError, match=message):
        cache.attend(0, STEP_TENSORS["q"], step, **given)


@pytest.mark.parametrize("sizes", [{"topk": 0}, {"topk": 17}, {"block_size": 24}, {"topk": 2, "local_blocks": 3}])
def test_blocks_that_no_step_could_choose_are_refused_when_they_are_named(sizes: dict[str, int]) -> None:
    with pytest.raises(GuardError, match="must be"):
        SparseBlocks(**sizes)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    (
        ({"dtype": torch.int8}, "dtype must be one of torch.float8_.*, torch.uint8; got torch.int8"),
        ({"dtype": torch.float8_e5m2}, "got torch.float8_e5m2"),
        ({"index_dtype": torch.float32}, "index_dtype must be one of torch.float16, torch.bfloat16, .*float32"),
    ),
)
def test_a_cache_of_another_dtype_is_refused_as_that(dtypes: dict[str, torch.dtype], message: str) -> None:
    with pytest.raises(GuardError, match=message) as raised:
        PagedKVCache(1, 1, 16, 1, 64, **dtypes)
    assert not isinstance(raised.value, OutOfMemoryError)


def stacked(experts: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate with up, and down, of experts of 32 by 32."""
    return torch.ones(experts, 64, 32), torch.ones(experts, 32, 32)


@pytest.mark.parametrize("given", ["topk_weights", "topk_ids"])
def test_half_of_a_choice_of_experts_is_not_expert_0_for_every_token(given: str) -> None:
    choices = {"topk_weights": torch.ones(2, 2), "topk_ids": torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)}
    layer = MXFP8Experts.from_weights(*stacked())
    missing = next(name for name in choices if name != given)
    with pytest.raises(GuardError, match=f"must both be given, or neither; got no {missing}"):
        layer(torch.ones(2, 32).bfloat16(), **{given: choices[given]})


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: MXFP8Experts.from_weights(*stacked(), "silu"), r"activation must be .*Activation\(...\); got 'silu'"),
        (lambda: MXFP8MoE.from_weights(*stacked(), torch.ones(4, 32), 2), r"routing must be .*Routing\(...\); got 2"),
        (lambda: MXFP8MoE.from_weights(*stacked(), torch.ones(4, 32), Routing("2")), "top_k must be an int; got str"),
        (lambda: MXFP8MoE.from_weights(*stacked(), torch.ones(4, 32), Routing(0)), "top_k must be at least 1; got 0"),
    ),
)
def test_parameters_of_another_class_are_refused_when_the_layer_is_made(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(GuardError, match=message):
        make()


@pytest.mark.parametrize("kind", [MXFP8Experts, FP8Experts, MXFP4Experts])
def test_a_rank_without_experts_gives_zeros(kind: type[Experts]) -> None:
    ids = torch.tensor([[0], [3]], dtype=torch.int32)
    nowhere = torch.full((4,), -1, dtype=torch.int32)
    y = kind.from_weights(*stacked(0))(torch.ones(2, 32).bfloat16(), torch.ones(2, 1), ids, nowhere)
    assert torch.equal(y, torch.zeros(2, 32).bfloat16())


def test_a_layer_without_outputs_is_quantised() -> None:
    with torch.no_grad():
        layer = MXFP8Linear.from_linear(torch.nn.Linear(64, 1, bias=False))
        none = MXFP8Linear.from_quantized(layer.weight[:0], layer.weight_scale[:0])
        assert none(torch.ones(2, 64)).shape == (2, 0)
        assert torch.equal(MXFP8Linear.from_linear(torch.nn.Linear(64, 0)).weight_scale, none.weight_scale)


def double() -> torch.nn.Linear:
    return torch.nn.Linear(128, 128, dtype=torch.float64)


def with_a_bias_of_another_size() -> torch.nn.Linear:
    layer = torch.nn.Linear(128, 128)
    layer.bias = torch.nn.Parameter(torch.zeros(3))
    return layer


def parametrised() -> torch.nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(128, 128))


@pytest.mark.parametrize(
    ("convert", "bad", "message"),
    (
        (convert_to_mxfp8, double, "the weight of 1 must be float32, bfloat16 or float16; got float64"),
        (convert_to_fp8, double, "the weight of 1 must be float32, bfloat16 or float16; got float64"),
        (convert_to_mxfp8, with_a_bias_of_another_size, r"the bias of 1 must be \[128\]"),
        (hipforge.convert_to_float8_training, parametrised, "computes its weight by a parametrization"),
    ),
)
def test_a_model_with_one_layer_that_cannot_be_converted_stays_as_it_is(
    convert: Callable[[torch.nn.Module], object], bad: Callable[[], torch.nn.Module], message: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), bad())
    before = list(model)
    with pytest.raises(GuardError, match=message):
        convert(model)
    assert all(now is then for now, then in zip(model, before, strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    (
        (("model",), "model must be a torch.nn.Module; got str"),
        ((torch.nn.ReLU(), None), "tokens must be an int; got NoneType"),
        ((torch.nn.ReLU(), 1, "bfloat16"), "dtype must be a torch.dtype"),
    ),
)
def test_prepare_names_what_is_none(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        hipforge.prepare(*given)


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: hipforge.Float8Linear(16, 16, config="tensorwise"), "config must be a Float8LinearConfig or None"),
        (lambda: hipforge.Float8LinearConfig(torch.int8), "must be a floating-point dtype; got torch.int8"),
        (lambda: hipforge.Float8LinearConfig("bfloat16"), "compute_dtype must be a torch.dtype"),
        (lambda: hipforge.disable_fp8(5).__enter__(), "model must be a torch.nn.Module; got int"),
    ),
)
def test_a_training_layer_is_configured_before_it_is_called(make: Callable[[], object], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        make()
