"""The whole MoE layer beside all experts in float64: activations, biases, ranks, launches, paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.mxfp8_cases import dequantize, relf
from helpers.mxfp8_grouped_cases import ODD_TILES

import hipforge
from hipforge import emulator
from hipforge.cli.profile_subjects import call_of
from hipforge.errors import GuardError
from hipforge.ops import moe
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.moe import fused_moe_mxfp8
from hipforge.ops.reference import dequantize_mxfp8, quantize_mxfp8

pytestmark = pytest.mark.gfx942("each_step_has_its_launch or six_launches")


def layer(tokens: int, top_k: int, experts: int, width: int, inner: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    w1, w1_scale = quantize_mxfp8(random(experts, 2 * inner, width) * width**-0.5)
    w2, w2_scale = quantize_mxfp8(random(experts, width, inner) * inner**-0.5)
    scores = random(tokens, experts).softmax(-1)
    topk_weights, topk_ids = scores.topk(top_k)
    return {
        "hidden": random(tokens, width).bfloat16(), "w1": w1, "w1_scale": w1_scale, "w2": w2, "w2_scale": w2_scale,
        "topk_weights": topk_weights, "topk_ids": topk_ids,
    }  # fmt: skip


def dense_layer(
    parts: dict[str, torch.Tensor],
    rounded: bool,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = float("inf"),
    interleaved: bool = False,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """All experts for all tokens in float64, weighted by a dense [E, T] matrix.

    ``rounded``: with the layer's own quantisations and gate and up rounded to bf16; otherwise activations stay exact.
    """

    def quantized(x: torch.Tensor) -> torch.Tensor:
        if not rounded:
            return x
        q, scale = quantize_mxfp8(x.float().flatten(0, -2))
        return dequantize(q.view(torch.uint8), scale).view(x.shape)

    def weight(name: str) -> torch.Tensor:
        payload, scale = parts[name].view(torch.uint8), parts[f"{name}_scale"]
        return dequantize(payload.flatten(0, 1), scale.flatten(0, 1)).view(payload.shape)

    hidden = quantized(parts["hidden"].double())
    dense = torch.zeros(hidden.shape[0], parts["w1"].shape[0], dtype=torch.float64)
    dense.scatter_(1, parts["topk_ids"].long(), parts["topk_weights"].double())
    gate_up = torch.einsum("th,eoh->eto", hidden, weight("w1"))
    if w1_bias is not None:
        gate_up = gate_up + w1_bias.double()[:, None]
    if rounded:
        gate_up = gate_up.bfloat16().double()
    gate, up = (gate_up[..., 0::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + beta
    down = torch.einsum("eti,ehi->eth", quantized(gate * torch.sigmoid(alpha * gate) * up), weight("w2"))
    if w2_bias is not None:
        down = down + w2_bias.double()[:, None]
    return torch.einsum("te,eth->th", dense, down)


# With the same roundings on both sides there remain the two to bf16 at the end (each choice, and the sum), 1.7e-3 each
# or 2.4e-3 together; twice that leaves room for choices that cancel and for an fp8 code that tips over.
SAME_ROUNDINGS = 5e-3
# Against exact activations: an e4m3 code is off by 2.6e-2 in the root mean square (uniform within half a unit, a unit
# being an 8th to a 16th). Gate, up and their product each bring it in independently: sqrt(3) 2.6e-2 = 4.5e-2, more by
# what silu adds for negative gates. A wrong scale, expert or routing weight gives more than 0.3.
EXACT_ACTIVATIONS = 7e-2


@pytest.mark.parametrize(("tokens", "top_k", "experts"), ((1, 1, 3), (1, 8, 8), (3, 4, 8), (2, 5, 129), (5, 2, 4)))
def test_the_layer_is_that_of_all_experts_in_float64(tokens: int, top_k: int, experts: int, path: str) -> None:
    parts = layer(tokens, top_k, experts, width=128, inner=96)
    got = fused_moe_mxfp8(**parts)
    assert got.dtype == torch.bfloat16 and got.shape == (tokens, 128)
    assert relf(got, dense_layer(parts, rounded=True)) < SAME_ROUNDINGS
    assert relf(got, dense_layer(parts, rounded=False)) < EXACT_ACTIVATIONS


@pytest.mark.parametrize(
    "activation",
    (
        {"alpha": 1.702, "beta": 1.0, "limit": 0.7},
        {"alpha": 1.702, "beta": 1.0, "limit": 0.7, "interleaved": True},
        {"limit": 0.5},
    ),
    ids=("minimax", "gpt_oss", "limit"),
)
def test_the_activation_has_the_models_parameters(activation: dict[str, Any]) -> None:
    """Gates and ups are about normal here, so that a limit below 1 acts on a third of them."""
    parts = layer(4, 3, 8, width=128, inner=96)
    got = fused_moe_mxfp8(**parts, **activation)
    assert relf(got, dense_layer(parts, rounded=True, **activation)) < SAME_ROUNDINGS
    for name, value in activation.items():  # each parameter is seen: without it the result is far off
        without = {key: other for key, other in activation.items() if key != name}
        assert relf(got, dense_layer(parts, rounded=True, **without)) > 5 * SAME_ROUNDINGS, (name, value)


def biases(parts: dict[str, torch.Tensor], size: float = 1.0) -> dict[str, torch.Tensor]:
    """Biases as large as what they are added to, so that a missing or misplaced one shows."""
    generator = torch.Generator().manual_seed(7)
    experts, width, inner = parts["w2"].shape
    return {
        "w1_bias": size * torch.randn(experts, 2 * inner, generator=generator),
        "w2_bias": size * torch.randn(experts, width, generator=generator),
    }


@pytest.mark.parametrize("tokens", (1, 4, 40))
@pytest.mark.parametrize("block_m", (64, ODD_TILES))
def test_biases_are_added_before_activation_and_routing_weight(tokens: int, block_m: int) -> None:
    """One slot, several and more than a wave's tile of an expert, by the kernel and by torch."""
    parts = layer(tokens, 3, 4, width=128, inner=96)
    given = biases(parts)
    got = fused_moe_mxfp8(**parts, **given, block_m=block_m)
    assert relf(got, dense_layer(parts, rounded=True, **given)) < SAME_ROUNDINGS
    for name in given:
        without = {key: value for key, value in given.items() if key != name}
        assert relf(got, dense_layer(parts, rounded=True, **without)) > 5 * SAME_ROUNDINGS
        with pytest.raises(GuardError, match="bias must"):
            fused_moe_mxfp8(**parts, **{**given, name: given[name][:, :-1].contiguous()}, block_m=block_m)
        with pytest.raises(GuardError, match=r"bias must.*(float32|have dtype)"):
            fused_moe_mxfp8(**parts, **{**given, name: given[name].bfloat16()}, block_m=block_m)


