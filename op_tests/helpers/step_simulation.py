"""A decoder layer in float64 with the roundings of hipforge's ops, over the weights of a transformers model.

Every tensor that a launch writes is rounded as it writes it, and nothing else is: bf16 after a product, a norm, a
rotation or a sum; MX-FP8 where a product reads; fp8 in the cache. Softmax weights stay exact. Written from the models'
definitions, one token-by-expert matrix at a time; of hipforge it uses the reference quantiser alone.
"""

from __future__ import annotations

from typing import Any

import torch

from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference import dequantize_mxfp8, quantize_mxfp8


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16().double()


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    q, scale = quantize_mxfp8(x.float().contiguous(), fp8_dtypes("cpu")[0])
    return dequantize_mxfp8(q, scale, torch.float64)


def fp8(x: torch.Tensor) -> torch.Tensor:
    own = fp8_dtypes("cpu")[0]
    return x.float().clamp(-torch.finfo(own).max, torch.finfo(own).max).to(own).double()


def product(x: torch.Tensor, linear: Any) -> torch.Tensor:
    y = x @ linear.weight.double().T
    return bf16(y if linear.bias is None else y + bf16(linear.bias.double()))


def rms_norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    weight = bf16(norm.weight.double())
    if "Qwen3" in type(norm).__name__ or "GptOss" in type(norm).__name__:
        return bf16(bf16(normed) * weight)
    return bf16(normed * (1.0 + weight))


