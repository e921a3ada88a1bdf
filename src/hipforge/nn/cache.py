"""A paged cache of keys and values: which page holds which tokens, and the two ops that write and read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from hipforge.errors import GuardError, OutOfMemoryError
from hipforge.nn.payload import place_of
from hipforge.ops.core.checks import as_text, require_choice, require_int, require_shape
from hipforge.ops.core.formats import HALVES
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.decode_attention import decode_attention_fp8
from hipforge.ops.reference.sparse_attention import INDEX_BLOCK, TOPK_BLOCKS
from hipforge.ops.rope_and_cache import Style, rope_and_cache
from hipforge.ops.sparse_attention import BLOCK_SIZES, MAX_TOPK, sparse_block_scores, sparse_topk_blocks

_MOST_PAGES = (1 << 31) - 1

# Four blocks of 64 keys are less work than the second launch that merging the parts of a sequence takes.
UNSPLIT_KEYS = 256


@dataclass(frozen=True)
class CacheStep:
    """Where the tokens of one step go and what they see.

    Attributes:
        tokens: new tokens of each sequence.
        positions: int64 [B * tokens], the tokens of a sequence next to each other.
        slot_mapping: int64 [B * tokens]: page * page_size + slot.
        block_tables: int32 [B, pages of the longest sequence].
        seqlens: int32 [B], the new tokens included.

    Example:
        >>> from hipforge.nn import PagedKVCache
        >>> cache = PagedKVCache(layers=1, pages=8, page_size=16, kv_heads=1, head_dim=64)
        >>> step = cache.extend([7], 2)
        >>> step.tokens, step.positions.tolist()
        (2, [0, 1])
    """

    tokens: int
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seqlens: torch.Tensor


@dataclass(frozen=True)
class SparseBlocks:
    """Which blocks of keys a token of sparse attention sees; MiniMax-M3's numbers.

    Attributes:
        topk: blocks for each token and KV head, 1 to 16.
        block_size: keys of a block: 16, 32, 64 or 128, a multiple of the page size.
        local_blocks: the token's own block and those just before it that are always among them, at most ``topk``.

    Raises:
        GuardError: a number out of its range.

    Example:
        >>> from hipforge.nn import SparseBlocks
        >>> SparseBlocks().most_keys
        2048
    """

    topk: int = TOPK_BLOCKS
    block_size: int = INDEX_BLOCK
    local_blocks: int = 1

    def __post_init__(self) -> None:
        """Refuse what no step could choose, before a sequence is so long that it has to."""
        require_choice("block_size", self.block_size, BLOCK_SIZES)
        topk, local = require_int("topk", self.topk, 1), require_int("local_blocks", self.local_blocks, 0)
        if topk > MAX_TOPK or local > topk:
            raise GuardError(
                f"topk must be 1 to {MAX_TOPK} and local_blocks at most topk; got topk={topk} and local_blocks={local}"
            )

    @property
    def most_keys(self) -> int:
        """Keys that a token sees at most. Up to so many, sparse attention is full attention."""
        return self.topk * self.block_size


_BLOCKS = SparseBlocks()


class PagedKVCache:
    """Keys and values of every layer in pages of fp8, with a scale per KV head.

    Pages are handed out as sequences grow (:meth:`extend`) and come back when one ends (:meth:`release`). A layer
    writes and reads through :meth:`rope_and_store` and :meth:`attend`, one launch each.

    Args:
        layers: of the model.
        pages: in all; each serves every layer.
        page_size: tokens of a page. On sm_90 attention over pages that are no multiple of 16 runs in torch.
        kv_heads: Hkv.
        head_dim: D, as :func:`hipforge.decode_attention_fp8` takes it.
        device: where the pages are.
        dtype: the device's e4m3, the default, or uint8 with its bits.
        index_dtype: of the index keys of sparse attention, float16, bfloat16, the device's e4m3 or uint8 with its bits;
            None: there are none.

    Attributes:
        k, v: [layers, pages, page_size, Hkv, D].
        index: [layers, pages, page_size, D] of ``index_dtype``, one index key per token, or None.
        k_scale, v_scale: float32 [layers, Hkv], 1 until written: what an element stands for over its fp8 value.

    Example:
        >>> from hipforge.nn import PagedKVCache
        >>> cache = PagedKVCache(layers=2, pages=8, page_size=16, kv_heads=1, head_dim=64)
        >>> step = cache.extend([7], 20)
        >>> step.seqlens.tolist(), tuple(step.block_tables.shape), cache.free_pages
        ([20], (1, 2), 6)
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            require_int(name, size, 1)
        if pages > _MOST_PAGES:
            raise GuardError(f"pages must be at most {_MOST_PAGES}, since block tables are int32; got {pages}")
        place = place_of(device)
        fp8 = fp8_dtypes(place)[0]
        _require_one_of("dtype", dtype, (fp8, torch.uint8))
        _require_one_of("index_dtype", index_dtype, (*HALVES, fp8, torch.uint8))
        own = fp8 if dtype is None else dtype
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.page_size, self.device = page_size, place
        # Zeroed: a page that is read before it is full must not hold NaN.
        try:
            self.k, self.v = (torch.zeros(shape, dtype=torch.uint8, device=place).view(own) for _ in range(2))
            self.index = None if index_dtype is None else _zeros((*shape[:3], head_dim), index_dtype, place)
        except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
            need = f"{2 * math.prod(shape) / 1e9:.3g} GB"
            raise OutOfMemoryError(f"a cache of {sizes} needs {need}, which {place} does not give") from error
        self.k_scale, self.v_scale = (torch.ones(layers, kv_heads, dtype=torch.float32, device=place) for _ in range(2))
        self._free = list(range(pages - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence; 0 for one that is not there."""
        _require_name(sequence)
        return self._lengths.get(sequence, 0)

    def extend(self, sequences: Sequence[int], tokens: int) -> CacheStep:
        """Make room for so many further tokens of each sequence; those that are new begin.

        Args:
            sequences: their names, in the order of the batch; each once.
            tokens: of each, at least 1. A decode step has 1, a chunk of a prompt up to 16, which attention takes at
                once.

        Returns:
            Where the tokens go, as tensors on the device.

        Raises:
            GuardError: a sequence twice, or too few free pages; then nothing has changed.
        """
        require_int("tokens", tokens, 1)
        if not isinstance(sequences, Sequence):
            raise GuardError(f"sequences must be a list of names; got {type(sequences).__name__}")
        for name in sequences:
            _require_name(name)
        if len(set(sequences)) != len(sequences) or not sequences:
            raise GuardError(f"sequences must be one or more, each once; got {list(sequences)}")
        missing = {
            name: -(-(self.length(name) + tokens) // self.page_size) - len(self._pages.get(name, ()))
            for name in sequences
        }
        if sum(missing.values()) > len(self._free):
            raise GuardError(
                f"the cache has {len(self._free)} free pages of {self.page_size} tokens; {tokens} more tokens of "
                f"{len(sequences)} sequences need {sum(missing.values())}: release a sequence or make a larger cache"
            )
        positions: list[int] = []
        slots: list[int] = []
        for name in sequences:
            held = self._pages.setdefault(name, [])
            held += [self._free.pop() for _ in range(missing[name])]
            first = self.length(name)
            self._lengths[name] = first + tokens
            for position in range(first, first + tokens):
                positions.append(position)
                slots.append(held[position // self.page_size] * self.page_size + position % self.page_size)
        widest = max(len(self._pages[name]) for name in sequences)
        tables = [self._pages[name] + [0] * (widest - len(self._pages[name])) for name in sequences]
        return CacheStep(
            tokens,
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            torch.tensor(slots, dtype=torch.int64, device=self.device),
            torch.tensor(tables, dtype=torch.int32, device=self.device),
            torch.tensor([self._lengths[name] for name in sequences], dtype=torch.int32, device=self.device),
        )

    def release(self, sequence: int) -> None:
        """Give a sequence's pages back; it is forgotten."""
        _require_name(sequence)
        self._free += reversed(self._pages.pop(sequence, []))
        self._lengths.pop(sequence, None)

    def rope_and_store(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        step: CacheStep,
        *,
        style: Style = "neox",
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        epsilon: float = 1e-6,
        q_out: torch.Tensor | None = None,
        index_q: torch.Tensor | None = None,
        index_k: torch.Tensor | None = None,
        index_q_weight: torch.Tensor | None = None,
        index_k_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise and rotate q and k, store k and v; return the rotated q: ``q_out``, or q itself.

        Args:
            layer: which.
            q: float16 or bfloat16 [B * tokens, Hq, D].
            k: [B * tokens, Hkv, D].
            v: like ``k``.
            cos_sin: [positions, rotary_dim], as :func:`hipforge.rope_and_cache` takes it, like all that follows.
            step: of :meth:`extend`.
            style: which elements rotate together.
            q_weight: [D], a norm's.
            k_weight: [D].
            weight_offset: added to both.
            epsilon: of both norms.
            q_out: like q; None writes q in place.
            index_q: [B * tokens, Hkv, D], the index queries, which are normalised and rotated in place.
            index_k: [B * tokens, 1, D], the index keys, which are stored.
            index_q_weight: [D], a norm's.
            index_k_weight: [D].

        Raises:
            GuardError: operands that do not fit each other or the cache.
        """
        self._require_layer(layer)
        _require_step(step)
        return rope_and_cache(
            q, k, v, cos_sin, step.positions, self.k[layer], self.v[layer], step.slot_mapping, style=style,
            q_weight=q_weight, k_weight=k_weight, weight_offset=weight_offset, epsilon=epsilon,
            k_scale=self.k_scale[layer], v_scale=self.v_scale[layer], q_out=q_out, index_q=index_q, index_k=index_k,
            index_cache=None if index_q is None else self._index_of(layer), index_q_weight=index_q_weight,
            index_k_weight=index_k_weight,
        )  # fmt: skip

    @overload
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        step: CacheStep,
        scale: float | None = None,
        split_k: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
        window: int | None = None,
        index_q: torch.Tensor | None = None,
        blocks: SparseBlocks | None = None,
        out_format: None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    @overload
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        step: CacheStep,
        scale: float | None = None,
        split_k: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
        window: int | None = None,
        index_q: torch.Tensor | None = None,
        blocks: SparseBlocks | None = None,
        out_format: Literal["mxfp8"],
        out: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        step: CacheStep,
        scale: float | None = None,
        split_k: int | None = None,
        *,
        sinks: torch.Tensor | None = None,
        window: int | None = None,
        index_q: torch.Tensor | None = None,
        blocks: SparseBlocks | None = None,
        out_format: Literal["mxfp8"] | None = None,
        out: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the attention of the step's tokens over their sequences, each over what is not after it.

        Args:
            layer: which.
            q: float16 or bfloat16 [B * tokens, Hq, D], as :meth:`rope_and_store` returns it.
            step: of :meth:`extend`; at most 16 tokens per sequence.
            scale: factor of q.k; 1/sqrt(D) by default.
            split_k: parts that the keys of a sequence are cut into, with a second launch to merge them; None: one part
                for up to 256 keys, else what :func:`hipforge.decode_attention_fp8` decides by shape.
            sinks: float32 [Hq], scores that no key has.
            window: keys that a token sees at most, its own among them.
            index_q: [B * tokens, Hkv, D] of :meth:`rope_and_store`: the token sees the chosen ``blocks`` alone, with
                two launches that choose them unless no sequence can have more keys than they hold.
            blocks: how many of which size; None: MiniMax-M3's.
            out_format: "mxfp8": quantise the result in the same launch, as :class:`MXFP8Linear` reads it.
            out: contiguous [B * tokens, Hq, D] to write into.
            scale_out: contiguous uint8 [B * tokens, Hq * D / 32] to write the scales into.

        Returns:
            [B * tokens, Hq, D] of q's dtype; with ``out_format`` the device's e4m3, and scales uint8 e8m0
            [B * tokens, Hq * D / 32].

        Raises:
            GuardError: operands that do not fit each other or the cache.
        """
        self._require_layer(layer)
        _require_step(step)
        if not isinstance(q, torch.Tensor) or q.dim() != 3 or q.shape[0] % step.tokens:
            got = f"shape {tuple(q.shape)}" if isinstance(q, torch.Tensor) else type(q).__name__
            raise GuardError(f"q must be a tensor [B * tokens, Hq, D] of a step of {step.tokens} tokens; got {got}")
        if out_format is None and scale_out is not None:
            raise GuardError("scale_out takes the scales of out_format='mxfp8'; got out_format=None")
        if out is not None:
            require_shape("out", out, q.shape, "that of q")
        self._require_index(index_q, blocks, window, q)
        held = step.block_tables.shape[1] * self.page_size
        tables, lengths, batched = step.block_tables, step.seqlens, q.unflatten(0, (-1, step.tokens))
        # Not a default argument: torch.compile could not make one.
        if index_q is not None and held > (rule := blocks or _BLOCKS).most_keys:
            tables, lengths, batched = *self._chosen(layer, index_q, step, rule), q.unsqueeze(1)
            held = rule.most_keys
        if split_k is None and held <= UNSPLIT_KEYS:
            split_k = 1
        operands = batched, self.k[layer], self.v[layer], tables, lengths
        scales = self.k_scale[layer], self.v_scale[layer]
        options: dict[str, Any] = {"scale": scale, "split_k": split_k, "sinks": sinks, "window": window}
        options["out"] = None if out is None else out.view(batched.shape)
        if out_format is None:
            return decode_attention_fp8(*operands, *scales, **options).view(q.shape)
        options |= {"out_format": out_format, "scale_out": scale_out}
        found, block_scales = decode_attention_fp8(*operands, *scales, **options)
        return found.view(q.shape), block_scales

    def _chosen(
        self, layer: int, index_q: torch.Tensor, step: CacheStep, blocks: SparseBlocks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pages and lengths of the blocks that each token and KV head sees."""
        lists, size = (step.block_tables, step.seqlens), blocks.block_size
        queries = index_q.unflatten(0, (-1, step.tokens))
        scores = sparse_block_scores(queries, self._index_of(layer), *lists, block_size=size)
        _, tables, lengths = sparse_topk_blocks(
            scores,
            *lists,
            page_size=self.page_size,
            topk=blocks.topk,
            local_blocks=blocks.local_blocks,
            block_size=size,
        )
        return tables, lengths

    def _require_index(
        self, index_q: torch.Tensor | None, blocks: SparseBlocks | None, window: int | None, q: torch.Tensor
    ) -> None:
        """Refuse an index that does not fit, also while sequences are short and no block is chosen yet."""
        if not (blocks is None or isinstance(blocks, SparseBlocks)):
            raise GuardError(f"blocks must be SparseBlocks; got {as_text(blocks)}")
        if index_q is None:
            if blocks is not None:
                raise GuardError("blocks are chosen by index_q; got blocks and no index_q")
            return
        if window is not None:
            raise GuardError(
                f"index_q chooses the keys that a token sees: a window has no meaning; got window={window}"
            )
        require_shape("index_q", index_q, (q.shape[0], *self.k.shape[3:]), "[B * tokens, Hkv, D]")
        self._index_of(0)
        size = (blocks or _BLOCKS).block_size
        if size % self.page_size:
            raise GuardError(f"block_size of blocks must be a multiple of the page size, {self.page_size}; got {size}")

    def _index_of(self, layer: int) -> torch.Tensor:
        if self.index is None:
            raise GuardError("index_q needs a cache of index keys; got one made without index_dtype: pass bfloat16")
        return self.index[layer]

    def _require_layer(self, layer: int) -> None:
        require_int("layer", layer, 0)
        if layer >= len(self.k):
            raise GuardError(f"layer must be at most {len(self.k) - 1}, of {len(self.k)} layers; got {layer}")


def _require_one_of(name: str, dtype: object, accepted: tuple[torch.dtype, ...]) -> None:
    """Refuse a dtype that is neither None nor accepted."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in accepted):
        raise GuardError(f"{name} must be one of {', '.join(map(str, accepted))}; got {as_text(dtype)}")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    zeros = torch.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=device)
    return zeros.view(dtype)


def _require_step(step: object) -> None:
    if not isinstance(step, CacheStep):
        raise GuardError(f"step must be what extend() returned; got {type(step).__name__}")


def _require_name(sequence: object) -> None:
    try:
        hash(sequence)
    except TypeError:
        raise GuardError(f"a sequence's name must be an int; got {type(sequence).__name__}") from None
