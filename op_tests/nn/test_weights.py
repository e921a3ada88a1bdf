"""hipforge.weights: real files, written by the safetensors library, in each published layout; and broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.draws import normal
from safetensors.torch import save_file

import hipforge
from hipforge import weights
from hipforge.errors import ConfigError, GuardError
from hipforge.nn import FP8Linear, MXFP8Linear
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference import (
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_fp8_rows,
    quantize_fp8_weights,
    quantize_mxfp4,
    quantize_mxfp8,
    shuffle_scale,
    shuffle_weight,
)

pytestmark = pytest.mark.gfx942("devices_format or elsewhere or 254 or places or doubled")

N, K = 48, 128


def fn_mxfp8(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """With zeros of both signs and NaN, whose codes differ between the formats."""
    q, scale = quantize_mxfp8(normal(*shape))
    q.view(torch.uint8).view(-1)[:4] = torch.tensor([0x80, 0x00, 0x7F, 0xFF], dtype=torch.uint8)
    scale.view(-1)[-1] = 255
    return q, scale


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def state_of(path: Path, **options: Any) -> dict[str, tuple[torch.Tensor, weights.Meta]]:
    return {name: (tensor, meta) for name, tensor, meta in weights.load(path, **options)}


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": 32}}},
}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
}


def same_numbers(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> bool:
    numbers = [dequantize_mxfp8(*pair, torch.float64) for pair in (got, want)]
    return torch.equal(numbers[0].nan_to_num(1e9), numbers[1].nan_to_num(1e9))


@pytest.mark.parametrize(
    ("config", "as_bytes"),
    ((COMPRESSED, False), ({"quant_method": "quark"}, False), ({"quant_method": "modelopt"}, True), (None, False)),
    ids=("compressed", "quark", "modelopt", "undeclared"),
)
def test_mxfp8_weights_come_in_the_devices_format(tmp_path: Path, config: Any, as_bytes: bool) -> None:
    q, scale = fn_mxfp8(N, K)
    stored = {
        "a.weight": bits(q) if as_bytes else q, "a.weight_scale": scale, "a.bias": normal(N), "norm.weight": normal(K),
        "steps": torch.tensor([3]),
    }  # fmt: skip
    loaded = state_of(checkpoint(tmp_path, stored, config))
    assert set(loaded) == set(stored)
    elements, meta = loaded["a.weight"]
    assert elements.dtype == fp8_dtypes("cpu")[0]
    assert (meta.format, meta.part, meta.source, meta.file.name) == (
        "mxfp8", "elements", "a.weight", "model.safetensors",
    )  # fmt: skip
    assert same_numbers((elements, loaded["a.weight_scale"][0]), (q, scale))
    for name in ("a.bias", "norm.weight", "steps"):
        assert torch.equal(loaded[name][0], stored[name]) and loaded[name][1].format == "plain"
    layer = MXFP8Linear(K, N, bias=True)
    layer.load_state_dict({name.removeprefix("a."): loaded[name][0] for name in stored if name.startswith("a.")})
    assert same_numbers((layer.weight, layer.weight_scale), (q, scale))


def test_modelopts_own_configuration_file_is_read(tmp_path: Path) -> None:
    q, scale = quantize_mxfp8(normal(N, K))
    checkpoint(tmp_path, {"a.weight": q, "a.weight_scale": scale.view(torch.float8_e8m0fnu)})
    declared = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8", "group_size": 32}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    assert state_of(tmp_path)["a.weight_scale"][0].dtype == torch.uint8
    declared["quantization"]["group_size"] = 16
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))
    with pytest.raises(ConfigError, match="declares group_size 16; MX formats have 32 elements per scale, fp8"):
        weights.load(tmp_path)


@pytest.mark.parametrize("name", ("a.weight_packed", "a.weight"), ids=("compressed", "quark"))
@pytest.mark.parametrize("shuffled", (False, True))
def test_mxfp4_weights_come_as_rows_or_shuffled(tmp_path: Path, name: str, shuffled: bool) -> None:
    packed, scale = quantize_mxfp4(normal(N, K))
    loaded = state_of(checkpoint(tmp_path, {name: packed, "a.weight_scale": scale}, QUARK), shuffled=shuffled)
    elements, meta = loaded["a.weight"]
    assert meta.format == "mxfp4" and meta.layout == ("shuffled" if shuffled else "rows") and meta.source == name
    assert torch.equal(elements, shuffle_weight(packed) if shuffled else packed)
    assert torch.equal(loaded["a.weight_scale"][0], shuffle_scale(scale) if shuffled else scale)


def test_gpt_oss_experts_come_as_packed_rows(tmp_path: Path) -> None:
    experts = normal(3, N, K)
    parts = [quantize_mxfp4(expert) for expert in experts]
    packed, scale = (torch.stack(part) for part in zip(*parts, strict=True))
    stored = {
        "mlp.experts.down_proj_blocks": packed.view(3, N, K // 32, 16), "mlp.experts.down_proj_scales": scale,
        "mlp.experts.down_proj_bias": normal(3, N),
    }  # fmt: skip
    loaded = state_of(checkpoint(tmp_path, stored, {"quant_method": "mxfp4"}), shuffled=True)
    elements, meta = loaded["mlp.experts.down_proj"]
    assert meta.format == "mxfp4" and meta.layout == "rows" and elements.shape == (3, N, K // 2)
    got = dequantize_mxfp4(elements[1], loaded["mlp.experts.down_proj_scale"][0][1])
    assert torch.equal(got, dequantize_mxfp4(*parts[1]))
    # MXFP4 experts load; the layer that has no kernel for them says so by name.
    down_scale = loaded["mlp.experts.down_proj_scale"][0]
    w2, w2_scale = torch.zeros(3, K, 32).byte(), torch.zeros(3, K, 1).byte()
    hidden, ids = torch.zeros(1, K).bfloat16(), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(GuardError, match="got MXFP4"):
        hipforge.fused_moe_mxfp8(hidden, elements, down_scale, w2, w2_scale, torch.ones(1, 1), ids)


def quantised_fp8(kind: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements with codes that differ between the formats, and scales of a kind for two blocks of rows and columns."""
    w = normal(N + 128, K + 40, seed=seed)
    if kind in ("tensor", "rows"):
        q, scale = quantize_fp8_rows(w)
        scale = scale[:, None] if kind == "rows" else scale[0]
    else:
        q, scale = quantize_fp8_weights(w, e8m0=kind.endswith("e8m0"), block=32 if kind == "shared_e8m0" else 128)
    bits(q).view(-1)[:4] = torch.tensor([0x80, 0x00, 0x7F, 0xFF], dtype=torch.uint8)
    return q, scale