class Simulation:
    """Layers of a model whose weights are already those that the device holds."""

    def __init__(self, source: Any) -> None:
        self.source, self.config = source, source.config

    def attention(self, index: int, stream: torch.Tensor) -> torch.Tensor:
        """What the attention of a layer adds to the stream [T, H] of one sequence."""
        layer = self.source.model.layers[index]
        part, tokens = layer.self_attn, len(stream)
        x = mxfp8(rms_norm(stream, layer.input_layernorm))
        q, k, v = (
            product(x, linear).view(tokens, -1, part.head_dim) for linear in (part.q_proj, part.k_proj, part.v_proj)
        )
        if getattr(part, "q_norm", None) is not None:
            q, k = rms_norm(q, part.q_norm), rms_norm(k, part.k_norm)
        q, k = self._rotated(q), self._rotated(k)
        groups = q.shape[1] // k.shape[1]
        keys, values = (fp8(y).repeat_interleave(groups, 1) for y in (k, v))
        scores = torch.einsum("thd,shd->hts", q, keys) * part.scaling
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        window = getattr(part, "sliding_window", None) or tokens
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        if getattr(part, "indexer", None) is not None:
            hidden = ~self._chosen(part.indexer, x)
            scores = scores.masked_fill(hidden.repeat_interleave(groups, 0), -torch.inf)
        sinks = getattr(part, "sinks", None)
        if sinks is not None:  # a key without a value
            column = sinks.double()[:, None, None].expand(-1, tokens, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :tokens]
        heads = torch.einsum("hts,shd->thd", weights, values)
        return product(mxfp8(heads.flatten(1)), part.o_proj)

    def _chosen(self, indexer: Any, x: torch.Tensor) -> torch.Tensor:
        """Which keys the indexer lets a token see besides the causal mask, bool [KV heads, T, T]."""
        tokens = len(x)
        q, k = (product(x, linear).view(tokens, -1, indexer.head_dim) for linear in (indexer.q_proj, indexer.k_proj))
        q, k = self._rotated(rms_norm(q, indexer.q_norm)), self._rotated(rms_norm(k, indexer.k_norm))[:, 0]
        chosen = torch.zeros(q.shape[1], tokens, tokens, dtype=torch.bool)
        size = indexer.block_size
        for group in range(q.shape[1]):
            for token in range(tokens):
                products = (k[: token + 1] @ q[token, group]).split(size)
                forced = range(len(products) - indexer.local_blocks, len(products))
                order = sorted(range(len(products)), key=lambda i: (i not in forced, -products[i].max()))
                for block in order[: indexer.topk_blocks]:
                    chosen[group, token, size * block : size * (block + 1)] = True
        return chosen

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        rotary = self.source.model.rotary_emb
        half = rotary.inv_freq.shape[0]
        cos, sin = (
            table[0, :, None, :half].double()
            for table in rotary(torch.zeros(1, dtype=torch.float32), torch.arange(len(x))[None])
        )
        a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
        return torch.cat((bf16(a * cos - b * sin), bf16(b * cos + a * sin), rest), -1)

    def mlp(self, index: int, stream: torch.Tensor) -> torch.Tensor:
        """What a layer adds after its attention."""
        layer = self.source.model.layers[index]
        mlp = layer.mlp
        normed = rms_norm(stream, layer.post_attention_layernorm)
        x = mxfp8(normed)
        if hasattr(mlp, "gate_proj"):
            return product(mxfp8(_swiglu(product(x, mlp.gate_proj), product(x, mlp.up_proj))), mlp.down_proj)
        plain = self.config.model_type == "qwen3_moe"
        clamp = () if plain else self._clamp(mlp)
        if hasattr(mlp, "gate_up_proj"):
            return product(mxfp8(_swiglu(*product(x, mlp.gate_up_proj).chunk(2, -1), *clamp)), mlp.down_proj)
        return self._experts(mlp, normed, x, clamp)

    def _clamp(self, mlp: Any) -> tuple[float, float, float]:
        """SwiGLU's alpha, beta and limit: gpt-oss's are its experts', whatever the configuration says."""
        if self.config.model_type == "gpt_oss":
            return mlp.experts.alpha, 1.0, mlp.experts.limit
        return self.config.swiglu_alpha, 1.0, self.config.swiglu_limit

    def _experts(self, mlp: Any, normed: torch.Tensor, x: torch.Tensor, clamp: tuple[float, ...]) -> torch.Tensor:
        experts, top_k = mlp.experts, self.config.num_experts_per_tok
        if hasattr(mlp, "router"):  # gpt-oss: a softmax over the logits of those chosen
            logits = normed @ mlp.router.weight.double().T + mlp.router.bias.double()
            best, chosen = logits.topk(top_k, -1)
            weights = best.softmax(-1)
        elif not hasattr(mlp.gate, "e_score_correction_bias"):  # Qwen3
            best, chosen = (normed @ mlp.gate.weight.double().T).softmax(-1).topk(top_k, -1)
            weights = best / best.sum(-1, keepdim=True)
        else:
            scores = torch.sigmoid(normed @ mlp.gate.weight.double().T)
            chosen = (scores + mlp.gate.e_score_correction_bias.double()).topk(top_k, -1).indices
            weights = scores.gather(1, chosen)
            weights = self.config.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(normed)
        for expert in range(len(experts.down_proj)):
            factor = torch.where(chosen == expert, weights, 0).sum(-1, keepdim=True)
            gate_up, down = experts.gate_up_proj[expert].double(), experts.down_proj[expert].double()
            if hasattr(mlp, "router"):  # stored [in, out], gate and up interleaved
                y = bf16(x @ gate_up + experts.gate_up_proj_bias[expert].double())
                y = mxfp8(_swiglu(y[:, ::2], y[:, 1::2], *clamp)) @ down + experts.down_proj_bias[expert].double()
            else:
                y = mxfp8(_swiglu(*bf16(x @ gate_up.T).chunk(2, -1), *clamp)) @ down.T
            total += bf16(y * factor)
        if hasattr(mlp, "shared_experts"):
            shared = mlp.shared_experts
            gate_up = product(x, shared.gate_up_proj).chunk(2, -1)
            total += product(mxfp8(_swiglu(*gate_up, *clamp)), shared.down_proj)
        return bf16(total)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The whole model over one sequence."""
        stream = bf16(self.source.model.embed_tokens.weight[tokens].double())
        for index in range(len(self.source.model.layers)):
            stream = bf16(stream + self.attention(index, stream))
            stream = bf16(stream + self.mlp(index, stream))
        return product(mxfp8(rms_norm(stream, self.source.model.norm)), self.source.lm_head)


def _swiglu(
    gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float = float("inf")
) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + beta) * gate * torch.sigmoid(alpha * gate)
