"""The whole MoE layer in every format beside all experts in float64: activations, biases, ranks, launches, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.errors import relative
from helpers.grouped_formats import FORMATS as GROUPED
from helpers.grouped_formats import counts, operands
from helpers.mxfp8_grouped_cases import ODD_TILES

import hipforge
from hipforge import emulator
from hipforge.cli.profile_subjects import call_of
from hipforge.errors import GuardError
from hipforge.ops import moe, reference
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.moe import fused_moe_fp8, fused_moe_mxfp4, fused_moe_mxfp8
from hipforge.ops.mxfp4_grouped_gemm import grouped_gemm_mxfp4, grouped_mxfp4_linear
from hipforge.ops.reference.fp8 import fp8_mm, quantize_fp8
from hipforge.ops.reference.swiglu import swiglu

pytestmark = pytest.mark.gfx942

FP8 = fp8_dtypes("cpu")[0]
PACKED = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
# With the same roundings on both sides there remain the two to bf16 at the end (each choice, and the sum), 1.7e-3 each
# or 2.4e-3 together; twice that leaves room for choices that cancel and for an fp8 code that tips over.
SAME_ROUNDINGS = 5e-3
# GPT-OSS's. Gates and ups are about normal here, so that a limit below 1 acts on a third of them.
ACTIVATION = {"alpha": 1.702, "beta": 1.0, "limit": 0.7, "interleaved": True}
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """The layer of some weights.

    Attributes:
        op: the layer.
        weights: (experts, n, k, seed) -> elements and scales, such that products are about as large as their rows.
        quantised: the layer's own activations.
        product: of quantised activations and one expert, in float64.
        launches: of a layer whose input is quantised: sorting, two products, the sum, and SwiGLU where it is alone.
    """

    op: Callable[..., torch.Tensor]
    weights: Callable[[int, int, int, int], Pair]
    quantised: Callable[[torch.Tensor], Pair]
    product: Callable[[Pair, Pair], torch.Tensor]
    launches: int = 4


def mx_weights(quantise: Callable[[torch.Tensor], Pair], experts: int, n: int, k: int, seed: int) -> Pair:
    drawn = torch.randn(experts * n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
    q, scale = quantise(drawn)
    return q.unflatten(0, (experts, n)), scale.unflatten(0, (experts, n))


def fp8_weights(kind: str, experts: int, n: int, k: int, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(experts, n, k, generator=generator) * 8).clamp(-200, 200).to(FP8)
    size = {"mx": 32, "blocks": 128, "blocks_e8m0": 128}.get(kind)
    shape = (experts, -(-n // size), -(-k // size)) if size else (experts, n) if kind == "rows" else (experts,)
    power = torch.randint(-1, 2, shape, generator=generator) - 3 - (k.bit_length() - 1) // 2
    scale = (power + 127).to(torch.uint8) if kind in ("mx", "blocks_e8m0") else torch.exp2(power.float())
    return q, scale


def in_mxfp8(x: torch.Tensor) -> Pair:
    return reference.quantize_mxfp8(x.float(), FP8)


def in_fp8(kind: str, x: torch.Tensor) -> Pair:
    if kind == "mx":
        return in_mxfp8(x)
    return quantize_fp8(x.float(), FP8, "blocks" if kind.startswith("blocks") else "rows", kind.endswith("e8m0"))


def mx_product(decoded: Callable[..., torch.Tensor], x: Pair, w: Pair) -> torch.Tensor:
    return reference.dequantize_mxfp8(*x, torch.float64) @ decoded(*w).double().T


FORMATS = {
    "mxfp8": Format(
        fused_moe_mxfp8, partial(mx_weights, in_mxfp8), in_mxfp8, partial(mx_product, reference.dequantize_mxfp8)
    ),
    "mxfp4": Format(
        fused_moe_mxfp4, partial(mx_weights, reference.quantize_mxfp4), in_mxfp8,
        partial(mx_product, reference.dequantize_mxfp4),
    ),
    **{
        kind: Format(
            fused_moe_fp8, partial(fp8_weights, kind), partial(in_fp8, kind),
            lambda x, w: fp8_mm(*x, *w, torch.float64, torch.float64), launches=5 if kind in ("rows", "expert") else 4,
        )
        for kind in ("rows", "expert", "blocks", "blocks_e8m0", "mx")
    },
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A layer's operands, in the order in which its op takes them."""

    form: Format
    hidden: torch.Tensor
    w1: torch.Tensor
    w1_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        _, *given = vars(self).values()
        return tuple(given)

    def __call__(self, *more: Any, **given: Any) -> torch.Tensor:
        return self.form.op(*self.args(), *more, **given)

    def but(self, **changes: torch.Tensor) -> Layer:
        return replace(self, **changes)

    def rank(self, mine: slice) -> tuple[Layer, torch.Tensor]:
        """Some of the experts, and where each is."""
        places = torch.full((len(self.w1),), -1, dtype=torch.int32)
        places[mine] = torch.arange(len(places[mine]), dtype=torch.int32)
        return self.but(**{name: getattr(self, name)[mine] for name in ("w1", "w1_scale", "w2", "w2_scale")}), places

    def dense(self, w1_bias: Any = None, w2_bias: Any = None, **activation: Any) -> torch.Tensor:
        """All experts for all tokens, with the layer's own quantisations and gate and up rounded to bf16."""
        total = torch.zeros(self.hidden.shape, dtype=torch.float64)
        for e in range(len(self.w1)):
            gate_up = self.form.product(self.form.quantised(self.hidden), (self.w1[e], self.w1_scale[e]))
            gate_up = gate_up + (0 if w1_bias is None else w1_bias[e].double())
            y = self.form.quantised(swiglu(gate_up.bfloat16(), **activation))
            down = self.form.product(y, (self.w2[e], self.w2_scale[e])) + (0 if w2_bias is None else w2_bias[e])
            total += down * (self.topk_weights * (self.topk_ids == e)).sum(1, keepdim=True)
        return total

    def biases(self) -> dict[str, torch.Tensor]:
        """As large as what they are added to, so that a missing or misplaced one shows."""
        generator = torch.Generator().manual_seed(7)
        named = {"w1_bias": self.w1, "w2_bias": self.w2}
        return {name: torch.randn(w.shape[:2], generator=generator) for name, w in named.items()}