def numbers_fp8(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize_fp8(q, scale, torch.float64).nan_to_num(1e9)


BLOCKS_OF = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
PTPC = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}  # fmt: skip
BLOCKS_CT = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    }},
}  # fmt: skip
QUARK_PTPC = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "group_size": None}},
}


@pytest.mark.parametrize(
    ("kind", "of_scales", "config", "stored_as"),
    (
        ("blocks", "weight_scale_inv", BLOCKS_OF, torch.float32),
        ("blocks", "weight_scale_inv", BLOCKS_OF, torch.bfloat16),
        ("blocks_e8m0", "weight_scale_inv", {**BLOCKS_OF, "scale_fmt": "ue8m0"}, torch.float8_e8m0fnu),
        ("blocks_e8m0", "scale", BLOCKS_OF, torch.float8_e8m0fnu),
        ("shared_e8m0", "scale", {**BLOCKS_OF, "weight_block_size": [32, 32]}, torch.float8_e8m0fnu),
        ("rows", "weight_scale", PTPC, torch.bfloat16),
        ("blocks", "weight_scale", BLOCKS_CT, torch.bfloat16),
        ("rows", "weight_scale", QUARK_PTPC, torch.float32),
        ("tensor", "weight_scale", {"quant_method": "modelopt"}, torch.float32),
        ("tensor", "weight_scale_inv", {**BLOCKS_OF, "weight_block_size": None}, torch.float32),
        ("rows", "qscale_weight", None, torch.float32),
    ),
)
def test_fp8_weights_come_in_the_devices_format(
    tmp_path: Path, kind: str, of_scales: str, config: Any, stored_as: torch.dtype
) -> None:
    q, scale = quantised_fp8(kind)
    if kind == "shared_e8m0":  # K is a multiple of 32 there
        q, scale = q[:, :160], scale[:, :5]
    stored_scale = (
        scale.to(stored_as) if stored_as.is_floating_point and stored_as.itemsize > 1 else scale.view(stored_as)
    )
    scale = stored_scale.float() if stored_as.itemsize > 1 else scale
    stored = {"a.weight": q, f"a.{of_scales}": stored_scale, "a.bias": normal(len(q)), "norm.weight": normal(K)}
    loaded = state_of(checkpoint(tmp_path, stored, config))
    assert set(loaded) == {"a.weight", "a.weight_scale", "a.bias", "norm.weight"}
    (elements, meta), (scales, of_scale) = loaded["a.weight"], loaded["a.weight_scale"]
    assert elements.dtype == fp8_dtypes("cpu")[0] and (meta.format, meta.part) == ("fp8", "elements")
    assert (of_scale.format, of_scale.part, of_scale.source) == ("fp8", "scale", f"a.{of_scales}")
    assert torch.equal(numbers_fp8(elements, scales), numbers_fp8(q, scale))
    layer = FP8Linear(q.shape[1], q.shape[0], bias=True, scales=kind)
    layer.load_state_dict({name.removeprefix("a."): loaded[name][0] for name in loaded if name.startswith("a.")})
    assert torch.equal(numbers_fp8(layer.weight, layer.weight_scale), numbers_fp8(q, scale))


