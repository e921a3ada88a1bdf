"""Stacked experts without a router, over MX-FP8, fp8 with other scales, or MXFP4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from hipforge.errors import GuardError
from hipforge.nn.payload import (
    Pair,
    Quantized,
    accepted,
    accepted_fp8,
    accepted_mxfp4,
    input_rows,
    quantized,
    quantized_mxfp4,
    quantized_rows,
)
from hipforge.ops.core.checks import as_text, require_rank, require_shape
from hipforge.ops.moe import DEFAULT_BLOCK_M, fused_moe_fp8, fused_moe_mxfp4, fused_moe_mxfp8


@dataclass(frozen=True)
class Activation:
    """The parameters of SwiGLU, as :func:`hipforge.swiglu_mxfp8` takes them.

    Attributes:
        alpha: factor inside the sigmoid.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        interleaved: even rows of ``w1`` are the gate's, odd ones up's.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    interleaved: bool = False


def require_kind(name: str, value: object, kind: type) -> None:
    """Refuse parameters that are neither None nor an object of their class."""
    if value is not None and not isinstance(value, kind):
        raise GuardError(f"{name} must be {kind.__module__}.{kind.__name__}(...); got {as_text(value)}")


class StackedExperts(Quantized):
    """Weights of several experts in one format, and their weighted sum; a subclass says which format.

    Attributes:
        w1, w1_scale: gate and up.
        w2, w2_scale: down.
        w1_bias, w2_bias: float32 [E, 2 I] and [E, H], or None.
    """

    w1: torch.Tensor
    w1_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w1_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    packing: ClassVar[int] = 1
    """Elements in a byte."""

    layer: Callable[..., torch.Tensor]
    """The op."""

    def __init__(
        self,
        w1: Pair,
        w2: Pair,
        activation: Activation | None = None,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        block_m: int = DEFAULT_BLOCK_M,
    ) -> None:
        super().__init__()
        require_kind("activation", activation, Activation)
        self.activation, self.block_m = activation or Activation(), block_m
        (w1_q, w1_scale), (w2_q, w2_scale) = self.accepted(*w1, "w1"), self.accepted(*w2, "w2")
        require_rank("w1", w1_q, 3, "[E, 2*I, H]")
        require_rank("w2", w2_q, 3, "[E, H, I]")
        experts, width, inner = w2_q.shape[0], w2_q.shape[1], w2_q.shape[2] * self.packing
        of = f"[E, 2*I, H{'/2' if self.packing == 2 else ''}] with w2's E, I and H"
        require_shape("w1", w1_q, (experts, 2 * inner, width // self.packing), of)
        for name, tensor in {"w1": w1_q, "w1_scale": w1_scale, "w2": w2_q, "w2_scale": w2_scale}.items():
            self.register_buffer(name, tensor.detach())
        self.hold_biases(w1_bias=(w1_bias, (experts, 2 * inner)), w2_bias=(w2_bias, (experts, width)))

    @staticmethod
    def quantised(weight: torch.Tensor, name: str) -> Pair:
        """Return elements and scales of a weight [E, N, K]."""
        raise NotImplementedError

    def hold_biases(self, **biases: tuple[torch.Tensor | None, tuple[int, ...]]) -> None:
        """Register biases of the shapes that are given beside them, in float32."""
        for name, (bias, shape) in biases.items():
            if bias is not None:
                require_shape(name, bias, shape, "that of what it is added to")
                bias = bias.detach().to(torch.float32).contiguous()
            self.register_buffer(name, bias)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return E, H and I."""
        return self.w2.shape[0], self.w2.shape[1], self.w2.shape[2] * self.packing

    def weighted_sum(
        self,
        hidden: torch.Tensor,
        hidden_scale: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what the op makes of rows [T, H] with the layer's weights."""
        act = self.activation
        return type(self).layer(
            hidden, self.w1, self.w1_scale, self.w2, self.w2_scale, topk_weights, topk_ids, expert_map,
            block_m=self.block_m, alpha=act.alpha, beta=act.beta, limit=act.limit, interleaved=act.interleaved,
            hidden_scale=hidden_scale, w1_bias=self.w1_bias, w2_bias=self.w2_bias, out=out,
        )  # fmt: skip

    def input_like(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros that :meth:`forward` takes as x, [rows, H] on the layer's device."""
        return torch.zeros(rows, self.sizes[1], dtype=dtype, device=self.w2.device)

    def extra_repr(self) -> str:
        """Return what ``print`` shows between the parentheses."""
        experts, width, inner = self.sizes
        return f"experts={experts}, hidden={width}, intermediate={inner}, {self.activation}"


class Experts(StackedExperts):
    """Experts whose choices come from elsewhere; :class:`MXFP8Experts`, :class:`FP8Experts`, :class:`MXFP4Experts`."""

    @classmethod
    def from_weights(
        cls,
        w1: torch.Tensor,
        w2: torch.Tensor,
        activation: Activation | None = None,
        **biases: torch.Tensor | None,
    ) -> Experts:
        """Quantise experts' weights, on their device.

        Args:
            w1: float32, float16 or bfloat16 [E, 2 I, H]: rows of the gate, then of up, or interleaved.
            w2: [E, H, I].
            activation: SwiGLU's parameters.
            biases: ``w1_bias``, ``w2_bias``.
        """
        return cls(cls.quantised(w1, "w1"), cls.quantised(w2, "w2"), activation, **biases)  # type: ignore[arg-type]

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the experts' weighted sum.

        Args:
            x: float32, float16 or bfloat16 [..., H]; with ``x_scale`` elements [T, H] that the layer's op takes.
            topk_weights: floating point [T, top_k]; without choices every token goes to expert 0 with weight 1.
            topk_ids: int32 or int64 [T, top_k]; ids of no expert contribute nothing.
            expert_map: integers, the place of each expert in ``w1``, -1 where it is not here.
            x_scale: scales of x.
            out: contiguous [T, H] to write into.

        Returns:
            [..., H] of x's dtype, bfloat16 where x is quantised.

        Raises:
            GuardError: an argument is not of this form, or x requires a gradient while gradients are recorded.
        """
        rows = input_rows(x, self.sizes[1], type(self).__name__)
        if (topk_weights is None) != (topk_ids is None):
            missing = "topk_weights" if topk_weights is None else "topk_ids"
            raise GuardError(f"topk_weights and topk_ids must both be given, or neither; got no {missing}")
        if topk_weights is None or topk_ids is None:
            topk_weights = torch.ones(rows.shape[0], 1, device=x.device, dtype=torch.float32)
            topk_ids = torch.zeros(rows.shape[0], 1, device=x.device, dtype=torch.int32)
        return self.weighted_sum(rows, x_scale, topk_weights, topk_ids, expert_map, out).view(x.shape)


class OverMXFP8(StackedExperts):
    """MX-FP8: e4m3 elements [E, N, K] with an e8m0 scale per 32 of K."""

    accepted = staticmethod(accepted)
    quantised = staticmethod(quantized)
    layer = staticmethod(fused_moe_mxfp8)


class OverFP8(StackedExperts):
    """fp8: e4m3 elements [E, N, K] with scales of a kind that :mod:`hipforge.ops.fp8_grouped_gemm` lists."""

    accepted = staticmethod(accepted_fp8)
    quantised = staticmethod(quantized_rows)
    layer = staticmethod(fused_moe_fp8)


class OverMXFP4(StackedExperts):
    """MXFP4: two e2m1 elements in a byte, [E, N, K / 2], with an e8m0 scale per 32 of K; activations are MX-FP8."""

    packing = 2
    accepted = staticmethod(accepted_mxfp4)
    quantised = staticmethod(quantized_mxfp4)
    layer = staticmethod(fused_moe_mxfp4)


class MXFP8Experts(OverMXFP8, Experts):
    """Experts over MX-FP8 weights, as :func:`hipforge.fused_moe_mxfp8` computes them.

    Attributes:
        w1, w1_scale: gate and up, e4m3 [E, 2 I, H] and e8m0 bytes [E, 2 I, H / 32].
        w2, w2_scale: down, e4m3 [E, H, I] and e8m0 bytes [E, H, I / 32].
        w1_bias, w2_bias: float32 [E, 2 I] and [E, H], or None.

    Example:
        >>> import torch
        >>> from hipforge.nn import MXFP8Experts
        >>> layer = MXFP8Experts.from_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32))
        >>> ids = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
        >>> tuple(layer(torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(2, 2), ids).shape)
        (2, 32)
    """


class FP8Experts(OverFP8, Experts):
    """Experts over fp8 weights with scales per tensor, row or block, as :func:`hipforge.fused_moe_fp8` computes them.

    Attributes:
        w1, w1_scale: gate and up, e4m3 [E, 2 I, H] with float32 [E], [E, 2 I] or [E, ceil(2 I / 128), ceil(H / 128)],
            or e8m0 bytes of that shape or [E, ceil(2 I / 32), H / 32].
        w2, w2_scale: down, e4m3 [E, H, I] with scales of the same kind.
        w1_bias, w2_bias: float32 [E, 2 I] and [E, H], or None.

    Example:
        >>> import torch
        >>> from hipforge.nn import FP8Experts
        >>> layer = FP8Experts.from_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32))
        >>> layer.w1_scale.shape, tuple(layer(torch.ones(3, 32)).shape)
        (torch.Size([4, 64]), (3, 32))
    """


class MXFP4Experts(OverMXFP4, Experts):
    """Experts over MXFP4 weights and MX-FP8 activations, as :func:`hipforge.fused_moe_mxfp4` computes them.

    Attributes:
        w1, w1_scale: gate and up, uint8 [E, 2 I, H / 2] and e8m0 bytes [E, 2 I, H / 32].
        w2, w2_scale: down, uint8 [E, H, I / 2] and e8m0 bytes [E, H, I / 32].
        w1_bias, w2_bias: float32 [E, 2 I] and [E, H], or None.

    Example:
        >>> import torch
        >>> from hipforge.nn import MXFP4Experts
        >>> layer = MXFP4Experts.from_weights(torch.ones(4, 64, 32), torch.ones(4, 32, 32))
        >>> layer.w1.shape, tuple(layer(torch.ones(3, 32)).shape)
        (torch.Size([4, 64, 16]), (3, 32))
    """
