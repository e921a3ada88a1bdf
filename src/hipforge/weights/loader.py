"""A checkpoint's tensors, one by one, weights in hipforge's layouts.

Quantised weights are recognised by their names, dtypes and shapes:

| published by | elements | scales |
|---|---|---|
| compressed-tensors, Quark, ModelOpt | ``X.weight`` F8_E4M3 (or U8) [N, K] | ``X.weight_scale`` U8 [N, K/32] |
| hipforge's plugin for transformers | ``X.weight`` F8_E4M3 [N, K/32, 32] | ``X.weight_scale`` U8 [N, K/32] |
| compressed-tensors MXFP4 | ``X.weight_packed`` U8 [N, K/2] | ``X.weight_scale`` U8 [N, K/32] |
| Quark and ModelOpt MXFP4 | ``X.weight`` U8 [N, K/2] | ``X.weight_scale`` U8 [N, K/32] |
| gpt-oss MXFP4 | ``X_blocks`` U8 [E, N, K/32, 16] | ``X_scales`` U8 [E, N, K/32] |
| DeepSeek-V4's MXFP4 | ``X.weight`` I8 [N, K/2] | ``X.scale`` F8_E8M0 [N, K/32] |
| compressed-tensors, Quark, ModelOpt fp8 | ``X.weight`` F8_E4M3 [N, K] | ``X.weight_scale``: one, [N] or [N, 1] |
| Hugging Face fp8 (``weight_block_size``) | ``X.weight`` F8_E4M3 [N, K] | ``X.weight_scale_inv`` [N/128, K/128] |
| DeepSeek-V4.1 | ``X.weight`` F8_E4M3 [N, K] | ``X.scale`` F8_E8M0 [N/32, K/32] or [N/128, K/128] |

Bytes of e8m0 may be U8 or F8_E8M0 in each, other scales F32, BF16 or F16; sizes in blocks are rounded up. A name of
scales goes with every kind. Stacked experts have a leading dimension. A scale may stand in another file than its
elements. Static scales of activations, ``X.input_scale`` and ``X.activation_scale``, are taken beside fp8 weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hipforge.errors import ConfigError, GuardError
from hipforge.ops.core.checks import TensorSpec
from hipforge.ops.core.formats import BLOCK, FP8_BLOCK
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference.fnuz import fn_to_fnuz, scaled_fn_to_fnuz
from hipforge.ops.reference.fp8 import canonical_scales, weight_scales_of
from hipforge.ops.reference.layout import shuffle_scale, shuffle_weight
from hipforge.weights.files import Entry, configuration, entries_of

METHODS = ("compressed-tensors", "quark", "modelopt", "mxfp4", "hipforge_mxfp8", "fp8", "mxfp8")
GROUP_SIZES = (None, BLOCK, FP8_BLOCK)
BLOCK_SIZES = (None, [FP8_BLOCK, FP8_BLOCK], [BLOCK, BLOCK], [1, BLOCK])
_BYTE_SCALES = ("U8", "F8_E8M0")
_FLOAT_SCALES = ("F32", "BF16", "F16")
_INPUT_SCALES = ("input_scale", "activation_scale")
_PLAIN_KINDS = ("BOOL", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64")
# Names that say how a weight was scaled, in ways that are not known here or beside a weight that has no such scales.
_UNKNOWN_SUFFIXES = (
    "_scale_inv", "weight_scale_2", "weight_global_scale", *_INPUT_SCALES, "input_global_scale", "weight_zero_point",
    "weight_shape", "weight_g_idx", "qweight", "qzeros",
)  # fmt: skip
_CONVERTED_AT_ONCE = 1 << 20  # elements, so that a conversion takes little beside the tensor itself
_UNSCALED = torch.zeros((), dtype=torch.float32)


@dataclass(frozen=True)
class Meta:
    """What a tensor is.

    Attributes:
        format: ``mxfp8``, ``mxfp4`` (two elements in a byte, the even one in the low nibble), ``fp8`` with scales that
            :func:`hipforge.fp8_gemm` takes, or ``plain``.
        part: ``elements`` or ``scale`` of a quantised weight; ``input_scale`` of the activations that it is multiplied
            with; ``whole`` of a plain one.
        layout: ``rows``, or ``shuffled`` as ``mxfp4_gemm(..., shuffled=True)`` reads it.
        source: its name in the file.
        file: the file.
    """

    format: Literal["mxfp8", "mxfp4", "fp8", "plain"]
    part: Literal["elements", "scale", "input_scale", "whole"]
    layout: Literal["rows", "shuffled"]
    source: str
    file: Path


@dataclass(frozen=True)
class _Pair:
    """A quantised weight: its name here, its format, and where its tensors are."""

    name: str
    format: Literal["mxfp8", "mxfp4", "fp8"]
    elements: Entry
    scale: Entry
    input_scale: Entry | None = None

    @property
    def scale_name(self) -> str:
        return f"{self.name}_scale"

    @property
    def input_scale_name(self) -> str:
        stem = self.name.removesuffix("weight")
        return f"{stem}input_scale" if stem != self.name else f"{stem}_input_scale"


Loaded = tuple[str, torch.Tensor, Meta]


def load(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", *, shuffled: bool = False
) -> Iterator[Loaded]:
    """Yield every tensor of a checkpoint as (name, tensor, meta), a weight's scales right after its elements.

    One tensor is read at a time and nothing is kept here: what the caller keeps and one tensor more is the most memory
    that is used. MX-FP8 and fp8 weights come in the format of ``device``: on gfx942 as e4m3fnuz with scales twice as
    large, which are the same numbers. The names of both tensors are those that :class:`hipforge.nn.MXFP8Linear` and
    :class:`hipforge.nn.FP8Linear` have in their state dicts: ``X.weight`` and ``X.weight_scale``; scales of fp8 have
    the shapes of the latter and are float32 or e8m0. ``X.input_scale``, float32, comes after the weight that has one.

    Args:
        path: a safetensors file, or a folder of them with or without an index.
        device: where the tensors go.
        shuffled: give MXFP4 matrices in the layout of ``mxfp4_gemm(..., shuffled=True)``: rows a multiple of 16, K of
            64. Stacked ones stay as they are, because no op takes them.

    Returns:
        An iterator. All headers are read and all names checked before the first tensor is.

    Raises:
        ConfigError: a file that is missing, cut off or of an unknown dtype; elements without scales or scales without
            elements; two tensors that would have one name; a kind of quantisation that is not MX-FP8, MXFP4 or fp8. The
            message names file and key. Also a ``path``, ``device`` or ``shuffled`` that is none.

    Example:
        >>> import hipforge.weights                                          # doctest: +SKIP
        >>> state = {name: tensor for name, tensor, _ in hipforge.weights.load("checkpoint/")}   # doctest: +SKIP
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path must be a file or a folder of safetensors; got {type(path).__name__}")
    if not isinstance(shuffled, bool):
        raise ConfigError(f"shuffled must be True or False; got {type(shuffled).__name__}")
    target = _usable(device)
    root = Path(path)
    entries = entries_of(root)
    _check_declared(root)
    return _read(_planned(entries), target, shuffled)


