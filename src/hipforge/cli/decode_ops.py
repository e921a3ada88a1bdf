"""The ops of a decode step, in the order of their launches: what ``time-model`` models and ``bench-model`` measures.

Layers are those of examples/generate.py. A model that is a part on one of several GPUs (``decode_model.part``) also has
the sums of a layer; ``time-model`` models such a part without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch

import hipforge
from hipforge import devices
from hipforge.cli.decode_model import Layer, Linear, Model, Pair, add_up_in_products
from hipforge.cli.decode_ranks import Ranks
from hipforge.cli.decode_step import BLOCK
from hipforge.jit import registry
from hipforge.nn import CacheStep, PagedKVCache
from hipforge.nn.cache import UNSPLIT_KEYS
from hipforge.ops import norm_router, summed_linear
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fused_linear import residual_rms_mxfp8_linear, swiglu_mxfp8_linear
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8
from hipforge.ops.mxfp4_grouped_gemm import grouped_swiglu_mxfp4
from hipforge.ops.mxfp8_gemm.kernels import row_stream_made
from hipforge.ops.mxfp8_grouped_gemm import token
from hipforge.ops.norm_router import residual_rms_mxfp8_router

PAGE_SIZE = 64
BLOCK_M = 64  # slots of a tile, as hipforge.nn.MXFP8MoE has
EPSILON = 1e-6
ALPHA = 1.702  # of SwiGLU where it is clamped
MOVES_ON = "next position"  # the op that makes a step the next one


@dataclass(frozen=True)
class Op:
    """One op of a step.

    Attributes:
        name: what it does.
        start: where its operands are: ``cold`` for weights and cache, ``mall`` for what the launch before has written,
            ``torch`` for what a modelled step leaves out: an op of torch's, and the choice of tokens.
        call: makes its launches.
        reads: bytes of weights, scales and cache that it reads, of the step that ran last.
        of_context: whether its time depends on the length of the context.
        planned: a call of the op that is planned as this one is, where there is one to ask.
    """

    name: str
    start: Literal["cold", "mall", "torch"]
    call: Callable[[], object]
    reads: Callable[[], int] = lambda: 0
    of_context: bool = False
    planned: partial[Any] | None = None

    def path(self) -> str:
        """Return the path that the op takes: ``kernel``, ``triton`` or ``torch``."""
        if self.planned is None:
            return self.start if self.start == "torch" else "kernel"
        return str(hipforge.explain(self.planned.func, *self.planned.args, **self.planned.keywords).path)


@dataclass(frozen=True)
class Chain:
    """A step over ``batch`` sequences: its ops in order, and the tensors that they read and write.

    Attributes:
        ops: launches of a step, in order; each step moves every sequence by one token.
        tokens: int64 [batch], what a step reads and, by argmax, leaves.
        logits: bfloat16 [batch, V], this process's of those that share the model.
        cache: keys and values.
        tables: int32 [batch, pages] of the cache.
        start: tensors that move, and what they start with.
        ranks: the processes that share the model.
    """

    ops: list[Op]
    tokens: torch.Tensor
    logits: torch.Tensor
    cache: PagedKVCache
    tables: torch.Tensor
    start: list[tuple[torch.Tensor, torch.Tensor]]
    ranks: Ranks

    def all_logits(self) -> torch.Tensor:
        """Return the last step's logits of all processes; every process calls it."""
        return self.ranks.joined(self.logits)

    def reset(self) -> None:
        """Go back to the first step; keys and values stay."""
        for moved, first in self.start:
            moved.copy_(first)


