"""A decoder of MX-FP8 layers, built from a model of the transformers library: what examples/generate.py runs.

A layer is, with the residual stream beside it (each line a launch):

    norm of x + residual, quantised            norm of x + residual, quantised, and a 16-bit copy
    q, k, v projection                         router
    norm, rotate and store k and v             choice of experts
    attention, quantised                       slots sorted by expert
    output projection                          gate and up of the chosen experts
    norm of x + residual, quantised            SwiGLU, quantised
    gate and up                                down of the chosen experts
    SwiGLU, quantised                          weighted sum
    down
                                               (the right half follows the five of attention on the left)

9 launches in a dense layer, 13 in one with experts; torch makes views and allocates. Where GPUs share the layers, the
norms also add up their parts. Sparse attention adds two launches once a sequence has more keys than its blocks hold:
scores of blocks and their choice. Its index queries and keys are part of the first projection and of the launch that
stores k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from hipforge import all_reduce_residual_rms_mxfp8, residual_rms_mxfp8, rms_norm_mxfp8, swiglu_mxfp8
from hipforge.nn import CacheStep, MXFP8Linear, MXFP8MoE, PagedKVCache, Peers, SparseBlocks
from hipforge.nn.moe import Activation, Routing
from hipforge.ops.reference import dequantize_mxfp8


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model, each with a part of every product (tensor parallel).

    ``peers``: memory through which norms add up what the GPUs have; without it torch adds up.
    """

    rank: int = 0
    count: int = 1
    peers: Peers | None = None

    def part(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's part of a weight: rows (dim 0) of what splits its output, columns of what sums it."""
        if weight.shape[dim] % self.count:
            raise SystemExit(f"--tp {self.count} does not divide {tuple(weight.shape)} along dimension {dim}")
        return weight.chunk(self.count, dim)[self.rank].contiguous()

    def part_of_both(self, gate_up: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's part of a gate and of an up behind it."""
        return torch.cat([self.part(half, dim) for half in gate_up.chunk(2, dim)], dim)

    def once(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return a bias of what is summed: the first process's has it, the others' is zero."""
        return bias if bias is None or self.rank == 0 else torch.zeros_like(bias)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over all processes, in place."""
        if self.count > 1:
            torch.distributed.all_reduce(x)
        return x

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all processes next to each other."""
        if self.count == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.count)]
        torch.distributed.all_gather(parts, x)
        return torch.cat(parts, dim=1)


ALONE = Ranks()


@dataclass(frozen=True)
class Norm:
    """RMS norms of a model: ``n * (offset + weight)``."""

    epsilon: float
    offset: float = 0.0


class Attention(torch.nn.Module):
    def __init__(self, source: torch.nn.Module, index: int, norm: Norm, ranks: Ranks = ALONE) -> None:
        super().__init__()
        config: Any = source.config
        self.index, self.norm, self.dim = index, norm, source.head_dim
        of_k = config.num_key_value_heads // ranks.count
        self.heads: tuple[int, ...] = (config.num_attention_heads // ranks.count, of_k, of_k)
        projections = [source.q_proj, source.k_proj, source.v_proj]
        indexer = getattr(source, "indexer", None)
        self.blocks = None
        if indexer is not None:
            if (indexer.head_dim, indexer.num_heads) != (self.dim, of_k):
                raise SystemExit("index queries must be one for each KV head, as wide as it")
            self.blocks = SparseBlocks(indexer.topk_blocks, indexer.block_size, indexer.local_blocks)
            self.heads, projections = (*self.heads, of_k, 1), [*projections, indexer.q_proj, indexer.k_proj]
        self.qkv = fused_linear(*projections, ranks=ranks)
        self.out = linear(ranks.part(source.o_proj.weight, 1), ranks.once(source.o_proj.bias))
        self.window: int | None = getattr(source, "sliding_window", None)
        sinks = getattr(source, "sinks", None)
        self.register_buffer("sinks", None if sinks is None else ranks.part(sinks.detach().to(torch.float32), 0))
        norms = {"q_norm": source, "k_norm": source, "index_q_norm": indexer, "index_k_norm": indexer}
        for name, module in norms.items():
            part = getattr(module, name.removeprefix("index_"), None)
            self.register_buffer(name, None if part is None else part.weight.detach().to(torch.bfloat16))

    def forward(
        self, x: torch.Tensor, x_scale: torch.Tensor, step: CacheStep, cache: PagedKVCache, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """Return this process's part of the output."""
        tokens = x.shape[0]
        heads = self.qkv(x, x_scale).view(tokens, sum(self.heads), self.dim)
        q, k, v, *index = heads.split(self.heads, dim=1)
        index_q, index_k = index or (None, None)
        rotated = torch.empty(tokens, self.heads[0], self.dim, dtype=heads.dtype, device=heads.device)
        cache.rope_and_store(
            self.index, q, k, v, cos_sin, step, q_weight=self.q_norm, k_weight=self.k_norm,
            weight_offset=self.norm.offset, epsilon=self.norm.epsilon, q_out=rotated, index_q=index_q,
            index_k=index_k, index_q_weight=self.index_q_norm, index_k_weight=self.index_k_norm,
        )  # fmt: skip
        sinks = None if self.sinks is None else self.sinks.float()  # a cast of the model rounds them
        sparse = {} if self.blocks is None else {"index_q": index_q, "blocks": self.blocks}
        heads, scale = cache.attend(
            self.index, rotated, step, sinks=sinks, window=self.window, out_format="mxfp8", **sparse
        )
        return self.out(heads.view(tokens, -1), scale)


class DenseMLP(torch.nn.Module):
    """Gate, up and down; the activation quantises what down reads."""

    wants_copy = False  # of its input in 16 bits

    def __init__(self, gate_up: MXFP8Linear, down: MXFP8Linear, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, quantized: tuple[torch.Tensor, torch.Tensor], copy: torch.Tensor | None) -> torch.Tensor:
        """Return this process's part of the output."""
        act = self.activation
        gate_up = self.gate_up(*quantized)
        return self.down(*swiglu_mxfp8(gate_up, alpha=act.alpha, beta=act.beta, limit=act.limit))


class Experts(torch.nn.Module):
    wants_copy = True  # the router reads it

    def __init__(self, moe: MXFP8MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, quantized: tuple[torch.Tensor, torch.Tensor], copy: torch.Tensor | None) -> torch.Tensor:
        return self.moe(copy, quantized)


class DecoderLayer(torch.nn.Module):
    """Attention and what follows it; x is what the layer before adds to the residual stream, None in the first."""

    def __init__(
        self, source: torch.nn.Module, attention: Attention, mlp: DenseMLP | Experts, norm: Norm, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm, self.ranks = attention, mlp, norm, ranks
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.register_buffer(name, getattr(source, name).weight.detach().to(torch.bfloat16))

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        step: CacheStep,
        cache: PagedKVCache,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """Return what the layer adds last, this process's part of it; ``residual`` is changed in place."""
        q, scale = added_and_normed(x, residual, self.input_layernorm, self.norm, self.ranks)
        x = self.attention(q, scale, step, cache, cos_sin)
        copy = torch.empty_like(residual) if self.mlp.wants_copy else None
        q, scale = added_and_normed(x, residual, self.post_attention_layernorm, self.norm, self.ranks, copy)
        return self.mlp((q, scale), copy)


def added_and_normed(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, norm: Norm, ranks: Ranks = ALONE,
    copy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Add the processes' x to residual in place and return the norm, quantised; ``copy`` takes it in 16 bits."""
    if x is None:
        return rms_norm_mxfp8(residual, weight, norm.epsilon, weight_offset=norm.offset, also_out=copy)
    given: dict[str, Any] = {"weight_offset": norm.offset, "also_out": copy}
    if ranks.peers is not None:
        found = all_reduce_residual_rms_mxfp8(x, residual, weight, norm.epsilon, *ranks.peers, **given)
        if found is not None:  # the rows have room in the peers' memory
            return found[:2]
    return residual_rms_mxfp8(ranks.summed(x), residual, weight, norm.epsilon, **given)[:2]


class Decoder(torch.nn.Module):
    """Embedding, layers, last norm and head."""

    def __init__(self, source: Any, layers: list[DecoderLayer], norm: Norm, ranks: Ranks = ALONE) -> None:
        super().__init__()
        inner = source.model
        self.ranks = ranks
        self.norm, self.layers = norm, torch.nn.ModuleList(layers)
        self.register_buffer("embedding", inner.embed_tokens.weight.detach().to(torch.bfloat16))
        self.register_buffer("last_norm", inner.norm.weight.detach().to(torch.bfloat16))
        self.head = linear(ranks.part(source.lm_head.weight, 0))
        self.register_buffer("cos_sin", rotation_table(inner.rotary_emb, source.config.max_position_embeddings))

    def forward(self, tokens: torch.Tensor, step: CacheStep, cache: PagedKVCache) -> torch.Tensor:
        """Return logits bfloat16 [tokens, vocabulary]."""
        residual = self.embedding[tokens]
        x = None
        for layer in self.layers:
            x = layer(x, residual, step, cache, self.cos_sin)
        q, scale = added_and_normed(x, residual, self.last_norm, self.norm, self.ranks)
        return self.ranks.joined(self.head(q, scale))

    def make_cache(self, tokens: int, page_size: int = 16) -> PagedKVCache:
        """Return a cache for so many tokens in all."""
        attention = self.layers[0].attention
        pages = -(-tokens // page_size)
        place = self.embedding.device
        sparse = any(layer.attention.blocks is not None for layer in self.layers)
        return PagedKVCache(
            len(self.layers), pages, page_size, attention.heads[1], attention.dim, place,
            index_dtype=self.embedding.dtype if sparse else None,
        )  # fmt: skip


def rotation_table(rotary: torch.nn.Module, positions: int) -> torch.Tensor:
    """Return float32 [positions, rotary_dim]: cosines, then sines, from a model's own module."""
    inv_freq: Any = rotary.inv_freq
    half = inv_freq.shape[0]
    place = inv_freq.device
    cos, sin = rotary(torch.zeros(1, device=place), torch.arange(positions, device=place)[None])
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1).contiguous()


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> MXFP8Linear:
    """Return a layer of a weight, which is quantised, and a bias, which is rounded to bfloat16."""
    plain = torch.nn.Linear(weight.shape[1], 1, bias=False, device="meta")
    plain.weight = torch.nn.Parameter(weight.detach())
    layer = MXFP8Linear.from_linear(plain)
    if bias is not None:
        layer.bias = bias.detach().to(torch.bfloat16)
    return layer


def fused_linear(*parts: Any, ranks: Ranks = ALONE) -> MXFP8Linear:
    """Return linear layers of one input as one, their outputs next to each other; of each what this process has."""
    biases = None if parts[0].bias is None else torch.cat([ranks.part(part.bias, 0) for part in parts])
    return linear(torch.cat([ranks.part(part.weight, 0) for part in parts]), biases)


def from_qwen3(source: Any, ranks: Ranks = ALONE) -> Decoder:
    """Return a dense model with norms of q and k: Qwen3, and without those norms Llama; of it one process's part."""
    norm = Norm(source.config.rms_norm_eps)
    layers = []
    for index, layer in enumerate(source.model.layers):
        mlp = layer.mlp
        gate_up, down = fused_linear(mlp.gate_proj, mlp.up_proj, ranks=ranks), ranks.part(mlp.down_proj.weight, 1)
        dense = DenseMLP(gate_up, linear(down), Activation())
        layers.append(DecoderLayer(layer, Attention(layer.self_attn, index, norm, ranks), dense, norm, ranks))
    return Decoder(source, layers, norm, ranks)


def from_qwen3_moe(source: Any, ranks: Ranks = ALONE) -> Decoder:
    """Return Qwen3 with experts; of each expert, one process's part."""
    config = source.config
    norm, routing = Norm(config.rms_norm_eps), Routing(config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    layers = []
    for index, layer in enumerate(source.model.layers):
        experts, router = layer.mlp.experts, layer.mlp.gate.weight.detach().float()
        moe = MXFP8MoE.from_weights(
            ranks.part_of_both(experts.gate_up_proj.detach(), 1), ranks.part(experts.down_proj.detach(), 2), router,
            routing,
        )  # fmt: skip
        layers.append(DecoderLayer(layer, Attention(layer.self_attn, index, norm, ranks), Experts(moe), norm, ranks))
    return Decoder(source, layers, norm, ranks)


def from_minimax_m3(source: Any) -> Decoder:
    """Return MiniMax-M3's text model; the shared expert is the last of the experts."""
    config = source.config
    norm = Norm(config.rms_norm_eps, offset=1.0)
    activation = Activation(config.swiglu_alpha, 1.0, config.swiglu_limit)
    routing = Routing(config.num_experts_per_tok, "sigmoid", scale=config.routed_scaling_factor, shared_experts=1)
    if not {*config.layer_types} <= {"full_attention", "minimax_m3_sparse"}:
        raise SystemExit(f"layers must have full_attention or minimax_m3_sparse; got {config.layer_types}")
    layers = []
    for index, layer in enumerate(source.model.layers):
        mlp: DenseMLP | Experts
        if config.mlp_layer_types[index] == "dense":
            gate_up, down = layer.mlp.gate_up_proj, layer.mlp.down_proj
            mlp = DenseMLP(MXFP8Linear.from_linear(gate_up), MXFP8Linear.from_linear(down), activation)
        else:
            experts, shared, gate = layer.mlp.experts, layer.mlp.shared_experts, layer.mlp.gate
            mlp = Experts(MXFP8MoE.from_weights(
                torch.cat((experts.gate_up_proj.detach(), shared.gate_up_proj.weight.detach()[None])),
                torch.cat((experts.down_proj.detach(), shared.down_proj.weight.detach()[None])),
                gate.weight.detach().float(), routing, activation, correction_bias=gate.e_score_correction_bias,
            ))  # fmt: skip
        layers.append(DecoderLayer(layer, Attention(layer.self_attn, index, norm), mlp, norm))
    return Decoder(source, layers, norm)


def from_gpt_oss(source: Any, ranks: Ranks = ALONE) -> Decoder:
    """Return gpt-oss, or one process's part: sinks, a window in every other layer, biases, gate and up by turns."""
    config = source.config
    norm = Norm(config.rms_norm_eps)
    first = source.model.layers[0].mlp.experts
    activation = Activation(first.alpha, 1.0, first.limit, interleaved=True)
    routing = Routing(config.num_experts_per_tok)  # a softmax over those chosen is one over all, renormalised
    layers = []
    for index, layer in enumerate(source.model.layers):
        experts, router = layer.mlp.experts, layer.mlp.router
        gate_up, down = experts.gate_up_proj.detach().transpose(1, 2), experts.down_proj.detach().transpose(1, 2)
        moe = MXFP8MoE.from_weights(
            ranks.part(gate_up, 1), ranks.part(down, 2), router.weight.detach().float(), routing, activation,
            router_bias=router.bias, w1_bias=ranks.part(experts.gate_up_proj_bias, 1),
            w2_bias=ranks.once(experts.down_proj_bias),
        )  # fmt: skip
        layers.append(DecoderLayer(layer, Attention(layer.self_attn, index, norm, ranks), Experts(moe), norm, ranks))
    return Decoder(source, layers, norm, ranks)


def decoded(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize_mxfp8(weight, scale, torch.float32)


@torch.no_grad()
def read_back(model: Decoder, source: Any) -> None:
    """Give the transformers model the weights that ``model`` really holds: dequantised, biases rounded to bf16."""
    source.lm_head.weight = torch.nn.Parameter(decoded(model.head.weight, model.head.weight_scale))
    for layer, original in zip(model.layers, source.model.layers, strict=True):
        attention, theirs = layer.attention, original.self_attn
        indexer = getattr(theirs, "indexer", None)
        index = [] if indexer is None else [indexer.q_proj, indexer.k_proj]
        _split(attention.qkv, theirs.q_proj, theirs.k_proj, theirs.v_proj, *index)
        _split(attention.out, theirs.o_proj)
        mlp = original.mlp
        if isinstance(layer.mlp, DenseMLP):
            fused = getattr(mlp, "gate_up_proj", None)
            _split(layer.mlp.gate_up, *([mlp.gate_proj, mlp.up_proj] if fused is None else [fused]))
            _split(layer.mlp.down, mlp.down_proj)
            continue
        moe = layer.mlp.moe
        gate_up, down = decoded(moe.w1, moe.w1_scale), decoded(moe.w2, moe.w2_scale)
        if moe.activation.interleaved:  # stored [in, out]
            mlp.experts.gate_up_proj.copy_(gate_up.transpose(1, 2))
            mlp.experts.down_proj.copy_(down.transpose(1, 2))
            continue
        routed = moe.router.shape[0]
        mlp.experts.gate_up_proj.copy_(gate_up[:routed])
        mlp.experts.down_proj.copy_(down[:routed])
        if routed == len(gate_up):
            continue
        mlp.shared_experts.gate_up_proj.weight.copy_(gate_up[routed])
        mlp.shared_experts.down_proj.weight.copy_(down[routed])


def _split(layer: MXFP8Linear, *parts: Any) -> None:
    rows = [part.out_features for part in parts]
    for part, piece in zip(parts, decoded(layer.weight, layer.weight_scale).split(rows), strict=True):
        part.weight.copy_(piece)
    if layer.bias is not None:
        for part, piece in zip(parts, layer.bias.float().split(rows), strict=True):
            part.bias.copy_(piece)


FROM: dict[str, Callable[..., Decoder]] = {
    "qwen3": from_qwen3,
    "qwen3_moe": from_qwen3_moe,
    "minimax_m3": from_minimax_m3,
    "gpt_oss": from_gpt_oss,
}
SHARED = ("qwen3", "qwen3_moe", "gpt_oss")
"""Those of which several processes can have a part each."""


if __name__ == "__main__":  # the layers alone do nothing
    print(__doc__)