@pytest.mark.parametrize("name", ("experts.w1.weight", "experts.gate_up_proj"))
def test_stacked_fp8_experts_and_static_scales_keep_their_places(tmp_path: Path, name: str) -> None:
    pairs = [quantised_fp8("blocks", seed) for seed in range(3)]
    q, scale = (torch.stack(part) for part in zip(*pairs, strict=True))
    tensor, one = quantised_fp8("tensor")
    stem = name.removesuffix("weight") if name.endswith("weight") else f"{name}_"
    stored = {
        name: q, f"{name}_scale_inv": scale, f"{stem}activation_scale": torch.tensor([0.5, 2.0, 4.0]),
        "a.weight": tensor, "a.weight_scale": one, "a.input_scale": torch.tensor(0.25, dtype=torch.bfloat16),
    }  # fmt: skip
    loaded = state_of(checkpoint(tmp_path, stored, {**BLOCKS_OF, "activation_scheme": "static"}))
    order = [name, f"{name}_scale", f"{stem}input_scale", "a.weight", "a.weight_scale", "a.input_scale"]
    assert sorted(loaded) == sorted(order)
    for first in (0, 3):  # a weight's own come right after it
        place = list(loaded).index(order[first])
        assert list(loaded)[place : place + 3] == order[first : first + 3]
    for expert in range(3):
        got = numbers_fp8(loaded[name][0][expert], loaded[f"{name}_scale"][0][expert])
        assert torch.equal(got, numbers_fp8(*pairs[expert]))
    # Elements that an activation is quantised to mean half as much in e4m3fnuz.
    factor = 1.0 if fp8_dtypes("cpu")[0] == torch.float8_e4m3fn else 2.0
    assert loaded[f"{stem}input_scale"][0].tolist() == [0.5 * factor, 2.0 * factor, 4.0 * factor]
    assert loaded["a.input_scale"][0].item() == 0.25 * factor and loaded["a.input_scale"][1].part == "input_scale"
    assert loaded["a.weight_scale"][0].shape == (1,)