def _steps(cache: PagedKVCache, batch: int, context: int, ahead: int) -> tuple[CacheStep, torch.Tensor, torch.Tensor]:
    """Return the step that ends at ``context`` keys, and what it and the next ones are: a row each, and its number.

    A row has positions, slots, and lengths, two of them to a word: a step's tensors are views of one row, so that one
    launch moves on.
    """
    whole = cache.extend(range(batch), context + ahead)
    tables, place = whole.block_tables, cache.device
    # The last row stands for what there is no room for: a step moves on after it has run.
    last = context + ahead - 1
    positions = torch.arange(context - 1, last + 2, device=place).clamp(max=last)[:, None].expand(-1, batch)
    pages = tables[:, (positions[:, 0] // PAGE_SIZE)].T.long()
    rows = torch.zeros(len(positions), 2 * batch + -(-batch // 2), dtype=torch.int64, device=place)
    rows[:, :batch], rows[:, batch : 2 * batch] = positions, pages * PAGE_SIZE + positions % PAGE_SIZE
    rows[:, 2 * batch :].view(torch.int32)[:, :batch] = positions + 1
    row = rows[:1].clone()
    lengths = row[0, 2 * batch :].view(torch.int32)[:batch]
    return CacheStep(1, row[0, :batch], row[0, batch : 2 * batch], tables, lengths), rows, row


def chain(model: Model, batch: int, context: int, ahead: int = 0, fused: bool | None = None) -> Chain:
    """Return a step for ``batch`` sequences with ``context`` keys each, the new token included.

    Args:
        model: its parameters.
        batch: sequences.
        context: keys of each.
        ahead: further steps that there is room for.
        fused: whether a product makes its activations, where :mod:`hipforge.ops.fused_linear` can; None:
            where that is one launch.
    """
    shape, place = model.shape, model.place
    fused = devices.current().arch_of() in registry.module(row_stream_made.MODULE).archs if fused is None else fused
    (heads, kv_heads), dim, hidden = shape.heads, shape.head_dim, shape.hidden
    own = model.source.kept
    chosen: Any = shape.sparse
    cache = PagedKVCache(
        len(model.layers) if own else 1, batch * -(-(context + ahead) // PAGE_SIZE), PAGE_SIZE, kv_heads, dim, place,
        index_dtype=None if shape.sparse is None else torch.bfloat16,
    )  # fmt: skip
    step, rows, row = _steps(cache, batch, context, ahead)
    counter = torch.zeros(1, dtype=torch.int64, device=place)

    def new(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=place)

    def mxfp8(rows: int, columns: int) -> Pair:
        elements = new(rows, columns, dtype=torch.uint8).view(fp8_dtypes(place)[0])
        return elements, new(rows, columns // BLOCK, dtype=torch.uint8)

    residual, copy, logits = new(batch, hidden), new(batch, hidden), new(batch, shape.vocabulary)
    x_part, x, add_parts = model.ranks.summed(new(batch, hidden))
    peers: Any = model.ranks.peers(batch, hidden)  # through which norms add up, or products
    in_products = peers is not None and fused and add_up_in_products(model, batch)
    choosers = model.ranks.choosers(batch)
    streams = [residual, new(batch, hidden)]  # the residual stream, and where a fused norm writes the next one
    # Different tokens: equal ones would choose the same experts, in the first step only.
    drawn_tokens = torch.randint(len(model.embedding), (batch,), generator=torch.Generator().manual_seed(0))
    tokens = drawn_tokens.to(place)
    normed, attended = mxfp8(batch, hidden), mxfp8(batch, heads * dim)
    rotated, sections = new(batch, heads, dim), (heads, kv_heads, kv_heads)
    qkv, indexed = new(batch, sum(sections) * dim), new(batch, (sum(sections) + kv_heads + 1) * dim)
    half = shape.rotary_dim // 2
    frequency = shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(context + ahead)[:, None] * frequency
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).float().to(place)
    activation: dict[str, Any] = {} if shape.limit is None else {"alpha": ALPHA, "beta": 1.0, "limit": shape.limit}
    activation["interleaved"] = shape.biases
    parts: Any = SimpleNamespace()  # what only a model with experts, or only one without, has
    if shape.layers[0]:
        parts.gate_up, parts.inner = new(batch, 2 * shape.inner), mxfp8(batch, shape.inner)
    total, slots = shape.experts + shape.shared, batch * (shape.top_k + shape.shared)
    plain = not shape.biases  # gate and up do not take turns
    one_token = fused and batch == 1 and plain and token.refusal(slots, hidden, shape.expert_inner) is None
    if shape.layers[1]:
        drawn = torch.randn(batch, shape.experts, generator=torch.Generator().manual_seed(0))
        parts.scores, parts.expert_inner = drawn.to(place), mxfp8(slots, shape.expert_inner)
        # Weights that are zero score all experts alike: the choice stays that of the scores drawn.
        parts.scored = parts.scores if own else torch.empty_like(parts.scores)
        parts.weights, parts.ids = new(batch, slots // batch, dtype=torch.float32), new(batch, slots // batch).int()
        parts.slot_out, parts.slot_inner = new(slots, hidden), token.new_inner(slots, hidden, shape.expert_inner, place)

    ops: list[Op] = []

    def op(name: str, start: Any, call: Callable[[], object], reads: Any = None, **named: Any) -> None:
        if isinstance(call, partial):
            named.setdefault("planned", call)
        ops.append(Op(name, start, call, reads or (lambda: 0), **named))

    def product(name: str, given: Pair, by: Linear, out: torch.Tensor) -> None:
        call = partial(hipforge.mxfp8_linear, *given, by.weight, by.scale, by.bias, out=out)
        op(name, "cold", call, lambda: by.nbytes)

    def whole() -> None:
        if model.ranks.count > 1 and peers is None:
            op("sum over GPUs", "torch", add_parts)

    def norm(weight: torch.Tensor, first: bool = False, copied: bool = False) -> None:
        name = "norm + quantise, copy" if copied else "norm + quantise"
        given: dict[str, Any] = {"weight_offset": shape.offset, "out": normed[0], "scale_out": normed[1]}
        given["also_out"] = copy if copied else None
        if first:
            op(name, "mall", partial(hipforge.rms_norm_mxfp8, residual, weight, EPSILON, **given))
        elif peers is not None:
            call = partial(hipforge.all_reduce_residual_rms_mxfp8, x, streams[0], weight, EPSILON, *peers, **given)
            op(f"sum over GPUs, {name}", "mall", call)
        else:
            op(name, "mall", partial(hipforge.residual_rms_mxfp8, x, streams[0], weight, EPSILON, **given))

    def summed_product(name: str, weight: torch.Tensor, by: Linear, out: torch.Tensor) -> None:
        call = partial(
            summed_linear.summed_rms_mxfp8_linear, peers, streams[0], weight, EPSILON, by.weight, by.scale, by.bias,
            weight_offset=shape.offset, out=out, sum_out=streams[1],
        )  # fmt: skip
        op(f"sum over GPUs, norm, {name}", "cold", lambda: call(), lambda: by.nbytes)
        streams.reverse()

    def sent_product(name: str, product: Callable[..., None], *given: torch.Tensor, by: Linear, **more: Any) -> None:
        call = partial(product, *given, by.weight, by.scale, peers, by.bias, **more)
        op(f"{name}, to all GPUs", "cold", lambda: call(), lambda: by.nbytes)

    def normed_product(name: str, weight: torch.Tensor, by: Linear, out: torch.Tensor, first: bool = False) -> None:
        if in_products and not first:
            return summed_product(name, weight, by, out)
        alone = first or peers is not None or not fused
        if alone or row_stream_made.norm_refusal(batch, *by.weight.shape) is not None:
            norm(weight, first)
            product(name, normed, by, out)
            return
        call = partial(
            residual_rms_mxfp8_linear, x, streams[0], weight, EPSILON, by.weight, by.scale, by.bias,
            weight_offset=shape.offset, out=out, sum_out=streams[1],
        )  # fmt: skip
        op(f"norm, {name}", "cold", call, lambda: by.nbytes)
        streams.reverse()

    def attention(index: int, layer: Layer) -> None:
        at, weights = index if own else 0, layer.head_norms
        window = shape.window if index % 2 == 0 else None
        options: dict[str, Any] = {"sinks": layer.sinks, "window": window, "out_format": "mxfp8"}
        given: dict[str, Any] = {}
        if layer.index_norms is None:
            q, k, v = qkv.view(batch, -1, dim).split(sections, 1)
        else:
            q, k, v, *of_index = indexed.view(batch, -1, dim).split((*sections, kv_heads, 1), 1)
            given = dict(zip(("index_q", "index_k", "index_q_weight", "index_k_weight"),
                             (*of_index, *layer.index_norms), strict=True))  # fmt: skip
        op("norm, rope, store k v" + (", index" if given else ""), "mall", lambda: cache.rope_and_store(
            at, q, k, v, cos_sin, step, q_weight=weights[0], k_weight=weights[1], weight_offset=shape.offset,
            epsilon=EPSILON, q_out=rotated, **given,
        ))  # fmt: skip
        if given and step.block_tables.shape[1] * PAGE_SIZE > chosen.most_keys:
            over_blocks(at, given["index_q"], options)
            return
        op(
            "attention, quantise" if window is None else "attention in a window", "cold",
            lambda: cache.attend(
                at, rotated, step, out=attended[0].view(batch, heads, dim), scale_out=attended[1], **options
            ),
            lambda: batch * min(context, window or context) * 2 * kv_heads * dim, of_context=window is None,
            planned=partial(
                hipforge.decode_attention_fp8, rotated[:, None], cache.k[at], cache.v[at], step.block_tables,
                step.seqlens, cache.k_scale[at], cache.v_scale[at], **options,
            ),
        )  # fmt: skip

    def around_attention(layer: Layer) -> None:
        latents = new(batch, layer.qkv.weight.shape[0])
        norm_weight: Any = layer.latent_norm
        rank = norm_weight.numel()
        queries, groups = mxfp8(batch, rank), None
        # The norm takes rows that follow each other; those of the latents have the keys' behind them, and take as long.
        of_queries = latents if batch == 1 else new(batch, rank)
        by_reads = [(each, by) for reads in ("hidden", "latent", "groups", "heads") for each, by in
                    zip(shape.projections, layer.around, strict=True) if each.reads == reads]  # fmt: skip
        for number, (each, by) in enumerate(by_reads):
            given = {"hidden": normed, "latent": queries}.get(each.reads) or mxfp8(batch, each.k)
            if each.reads == "latent" and by_reads[number - 1][0].reads == "hidden":
                op("norm of the queries' latent + quantise", "mall", partial(
                    hipforge.rms_norm_mxfp8, of_queries[:, :rank], norm_weight, EPSILON, out=queries[0],
                    scale_out=queries[1],
                ))  # fmt: skip
            if each.reads == "groups":
                groups = new(batch, each.count * each.n)
                for _ in range(each.count):
                    product(each.name, given, by, new(batch, each.n))
            elif each.reads == "heads":
                if groups is not None:
                    op("quantise", "mall", partial(hipforge.mxfp8_quantize, groups, out=given[0], scale_out=given[1]))
                product(each.name, given, by, x_part)
            else:
                product(each.name, given, by, latents if number == 0 else new(batch, each.n))

    def over_blocks(at: int, index_q: torch.Tensor, options: dict[str, Any]) -> None:
        lists, size, all_keys = (step.block_tables, step.seqlens), chosen.block_size, cache.index
        assert all_keys is not None, "a model of sparse attention has a cache of index keys"
        keys = all_keys[at]
        scores = hipforge.sparse_block_scores(index_q[:, None], keys, *lists, block_size=size)
        names = "ids_out", "tables_out", "lengths_out"
        how: dict[str, Any] = {"page_size": PAGE_SIZE, "block_size": size}
        how |= {"topk": chosen.topk, "local_blocks": chosen.local_blocks}
        found = hipforge.sparse_topk_blocks(scores, step.block_tables, step.seqlens, **how)
        op("scores of key blocks", "cold", partial(
            hipforge.sparse_block_scores, index_q[:, None], keys, *lists, block_size=size, out=scores,
        ), lambda: batch * context * dim * keys.element_size(), of_context=True)  # fmt: skip
        op("choice of key blocks", "mall", partial(
            hipforge.sparse_topk_blocks, scores, *lists, **{**how, **dict(zip(names, found, strict=True))},
        ), of_context=True)  # fmt: skip
        op("attention over chosen blocks, quantise", "cold", partial(
            hipforge.decode_attention_fp8, rotated[:, None], cache.k[at], cache.v[at], *found[1:], cache.k_scale[at],
            cache.v_scale[at], split_k=1 if chosen.most_keys <= UNSPLIT_KEYS else None, **options,
            out=attended[0].view(batch, 1, heads, dim), scale_out=attended[1],
        ), lambda: batch * min(context, chosen.most_keys) * 2 * kv_heads * dim)  # fmt: skip

    def dense(layer: Layer) -> None:
        plain = (
            not activation["interleaved"] and row_stream_made.swiglu_refusal(batch, *layer.down.weight.shape) is None
        )
        if in_products:
            of = {name: each for name, each in activation.items() if name != "interleaved"}
            sent_product("swiglu, down", summed_linear.send_swiglu_mxfp8_linear, parts.gate_up, by=layer.down, **of)
            return
        if fused and plain:
            by = layer.down
            call = partial(swiglu_mxfp8_linear, parts.gate_up, by.weight, by.scale, by.bias, **activation, out=x_part)
            op("swiglu, down", "cold", call, lambda: by.nbytes)
            return
        out, scale = parts.inner
        op(
            "swiglu + quantise",
            "mall",
            partial(hipforge.swiglu_mxfp8, parts.gate_up, **activation, out=out, scale_out=scale),
        )
        product("down", parts.inner, layer.down, x_part)

    def choose(bias: torch.Tensor | None) -> object:
        return hipforge.topk_gating(
            parts.scores, shape.top_k, scoring=shape.scoring, bias=bias, shared_experts=shape.shared,
            out=parts.weights, ids_out=parts.ids,
        )  # fmt: skip

    def routed(layer: Layer) -> None:
        router: Any = layer.router
        if peers is not None or not fused or norm_router.refusal(batch, hidden) is not None:
            norm(layer.post_norm, copied=True)
            op(
                "router",
                "cold",
                partial(hipforge.router_gemm, copy, router, layer.router_bias, out=parts.scored),
                lambda: router.nbytes,
            )
            return
        call = partial(
            residual_rms_mxfp8_router, x, streams[0], layer.post_norm, EPSILON, router, layer.router_bias,
            weight_offset=shape.offset, out=parts.scored, sum_out=streams[1], q_out=normed[0], scale_out=normed[1],
        )  # fmt: skip
        op("norm, router", "cold", call, lambda: router.nbytes)
        streams.reverse()

    def experts_of_one(layer: Layer) -> None:
        by, last, bias = layer.gate_up, layer.down, layer.correction_bias
        given = {name: activation[name] for name in ("alpha", "beta", "limit") if name in activation}
        chosen: Any = parts.ids.view(-1)
        if token.choice_refusal(hidden, shape.expert_inner, shape.scoring, bias is not None) is None:
            chosen = token.Choice(
                parts.scores, shape.top_k, shape.scoring, bias, shared_experts=shape.shared,
                ids_out=parts.ids.view(-1),
            )
        else:
            op("choice of experts", "mall", lambda: choose(bias))
        chooses = isinstance(chosen, token.Choice)

        def touched(of: Linear) -> Callable[[], int]:
            def count() -> int:
                if chooses:
                    choose(bias)
                return of.nbytes // total * len(parts.ids.unique())

            return count

        def first_product() -> object:
            return token.token_gate_up(*normed, by.weight, by.scale, chosen, **given, out=parts.slot_inner)

        def last_product() -> object:
            routing = None if chooses else parts.weights.view(-1)
            own = parts.slot_inner, last.weight, last.scale, chosen, routing
            return token.token_down(*own, **given, out=x_part)

        op("experts' choice, gate_up" if chooses else "experts' gate_up", "cold", first_product, touched(by))
        op("experts' swiglu, down, sum", "cold", last_product, touched(last))

    def experts(layer: Layer) -> None:
        first: Callable[..., Pair] = grouped_swiglu_mxfp8 if shape.expert_bits == 8 else grouped_swiglu_mxfp4
        second: Callable[..., torch.Tensor] = (
            hipforge.grouped_mxfp8_linear if shape.expert_bits == 8 else hipforge.grouped_mxfp4_linear
        )

        def touched(by: Linear) -> Callable[[], int]:
            return lambda: by.nbytes // total * len(parts.ids.unique())

        def gate_up() -> None:
            by = layer.gate_up
            parts.expert_inner = first(
                *normed, by.weight, by.scale, *parts.index, slots, BLOCK_M, slots // batch, bias=by.bias, **activation
            )

        def down() -> partial[Any]:
            by = layer.down
            return partial(
                second, *parts.expert_inner, by.weight, by.scale, *parts.index, slots, BLOCK_M, 1,
                parts.weights.view(-1), bias=by.bias, uncovered="undefined", out=parts.slot_out,
            )  # fmt: skip

        op("choice of experts", "mall", lambda: choose(layer.correction_bias))
        op("sorted slots", "mall", partial(hipforge.moe_align_block_size, parts.ids, BLOCK_M, total, out=parts.index))
        op("experts' gate_up, swiglu", "cold", gate_up, touched(layer.gate_up))
        op("experts' down", "cold", lambda: down()(), touched(layer.down), planned=down())
        op(
            "weighted sum",
            "mall",
            partial(hipforge.moe_combine, parts.slot_out, ids=parts.ids, num_experts=total, out=x_part),
        )

    if shape.layers[1]:
        choose(model.layers[-1].correction_bias)
        parts.index = hipforge.moe_align_block_size(parts.ids, BLOCK_M, total)
    op("embedding", "torch", lambda: torch.index_select(model.embedding, 0, tokens, out=residual))
    for index, layer in enumerate(model.layers):
        if layer.around:
            norm(layer.input_norm, first=index == 0)
            around_attention(layer)
        else:
            name, into = ("qkv", qkv) if layer.index_norms is None else ("qkv, index", indexed)
            normed_product(name, layer.input_norm, layer.qkv, into, first=index == 0)
            attention(index, layer)
            if in_products:
                sent_product("o_proj", summed_linear.send_mxfp8_linear, *attended, by=layer.out)
            else:
                product("o_proj", attended, layer.out, x_part)
        whole()
        if layer.router is None:
            normed_product("gate_up", layer.post_norm, layer.gate_up, parts.gate_up)
            dense(layer)
        else:
            routed(layer)
            experts_of_one(layer) if one_token else experts(layer)
        whole()
    if in_products:
        summed_product("lm_head", model.last_norm, model.head, logits)
    else:
        norm(model.last_norm)
        product("lm_head", normed, model.head, logits)
    if model.ranks.count == 1:
        op("argmax", "torch", partial(hipforge.argmax, logits, out=tokens))
    else:
        op("argmax of all GPUs", "torch", lambda: model.ranks.choose(logits, choosers, tokens))
    op(MOVES_ON, "torch", lambda: torch.index_select(rows, 0, counter.add_(1), out=row))
    moved = row, counter, tokens
    start = [(part, part.clone()) for part in moved]
    return Chain(ops, tokens, logits, cache, step.block_tables, start, model.ranks)
