"""Turn the linear layers of a model into quantised ones."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterable

import torch

from hipforge.errors import GuardError
from hipforge.nn.fp8_linear import LAYOUTS, FP8Linear
from hipforge.nn.linear import MXFP8Linear, QuantizedLinear
from hipforge.ops.core.checks import as_text, require_choice, require_floating, require_real, require_shape
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.fp8_linear import require_linear, take_hooks


def convert_to_mxfp8(model: torch.nn.Module, skip: str | Iterable[str] = ()) -> torch.nn.Module:
    """Replace every ``torch.nn.Linear`` of a model by an :class:`~hipforge.nn.MXFP8Linear`, in place.

    A layer that two places of the model share becomes one that they share; hooks move along. Weights that a linear
    layer shares with something else (an embedding) are quantised for the layer alone. Parameters that are no
    ``Linear``, such as stacked experts, stay: see :class:`~hipforge.nn.MXFP8MoE`.

    Args:
        model: on the device where its kernels run; a model that is a ``Linear`` itself is returned converted.
        skip: names, or patterns of :mod:`fnmatch`, of layers to leave as they are: ``"lm_head"``,
            ``"*.gate"``, ``"*.experts.*"``.

    Returns:
        The model.

    Raises:
        GuardError: no module; a layer whose in_features is not a multiple of 32, whose weight a hook computes or is of
            another dtype than float32, float16 and bfloat16, by name; a pattern that matches no layer. No layer is
            replaced then.

    Example:
        >>> import torch
        >>> from hipforge.nn import convert_to_mxfp8
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> [type(part).__name__ for part in convert_to_mxfp8(model, skip="2")]
        ['MXFP8Linear', 'ReLU', 'Linear']
    """
    return _converted(model, skip, MXFP8Linear.from_linear, BLOCK)


def convert_to_fp8(model: torch.nn.Module, skip: str | Iterable[str] = (), scales: str = "rows") -> torch.nn.Module:
    """Replace every ``torch.nn.Linear`` of a model by an :class:`~hipforge.nn.FP8Linear`, in place.

    Which layers are replaced, and how, is as in :func:`convert_to_mxfp8`.

    Args:
        model: on the device where its kernels run; a model that is a ``Linear`` itself is returned converted.
        skip: names, or patterns of :mod:`fnmatch`, of layers to leave as they are.
        scales: ``rows``, ``blocks``, ``blocks_e8m0`` or ``shared_e8m0``, see :class:`~hipforge.nn.FP8Linear`.

    Returns:
        The model.

    Raises:
        GuardError: no module; other scales; a layer whose weight a hook computes, or, with ``shared_e8m0``, whose
            in_features is not a multiple of 32, by name; a pattern that matches no layer.

    Example:
        >>> import torch
        >>> from hipforge.nn import convert_to_fp8
        >>> model = torch.nn.Sequential(torch.nn.Linear(50, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> [type(part).__name__ for part in convert_to_fp8(model, skip="2")]
        ['FP8Linear', 'ReLU', 'Linear']
    """
    require_choice("scales", scales, LAYOUTS[1:])
    multiple = BLOCK if scales == "shared_e8m0" else 1
    return _converted(model, skip, functools.partial(FP8Linear.from_linear, scales=scales), multiple)


def _converted(
    model: torch.nn.Module,
    skip: str | Iterable[str],
    make: Callable[[torch.nn.Linear], QuantizedLinear],
    multiple: int,
) -> torch.nn.Module:
    """Replace linear layers by what ``make`` makes of them; K must be a multiple of ``multiple``."""
    if not isinstance(model, torch.nn.Module):
        raise GuardError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    patterns = _patterns(skip)
    linears = {
        name: part for name, part in model.named_modules(remove_duplicate=False) if type(part) is torch.nn.Linear
    }
    for pattern in patterns:
        if not fnmatch.filter(linears, pattern):
            raise GuardError(f"skip must match names of linear layers; {pattern!r} matches none of the {len(linears)}")
    wanted = {
        name: part
        for name, part in linears.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    for name, part in wanted.items():
        if part.in_features % multiple:
            raise GuardError(
                f"{name or 'the model'} has in_features={part.in_features}, which is not a multiple of {BLOCK} (one "
                f"e8m0 scale per {BLOCK} weights); name it in skip to leave it as it is"
            )
        require_linear(name or "the model", part)
        _require_convertible(name or "the model", part)
    made: dict[torch.nn.Linear, QuantizedLinear] = {}
    for name, part in wanted.items():
        if part not in made:
            made[part] = make(part)
            take_hooks(made[part], part)
        if not name:
            return made[part]
        model.set_submodule(name, made[part])
    for layer in model.modules():
        if isinstance(layer, torch.nn.TransformerEncoderLayer) and set(made.values()).intersection(layer.children()):
            layer.activation_relu_or_gelu = 0  # else torch's fused inference multiplies the weights itself
    return model


def _require_convertible(name: str, part: torch.nn.Linear) -> None:
    """Refuse, before a layer is replaced, parameters that its conversion would refuse."""
    require_real(f"the weight of {name}", part.weight)
    if part.bias is not None:
        require_floating(**{f"the bias of {name}": part.bias})
        require_shape(f"the bias of {name}", part.bias, (part.weight.shape[0],), "out_features")


def _patterns(skip: str | Iterable[str]) -> tuple[str, ...]:
    with contextlib.suppress(TypeError, RuntimeError):  # the latter of a tensor without memory
        found = (skip,) if isinstance(skip, str) else tuple(skip)
        if all(isinstance(pattern, str) for pattern in found):
            return found
    raise GuardError(f"skip must be a name or several names; got {as_text(skip)}")