def test_deepseeks_experts_in_mxfp4_come_as_packed_rows(tmp_path: Path) -> None:
    packed, scale = quantize_mxfp4(normal(N, K))
    stored = {"experts.0.w1.weight": packed.view(torch.int8), "experts.0.w1.scale": scale.view(torch.float8_e8m0fnu)}
    config = {**BLOCKS_OF, "scale_fmt": "ue8m0"}
    loaded = state_of(checkpoint(tmp_path, {**stored, "ids": torch.zeros(3, dtype=torch.int8)}, config))
    elements, meta = loaded["experts.0.w1.weight"]
    assert meta.format == "mxfp4" and elements.dtype == torch.uint8 and torch.equal(elements, packed)
    assert torch.equal(loaded["experts.0.w1.weight_scale"][0], scale) and loaded["ids"][1].format == "plain"


def test_blocks_of_another_size_are_refused_by_name(tmp_path: Path) -> None:
    q, scale = quantised_fp8("blocks")
    folder = checkpoint(
        tmp_path, {"a.weight": q, "a.weight_scale_inv": scale}, {**BLOCKS_OF, "weight_block_size": [64, 64]}
    )
    with pytest.raises(ConfigError, match=r"declares weight_block_size \[64, 64\]; known are \[128, 128\], "):
        weights.load(folder)


def test_a_float_scale_without_a_double_is_refused_where_it_must_be_doubled(tmp_path: Path) -> None:
    q, scale = quantised_fp8("rows")
    scale[3] = 2.0**127
    folder = checkpoint(tmp_path, {"a.weight": q, "a.weight_scale": scale})
    if fp8_dtypes("cpu")[0] == torch.float8_e4m3fn:
        assert state_of(folder)["a.weight_scale"][0][3] == 2.0**127
        return
    with pytest.raises(ConfigError, match=r"a.weight in .* cannot be converted to e4m3fnuz: twice a scale of 1.7e"):
        state_of(folder)


def test_shards_are_read_by_their_index_and_scales_may_be_elsewhere(tmp_path: Path) -> None:
    q, scale = fn_mxfp8(2, N, K)
    save_file({"e.weight": q, "x": normal(3)}, tmp_path / "part-1.safetensors")
    save_file({"e.weight_scale": scale}, tmp_path / "part-2.safetensors")
    save_file({"y": normal(3)}, tmp_path / "unlisted.safetensors")
    listed = {"e.weight": "part-1.safetensors", "x": "part-1.safetensors", "e.weight_scale": "part-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    loaded = state_of(tmp_path)
    assert sorted(loaded) == ["e.weight", "e.weight_scale", "x"]
    assert same_numbers((loaded["e.weight"][0], loaded["e.weight_scale"][0]), (q, scale))
    assert list(loaded).index("e.weight_scale") == list(loaded).index("e.weight") + 1
    index.write_text(json.dumps({"weight_map": {**listed, "z": "part-1.safetensors"}}))
    with pytest.raises(ConfigError, match=r"^z is not in .*part-1.safetensors, .* lists it, one of 1 such tensors: "):
        weights.load(tmp_path)
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"part-2.safetensors is missing; model.safetensors.index.json lists it"):
        weights.load(tmp_path)
    index.write_text("[]")
    with pytest.raises(ConfigError, match=r"index.json must hold a JSON object; got list"):
        weights.load(tmp_path)


