"""A mixture of experts with quantised weights: router, choice, experts, weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import Self

from hipforge.errors import GuardError
from hipforge.nn.experts import Activation as Activation
from hipforge.nn.experts import OverFP8, OverMXFP4, OverMXFP8, StackedExperts, require_kind
from hipforge.nn.payload import Pair, input_rows
from hipforge.ops.core.checks import require_dtype, require_int, require_shape, require_tensor
from hipforge.ops.moe import DEFAULT_BLOCK_M
from hipforge.ops.router_gemm import router_gemm
from hipforge.ops.topk_gating import topk_gating


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighted: what :func:`hipforge.topk_gating` takes.

    Attributes:
        top_k: experts per token.
        scoring: ``softmax`` or ``sigmoid``.
        renormalize: make the weights of a token sum to ``scale``.
        groups: groups of neighbouring experts, or None.
        topk_groups: groups that are kept.
        scale: of the chosen experts' weights.
        shared_experts: the last so many experts serve every token with weight 1; the router has no rows for them.
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    groups: int | None = None
    topk_groups: int | None = None
    scale: float = 1.0
    shared_experts: int = 0


class MoE(StackedExperts):
    """Router, top-k choice and experts; :class:`MXFP8MoE`, :class:`FP8MoE` and :class:`MXFP4MoE`.

    Attributes:
        router: float32 or bfloat16 [E - shared, H].
        router_bias: float32 [E - shared], added to the logits, or None.
        correction_bias: float32 [E - shared], added to the scores for the choice only, or None.
        w1, w1_scale: gate and up, as the experts of the same format have them.
        w2, w2_scale: down.
        w1_bias, w2_bias: float32 [E, 2 I] and [E, H], or None.
    """

    router: torch.Tensor
    router_bias: torch.Tensor | None
    correction_bias: torch.Tensor | None

    def __init__(
        self,
        w1: Pair,
        w2: Pair,
        router: torch.Tensor,
        routing: Routing,
        activation: Activation | None = None,
        *,
        router_bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        block_m: int = DEFAULT_BLOCK_M,
    ) -> None:
        """Take quantised weights as they are; see :meth:`from_weights` for ones to quantise.

        Raises:
            GuardError: weights, router or biases that do not fit each other.
        """
        require_kind("routing", routing, Routing)
        super().__init__(w1, w2, activation, w1_bias=w1_bias, w2_bias=w2_bias, block_m=block_m)
        self.routing = routing
        require_int("top_k", routing.top_k, 1)
        require_int("shared_experts", routing.shared_experts, 0)
        experts, width, _ = self.sizes
        routed = experts - routing.shared_experts
        if routed < routing.top_k:
            raise GuardError(f"there must be at least top_k + shared_experts experts, "
                             f"{routing.top_k + routing.shared_experts}; got {experts}")  # fmt: skip
        require_tensor(router=router)
        require_dtype("router", router, (torch.float32, torch.bfloat16))
        require_shape("router", router, (routed, width), "[E - shared_experts, H]")
        self.register_buffer("router", router.detach().contiguous())
        self.hold_biases(router_bias=(router_bias, (routed,)), correction_bias=(correction_bias, (routed,)))

    @classmethod
    def from_weights(
        cls,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router: torch.Tensor,
        routing: Routing,
        activation: Activation | None = None,
        **biases: torch.Tensor | None,
    ) -> Self:
        """Quantise experts' weights, on their device.

        Args:
            w1: float32, float16 or bfloat16 [E, 2 I, H]: rows of the gate, then of up, or interleaved.
            w2: [E, H, I].
            router: float32 or bfloat16 [E - shared_experts, H].
            routing: how experts are chosen.
            activation: SwiGLU's parameters.
            biases: ``router_bias``, ``correction_bias``, ``w1_bias``, ``w2_bias``.
        """
        return cls(cls.quantised(w1, "w1"), cls.quantised(w2, "w2"), router, routing, activation, **biases)  # type: ignore[arg-type]

    def forward(
        self,
        x: torch.Tensor,
        quantized_x: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the experts' weighted sum.

        Args:
            x: float16 or bfloat16 [..., H]: what the router reads, and what is quantised for the experts.
            quantized_x: (elements [T, H], scales) of x, as the experts' op takes them, where a norm has made both.
            out: contiguous [T, H] to write into.

        Returns:
            [..., H] of x's dtype.

        Raises:
            GuardError: an argument is not of this form, or x requires a gradient while gradients are recorded.
        """
        rows = input_rows(x, self.sizes[1], type(self).__name__)
        chosen = self.routing
        weights, ids = topk_gating(
            router_gemm(rows, self.router, self.router_bias), chosen.top_k, scoring=chosen.scoring,
            bias=self.correction_bias, renormalize=chosen.renormalize, groups=chosen.groups,
            topk_groups=chosen.topk_groups, scale=chosen.scale, shared_experts=chosen.shared_experts,
        )  # fmt: skip
        hidden, hidden_scale = (rows, None) if quantized_x is None else quantized_x
        if out is None:
            out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        self.weighted_sum(hidden, hidden_scale, weights, ids, None, out)
        return out.view(x.shape)

    def extra_repr(self) -> str:
        """Return what ``print`` shows between the parentheses."""
        return f"{super().extra_repr()}, {self.routing}"


