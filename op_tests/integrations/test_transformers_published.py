"""hipforge.integrations.transformers.register: published fp8 and MXFP4 checkpoints, loaded by the library itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fp8_cases import dequantised
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig
from transformers.quantizers import auto

import hipforge
from hipforge.errors import ConfigError
from hipforge.integrations import transformers as plugin
from hipforge.integrations.transformers.declared import scheme_of
from hipforge.nn import FP8Experts, FP8Linear, MXFP4Experts
from hipforge.ops.fp8_quant import QUANTISERS
from hipforge.ops.reference import (
    dequantize_fp8,
    dequantize_mxfp4,
    quantize_fp8_rows,
    quantize_fp8_weights,
    quantize_mxfp4,
)
from hipforge.ops.reference.fp8 import Scales

pytestmark = pytest.mark.gfx942("not refused and not own_quantiser")

FN = torch.float8_e4m3fn
VOCABULARY, HIDDEN, INNER, EXPERTS = 64, 64, 128, 4
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        for method in plugin.declared.METHODS:
            monkeypatch.setitem(table, method, table[method])
    plugin.register()
    plugin.register()


def dense() -> Any:
    return built(LlamaConfig(**SMALL, intermediate_size=INNER, attention_bias=True))


def mixture() -> Any:
    return built(Qwen3MoeConfig(
        **SMALL, intermediate_size=INNER, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=2,
        head_dim=32, norm_topk_prob=True,
    ))  # fmt: skip


def gpt_oss() -> Any:
    return built(GptOssConfig(
        **SMALL, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=32,
        sliding_window=16,
    ))  # fmt: skip


def built(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2 if parameter.dim() > 1 else 0.5)
    return model


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
QUARK = {
    "quant_method": "quark", "exclude": ["lm_head", "*.mlp.gate"], "layer_quant_config": {},
    "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False, "ch_axis": 0},
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True, "ch_axis": 1},
    },
}  # fmt: skip


def changed(declared: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A declaration with other weights (compressed-tensors, Quark)."""
    made = json.loads(json.dumps(declared))
    compressed = "config_groups" in made
    of = made["config_groups"]["group_0"]["weights"] if compressed else made["global_quant_config"]["weight"]
    of.update(changes)
    return made