def layer(
    kind: str = "mxfp8", tokens: int = 3, top_k: int = 2, experts: int = 4, width: int = 160, inner: int = 96
) -> Layer:
    form, generator = FORMATS[kind], torch.Generator().manual_seed(7)
    scores, ids = torch.randn(tokens, experts, generator=generator).softmax(-1).topk(top_k)
    w1, w2 = form.weights(experts, 2 * inner, width, 1), form.weights(experts, width, inner, 2)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    return Layer(form, hidden, *w1, *w2, scores, ids)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_layer_is_that_of_all_experts_in_float64(kind: str) -> None:
    parts = layer(kind)
    got = parts()
    assert got.dtype == torch.bfloat16 and got.shape == (3, 160)
    assert relative(got, parts.dense()) < SAME_ROUNDINGS
    given: dict[str, Any] = {**ACTIVATION, **parts.biases()}
    got = parts(**given)
    assert relative(got, parts.dense(**given)) < SAME_ROUNDINGS
    for name in given:  # each is seen: without it the result is far off
        without = {key: other for key, other in given.items() if key != name}
        assert relative(got, parts.dense(**without)) > 5 * SAME_ROUNDINGS, name


@pytest.mark.parametrize(("tokens", "top_k", "experts"), ((1, 1, 3), (1, 8, 8), (3, 4, 8), (2, 5, 129), (5, 2, 4)))
def test_any_number_of_tokens_choices_and_experts(tokens: int, top_k: int, experts: int, path: str) -> None:
    parts = layer("mxfp8", tokens, top_k, experts, 128)
    assert relative(parts(), parts.dense()) < SAME_ROUNDINGS