BROKEN: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no scales": ({"a.weight": fn_mxfp8(8, 32)[0]}, r"a.weight in .*model.safetensors is quantised, but there are no "
                  r"scales a.weight_scale; a file of the checkpoint is missing"),
    "other scales": ({"a.weight": fn_mxfp8(8, 32)[0], "a.weight_scale_of": torch.ones(1, 1)},
                     r"no scales a.weight_scale; there is a.weight_scale_of"),
    "float scales": ({"a.weight": torch.ones(8, 32).byte(), "a.weight_scale": torch.ones(8, 1)},
                     r"a.weight_scale in .* is F32; MX scales are e8m0 bytes"),
    "int8": ({"a.weight": torch.ones(8, 32, dtype=torch.int8), "a.weight_scale": torch.ones(8, 1)},
             r"a.weight_scale in .* is F32; MX scales are e8m0 bytes"),
    "wrong shape": ({"a.weight": fn_mxfp8(8, 32)[0], "a.weight_scale": torch.ones(8, 2, dtype=torch.uint8)},
                    r"a.weight_scale in .* does not fit a.weight F8_E4M3 \(8, 32\): a.weight_scale must have"),
    "wrong rows": ({"a.weight": torch.ones(8, 32).byte(), "a.weight_scale": torch.ones(4, 1, dtype=torch.uint8)},
                   r"a.weight_scale in .* is \(4, 1\); a.weight \(8, 32\) needs one scale per 32 elements"),
    "half the rows": ({"a.weight": fn_mxfp8(8, 32)[0], "a.weight_scale": torch.ones(4, 1)},
                      r"must have one float32 or 8; or .* got torch.float32 \[4, 1\] for weights \[8, 32\]"),
    "blocks cut off": ({"a.weight": fn_mxfp8(200, 320)[0], "a.weight_scale_inv": torch.ones(2, 2)},
                       r"a.weight_scale_inv in .* does not fit .* or \[2, 3\] float32 or e8m0 bytes"),
    "too few experts": ({"a.weight": fn_mxfp8(3, 8, 32)[0], "a.weight_scale": torch.ones(2, 8)},
                        r"for each of 3 experts one float32 or 8; .* got torch.float32 \[2, 8\]"),
    "an fp8 vector": ({"a.weight": fn_mxfp8(1, 32)[0][0], "a.weight_scale": torch.ones(1)},
                      r"a.weight in .* is \(32,\); fp8 weights are \[N, K\]"),
    "double scales": ({"a.weight": fn_mxfp8(8, 32)[0], "a.weight_scale": torch.ones(8, 1).double()},
                      r"a.weight_scale in .* is F64; scales are e8m0 bytes or floats \(U8 or F8_E8M0 or F32 or"),
    "two kinds": ({"a.weight": fn_mxfp8(8, 32)[0], "a.weight_scale": torch.ones(8), "a.scale": torch.ones(8, 1).byte()},
                  r"a.weight in .* has two tensors of scales, a.weight_scale and a.scale"),
    "static integer": ({"a.weight": fn_mxfp8(8, 32)[0], "a.weight_scale": torch.ones(()),
                        "a.input_scale": torch.ones((), dtype=torch.int32)}, r"a.input_scale in .* is I32; a static"),
    "static rows": ({"a.weight": fn_mxfp8(8, 32)[0], "a.weight_scale": torch.ones(()), "a.input_scale": torch.ones(32)},
                    r"a.input_scale in .* is \(32,\); a static scale is one number"),
    "static beside MX": ({"a.weight": torch.ones(8, 32).byte(), "a.weight_scale": torch.ones(8, 1).byte(),
                          "a.input_scale": torch.ones(())}, r"a.input_scale in .* belongs to a kind of quantisation"),
    "scales alone": ({"a.weight_scale_inv": torch.ones(1, 1)}, r"a.weight_scale_inv in .* belongs to a kind"),
    "e8m0 alone": ({"a.scale": torch.ones(8, 1).byte().view(torch.float8_e8m0fnu)}, r"a.scale in .* is F8_E8M0"),
    "gpt-oss in floats": ({"a_blocks": torch.ones(2, 8, 1, 16).byte(), "a_scales": torch.ones(2, 8, 1)},
                          r"a_scales in .* is F32; MX scales are e8m0 bytes"),
    "no elements": ({"a.weight_scale": torch.ones(8, 1, dtype=torch.uint8)}, r"a.weight_scale .* without its weight"),
    "two scales": ({"a.weight": torch.ones(8, 16, dtype=torch.uint8), "a.weight_scale": torch.ones(8, 1).byte(),
                    "a.weight_scale_2": torch.ones(1)}, r"a.weight_scale_2 in .* a kind of quantisation"),
    "blocks": ({"a_blocks": torch.ones(2, 8, 1, 8).byte(), "a_scales": torch.ones(2, 8, 1).byte()},
               r"a_blocks in .* is U8 \(2, 8, 1, 8\); MXFP4 blocks beside scales \(2, 8, 1\) are U8 \(2, 8, 1, 16\)"),
    "one scale of MX": ({"a_blocks": torch.ones(16).byte(), "a_scales": torch.ones(()).byte()},
                        r"a_scales in .* is one number; MX scales have one per 32 elements of each row"),
    "one number and no scales": ({"a.weight": torch.ones(()).char(), "a.scale": torch.ones(0).byte()},
                                 r"a.scale in .* is \(0,\); a.weight \(\) needs one scale per 32 elements"),
    "one byte for fp8": ({"a.weight": fn_mxfp8(8, 32)[0], "a.weight_scale": torch.ones(()).byte()},
                         r"a.weight_scale in .* does not fit a.weight F8_E4M3 \(8, 32\)"),
    "packed and not": ({"a.weight": torch.ones(8, 32).byte(), "a.weight_packed": torch.ones(8, 16).byte(),
                        "a.weight_scale": torch.ones(8, 1).byte()},
                       r"a.weight_packed in .* and a.weight in .* would both be a.weight; remove one of them"),
    "blocks and plain": ({"a_blocks": torch.ones(2, 16).byte(), "a_scales": torch.ones(2).byte(), "a": torch.ones(1)},
                         r"would both be a; remove one of them"),
    "e5m2": ({"a": torch.ones(8, 32).to(torch.float8_e5m2)}, r"F8_E5M2 without a scale; tensors without one are BOOL"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_known_is_refused_by_name_before_anything_is_read(tmp_path: Path, case: str) -> None:
    tensors, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message):
        weights.load(checkpoint(tmp_path, tensors))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a safetensors file nor a folder"):
        weights.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"there is no \*.safetensors file in"):
        weights.load(tmp_path)
    file = checkpoint(tmp_path, {"a": normal(1000), "b": normal(10)}) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match=r"[ab] in .*model.safetensors is cut off: its bytes end at \d+, the file at"):
        weights.load(file)
    for damaged in (whole[:5], b"", b"\xff" * 64, whole[:40]):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="is not a whole safetensors file"):
            weights.load(tmp_path)
    for old, new, message in (
        (b'"F32"', b'"F33"', "has dtype F33, which is not known here"),
        (b"[1000]", b"[1001]", "has 4000 bytes; F32 of shape"),
        (b'"dtype"', b'"dtxpe"', "has no safetensors header"),
        (b"{", b"[", "has no safetensors header"),
    ):
        assert old in whole
        file.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(ConfigError, match=message):
            weights.load(tmp_path)
    file.write_bytes(whole)
    stream = weights.load(tmp_path)
    next(stream)
    file.write_bytes(whole[:-20])  # cut off while it is being read
    with pytest.raises(ConfigError, match="is cut off"):
        list(stream)
    file.write_bytes(whole)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(ConfigError, match="declares quant_method 'awq'; known are compressed-tensors"):
        weights.load(tmp_path)


