"""FP8 linear layers for training: tensor-wise scales, and operand layouts that ``torch._scaled_mm`` accepts.

The layout rule that decides everything here: ``_scaled_mm(A[M, K], B[K, N])`` wants A row-major (strides ``(K, 1)``)
and B column-major (strides ``(1, K)``), and transposes nothing by itself. With both factors stored row-major as
``X[B, K]`` and ``W[N, K]`` the three products of a linear layer need

=============  ==================  ==========================  ==================
product        first operand       second operand              copies
=============  ==================  ==========================  ==================
forward        ``x8[B, K]``        ``w8.t()``                  none
grad input     ``go8[B, N]``       ``to_col_major(w8)``        w8 transposed
grad weight    ``go8.t()`` packed  ``to_col_major(x8)``        go8 and x8 transposed
=============  ==================  ==========================  ==================

Formats: e4m3 forward and e5m2 for gradients, in the OCP variants on gfx950 and the FNUZ variants on gfx942. A float is
clamped to the format's range before every cast, since the result of an overflowing cast differs by format (448, inf or
NaN).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from hipforge.errors import ConfigError, GuardError
from hipforge.ops.core.arguments import naming_arguments, require_one_kind, require_readable
from hipforge.ops.core.checks import (
    require_device,
    require_floating,
    require_one,
    require_rank,
    require_tensor,
    require_torch_dtype,
)
from hipforge.ops.core.fp8 import E5M2_DTYPES as E5M2_DTYPES
from hipforge.ops.core.fp8 import FP8_DTYPES as FP8_DTYPES
from hipforge.ops.core.fp8 import fp8_dtypes as fp8_dtypes
from hipforge.ops.core.fp8 import to_fp8 as to_fp8

PUBLIC = ("Float8Linear", "Float8LinearConfig", "convert_to_float8_training", "disable_fp8", "scaled_mm")

# _scaled_mm reads 16 fp8 elements at a time along K and along N.
ALIGNMENT = 16
# Below this a tensor-wise FP8 product gains less than quantising costs (the rule of torchao's recipe filter too).
MIN_FEATURES = 128


def to_col_major(x: torch.Tensor) -> torch.Tensor:
    """Return ``x[R, C]`` with the same values and strides ``(1, R)``; one transposing copy unless it is so already.

    Raises:
        GuardError: x does not have two dimensions.
    """
    require_rank("x", x, 2, "[R, C]")
    return x.t().contiguous().t()


@naming_arguments
def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """``(a @ b) * scale_a * scale_b`` on FP8 operands, with the operand layouts checked rather than assumed.

    Args:
        a: [M, K] float8, row-major: strides ``(pitch, 1)``.
        b: [K, N] float8, column-major: strides ``(1, pitch)``; for a row-major ``w[N, K]`` pass ``w.t()``.
        scale_a: fp32, one element: the factor that turns a's codes into values (the inverse of the quantising scale).
        scale_b: fp32, one element: the same for b.
        out_dtype: dtype of the result, floating point.
        use_fast_accum: allow the lower-precision accumulation some devices offer.

    Returns:
        [M, N] of ``out_dtype``. Where K or N is not a multiple of 16, which ``torch._scaled_mm`` refuses, the product
        is taken in bfloat16 instead (exact inputs, fp32 accumulation, one more rounding before the scales).

    Raises:
        GuardError: ranks, dtypes, devices, inner dimensions or scales do not fit, both operands are e5m2, or an operand
            is in the wrong memory order; the message says which one, and how to fix it.

    Example:
        >>> import torch, hipforge
        >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
        >>> a = torch.ones(16, 32).to(torch.float8_e4m3fn)
        >>> hipforge.scaled_mm(a, a.t(), one, two)[0, 0].item()
        64.0
    """
    require_torch_dtype("out_dtype", out_dtype)
    if not out_dtype.is_floating_point:
        raise GuardError(f"out_dtype must be a floating-point dtype; got {out_dtype}")
    _check_operands(a, b, scale_a, scale_b)
    require_readable(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())  # one element each, in whatever shape
    k, n = b.shape
    if a.numel() == 0 or b.numel() == 0:
        return torch.zeros(a.shape[0], n, dtype=out_dtype, device=a.device)
    if k % ALIGNMENT or n % ALIGNMENT:
        product = torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16))
        return (product.float() * (scale_a * scale_b)).to(out_dtype)
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


def _check_operands(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
    require_tensor(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    for name, operand in (("a", a), ("b", b)):
        require_rank(name, operand, 2, "[rows, columns]")
        if operand.dtype not in FP8_DTYPES:
            raise GuardError(f"{name} must be float8; got {operand.dtype}: quantise it with to_fp8")
    if a.shape[1] != b.shape[0]:
        hint = f"; b looks like [N, K]: pass b.t(), strides {b.t().stride()}" if a.shape[1] == b.shape[1] else ""
        raise GuardError(f"a is {list(a.shape)} and b is {list(b.shape)}: the inner dimensions differ{hint}")
    if a.dtype in E5M2_DTYPES and b.dtype in E5M2_DTYPES:
        raise GuardError(f"a and b are both e5m2 ({a.dtype}, {b.dtype}); at least one operand must be e4m3")
    if a.stride(1) != 1 and a.shape[1] > 1:
        raise GuardError(
            f"a must be row-major (strides (K, 1)); got strides {a.stride()} for shape {list(a.shape)}: "
            "pass a.contiguous()"
        )
    if b.stride(0) != 1 and b.shape[0] > 1:
        raise GuardError(
            f"b must be column-major (strides (1, K)); got strides {b.stride()} for shape {list(b.shape)}: "
            "pass w.t() of a contiguous w[N, K], or to_col_major(b)"
        )
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        require_one(name, scale)
    for name, tensor in (("b", b), ("scale_a", scale_a), ("scale_b", scale_b)):
        require_device(name, tensor, a.device)


class _Float8Matmul(torch.autograd.Function):
    """``x @ weight.t()`` in FP8, and both gradients in FP8. x is [B, K], weight [N, K]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        dtype, _ = fp8_dtypes(x.device)
        # Casts keep strides, so an input in another memory order is packed before it is quantised, not after.
        x8, x_inv = to_fp8(x.contiguous(), dtype)
        w8, w_inv = to_fp8(weight.contiguous(), dtype)
        ctx.save_for_backward(x8, x_inv, w8, w_inv, weight)
        ctx.weight_dtype = weight.dtype  # type: ignore[attr-defined]
        return scaled_mm(x8, w8.t(), x_inv, w_inv, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x8, x_inv, w8, w_inv, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight = ctx.needs_input_grad  # type: ignore[attr-defined]
        _, dtype = fp8_dtypes(grad_output.device)
        # A gradient that was expanded (of a sum, say) or transposed is packed first.
        go8, go_inv = to_fp8(grad_output.detach().contiguous(), dtype)
        grad_x = grad_weight = None
        if needs_x:
            grad_x = scaled_mm(go8, to_col_major(w8), go_inv, w_inv, out_dtype=grad_output.dtype)
        if needs_weight:
            grad_weight = scaled_mm(
                go8.t().contiguous(),
                to_col_major(x8),
                go_inv,
                x_inv,
                out_dtype=ctx.weight_dtype,  # type: ignore[attr-defined]
            )
        if torch.is_grad_enabled():  # the gradients are to be differentiated again
            grad_x, grad_weight = (
                None if each is None else _FirstDerivative.apply(each, grad_output, weight)
                for each in (grad_x, grad_weight)
            )
        return grad_x, grad_weight


class _FirstDerivative(torch.autograd.Function):
    """A gradient of the output's gradient and the weight, which raises if it is differentiated again."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor, *depends_on: torch.Tensor
    ) -> torch.Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> None:
        raise GuardError(
            "Float8Linear has no second derivative: its gradients are FP8 products; use nn.Linear (to_float()) where a "
            "gradient is differentiated again"
        )


def float8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.t()`` in x's dtype, it and both gradients computed in FP8. x is [B, K], weight [N, K]."""
    product = _Float8Matmul.apply(x, weight)
    assert isinstance(product, torch.Tensor)
    return product


@dataclass(frozen=True)
class Float8LinearConfig:
    """How a :class:`Float8Linear` computes. ``compute_dtype``: what inputs are cast to and outputs are given in.

    Where input and parameters have one 16-bit dtype, as in a model after ``half()``, a 16-bit ``compute_dtype`` gives
    way to it.

    Example:
        >>> Float8LinearConfig.from_recipe_name("tensorwise").compute_dtype
        torch.bfloat16
    """

    compute_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Refuse what is no floating-point dtype."""
        require_torch_dtype("compute_dtype", self.compute_dtype)
        if not self.compute_dtype.is_floating_point:
            raise GuardError(f"compute_dtype must be a floating-point dtype; got {self.compute_dtype}")

    @staticmethod
    def from_recipe_name(recipe_name: str) -> Float8LinearConfig:
        """Return the configuration of a named recipe; only ``"tensorwise"`` exists.

        Raises:
            ConfigError: any other name.
        """
        if recipe_name != "tensorwise":
            raise ConfigError(f"there is no FP8 recipe {recipe_name!r}; known: 'tensorwise'")
        return Float8LinearConfig()


def _require_config(config: object) -> None:
    if not isinstance(config, Float8LinearConfig | None):
        raise GuardError(f"config must be a Float8LinearConfig or None; got {type(config).__name__}")


class Float8Linear(nn.Linear):
    """A drop-in ``nn.Linear`` whose products run in FP8 with tensor-wise scales.

    Parameters keep their dtype and stay the master copy; the input is cast to the configuration's compute dtype (to
    autocast's where that is on) and the output has it. Where the flattened batch or a feature count is not a multiple
    of 16, the product runs in the compute dtype without FP8.

    Example:
        >>> import torch, hipforge
        >>> layer = hipforge.Float8Linear(128, 128, bias=False)
        >>> layer(torch.ones(16, 128)).shape
        torch.Size([16, 128])
    """

    def __init__(self, *args: object, config: Float8LinearConfig | None = None, **kwargs: object) -> None:
        _require_config(config)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.config = config or Float8LinearConfig()

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> Float8Linear:
        """Return a Float8Linear that shares ``mod``'s parameters and has its hooks.

        Raises:
            GuardError: no linear layer, or one whose weight a parametrization or a hook computes, so that there is no
                parameter to share.
        """
        require_linear("mod", mod)
        if parametrize.is_parametrized(mod):
            names = ", ".join(mod.parametrizations)  # type: ignore[arg-type]
            raise GuardError(
                f"{mod} computes its {names} by a parametrization; make it a parameter with "
                "torch.nn.utils.parametrize.remove_parametrizations, or leave the layer out with module_filter_fn"
            )
        with torch.device("meta"):
            new = cls(mod.in_features, mod.out_features, bias=mod.bias is not None, config=config)
        fp8_dtypes(mod.weight.device)
        return _taking_over(new, mod)

    def to_float(self) -> nn.Linear:
        """Return a plain ``nn.Linear`` that shares this module's parameters and has its hooks."""
        with torch.device("meta"):
            new = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        return _taking_over(new, self)

    @functools.partial(naming_arguments, name="Float8Linear")
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer to ``input[..., in_features]``; returns ``[..., out_features]`` in the compute dtype.

        Raises:
            GuardError: the last dimension is not ``in_features``, or the input is not floating point.
        """
        require_tensor(input=input)
        require_readable(input=input)
        require_one_kind("Float8Linear", input=input, weight=self.weight, bias=self.bias)
        require_device("input", input, self.weight.device)
        require_floating(input=input)
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise GuardError(
                f"input must have last dimension in_features={self.in_features}; got shape {tuple(input.shape)}"
            )
        dtype = self._compute_dtype(input)
        x = input.to(dtype).reshape(-1, self.in_features)
        bias = None if self.bias is None else self.bias.to(dtype)
        if x.shape[0] % ALIGNMENT or self.in_features % ALIGNMENT or self.out_features % ALIGNMENT or not x.shape[0]:
            y = F.linear(x, self.weight.to(dtype), bias)
        else:
            y = float8_product(x, self.weight)
            y = y if bias is None else y + bias
        return y.reshape(*input.shape[:-1], self.out_features)

    def _compute_dtype(self, input: torch.Tensor) -> torch.dtype:
        if torch.is_autocast_enabled(input.device.type):
            return torch.get_autocast_dtype(input.device.type)
        asked, own = self.config.compute_dtype, self.weight.dtype
        return own if input.dtype == own and own.itemsize == asked.itemsize == 2 else asked


Linear = TypeVar("Linear", bound=nn.Linear)


def require_linear(name: str, layer: nn.Module) -> None:
    """Refuse what is no linear layer, and one whose weight or bias is what a hook of its last call left there.

    Raises:
        GuardError: it says how to make such a weight a parameter.
    """
    if not isinstance(layer, nn.Linear):
        raise GuardError(f"{name} must be a torch.nn.Linear; got {type(layer).__name__}")
    computed = [each for each in ("weight", "bias") if each in vars(layer)] if layer._forward_pre_hooks else []
    if computed:
        raise GuardError(
            f"{name} computes its {' and '.join(computed)} in a forward pre-hook, and may hold an old one; make it a "
            "parameter first, with torch.nn.utils.remove_weight_norm, remove_spectral_norm or prune.remove"
        )


def take_hooks(new: nn.Module, old: nn.Module) -> None:
    """Give ``new`` the hooks and the mode of ``old``, in whose place it is called."""
    new.training = old.training
    for name, hooks in vars(old).items():
        if name.endswith("_hooks") or "_hooks_" in name:
            vars(new)[name] = hooks  # the dictionary itself, so that handles given out still remove from it


def _taking_over(new: Linear, old: nn.Linear) -> Linear:
    """Give ``new`` the parameters, hooks and mode of ``old``."""
    new.weight = old.weight
    new.bias = old.bias
    take_hooks(new, old)
    return new


def default_module_filter(module: nn.Module, fqn: str) -> bool:
    """Whether a layer is worth converting: both feature counts multiples of 16 and at least 128."""
    if not isinstance(module, nn.Linear):
        return False
    features = (module.in_features, module.out_features)
    return min(features) >= MIN_FEATURES and all(count % ALIGNMENT == 0 for count in features)


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model by :class:`Float8Linear`, in place, children before parents.

    Args:
        module: the model, or a single linear layer.
        config: applies to every layer converted.
        module_filter_fn: called as ``f(layer, fully_qualified_name)``, True to convert; default: both feature counts
            multiples of 16 and at least 128. Converted layers are left alone; one that is used in several places is
            passed to the filter once and converted once.

    Returns:
        The model; a new object only if ``module`` itself is a converted linear layer.

    Raises:
        GuardError: ``module`` is no module, ``config`` no configuration; a layer to convert has a weight that is
            computed, as :meth:`Float8Linear.from_float` says. No layer is replaced then.

    Example:
        >>> from torch import nn
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 8)))
        >>> [type(layer).__name__ for layer in model]
        ['Float8Linear', 'Linear']
    """
    if not isinstance(module, nn.Module):
        raise GuardError(f"module must be a torch.nn.Module; got {type(module).__name__}")
    _require_config(config)
    wanted = module_filter_fn or default_module_filter

    converted: dict[nn.Module, nn.Module] = {}  # a layer that is used in several places stays one layer
    swaps: list[tuple[nn.Module, str, nn.Module]] = []  # made after the last layer was found convertible

    def convert(child: nn.Module, fqn: str) -> nn.Module:
        if child in converted:
            return converted[child]
        for name, grandchild in _slots(child):
            replacement = convert(grandchild, f"{fqn}.{name}" if fqn else name)
            if replacement is not grandchild:
                swaps.append((child, name, replacement))
        converted[child] = child
        if isinstance(child, nn.Linear) and not isinstance(child, Float8Linear) and wanted(child, fqn):
            converted[child] = Float8Linear.from_float(child, config)
        return converted[child]

    result = convert(module, "")
    for parent, name, replacement in swaps:
        setattr(parent, name, replacement)
    return result


def _slots(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every name of a child and what it holds; ``named_children`` leaves out what it has already named."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


@contextlib.contextmanager
def disable_fp8(model: nn.Module) -> Iterator[None]:
    """Run a ``with`` block with every :class:`Float8Linear` below ``model`` replaced by a plain ``nn.Linear``.

    The parameters are shared, so nothing is copied; the FP8 layers come back when the block ends, also by an error.
    A model that is itself a Float8Linear cannot be swapped from outside and is refused.

    Raises:
        GuardError: ``model`` is no module, or itself a Float8Linear.

    Example:
        >>> from torch import nn
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(128, 256)))
        >>> with disable_fp8(model):
        ...     type(model[0]).__name__
        'Linear'
    """
    if not isinstance(model, nn.Module):
        raise GuardError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if isinstance(model, Float8Linear):
        raise GuardError("model is itself a Float8Linear and has no parent to swap it in; use model.to_float()")
    swapped: list[tuple[nn.Module, str, Float8Linear]] = []
    plain: dict[Float8Linear, nn.Linear] = {}
    for parent in list(model.modules()):
        for name, child in _slots(parent):
            if isinstance(child, Float8Linear):
                swapped.append((parent, name, child))
                setattr(parent, name, plain.setdefault(child, child.to_float()))
    try:
        yield
    finally:
        for parent, name, child in swapped:
            setattr(parent, name, child)
