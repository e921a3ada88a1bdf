"""A linear layer with fp8 weights and scales per tensor, row or block, that quantises its input."""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.nn.linear import QuantizedLinear
from hipforge.nn.payload import Pair, accepted_fp8, bias_of, place_of, quantized_rows
from hipforge.ops.core.checks import require_choice, require_int, require_rank, require_real, require_tensor
from hipforge.ops.core.formats import BLOCK, HALVES
from hipforge.ops.core.formats import FP8_BLOCK as STEP
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_gemm import fp8_linear
from hipforge.ops.fp8_linear import require_linear
from hipforge.ops.fp8_quant import QUANTISERS
from hipforge.ops.reference.fp8 import Scales, quantize_fp8_weights, weight_scales_of

LAYOUTS = ("tensor", "rows", "blocks", "blocks_e8m0", "shared_e8m0")


def scale_like(layout: str, n: int, k: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of the scales of a weight [n, k] in one of :data:`LAYOUTS`.

    Raises:
        GuardError: another layout, or ``shared_e8m0`` for a K that is not a multiple of 32.
    """
    require_choice("scales", layout, LAYOUTS)
    if layout == "tensor":
        return (1,), torch.float32
    if layout == "rows":
        return (n,), torch.float32
    if layout == "shared_e8m0":
        if k % BLOCK:
            raise GuardError(f"K must be a multiple of {BLOCK} for scales of 32 x 32 elements; got {k}")
        return (-(-n // BLOCK), k // BLOCK), torch.uint8
    return (-(-n // STEP), -(-k // STEP)), torch.float32 if layout == "blocks" else torch.uint8


class FP8Linear(QuantizedLinear):
    """``y = x W^T + bias`` with W as e4m3 elements and scales per tensor, row, 128 x 128 or 32 x 32 elements.

    The input is quantised in one launch, with a scale per row of x, per 128 of it, or per 32 where W has 32 x 32,
    unless it comes quantised; the product is :func:`hipforge.fp8_linear`. A static scale of the input that a checkpoint
    has is not needed: the scales made here clip nothing.

    Args:
        in_features: K, a multiple of 32 for ``shared_e8m0``.
        out_features: N.
        bias: whether there is one, bfloat16.
        device: where the buffers are; the default device if None.
        scales: their layout, see ``weight_scale``.

    Attributes:
        weight: the device's e4m3 [N, K].
        weight_scale: float32 [1] (``tensor``), [N] (``rows``) or [ceil(N / 128), ceil(K / 128)] (``blocks``), or uint8
            e8m0 of that shape (``blocks_e8m0``) or [ceil(N / 32), K / 32] (``shared_e8m0``).
        bias: bfloat16 or float16 [N], or None.
        out_dtype: of the result where the input comes quantised: bfloat16, or what the layer was last cast to
            (``half()``, ``float()``, ``to(dtype)``). The buffers keep their dtypes.

    Raises:
        GuardError: a size below 1, a layout that does not exist, or a K that it does not take.

    Example:
        >>> import torch
        >>> from hipforge.nn import FP8Linear
        >>> layer = FP8Linear.from_linear(torch.nn.Linear(64, 16, dtype=torch.bfloat16))
        >>> with torch.no_grad():
        ...     y = layer(torch.ones(2, 3, 64, dtype=torch.bfloat16))
        >>> tuple(y.shape), y.dtype, tuple(layer.weight_scale.shape)
        ((2, 3, 16), torch.bfloat16, (16,))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        scales: str = "rows",
    ) -> None:
        super().__init__()
        n, k = require_int("out_features", out_features, 1), require_int("in_features", in_features, 1)
        self.in_features, self.out_features = k, n
        shape, dtype = scale_like(scales, n, k)
        place = place_of(device)
        one = 127 if dtype == torch.uint8 else 1.0
        self.register_buffer("weight", torch.zeros(n, k, dtype=fp8_dtypes(place)[0], device=place))
        self.register_buffer("weight_scale", torch.full(shape, one, dtype=dtype, device=place))
        self.register_buffer("bias", torch.zeros(n, dtype=torch.bfloat16, device=place) if bias else None)

    @property
    def kind(self) -> Scales:
        """Return what the scales are to the product."""
        return weight_scales_of("weight_scale", self.weight_scale, None, self.out_features, self.in_features)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, scales: str = "rows") -> FP8Linear:
        """Quantise a linear layer's weight, on its device, with scales in one of the layouts but ``tensor``.

        Raises:
            GuardError: no linear layer, its weight not float32, float16 or bfloat16, or computed by a hook
                (``weight_norm``), or a layout that is not taken.
        """
        require_linear("linear", linear)
        require_choice("scales", scales, LAYOUTS[1:])
        require_real("weight", linear.weight)
        scale_like(scales, *linear.weight.shape)
        weight = linear.weight.detach()
        if scales == "rows":
            pair = quantized_rows(weight)
        else:
            own, block = fp8_dtypes(weight.device)[0], BLOCK if scales == "shared_e8m0" else STEP
            pair = quantize_fp8_weights(weight, own, scales != "blocks", block)
        layer = cls.from_quantized(*pair, linear.bias)
        if weight.dtype == torch.float16:
            layer.out_dtype = torch.float16
        return layer

    @classmethod
    def from_quantized(
        cls, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> FP8Linear:
        """Make a layer of fp8 tensors, as :func:`hipforge.weights.load` yields them; elements are not copied.

        Args:
            weight: float8_e4m3fn, or uint8 with its bits, [N, K]; converted to e4m3fnuz on gfx942, where that may be
                given too.
            weight_scale: float32, float16 or bfloat16: one, [N], [N, 1] or [ceil(N / 128), ceil(K / 128)]; or e8m0
                bytes of the last shape or [ceil(N / 32), K / 32].
            bias: floating point [N], float32 and float64 rounded to bfloat16.

        Raises:
            GuardError: a dtype or shape that is not accepted.
        """
        require_tensor(weight=weight)
        require_rank("weight", weight, 2, "[N, K]")
        weight, weight_scale = accepted_fp8(weight, weight_scale)
        layer = cls(weight.shape[1], weight.shape[0], device="meta")
        layer.weight, layer.weight_scale = weight, weight_scale
        if bias is not None:
            layer.bias = bias_of(bias, layer.out_features, HALVES)
        return layer

    @staticmethod
    def accepted(elements: torch.Tensor, scales: torch.Tensor, name: str = "weight") -> Pair:
        """Return checked elements and scales in the format of their device."""
        return accepted_fp8(elements, scales, name)

    def quantise(self, rows: torch.Tensor) -> Pair:
        """Return x [M, K] as e4m3 elements and scales of the weight's kind."""
        return QUANTISERS[self.kind](rows)

    def product(
        self, q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the product [M, N]: float16 where ``dtype`` or ``out`` is, else bfloat16."""
        rounded = out.dtype if out is not None else dtype if dtype in HALVES else torch.bfloat16
        bias = None if self.bias is None else self.bias.to(rounded)
        return fp8_linear(q, scale, self.weight, self.weight_scale, out_dtype=rounded, bias=bias, out=out)

    def extra_repr(self) -> str:
        """Return what ``print`` shows between the parentheses."""
        return f"{super().extra_repr()}, scales={self.weight_scale.dtype} {list(self.weight_scale.shape)}"