@pytest.mark.parametrize("tokens", (1, 4, 40))
@pytest.mark.parametrize("block_m", (64, ODD_TILES))
def test_biases_are_added_before_activation_and_routing_weight(tokens: int, block_m: int) -> None:
    """One slot, several and more than a wave's tile of an expert, by the kernel and by torch."""
    parts = layer("mxfp8", tokens, 3)
    given = parts.biases()
    assert relative(parts(**given, block_m=block_m), parts.dense(**given)) < SAME_ROUNDINGS
    for name in given:
        with pytest.raises(GuardError, match="bias must"):
            parts(**{**given, name: given[name][:, :-1].contiguous()}, block_m=block_m)
        with pytest.raises(GuardError, match=r"bias must.*(float32|have dtype)"):
            parts(**{**given, name: given[name].bfloat16()}, block_m=block_m)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_quantised_input_gives_the_same_and_saves_a_launch(kind: str) -> None:
    parts = layer(kind)
    q, scale = parts.form.quantised(parts.hidden)
    with emulator.counters() as counted:
        got = parts.but(hidden=q)(hidden_scale=scale)
    assert counted.launches == parts.form.launches, [launch.name for launch in counted.kernels]
    assert torch.equal(got, parts())
    out = torch.full(got.shape, 9.0, dtype=torch.float32)
    assert parts(out=out) is out and torch.equal(out.bfloat16(), got)


@pytest.mark.parametrize("kind", FORMATS)
def test_ranks_add_up_to_the_whole_layer(kind: str) -> None:
    parts = layer(kind)
    total = torch.zeros(parts.hidden.shape, dtype=torch.float64)
    for mine in (slice(0, 3), slice(3, 4)):
        of_rank, places = parts.rank(mine)
        total += of_rank(places).double()
    # Each rank rounds its sum to bf16 once, 2^-9 of itself at most.
    assert (total - parts().double()).abs().max() <= 3 * 2.0**-9 * total.abs().max()


