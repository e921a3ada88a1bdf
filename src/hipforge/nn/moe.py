"""A mixture of experts with MX-FP8 weights: router, choice, experts, weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipforge.errors import GuardError
from hipforge.nn.payload import Quantized, accepted, input_rows, quantized
from hipforge.ops.core.checks import require_dtype, require_rank, require_shape, require_tensor
from hipforge.ops.moe import DEFAULT_BLOCK_M, fused_moe_mxfp8
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


class MXFP8MoE(Quantized):
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

    router: torch.Tensor
    router_bias: torch.Tensor | None
    correction_bias: torch.Tensor | None
    w1: torch.Tensor
    w1_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w1_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    def __init__(
        self,
        w1: tuple[torch.Tensor, torch.Tensor],
        w2: tuple[torch.Tensor, torch.Tensor],
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
        """Take MX-FP8 weights as they are; see :meth:`from_weights` for ones to quantise.

        Raises:
            GuardError: weights, router or biases that do not fit each other.
        """
        super().__init__()
        self.routing, self.activation, self.block_m = routing, activation or Activation(), block_m
        (w1_q, w1_scale), (w2_q, w2_scale) = accepted(*w1, "w1"), accepted(*w2, "w2")
        require_rank("w1", w1_q, 3, "[E, 2*I, H]")
        require_rank("w2", w2_q, 3, "[E, H, I]")
        experts, width, inner = w2_q.shape
        require_shape("w1", w1_q, (experts, 2 * inner, width), "[E, 2*I, H] with w2's E, I and H")
        routed = experts - routing.shared_experts
        if routed < routing.top_k:
            raise GuardError(f"there must be at least top_k + shared_experts experts, "
                             f"{routing.top_k + routing.shared_experts}; got {experts}")  # fmt: skip
        require_tensor(router=router)
        require_dtype("router", router, (torch.float32, torch.bfloat16))
        require_shape("router", router, (routed, width), "[E - shared_experts, H]")
        shapes = {
            "router_bias": (router_bias, (routed,)),
            "correction_bias": (correction_bias, (routed,)),
            "w1_bias": (w1_bias, (experts, 2 * inner)),
            "w2_bias": (w2_bias, (experts, width)),
        }
        held = {"w1": w1_q, "w1_scale": w1_scale, "w2": w2_q, "w2_scale": w2_scale, "router": router.contiguous()}
        for name, tensor in held.items():
            self.register_buffer(name, tensor.detach())
        for name, (bias, shape) in shapes.items():
            if bias is not None:
                require_shape(name, bias, shape, "that of what it is added to")
                bias = bias.detach().to(torch.float32).contiguous()
            self.register_buffer(name, bias)

    @classmethod
    def from_weights(
        cls,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router: torch.Tensor,
        routing: Routing,
        activation: Activation | None = None,
        **biases: torch.Tensor | None,
    ) -> MXFP8MoE:
        """Quantise experts' weights, on their device.

        Args:
            w1: float32, float16 or bfloat16 [E, 2 I, H]: rows of the gate, then of up, or interleaved.
            w2: [E, H, I].
            router: float32 or bfloat16 [E - shared_experts, H].
            routing: how experts are chosen.
            activation: SwiGLU's parameters.
            biases: ``router_bias``, ``correction_bias``, ``w1_bias``, ``w2_bias``.
        """
        return cls(quantized(w1, "w1"), quantized(w2, "w2"), router, routing, activation, **biases)  # type: ignore[arg-type]

    def forward(
        self,
        x: torch.Tensor,
        quantized_x: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the experts' weighted sum.

        Args:
            x: float16 or bfloat16 [..., H]: what the router reads, and what is quantised for the experts.
            quantized_x: (e4m3 elements [T, H], e8m0 bytes [T, H / 32]) of x, where a norm has made both.
            out: contiguous [T, H] to write into.

        Returns:
            [..., H] of x's dtype.

        Raises:
            GuardError: an argument is not of this form, or x requires a gradient while gradients are recorded.
        """
        rows = input_rows(x, self.w2.shape[1], "MXFP8MoE")
        chosen, act = self.routing, self.activation
        weights, ids = topk_gating(
            router_gemm(rows, self.router, self.router_bias), chosen.top_k, scoring=chosen.scoring,
            bias=self.correction_bias, renormalize=chosen.renormalize, groups=chosen.groups,
            topk_groups=chosen.topk_groups, scale=chosen.scale, shared_experts=chosen.shared_experts,
        )  # fmt: skip
        hidden, hidden_scale = (rows, None) if quantized_x is None else quantized_x
        if out is None:
            out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        fused_moe_mxfp8(
            hidden, self.w1, self.w1_scale, self.w2, self.w2_scale, weights, ids, block_m=self.block_m, alpha=act.alpha,
            beta=act.beta, limit=act.limit, interleaved=act.interleaved, hidden_scale=hidden_scale,
            w1_bias=self.w1_bias, w2_bias=self.w2_bias, out=out,
        )  # fmt: skip
        return out.view(x.shape)

    def input_like(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros that :meth:`forward` takes, [rows, H] on the layer's device."""
        return torch.zeros(rows, self.w2.shape[1], dtype=dtype, device=self.w2.device)

    def extra_repr(self) -> str:
        """Return what ``print`` shows between the parentheses."""
        experts, width, inner = self.w2.shape
        return f"experts={experts}, hidden={width}, intermediate={inner}, {self.routing}, {self.activation}"
