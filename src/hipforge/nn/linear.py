"""Linear layers with quantised weights that quantise their input: what they share, and the one over MX-FP8."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hipforge.errors import GuardError
from hipforge.nn.payload import Pair, Quantized, accepted, bias_of, input_rows, place_of, quantized
from hipforge.ops.core.checks import require_int, require_rank
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_linear import require_linear
from hipforge.ops.mx_quantize import mxfp8_quantize
from hipforge.ops.mxfp8_gemm import mxfp8_linear

ACTIVATIONS = (torch.float32, torch.float16, torch.bfloat16)


class QuantizedLinear(Quantized):
    """What linear layers with quantised weights share: they quantise x [..., K], multiply, and follow x's dtype.

    Attributes:
        in_features: K.
        out_features: N.
        weight: elements.
        weight_scale: their scales.
        bias: [N], or None.
        out_dtype: of the result where the input comes quantised: bfloat16, or what the layer was last cast to
            (``half()``, ``float()``, ``to(dtype)``). The buffers keep their dtypes.
    """

    in_features: int
    out_features: int
    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype = torch.bfloat16

    def quantise(self, rows: torch.Tensor) -> Pair:
        """Return x [M, K] as elements and scales that :meth:`product` takes."""
        raise NotImplementedError

    def product(
        self, q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the product [M, N] in a 16-bit dtype, ``dtype`` where the op writes it; ``out`` where it is given."""
        raise NotImplementedError

    def forward(
        self, x: torch.Tensor, x_scale: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the product.

        Args:
            x: float32, float16 or bfloat16 [..., K]; with ``x_scale`` e4m3 elements [M, K], as a norm or an activation
                that quantises made them.
            x_scale: what the layer's op takes beside the weight's scales, for MX-FP8 e8m0 bytes [M, K / 32].
            out: contiguous [M, N] to write into, M the rows of x, of a dtype that the op writes: bfloat16.

        Returns:
            [..., N] of x's dtype, from float32 sums rounded to 16 bits; where x is quantised, ``out``, or a tensor of
            ``out_dtype``.

        Raises:
            GuardError: an argument is not of this form, or x requires a gradient while gradients are recorded.
        """
        if x_scale is not None:
            y = self.product(x, x_scale, self.out_dtype, out)
            return y if out is not None else y.to(self.out_dtype)
        rows = input_rows(x, self.in_features, type(self).__name__)
        y = self.product(*self.quantise(rows), x.dtype, out)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        super()._apply(fn, recurse)
        cast = fn(torch.empty(0, dtype=self.out_dtype, device=self.weight.device)).dtype
        if cast in ACTIVATIONS:
            self.out_dtype = cast
        return self

    def input_like(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros that :meth:`forward` takes, [rows, K] on the layer's device."""
        return torch.zeros(rows, self.in_features, dtype=dtype, device=self.weight.device)

    def extra_repr(self) -> str:
        """Return what ``print`` shows between the parentheses."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class MXFP8Linear(QuantizedLinear):
    """``y = x W^T + bias`` with W as e4m3 elements and an e8m0 scale per 32 of them: 33 bytes for 32 weights.

    The input is quantised in one launch (round_up: nothing clips), unless it comes quantised, and multiplied by
    :func:`hipforge.mxfp8_linear`.

    Args:
        in_features: K, a multiple of 32.
        out_features: N.
        bias: whether there is one, bfloat16.
        device: where the buffers are; the default device if None.

    Attributes:
        weight: the device's e4m3 [N, K].
        weight_scale: uint8 e8m0 [N, K / 32].
        bias: bfloat16 [N], or None.
        out_dtype: of the result where the input comes quantised: bfloat16, or what the layer was last cast to
            (``half()``, ``float()``, ``to(dtype)``). The buffers keep their dtypes.

    Raises:
        GuardError: ``in_features`` is not a positive multiple of 32, ``out_features`` no size, ``device`` no device.

    Example:
        >>> import torch
        >>> from hipforge.nn import MXFP8Linear
        >>> layer = MXFP8Linear.from_linear(torch.nn.Linear(64, 16, dtype=torch.bfloat16))
        >>> with torch.no_grad():
        ...     y = layer(torch.ones(2, 3, 64, dtype=torch.bfloat16))
        >>> tuple(y.shape), y.dtype
        ((2, 3, 16), torch.bfloat16)
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        n, k = require_int("out_features", out_features, 0), require_int("in_features", in_features)
        place = place_of(device)
        if k < BLOCK or k % BLOCK:
            raise GuardError(
                f"in_features must be a positive multiple of {BLOCK}, one e8m0 scale per {BLOCK} weights; got {k}"
            )
        self.in_features, self.out_features = k, n
        self.register_buffer("weight", torch.zeros(n, k, dtype=fp8_dtypes(place)[0], device=place))
        self.register_buffer("weight_scale", torch.full((n, k // BLOCK), 127, dtype=torch.uint8, device=place))
        self.register_buffer("bias", torch.zeros(n, dtype=torch.bfloat16, device=place) if bias else None)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear) -> MXFP8Linear:
        """Quantise a linear layer's weight, on its device.

        Raises:
            GuardError: no linear layer; its in_features is not a multiple of 32, or its weight not float32, float16 or
                bfloat16, or computed by a hook (``weight_norm``).
        """
        require_linear("linear", linear)
        layer = cls.from_quantized(*quantized(linear.weight), linear.bias)
        if linear.weight.dtype == torch.float16:
            layer.out_dtype = torch.float16
        return layer

    @classmethod
    def from_quantized(
        cls, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> MXFP8Linear:
        """Make a layer of MX-FP8 tensors, as :func:`hipforge.weights.load` yields them; they are not copied.

        Args:
            weight: float8_e4m3fn, or uint8 with its bits, [N, K]; converted to e4m3fnuz on gfx942, where that may be
                given too.
            weight_scale: uint8 or float8_e8m0fnu [N, K / 32].
            bias: floating point [N], rounded to bfloat16.

        Raises:
            GuardError: a dtype or shape that is not accepted.
        """
        weight, weight_scale = accepted(weight, weight_scale)
        require_rank("weight", weight, 2, "[N, K]")
        layer = cls(weight.shape[1], weight.shape[0], device="meta")
        layer.weight, layer.weight_scale = weight, weight_scale
        if bias is not None:
            layer.bias = bias_of(bias, layer.out_features, (torch.bfloat16,))
        return layer

    def quantise(self, rows: torch.Tensor) -> Pair:
        """Return x [M, K] as e4m3 elements and e8m0 scales."""
        return mxfp8_quantize(rows)

    def product(
        self, q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the product [M, N], bfloat16; ``out`` where it is given."""
        return mxfp8_linear(q, scale, self.weight, self.weight_scale, self.bias, out)