def test_rows_of_experts_elsewhere_are_left_out_of_the_sum_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no tile covers are undefined; NaN from one of them would reach the sum."""
    parts = layer()
    parts.topk_ids[1] = torch.tensor([-1, 4])
    clean = parts()
    assert (clean[1] == 0).all()
    filled = torch.empty

    def full_of_nan(*shape: object, **named: object) -> torch.Tensor:
        made = filled(*shape, **named)
        return made.fill_(float("nan")) if made.dtype == torch.bfloat16 else made

    monkeypatch.setattr(torch, "empty", full_of_nan)
    assert torch.equal(parts(), clean)


def test_each_step_has_its_launch() -> None:
    parts = layer("mxfp8", 4, 3, 8)
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with emulator.counters() as counted:
        weights, ids = hipforge.topk_gating(logits, 3)
        parts.but(topk_weights=weights, topk_ids=ids)()
    names = [kernel.name for kernel in counted.kernels]
    order = ("gating", "align", "quantize", "mxfp8_gate_up", "mxfp8_grouped_split", "combine")
    assert counted.launches == 6
    assert all(part in name for part, name in zip(order, names, strict=True)), names


def test_the_layer_does_not_care_which_path_its_gemms_take() -> None:
    # The tables and the default rule leave 40 slots of 2 experts to Triton; where there is none, the kernel takes them,
    # 32 slots at a time.
    parts = layer("mxfp8", 20, 2, 2, 64, 64)
    for block_m, launches in ((64, 5), (ODD_TILES, 4)):
        with emulator.counters() as counted:
            got = parts(block_m=block_m)
        assert counted.launches == launches, block_m
        assert relative(got, parts.dense()) < SAME_ROUNDINGS


def test_the_layer_checks_its_shapes_and_its_limit() -> None:
    parts = layer()
    for name, change, message in (
        ("hidden", parts.hidden[0], r"hidden must be \[T, H\]"),
        ("w1", parts.w1[:, :64], r"w1 must be .*\[4, 192, 160\]"),
        ("w2", parts.w2[:, :32], r"w2 must be .*\[4, 160, 96\]"),
        ("topk_weights", parts.topk_weights[:, :1], "one weight per choice"),
        ("topk_ids", parts.topk_ids[:1], "one row per token"),
    ):
        with pytest.raises(GuardError, match=message):
            parts.but(**{name: change})()
    for limit in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(GuardError, match="limit must be positive and finite, or None"):
            parts(limit=limit)
    named = ("hidden", "topk_ids", "topk_weights")
    assert parts.but(**{name: getattr(parts, name)[:0] for name in named})().shape == (0, 160)


def test_scales_of_no_kind_or_of_two_are_refused() -> None:
    parts = layer("rows")
    for wrong in (parts.w1_scale[:3], parts.w1_scale.half(), parts.w1_scale[:, :5]):
        with pytest.raises(GuardError, match="w1_scale must have for each of 4 experts one float32 or 192; or"):
            parts.but(w1_scale=wrong)()
    with pytest.raises(GuardError, match="must be of one kind; got ONCE and BLOCKS"):
        parts.but(w2_scale=torch.ones(4, 2, 1))()


def test_what_is_not_mxfp4_and_mxfp4_elsewhere_are_refused() -> None:
    parts = layer("mxfp4")
    with pytest.raises(GuardError, match="two elements in a byte"):
        parts.but(w1=parts.w1[:, :, :40])()
    with pytest.raises(GuardError, match="w1_scale must"):
        parts.but(w1_scale=parts.w1_scale[..., :2])()
    for w1 in (parts.w1, parts.w1.view(PACKED)):
        with pytest.raises(GuardError, match=r"got MXFP4, two elements per byte.*fused_moe_mxfp4 takes these"):
            fused_moe_mxfp8(*parts.but(w1=w1).args())
    form = GROUPED["mxfp4"]
    case = form.case((0, 1, 1), 2, 24, 96)
    assert torch.equal(form.linear(case.but(w=case.w.view(PACKED))), form.linear(case))
    a, a_scale, w, w_scale, *index = operands(case)
    for op in (grouped_gemm_mxfp4, grouped_mxfp4_linear):
        for weight, scale, message in (
            (w.view(FP8), w_scale, "w must"), (w[..., :16], w_scale, "its K is that of a_q"),
            (w, w_scale[..., :1], "w_scale must"),
        ):  # fmt: skip
            with pytest.raises(GuardError, match=message):
                op(a, a_scale, weight, scale, *index, *counts(case))
    with pytest.raises(GuardError, match="K = 96 disagrees with the shape of w, which says 32"):
        form.split(case.but(w=case.w[..., :16].contiguous()))


@pytest.mark.parametrize("place", [4, 9, 2**31 - 1, 2**40])
def test_a_place_that_the_weights_do_not_have_is_refused_or_remote(
    place: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = layer("mxfp8", width=64, inner=32)
    expert_map = torch.tensor([0, 1, -1, 3])
    want = parts(expert_map)
    expert_map[2] = place
    with pytest.raises(GuardError, match=rf"below their 4 experts, or -1; got {place} for expert 2"):
        parts(expert_map)
    monkeypatch.setattr(moe, "_check_places", lambda *given: None)  # as on a GPU, where nobody looks
    assert torch.equal(parts(expert_map), want)


@pytest.mark.parametrize("weights", ["mxfp8", "mxfp4", "fp8"])
def test_meta_operands_give_meta_results_of_the_same_shape(weights: str) -> None:
    def on_meta(op: str, n: int) -> Any:
        call = call_of(op, f"m=3,n={n},k=64,e=4,topk=2")
        place = [part.to("meta") if isinstance(part, torch.Tensor) else part for part in call.args]
        return call.func(*place, **call.keywords)

    linear, layer = on_meta(f"grouped_{weights}_linear", 32), on_meta(f"fused_moe_{weights}", 32)
    q, scales = on_meta(f"grouped_swiglu_{weights}", 64)
    assert linear.is_meta and linear.shape == (6, 32) and layer.is_meta and layer.shape == (3, 64)
    assert q.is_meta and scales.is_meta and q.shape == (6, 32) and len(scales) == 6