def _usable(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"device must be one on which torch makes tensors; got {device!r}: {why}") from None
    return found


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
            f"{root} declares quant_method {method or None!r}; known are {', '.join(METHODS)} with MX-FP8, MXFP4 or fp8"
        )
    for size in _values_of(declared, "group_size"):
        if size not in GROUP_SIZES:
            raise ConfigError(
                f"{root} declares group_size {size}; MX formats have {BLOCK} elements per scale, fp8 blocks {FP8_BLOCK}"
            )
    for key in ("weight_block_size", "block_structure"):
        for sizes in _values_of(declared, key):
            if sizes not in BLOCK_SIZES:
                known = ", ".join(map(str, BLOCK_SIZES[1:]))
                raise ConfigError(f"{root} declares {key} {sizes}; known are {known}, or none")


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
    scales |= {pair.input_scale.key for pair in pairs.values() if pair.input_scale is not None}
    planned: list[_Pair | Entry] = []
    for key, entry in entries.items():
        if key in pairs:
            planned.append(pairs[key])
        elif key not in scales:
            _require_plain(entry)
            planned.append(entry)
    _require_names(planned)
    return planned


def _require_names(planned: list[_Pair | Entry]) -> None:
    """Refuse two tensors that would have one name here, as packed elements beside those that they were made from."""
    found: dict[str, Entry] = {}
    for part in planned:
        named = {part.key: part} if isinstance(part, Entry) else {part.name: part.elements, part.scale_name: part.scale}
        if isinstance(part, _Pair) and part.input_scale is not None:
            named[part.input_scale_name] = part.input_scale
        for name, entry in named.items():
            if name in found:
                raise ConfigError(f"{entry.where} and {found[name].where} would both be {name}; remove one of them")
            found[name] = entry