def test_a_quantised_input_gives_the_same_and_saves_a_launch() -> None:
    parts = layer(4, 3, 8, width=128, inner=96)
    q, scale = hipforge.mxfp8_quantize(parts["hidden"])
    with emulator.counters() as counted:
        got = fused_moe_mxfp8(**{**parts, "hidden": q}, hidden_scale=scale)
    assert counted.launches == 4
    assert torch.equal(got, fused_moe_mxfp8(**parts))
    out = torch.full((4, 128), 9.0, dtype=torch.float32)
    assert fused_moe_mxfp8(**parts, out=out) is out and torch.equal(out.bfloat16(), got)


def test_rows_of_experts_elsewhere_are_left_out_of_the_sum_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no tile covers are undefined; NaN from one of them would reach the sum."""
    parts = layer(3, 2, 4, width=64, inner=64)
    parts["topk_ids"][1] = torch.tensor([-1, 4])
    clean = fused_moe_mxfp8(**parts)
    assert (clean[1] == 0).all()
    filled = torch.empty

    def full_of_nan(*shape: object, **named: object) -> torch.Tensor:
        made = filled(*shape, **named)
        return made.fill_(float("nan")) if made.dtype == torch.bfloat16 else made

    monkeypatch.setattr(torch, "empty", full_of_nan)
    assert torch.equal(fused_moe_mxfp8(**parts), clean)


def test_mxfp4_weights_are_refused_by_name() -> None:
    parts = layer(2, 2, 3, width=128, inner=64)
    packed = {**parts, "w1": torch.zeros(3, 128, 64, dtype=torch.uint8), "w1_scale": torch.full((3, 128, 4), 127)}
    with pytest.raises(GuardError, match=r"got MXFP4, two elements per byte.*fused_moe_mxfp4 takes these"):
        fused_moe_mxfp8(**packed)
    with pytest.raises(GuardError, match="got MXFP4"):
        fused_moe_mxfp8(**{**packed, "w1": packed["w1"].view(torch.float4_e2m1fn_x2)})


def test_each_step_has_its_launch() -> None:
    fnuz = fp8_dtypes("cpu")[0] == torch.float8_e4m3fnuz
    parts = layer(4, 3, 8, width=128, inner=96)
    quantizers = {name: hipforge.mxfp8_quantize(parts[name].float().flatten(0, 1)) for name in ("w1", "w2")}
    for name, (q, scale) in quantizers.items():  # the device's own format, fnuz on gfx942
        parts[name], parts[f"{name}_scale"] = q.view(parts[name].shape), scale.view(parts[f"{name}_scale"].shape)
    with emulator.counters() as counted:
        got = fused_moe_mxfp8(**parts)
    names = [kernel.name for kernel in counted.kernels]
    order = ("align", "quantize", "mxfp8_gate_up", "mxfp8_grouped_split", "combine")
    assert len(names) == counted.launches == 5, names
    assert all(part in name for part, name in zip(order, names, strict=True)), names
    decoded = {name: dequantize_mxfp8(parts[name], parts[f"{name}_scale"], torch.float64) for name in ("w1", "w2")}
    exact_layer = {**parts}
    for name, values in decoded.items():  # in e4m3fn, as the oracle reads; the same numbers
        exact_layer[name], exact_layer[f"{name}_scale"] = quantize_mxfp8(values.float())
        assert torch.equal(dequantize_mxfp8(exact_layer[name], exact_layer[f"{name}_scale"], torch.float64), values)
    # fnuz codes have the same spacing but other block scales where a block's maximum is between 240 and 448 units.
    bound = EXACT_ACTIVATIONS if fnuz else SAME_ROUNDINGS
    assert relf(got, dense_layer(exact_layer, rounded=not fnuz)) < bound


def test_a_layer_is_six_launches_from_router_logits_to_output() -> None:
    parts = layer(4, 3, 8, width=128, inner=96)
    own = fp8_dtypes("cpu")[0]
    if own != torch.float8_e4m3fn:  # any bytes of the device's format
        for name in ("w1", "w2"):
            payload = parts[name].view(torch.uint8)
            parts[name] = payload.masked_fill(payload == 0x80, 0).view(own)
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with emulator.counters() as counted:
        parts["topk_weights"], parts["topk_ids"] = hipforge.topk_gating(logits, 3)
        fused_moe_mxfp8(**parts)
    assert counted.launches == 6  # gating, slots, quantisation, gate and up with SwiGLU, down, sum over choices


def test_a_limit_must_be_one() -> None:
    parts = layer(4, 3, 8, width=128, inner=96)
    for limit in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(GuardError, match="limit must be positive and finite, or None"):
            fused_moe_mxfp8(**parts, limit=limit)


def test_ranks_add_up_to_the_whole_layer() -> None:
    parts = layer(4, 3, 8, width=64, inner=64)
    total = torch.zeros(4, 64, dtype=torch.float64)
    for rank in range(2):
        mine = slice(4 * rank, 4 * rank + 4)
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(4, dtype=torch.int32)
        local = {name: parts[name][mine] for name in ("w1", "w1_scale", "w2", "w2_scale")}
        total += fused_moe_mxfp8(**{**parts, **local}, expert_map=expert_map).double()
    # Each rank rounds its sum to bf16 once, 2^-9 of itself at most.
    whole = fused_moe_mxfp8(**parts).double()
    assert (total - whole).abs().max() <= 3 * 2.0**-9 * total.abs().max()


def test_the_layer_does_not_care_which_path_its_gemms_take() -> None:
    # The tables and the default rule leave 40 slots of 2 experts to Triton; where there is none, the kernel takes them,
    # 32 slots at a time.
    parts = layer(20, 2, 2, width=64, inner=64)
    for block_m, launches in ((64, 5), (ODD_TILES, 4)):
        with emulator.counters() as counted:
            got = fused_moe_mxfp8(**parts, block_m=block_m)
        assert counted.launches == launches, block_m
        assert relf(got, dense_layer(parts, rounded=True)) < SAME_ROUNDINGS


def test_the_layer_checks_its_shapes() -> None:
    parts = layer(2, 2, 3, width=64, inner=64)
    for name, change, message in (
        ("hidden", parts["hidden"][0], r"hidden must be \[T, H\]"),
        ("w1", parts["w1"][:, :64], r"w1 must be .*\[3, 128, 64\]"),
        ("w2", parts["w2"][:, :32], r"w2 must be .*\[3, 64, 64\]"),
        ("topk_weights", parts["topk_weights"][:, :1], "one weight per choice"),
        ("topk_ids", parts["topk_ids"][:1], "one row per token"),
    ):
        with pytest.raises(GuardError, match=message):
            fused_moe_mxfp8(**{**parts, name: change})
    none = fused_moe_mxfp8(
        **{
            **parts,
            "hidden": parts["hidden"][:0],
            "topk_ids": parts["topk_ids"][:0],
            "topk_weights": parts["topk_weights"][:0],
        }
    )
    assert none.shape == (0, 64)


@pytest.mark.parametrize("place", [4, 9, 2**31 - 1, 2**40])
def test_a_place_that_the_weights_do_not_have_is_refused_or_remote(
    place: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = layer(3, 2, 4, width=64, inner=32)
    expert_map = torch.tensor([0, 1, -1, 3])
    want = fused_moe_mxfp8(**parts, expert_map=expert_map)
    expert_map[2] = place
    with pytest.raises(GuardError, match=rf"below their 4 experts, or -1; got {place} for expert 2"):
        fused_moe_mxfp8(**parts, expert_map=expert_map)
    monkeypatch.setattr(moe, "_check_places", lambda *given: None)  # as on a GPU, where nobody looks
    assert torch.equal(fused_moe_mxfp8(**parts, expert_map=expert_map), want)


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