SHAPES = {
    "negative sizes": ([-10, -100], [0, 4000]), "a size that is a string": (["1000"], [0, 4000]),
    "a place that is a fraction": ([1000], [0.0, 4000.0]), "a size beyond 63 bits": ([2**70, 0], [0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_sizes_that_are_no_numbers_of_elements_are_refused(tmp_path: Path, case: str) -> None:
    shape, offsets = SHAPES[case]
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4000))
    with pytest.raises(ConfigError, match=r"a in .* has shape .* and bytes .* these are integers from 0 on"):
        weights.load(file)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match=r"of 2\^63 bytes or more"):
        weights.load(file)


def test_a_weight_without_rows_is_read(tmp_path: Path) -> None:
    for number, scale in enumerate((torch.zeros(0, 2).byte(), torch.zeros(0, 4).byte())):
        folder = tmp_path / str(number)
        folder.mkdir()
        loaded = state_of(checkpoint(folder, {"a.weight": torch.zeros(0, 64).byte(), "a.weight_scale": scale}))
        assert loaded["a.weight"][0].shape == (0, 64) and loaded["a.weight"][1].format == ("mxfp8", "mxfp4")[number]


@pytest.mark.parametrize("kind", ("folder", "fifo", "dangling", "loop"))
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.safetensors"
    if kind == "folder":
        file.mkdir()
    elif kind == "fifo":  # opening one waits for ever
        os.mkfifo(file)
    else:
        file.symlink_to(file if kind == "loop" else tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model.safetensors is not a regular file"):
        weights.load(tmp_path)


def test_names_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a safetensors file nor a folder"):
        weights.load("x" * 300)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(ConfigError, match=r"is missing; model.safetensors.index.json lists it"):
        weights.load(tmp_path)


def test_a_device_or_an_order_that_is_none_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"a": normal(4)})
    for device in ("nosuch", "hip", None, torch.float32, -1):
        with pytest.raises(ConfigError, match=r"device must be one on which torch makes tensors; got"):
            weights.load(tmp_path, device)  # type: ignore[arg-type]  # what this test is about
    with pytest.raises(ConfigError, match="shuffled must be True or False; got str"):
        weights.load(tmp_path, shuffled="no")  # type: ignore[arg-type]  # what this test is about