Stored = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rows(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = quantize_fp8_rows(w)
    return q, scale[:, None].bfloat16()  # as compressed-tensors stores them


def one(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = w.float().abs().amax() / 448
    return (w.float() / scale).to(FN), scale


def in_e8m0(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q, scale.view(torch.float8_e8m0fnu)


CASES: dict[str, tuple[dict[str, Any], str, Stored]] = {
    "fp8": (FP8, "weight_scale_inv", quantize_fp8_weights),
    "fp8-e8m0": (
        {**FP8, "scale_fmt": "ue8m0"}, "scale",
        lambda w: in_e8m0(*quantize_fp8_weights(w, FN, True)),
    ),
    "fp8-e8m0-in-float32": ({**FP8, "scale_fmt": "ue8m0"}, "weight_scale_inv", quantize_fp8_weights),
    "fp8-32x32": (
        {**FP8, "weight_block_size": [32, 32]}, "scale",
        lambda w: in_e8m0(*quantize_fp8_weights(w, FN, True, 32)),
    ),
    "fp8-tensor": ({**FP8, "weight_block_size": None, "activation_scheme": "static"}, "weight_scale_inv", one),
    "compressed": (COMPRESSED, "weight_scale", rows),
    "compressed-tensor": (
        changed(COMPRESSED, strategy="tensor"), "weight_scale", lambda w: (one(w)[0], one(w)[1][None]),
    ),
    "compressed-blocks": (changed(COMPRESSED, strategy="block", block_structure=[128, 128]), "weight_scale",
                          quantize_fp8_weights),
    "quark": (QUARK, "weight_scale", quantize_fp8_rows),
    "quark-tensor": (changed(QUARK, qscheme="per_tensor"), "weight_scale", one),
}  # fmt: skip


def write(model: Any, folder: Path, case: str) -> Path:
    """A checkpoint as it is published: every expert by itself, all but the router, embedding and head quantised."""
    declared, companion, quantise = CASES[case]
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for index, expert in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                    state[f"{stem}{index}.{part}.weight"] = half
        elif name.endswith("experts.down_proj"):
            for index, expert in enumerate(tensor):
                state[f"{name.removesuffix('down_proj')}{index}.down_proj.weight"] = expert
        else:
            state[name] = tensor
    for name in [name for name in state if name.endswith("proj.weight")]:
        stem = name.removesuffix("weight")
        state[name], state[f"{stem}{companion}"] = quantise(state[name])
        if declared.get("activation_scheme") == "static":
            state[f"{stem}activation_scale"] = torch.tensor(0.5)
    return saved(state, model, folder, declared)


def saved(state: dict[str, torch.Tensor], model: Any, folder: Path, declared: dict[str, Any]) -> Path:
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": declared}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager")


def numbers(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.view(torch.uint8) if scale.element_size() == 1 else scale.float()
    return dequantize_fp8(q, scale, torch.float64)


def calls_of(layers: dict[str, torch.nn.Module]) -> dict[str, tuple[Any, torch.Tensor]]:
    """The arguments and the result of each layer's first call, once the model has run."""
    seen: dict[str, tuple[Any, torch.Tensor]] = {}
    for name, layer in layers.items():

        def keep(_: object, given: Any, result: torch.Tensor, name: str = name) -> None:
            seen.setdefault(name, (given, result))

        layer.register_forward_hook(keep)
    return seen


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_published_checkpoint_generates_with_the_numbers_that_it_holds(tmp_path: Path, case: str) -> None:
    """Every layer, at the input that it has in the model, against the stored numbers in float64."""
    model = loaded(write(dense(), tmp_path, case))
    layers = {name: part for name, part in model.named_modules() if isinstance(part, FP8Linear)}
    assert len(layers) == 2 * 7 and type(model.lm_head) is torch.nn.Linear
    stored, companion = load_file(tmp_path / "model.safetensors"), CASES[case][1]
    seen = calls_of(layers)
    tokens = model.generate(torch.arange(5)[None], max_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, 8)
    for name, layer in layers.items():
        weight = numbers(stored[f"{name}.weight"], stored[f"{name}.{companion}"])
        assert torch.equal(numbers(layer.weight, layer.weight_scale), weight), name
        bias = 0 if layer.bias is None else stored[f"{name}.bias"].double()
        given, result = seen[name][0][0].flatten(0, -2), seen[name][1].flatten(0, -2)
        x = dequantised(*QUANTISERS[layer.kind](given), layer.kind)
        exact = x @ weight.T + bias
        # one rounding to bfloat16; float32 sums of K + 1 terms and the product of two scales in each block
        magnitude = x.abs() @ weight.abs().T + abs(bias)
        bound = 2.0**-8 * exact.abs() + (x.shape[1] + 4) * 2.0**-23 * magnitude
        assert ((result.double() - exact).abs() <= bound).all(), name


def token_by_token(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, kind: Scales,
    gate: Callable[[torch.Tensor], torch.Tensor], biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Experts in float64 with the roundings of the op: gate and up to bfloat16, the activation as it is quantised."""
    x, out = dequantised(*QUANTISERS[kind](hidden), kind), torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(len(x)):
        for choice, expert in enumerate(ids[token].tolist()):
            first = w1[expert] @ x[token] + (0 if biases is None else biases[0][expert])
            inner = dequantised(*QUANTISERS[kind](gate(first.bfloat16().double())[None].float()), kind)[0]
            second = w2[expert] @ inner + (0 if biases is None else biases[1][expert])
            out[token] += weights[token, choice].double() * second
    return out


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2)
    return gate * torch.sigmoid(gate) * up


def gpt_oss_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up[0::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


# Both sides share every quantisation but that of elements of the activation beside a tie of e4m3, which come out one
# step, 2^-3, away: a few of INNER, at random. The result and what is weighted are rounded to bfloat16.
EXPERTS_BOUND = 2**-3 / INNER**0.5


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_experts_of_a_published_checkpoint_are_stacked_with_their_scales(tmp_path: Path, case: str) -> None:
    model = loaded(write(mixture(), tmp_path, case))
    stored, companion = load_file(tmp_path / "model.safetensors"), CASES[case][1]
    layers = {name: part for name, part in model.named_modules() if isinstance(part, FP8Experts)}
    assert len(layers) == 2 and all(type(layer.mlp.gate) is not FP8Linear for layer in model.model.layers)
    seen = calls_of(layers)
    model(torch.arange(6)[None])
    for name, layer in layers.items():
        stem = name.removesuffix("experts")
        parts = {
            part: torch.stack([
                numbers(stored[f"{stem}{index}.{part}.weight"], stored[f"{stem}{index}.{part}.{companion}"])
                for index in range(EXPERTS)
            ]) for part in ("gate_proj", "up_proj", "down_proj")
        }  # fmt: skip
        w1, w2 = torch.cat((parts["gate_proj"], parts["up_proj"]), 1), parts["down_proj"]
        for ours, want in (("w1", w1), ("w2", w2)):
            got = [numbers(q, s) for q, s in zip(getattr(layer, ours), getattr(layer, f"{ours}_scale"), strict=True)]
            assert torch.equal(torch.stack(got), want), name
        (hidden, weights, ids), result = seen[name]
        kind = hipforge.ops.reference.fp8.weight_scales_of("w1_scale", layer.w1_scale, EXPERTS, *layer.w1.shape[1:])
        want = token_by_token(hidden, ids, weights, w1, w2, kind, silu_gate)
        assert (result.double() - want).norm() <= EXPERTS_BOUND * want.norm()


@torch.no_grad()
def test_gpt_oss_generates_from_its_mxfp4_experts(tmp_path: Path) -> None:
    source = gpt_oss()
    state: dict[str, torch.Tensor] = {}
    for name, tensor in source.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            pairs = [quantize_mxfp4(expert.t().contiguous()) for expert in tensor]
            blocks, scales = (torch.stack(part) for part in zip(*pairs, strict=True))
            state[f"{name}_blocks"], state[f"{name}_scales"] = blocks.view(*scales.shape, 16), scales
        else:
            state[name] = tensor
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    model = loaded(saved(state, source, tmp_path, declared))
    layers = {name: part for name, part in model.named_modules() if isinstance(part, MXFP4Experts)}
    assert len(layers) == 2 and not any(isinstance(part, FP8Linear) for part in model.modules())
    seen = calls_of(layers)
    assert model.generate(torch.arange(5)[None], max_new_tokens=2, do_sample=False).shape == (1, 7)
    for name in layers:
        stem = name.removesuffix(".experts")
        w1, w2 = (
            torch.stack([
                dequantize_mxfp4(blocks.flatten(1), scales).double() for blocks, scales in zip(
                    state[f"{stem}.{part}_blocks"], state[f"{stem}.{part}_scales"], strict=True)
            ]) for part in ("gate_up_proj", "down_proj")
        )  # fmt: skip
        biases = tuple(state[f"{stem}.{part}_bias"].double() for part in ("gate_up_proj", "down_proj"))
        (hidden, weights, ids), result = seen[name]
        want = token_by_token(hidden, ids, weights, w1, w2, Scales.MX_SHARED, gpt_oss_gate, biases)
        assert (result.double() - want).norm() <= EXPERTS_BOUND * want.norm()


@pytest.mark.parametrize("missing", ("layers.1.mlp.up_proj.weight_scale_inv", "layers.0.self_attn.q_proj.weight"))
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_layer(tmp_path: Path, missing: str) -> None:
    folder = write(dense(), tmp_path, "fp8")
    state = load_file(folder / "model.safetensors")
    del state[f"model.{missing}"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    key = f"model.{missing}".replace("_inv", "").replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"{key} is not in the checkpoint"):
        loaded(folder)


def test_experts_whose_gate_and_up_share_a_block_are_refused(tmp_path: Path) -> None:
    model = built(Qwen3MoeConfig(**SMALL, intermediate_size=INNER, moe_intermediate_size=96, num_experts=EXPERTS,
                                 num_experts_per_tok=2, head_dim=32))  # fmt: skip
    with pytest.raises(ConfigError, match="intermediate size 96 with scales of 128 rows: gate and up must not share"):
        loaded(write(model, tmp_path, "fp8"))


@pytest.mark.parametrize(
    ("declared", "reason"),
    (
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({**FP8, "weight_block_size": 128}, "cannot be read"),
        ({**FP8, "modules_to_convert": ["embed"]}, "an embedding in fp8"),
        ({**FP8, "dequantize": True}, "dequantize"),
        (changed(COMPRESSED, num_bits=4, type="int"), r"weights \{'type': 'int', 'num_bits': 4.*fp8 is taken"),
        (changed(COMPRESSED, strategy="group"), "strategy 'group'"),
        (changed(COMPRESSED, strategy="block", block_structure=[64, 128]), r"block_structure \[64, 128\]"),
        (changed(COMPRESSED, symmetric=False), "asymmetric"),
        ({**COMPRESSED, "config_groups": {}}, "0 groups"),
        ({**COMPRESSED, "config_groups": ["a"]}, "cannot be read"),
        ({**COMPRESSED, "config_groups": {"a": {"targets": ["re:.*q_proj"]}}}, "targets"),
        (changed(QUARK, dtype="fp4", qscheme="per_group"), "weight .*'dtype': 'fp4'.*fp8_e4m3 is taken"),
        (changed(QUARK, qscheme="per_group"), "qscheme 'per_group'"),
        ({**QUARK, "layer_quant_config": {"*down_proj": {"weight": {"dtype": "int8"}}}}, "of .*down_proj differs"),
        ({**QUARK, "global_quant_config": 3}, "cannot be read"),
    ),
)
def test_what_is_not_taken_is_refused_by_name(declared: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"does not take this checkpoint: .*{reason}"):
        plugin.PublishedConfig(**declared)


def test_what_is_not_taken_goes_to_the_librarys_own_quantiser(caplog: pytest.LogCaptureFixture) -> None:
    found = auto.AutoQuantizationConfig.from_dict({**FP8, "weight_block_size": [64, 64]})
    assert type(found).__name__ == "FineGrainedFP8Config" and "weight_block_size [64, 64]" in caplog.text
    theirs = auto.AutoHfQuantizer.from_config(found)
    assert type(theirs).__name__ == "FineGrainedFP8HfQuantizer"
    ours = auto.AutoHfQuantizer.from_config(FP8)
    assert type(ours).__name__ == "PublishedQuantizer" and ours.quantization_config.to_dict() == FP8
    assert ours.is_compileable and not ours.is_trainable and not ours.is_serializable()
    with pytest.raises(ConfigError, match="methods must be among fp8, compressed-tensors, quark, mxfp4; got 'awq'"):
        plugin.register(["awq"])


def test_layers_that_are_left_plain_are_found_by_name_pattern_and_expression() -> None:
    scheme = scheme_of({**COMPRESSED, "ignore": ["lm_head", "re:.*self_attn.*", "*.gate"]})
    assert not isinstance(scheme, str)
    named = ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj")
    assert [scheme.leaves(name) for name in named] == [True, True, True, False]
