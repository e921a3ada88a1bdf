"""What a published checkpoint's ``quantization_config`` says of its weights, and which layers it leaves plain."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHODS = ("fp8", "compressed-tensors", "quark", "mxfp4")
_BLOCKS = {(128, 128): "blocks", (32, 32): "shared_e8m0"}


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's quantised layers are stored.

    Attributes:
        linear: a layout of :class:`hipforge.nn.FP8Linear`, or None where linear layers are plain.
        experts: a layout of fp8, or ``mxfp4``.
        companion: what follows the name of a weight in that of its scales.
        skipped: names and parts of names of layers that are plain, as the library matches them; None for its default.
        patterns: ``re:`` regular expressions, and names that may hold ``*``, of layers that are plain.
    """

    linear: str | None
    experts: str
    companion: str
    skipped: tuple[str, ...] | None = ()
    patterns: tuple[str, ...] = ()

    def leaves(self, name: str) -> bool:
        """Return whether a pattern leaves a layer plain."""
        return any(
            re.match(pattern[3:], name) is not None if pattern.startswith("re:") else fnmatch.fnmatchcase(name, pattern)
            for pattern in self.patterns
        )


def scheme_of(declared: Mapping[str, Any]) -> Scheme | str:
    """Return the scheme that a ``quantization_config`` declares, or why it is not taken."""
    method = declared.get("quant_method")
    try:
        if method == "fp8":
            return _fp8(declared)
        if method == "compressed-tensors":
            return _compressed_tensors(declared)
        if method == "quark":
            return _quark(declared)
    except (AttributeError, TypeError, ValueError) as error:
        return f"its quantization_config cannot be read: {error}"
    if method == "mxfp4":
        skipped = declared.get("modules_to_not_convert")
        return Scheme(None, "mxfp4", "_scales", None if skipped is None else tuple(skipped))
    return f"quant_method {method!r}: {', '.join(METHODS)} are taken"


def _fp8(declared: Mapping[str, Any]) -> Scheme | str:
    if declared.get("dequantize"):
        return "dequantize: the weights are to be plain"
    if declared.get("modules_to_convert"):
        return "modules_to_convert: an embedding in fp8"
    sizes = declared.get("weight_block_size", (128, 128))
    layout = "tensor" if sizes is None else _BLOCKS.get(tuple(sizes))
    if layout is None:
        return f"weight_block_size {sizes}: [128, 128], [32, 32] and none are taken"
    if layout == "blocks" and declared.get("scale_fmt") == "ue8m0":
        layout = "blocks_e8m0"
    skipped = declared.get("modules_to_not_convert")
    experts = "mxfp4" if declared.get("expert_dtype") == "fp4" else layout
    return Scheme(layout, experts, "_scale_inv", None if skipped is None else tuple(skipped))


def _compressed_tensors(declared: Mapping[str, Any]) -> Scheme | str:
    groups = list((declared.get("config_groups") or {}).values())
    if len(groups) != 1:
        return f"{len(groups)} groups of layers in compressed-tensors: one is taken"
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    if list(groups[0].get("targets") or ()) != ["Linear"]:
        return f"targets {groups[0].get('targets')}: all linear layers are taken"
    for name, each in (("weights", weights), ("input_activations", inputs)):
        if not each or each.get("type") != "float" or each.get("num_bits") != 8:
            return f"{name} {_short(each)}: fp8 is taken"
    if weights.get("symmetric", True) is False:
        return "asymmetric weights"
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    layouts = {"tensor": "tensor", "channel": "rows", "block": _BLOCKS.get(tuple(block)) if block else None}
    layout = layouts.get(str(strategy))
    if layout is None:
        return f"strategy {strategy!r} with block_structure {block}: tensor, channel and block of 128 x 128 are taken"
    return Scheme(layout, layout, "_scale", patterns=tuple(declared.get("ignore") or ()))


def _quark(declared: Mapping[str, Any]) -> Scheme | str:
    whole = declared.get("global_quant_config") or {}
    weights, inputs = whole.get("weight") or {}, whole.get("input_tensors")
    for name, each in (("weight", weights), ("input_tensors", inputs)):
        if not each or not str(each.get("dtype")).startswith("fp8_e4m3"):
            return f"{name} {_short(each)}: fp8_e4m3 is taken"
    layout = {"per_tensor": "tensor", "per_channel": "rows"}.get(str(weights.get("qscheme")))
    if layout is None:
        return f"qscheme {weights.get('qscheme')!r}: per_tensor and per_channel are taken"
    for key in ("layer_quant_config", "layer_type_quant_config"):
        for name, layer in (declared.get(key) or {}).items():
            if (layer or {}).get("weight") not in (weights, None):
                return f"{key} of {name} differs from the whole model's"
    return Scheme(layout, layout, "_scale", patterns=tuple(declared.get("exclude") or ()))


def _short(part: object) -> str:
    if not isinstance(part, Mapping):
        return repr(part)
    return str({key: part[key] for key in ("dtype", "type", "num_bits", "qscheme", "strategy") if key in part})
