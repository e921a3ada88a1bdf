"""A checkpoint's tensors, one by one, weights in hipforge's layouts.

Quantised weights are recognised by their names, dtypes and shapes:

| published by | elements | scales |
|---|---|---|
| compressed-tensors, Quark, ModelOpt | ``X.weight`` F8_E4M3 (or U8) [N, K] | ``X.weight_scale`` U8 [N, K/32] |
| hipforge's plugin for transformers | ``X.weight`` F8_E4M3 [N, K/32, 32] | ``X.weight_scale`` U8 [N, K/32] |
| compressed-tensors MXFP4 | ``X.weight_packed`` U8 [N, K/2] | ``X.weight_scale`` U8 [N, K/32] |
| Quark and ModelOpt MXFP4 | ``X.weight`` U8 [N, K/2] | ``X.weight_scale`` U8 [N, K/32] |
| gpt-oss MXFP4 | ``X_blocks`` U8 [E, N, K/32, 16] | ``X_scales`` U8 [E, N, K/32] |

Scales may be F8_E8M0 too. Stacked experts have a leading dimension. A scale may stand in another file than its
elements.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hipforge.errors import ConfigError, GuardError
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference.fnuz import mx_fn_to_fnuz
from hipforge.ops.reference.layout import shuffle_scale, shuffle_weight
from hipforge.weights.files import Entry, configuration, entries_of

METHODS = ("compressed-tensors", "quark", "modelopt", "mxfp4", "hipforge_mxfp8")
_SCALE_KINDS = ("U8", "F8_E8M0")
_PLAIN_KINDS = ("BOOL", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64")
# Names that say how a weight was scaled, in ways that are not MX.
_UNKNOWN_SUFFIXES = (
    "_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale", "weight_zero_point",
    "weight_shape", "weight_g_idx", "qweight", "qzeros",
)  # fmt: skip
_CONVERTED_AT_ONCE = 1 << 20  # elements, so that a conversion takes little beside the tensor itself


@dataclass(frozen=True)
class Meta:
    """What a tensor is.

    Attributes:
        format: ``mxfp8``, ``mxfp4`` (two elements in a byte, the even one in the low nibble) or ``plain``.
        part: ``elements`` or ``scale`` of a quantised weight; ``whole`` of a plain one.
        layout: ``rows``, or ``shuffled`` as ``mxfp4_gemm(..., shuffled=True)`` reads it.
        source: its name in the file.
        file: the file.
    """

    format: Literal["mxfp8", "mxfp4", "plain"]
    part: Literal["elements", "scale", "whole"]
    layout: Literal["rows", "shuffled"]
    source: str
    file: Path


@dataclass(frozen=True)
class _Pair:
    """A quantised weight: its name here, its format, and where both its tensors are."""

    name: str
    format: Literal["mxfp8", "mxfp4"]
    elements: Entry
    scale: Entry


Loaded = tuple[str, torch.Tensor, Meta]


def load(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", *, shuffled: bool = False
) -> Iterator[Loaded]:
    """Yield every tensor of a checkpoint as (name, tensor, meta), a weight's scales right after its elements.

    One tensor is read at a time and nothing is kept here: what the caller keeps and one tensor more is the most memory
    that is used. MX-FP8 weights come in the format of ``device``: on gfx942 as e4m3fnuz with scales one larger, which
    are the same numbers. The names of both tensors are those that :class:`hipforge.nn.MXFP8Linear` has in its state
    dict: ``X.weight`` and ``X.weight_scale``.

    Args:
        path: a safetensors file, or a folder of them with or without an index.
        device: where the tensors go.
        shuffled: give MXFP4 matrices in the layout of ``mxfp4_gemm(..., shuffled=True)``: rows a multiple of 16, K of
            64. Stacked ones stay as they are, because no op takes them.

    Returns:
        An iterator. All headers are read and all names checked before the first tensor is.

    Raises:
        ConfigError: a file that is missing, cut off or of an unknown dtype; elements without scales or scales without
            elements; a kind of quantisation that is not MX-FP8 or MXFP4. The message names file and key.

    Example:
        >>> import hipforge.weights                                          # doctest: +SKIP
        >>> state = {name: tensor for name, tensor, _ in hipforge.weights.load("checkpoint/")}   # doctest: +SKIP
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path must be a file or a folder of safetensors; got {type(path).__name__}")
    root = Path(path)
    entries = entries_of(root)
    _check_declared(root)
    return _read(_planned(entries), torch.device(device), shuffled)


def _read(parts: list[_Pair | Entry], device: torch.device, shuffled: bool) -> Iterator[Loaded]:
    for part in parts:
        if isinstance(part, _Pair):
            yield from _weight(part, device, shuffled)
        else:
            yield part.key, part.read().to(device), Meta("plain", "whole", "rows", part.key, part.file)


def _check_declared(root: Path) -> None:
    declared = configuration(root)
    method = str(declared.get("quant_method") or "").lower()
    if declared and method not in METHODS:
        raise ConfigError(
            f"{root} declares quant_method {method or None!r}; known are {', '.join(METHODS)} with MX-FP8 or MXFP4"
        )
    for size in _values_of(declared, "group_size"):
        if size not in (None, BLOCK):
            raise ConfigError(f"{root} declares group_size {size}; MX formats have {BLOCK} elements per scale")