def _pair(entry: Entry, entries: dict[str, Entry]) -> _Pair | None:
    key = entry.key
    if key.endswith("_blocks"):
        name = key.removesuffix("_blocks")
        scale = _scale_of(entry, f"{name}_scales", entries)
        _require_mx(scale)
        if entry.kind != "U8" or entry.shape != (*scale.shape, BLOCK // 2):
            raise ConfigError(
                f"{entry.where} is {entry.kind} {entry.shape}; MXFP4 blocks beside scales {scale.shape} are U8 "
                f"{(*scale.shape, BLOCK // 2)}"
            )
        return _Pair(name, "mxfp4", entry, scale)
    if entry.kind not in ("F8_E4M3", "U8", "I8") or key.endswith(("_scale", "_scales", ".scale", "_scale_inv")):
        return None
    name = key.removesuffix("_packed")
    found = [entries[scale] for scale in _names_of_scales(name) if scale in entries]
    if not found and entry.kind == "I8":  # plain integers
        return None
    if not found and entry.kind == "U8" and not key.endswith(("weight", "weight_packed")):
        return None
    if len(found) > 1:
        raise ConfigError(f"{entry.where} has two tensors of scales, {found[0].key} and {found[1].key}")
    scale = found[0] if found else _scale_of(entry, f"{name}_scale", entries)
    if entry.kind == "F8_E4M3":
        return _fp8_pair(name, entry, scale, entries)
    _require_mx(scale)
    if entry.shape == (*scale.shape, BLOCK):
        return _Pair(name, "mxfp8", entry, scale)
    elements = entry.shape[-1] if entry.shape else -1
    wide = scale.shape[-1] * BLOCK
    if entry.shape[:-1] != scale.shape[:-1] or wide not in (elements, 2 * elements):
        raise ConfigError(f"{scale.where} is {scale.shape}; {key} {entry.shape} needs one scale per {BLOCK} elements")
    return _Pair(name, "mxfp8" if wide == elements else "mxfp4", entry, scale)


def _names_of_scales(name: str) -> list[str]:
    """Return what the scales of a weight may be called."""
    names = [f"{name}_scale", f"{name}_scale_inv"]
    if name.endswith(".weight"):
        stem = name.removesuffix(".weight")
        names += [f"{stem}.scale", f"{stem}.qscale_weight"]
    return names


def _fp8_pair(name: str, entry: Entry, scale: Entry, entries: dict[str, Entry]) -> _Pair:
    """Pair e4m3 elements with scales of a kind that :func:`hipforge.fp8_gemm` takes, or with those of MX-FP8."""
    _require_kind(scale, (*_BYTE_SCALES, *_FLOAT_SCALES), "scales are e8m0 bytes or floats")
    bytes_ = scale.kind in _BYTE_SCALES
    if bytes_ and scale.shape and entry.shape in ((*scale.shape, BLOCK), (*scale.shape[:-1], scale.shape[-1] * BLOCK)):
        return _Pair(name, "mxfp8", entry, scale)
    if len(entry.shape) not in (2, 3):
        raise ConfigError(f"{entry.where} is {entry.shape}; fp8 weights are [N, K], or [E, N, K] for stacked experts")
    stacked = entry.shape[0] if len(entry.shape) == 3 else None
    described = TensorSpec(scale.shape, torch.uint8 if bytes_ else torch.float32)
    try:
        weight_scales_of(scale.key, described, stacked, *entry.shape[-2:])
    except GuardError as error:
        raise ConfigError(f"{scale.where} does not fit {_key_and_shape(entry)}: {error}") from None
    stem = name.removesuffix("weight")
    separator = "" if stem != name else "_"
    static = (entries.get(f"{stem}{separator}{key}") for key in _INPUT_SCALES)
    given = next((one for one in static if one is not None), None)
    if given is not None:
        _require_kind(given, _FLOAT_SCALES, "a static scale is a float")
        if math.prod(given.shape) not in {1, stacked or 1}:
            raise ConfigError(f"{given.where} is {given.shape}; a static scale is one number, or one per expert")
    return _Pair(name, "fp8", entry, scale, given)


def _key_and_shape(entry: Entry) -> str:
    """Return what messages call a tensor beside another."""
    return f"{entry.key} {entry.kind} {entry.shape}"


def _scale_of(entry: Entry, key: str, entries: dict[str, Entry]) -> Entry:
    scale = entries.get(key)
    if scale is None:
        near = sorted(other for other in entries if other.startswith(key.rsplit(".", 1)[0] + ".") and "scale" in other)
        raise ConfigError(
            f"{entry.where} is quantised, but there are no scales {key}; "
            + (f"there is {', '.join(near)}" if near else "a file of the checkpoint is missing")
        )
    return scale


def _require_mx(scale: Entry) -> None:
    _require_kind(scale, _BYTE_SCALES, "MX scales are e8m0 bytes")
    if not scale.shape:
        raise ConfigError(f"{scale.where} is one number; MX scales have one per {BLOCK} elements of each row")


def _require_kind(scale: Entry, kinds: tuple[str, ...], rule: str) -> None:
    if scale.kind not in kinds:
        raise ConfigError(f"{scale.where} is {scale.kind}; {rule} ({' or '.join(kinds)})")


def _require_plain(entry: Entry) -> None:
    if entry.key.endswith(_UNKNOWN_SUFFIXES):
        raise ConfigError(f"{entry.where} belongs to a kind of quantisation that is not MX-FP8, MXFP4 or fp8")
    if entry.key.endswith(("weight_scale", "_scales", ".qscale_weight")):
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
    elements, scale = pair.elements.read(), pair.scale.read()
    if pair.format != "fp8":
        *rows, blocks = pair.scale.shape
        elements = elements.view(*rows, blocks * BLOCK // (2 if pair.format == "mxfp4" else 1))
    fnuz = pair.format != "mxfp4" and fp8_dtypes(device)[0] == torch.float8_e4m3fnuz
    if pair.format == "mxfp4":
        elements = elements.view(torch.uint8)
        if fold:
            elements, scale = shuffle_weight(elements), shuffle_scale(scale)
    else:
        elements = elements.view(torch.float8_e4m3fn)
        if pair.format == "fp8":
            scale = _fp8_scales(pair, scale)
        if fnuz:
            elements, scale = _in_fnuz(elements, scale, pair.elements)
    yield pair.name, elements.to(device), Meta(pair.format, "elements", layout, pair.elements.key, pair.elements.file)
    del elements
    yield pair.scale_name, scale.to(device), Meta(pair.format, "scale", layout, pair.scale.key, pair.scale.file)
    if pair.input_scale is not None:
        given = pair.input_scale
        static = given.read().float() * (2 if fnuz else 1)
        yield pair.input_scale_name, static.to(device), Meta("fp8", "input_scale", layout, given.key, given.file)


def _fp8_scales(pair: _Pair, scale: torch.Tensor) -> torch.Tensor:
    """Return scales as :class:`hipforge.nn.FP8Linear` and :class:`hipforge.nn.FP8Experts` hold them."""
    shape = pair.elements.shape
    scale = scale if scale.dtype == torch.uint8 else scale.float()
    n, k = shape[-2:]
    return canonical_scales(pair.scale.key, scale, shape[0] if len(shape) == 3 else None, n, k)


def _in_fnuz(elements: torch.Tensor, scale: torch.Tensor, source: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the elements in place, some at a time."""
    bytes_ = elements.view(torch.uint8).view(-1)
    try:
        _, doubled = scaled_fn_to_fnuz(bytes_[:0].view(torch.float8_e4m3fn), scale, source.where)
    except GuardError as error:
        raise ConfigError(str(error)) from None
    for piece in bytes_.split(_CONVERTED_AT_ONCE):
        piece.copy_(fn_to_fnuz(piece.view(torch.float8_e4m3fn), _UNSCALED)[0].view(torch.uint8))
    return elements.view(torch.float8_e4m3fnuz), doubled