def test_shuffling_refuses_a_matrix_that_has_no_such_layout(tmp_path: Path) -> None:
    packed, scale = quantize_mxfp4(normal(8, K))
    folder = checkpoint(tmp_path, {"a.weight": packed, "a.weight_scale": scale})
    with pytest.raises(ConfigError, match=r"a.weight in .* cannot be shuffled: rows must be a multiple of 16.*got 8"):
        state_of(folder, shuffled=True)


def test_a_scale_of_254_is_refused_where_fnuz_has_no_place_for_it(tmp_path: Path) -> None:
    q, scale = quantize_mxfp8(normal(N, K))
    scale[3, 1] = 254
    folder = checkpoint(tmp_path, {"a.weight": q, "a.weight_scale": scale})
    if fp8_dtypes("cpu")[0] == torch.float8_e4m3fn:
        assert state_of(folder)["a.weight_scale"][0][3, 1] == 254
        return
    with pytest.raises(ConfigError, match=r"a.weight in .* cannot be converted to e4m3fnuz.*byte 254"):
        state_of(folder)


# Peak resident memory of a process that keeps every tensor, over what it had before, and what the tensors take, in MB.
PEAK = """
import sys
from hipforge import weights

def resident(which):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(which)) / 1024

next(iter(weights.load(sys.argv[1])))       # what the first call of everything takes
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as control:
    control.write("5")                      # reset the peak
kept = [tensor for _, tensor, _ in weights.load(sys.argv[2])]
print(resident("VmHWM") - before, sum(tensor.nbytes for tensor in kept) / 2**20)
"""


def test_the_peak_is_what_is_kept_and_one_tensor(tmp_path: Path) -> None:
    """In gfx942's format, which converts: six tensors of 48 MB in two shards."""
    tensors = {}
    for index in range(6):
        tensors[f"{index}.weight"] = torch.full((6144, 8192), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensors[f"{index}.weight_scale"] = torch.full((6144, 256), 127, dtype=torch.uint8)
    names = list(tensors)
    large, small = tmp_path / "large", tmp_path / "small"
    large.mkdir(), small.mkdir()
    for shard in range(2):
        mine = {name: tensors[name] for name in names[6 * shard : 6 * shard + 6]}
        save_file(mine, large / f"model-{shard}.safetensors")
    q, scale = quantize_mxfp8(normal(N, K))
    checkpoint(small, {"a.weight": q, "a.weight_scale": scale})
    environment = {"HIPFORGE_EMULATE": "gfx942", "HIPFORGE_EMULATOR_QUIET": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", PEAK, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    grown, kept = map(float, done.stdout.split())
    assert 290 < kept < 310
    assert grown < kept + 48, f"peak {grown:.0f} MB for {kept:.0f} MB kept"


def test_importing_the_loader_is_light() -> None:
    program = "import sys, hipforge.weights; assert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