class MXFP8MoE(OverMXFP8, MoE):
    """Router, top-k choice and experts over MX-FP8 weights, in eight launches (seven where the input is quantised).

    Attributes:
        router: float32 or bfloat16 [E - shared, H].
        router_bias: float32 [E - shared], added to the logits, or None.
        correction_bias: float32 [E - shared], added to the scores for the choice only, or None.
        w1, w1_scale: gate and up, e4m3 [E, 2 I, H] and e8m0 bytes [E, 2 I, H / 32].
        w2, w2_scale: down, e4m3 [E, H, I] and e8m0 bytes [E, H, I / 32].
        w1_bias, w2_bias: float32 [E, 2 I] and [E, H], or None.

    Example:
        >>> import torch
        >>> from hipforge.nn import MXFP8MoE
        >>> from hipforge.nn.moe import Routing
        >>> w1, w2, router = torch.ones(4, 64, 32), torch.ones(4, 32, 32), torch.ones(4, 32)
        >>> layer = MXFP8MoE.from_weights(w1, w2, router, Routing(top_k=2))
        >>> tuple(layer(torch.ones(3, 32, dtype=torch.bfloat16)).shape)
        (3, 32)
    """


class FP8MoE(OverFP8, MoE):
    """Router, top-k choice and experts over fp8 weights: :class:`MXFP8MoE` with those of :class:`FP8Experts`.

    Example:
        >>> import torch
        >>> from hipforge.nn import FP8MoE
        >>> from hipforge.nn.moe import Routing
        >>> w1, w2, router = torch.ones(4, 64, 32), torch.ones(4, 32, 32), torch.ones(4, 32)
        >>> layer = FP8MoE.from_weights(w1, w2, router, Routing(top_k=2))
        >>> tuple(layer(torch.ones(3, 32, dtype=torch.bfloat16)).shape)
        (3, 32)
    """


class MXFP4MoE(OverMXFP4, MoE):
    """Router, top-k choice and experts over MXFP4 weights: :class:`MXFP8MoE` with those of :class:`MXFP4Experts`.

    Example:
        >>> import torch
        >>> from hipforge.nn import MXFP4MoE
        >>> from hipforge.nn.moe import Routing
        >>> w1, w2, router = torch.ones(4, 64, 32), torch.ones(4, 32, 32), torch.ones(4, 32)
        >>> layer = MXFP4MoE.from_weights(w1, w2, router, Routing(top_k=2))
        >>> tuple(layer(torch.ones(3, 32, dtype=torch.bfloat16)).shape)
        (3, 32)
    """