def _values_of(node: object, key: str) -> Iterator[object]:
    if isinstance(node, dict):
        if key in node:
            yield node[key]
        for value in node.values():
            yield from _values_of(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from _values_of(value, key)


def _planned(entries: dict[str, Entry]) -> list[_Pair | Entry]:
    """Pair elements with scales; refuse whatever is left that is not a plain tensor."""
    pairs = {entry.key: pair for entry in entries.values() if (pair := _pair(entry, entries)) is not None}
    scales = {pair.scale.key for pair in pairs.values()}
    planned: list[_Pair | Entry] = []
    for key, entry in entries.items():
        if key in pairs:
            planned.append(pairs[key])
        elif key not in scales:
            _require_plain(entry)
            planned.append(entry)
    return planned


def _pair(entry: Entry, entries: dict[str, Entry]) -> _Pair | None:
    key = entry.key
    if key.endswith("_blocks"):
        name = key.removesuffix("_blocks")
        scale = _scale_of(entry, f"{name}_scales", entries)
        if entry.kind != "U8" or entry.shape != (*scale.shape, BLOCK // 2):
            raise ConfigError(
                f"{entry.where} is {entry.kind} {entry.shape}; MXFP4 blocks beside scales {scale.shape} are U8 "
                f"{(*scale.shape, BLOCK // 2)}"
            )
        return _Pair(name, "mxfp4", entry, scale)
    if entry.kind not in ("F8_E4M3", "U8") or key.endswith(("_scale", "_scales")):
        return None
    name = key.removesuffix("_packed")
    if entry.kind == "U8" and f"{name}_scale" not in entries and not key.endswith(("weight", "weight_packed")):
        return None
    scale = _scale_of(entry, f"{name}_scale", entries)
    if entry.shape == (*scale.shape, BLOCK):
        return _Pair(name, "mxfp8", entry, scale)
    elements = entry.shape[-1] if entry.shape else 0
    wide = scale.shape[-1] * BLOCK if scale.shape else -1
    if entry.shape[:-1] != scale.shape[:-1] or wide not in (elements, 2 * elements):
        raise ConfigError(f"{scale.where} is {scale.shape}; {key} {entry.shape} needs one scale per {BLOCK} elements")
    if wide == elements:
        return _Pair(name, "mxfp8", entry, scale)
    if entry.kind != "U8":
        raise ConfigError(f"{entry.where} is {entry.kind} {entry.shape}, beside scales for {wide} elements per row")
    return _Pair(name, "mxfp4", entry, scale)


def _scale_of(entry: Entry, key: str, entries: dict[str, Entry]) -> Entry:
    scale = entries.get(key)
    if scale is None:
        near = sorted(other for other in entries if other.startswith(key.rsplit(".", 1)[0] + ".") and "scale" in other)
        raise ConfigError(
            f"{entry.where} is quantised, but there are no scales {key}; "
            + (f"there is {', '.join(near)}, which is no MX scale" if near else "a file of the checkpoint is missing")
        )
    if scale.kind not in _SCALE_KINDS:
        raise ConfigError(f"{scale.where} is {scale.kind}; MX scales are e8m0 bytes ({' or '.join(_SCALE_KINDS)})")
    return scale


def _require_plain(entry: Entry) -> None:
    if entry.key.endswith(_UNKNOWN_SUFFIXES):
        raise ConfigError(f"{entry.where} belongs to a kind of quantisation that is not MX-FP8 or MXFP4")
    if entry.key.endswith(("weight_scale", "_scales")):
        raise ConfigError(f"{entry.where} is a scale without its weight; a file of the checkpoint is missing")
    if entry.kind not in _PLAIN_KINDS:
        known = ", ".join(_PLAIN_KINDS)
        raise ConfigError(f"{entry.where} is {entry.kind} without a scale; tensors without one are {known}")


def _weight(pair: _Pair, device: torch.device, shuffled: bool) -> Iterator[Loaded]:
    fold = shuffled and pair.format == "mxfp4" and len(pair.scale.shape) == 2
    if fold and (pair.scale.shape[0] % 16 or pair.scale.shape[1] % 2):
        raise ConfigError(
            f"{pair.elements.where} cannot be shuffled: rows must be a multiple of 16 and K of 64; got "
            f"{pair.scale.shape[0]} and {BLOCK * pair.scale.shape[1]}"
        )
    layout: Literal["rows", "shuffled"] = "shuffled" if fold else "rows"
    elements = pair.elements.read().view(*pair.scale.shape[:-1], -1)
    scale = pair.scale.read()
    if pair.format == "mxfp8":
        elements = elements.view(torch.float8_e4m3fn)
        if fp8_dtypes(device)[0] == torch.float8_e4m3fnuz:
            elements, scale = _in_fnuz(elements, scale, pair.elements)
    elif fold:
        elements, scale = shuffle_weight(elements), shuffle_scale(scale)
    yield pair.name, elements.to(device), Meta(pair.format, "elements", layout, pair.elements.key, pair.elements.file)
    del elements
    yield f"{pair.name}_scale", scale.to(device), Meta(pair.format, "scale", layout, pair.scale.key, pair.scale.file)


def _in_fnuz(elements: torch.Tensor, scale: torch.Tensor, source: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert in place, some elements at a time."""
    bytes_, scales = elements.view(torch.uint8).view(-1), scale.view(-1)
    for first in range(0, len(bytes_), _CONVERTED_AT_ONCE):
        piece = bytes_[first : first + _CONVERTED_AT_ONCE]
        its_scales = scales[first // BLOCK : (first + len(piece)) // BLOCK]
        try:
            converted = mx_fn_to_fnuz(piece.view(torch.float8_e4m3fn), its_scales, source.where)
        except GuardError as error:
            raise ConfigError(str(error)) from None
        piece.copy_(converted[0].view(torch.uint8))
        its_scales.copy_(converted[1])
    return elements.view(torch.float8_e4m3fnuz), scale
