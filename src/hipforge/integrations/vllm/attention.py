"""vLLM's attention backend HIPFORGE: decode steps by hipforge, all other batches by vLLM's Triton backend.

Both read and write one cache, [blocks, Hkv, block_size, 2 D] with K in the first half of a row and V in the second,
which decode attention reads as it lies.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionLayer, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from hipforge.integrations import serving
from hipforge.ops.core.fp8 import fp8_dtypes


class HipforgeAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """Triton's, whose full graphs hold batches of one query length: the choice of a kernel is captured with them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH


class HipforgeAttentionBackend(TritonAttentionBackend):
    """Selected by ``--attention-backend HIPFORGE``; a layer that it does not take is refused with the reason."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(serving.CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM selects it by."""
        return "HIPFORGE"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Return the implementation."""
        return HipforgeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """Return the builder of its metadata."""
        return HipforgeAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether decode attention has a kernel for the head size."""
        return serving.cache_refusal(head_size, None, None) is None

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Only decoders."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """No ALiBi."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The host's query lengths decide which kernel runs."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, *rest: Any, **more: Any
    ) -> str | None:
        """Return why a cache is not taken, or None."""
        return serving.device_refusal() or serving.cache_refusal(head_size, block_size, kv_cache_dtype)


class HipforgeAttentionImpl(TritonAttentionImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # q is taken in 16 bits, and loses nothing
        window = self.sliding_window[0] + 1
        self._window = window if window > 0 else None

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (K, V) as views [blocks, block_size, Hkv, D]."""
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if self.kv_cache_dtype.startswith("fp8"):
            own = fp8_dtypes(kv_cache.device)[0]
            k, v = k.view(own), v.view(own)
        return k, v

    def refusal(self, metadata: TritonAttentionMetadata, kv_cache: torch.Tensor) -> str | None:
        """Return why a batch is left to Triton, or None."""
        if not 1 <= metadata.max_query_len <= serving.MAX_DECODE_TOKENS:
            return f"not a decode step: a sequence has more than {serving.MAX_DECODE_TOKENS} new tokens"
        if metadata.causal is not True or self.attn_type != AttentionType.DECODER:
            return "not causal"
        if metadata.mm_prefix_range is not None or metadata.rswa_prefix_lens is not None or self.chunk_lookback >= 0:
            return "a mask other than a causal one with a window"
        if self.alibi_slopes is not None:
            return "ALiBi"
        if kv_cache.shape[-1] != 2 * self.head_size:
            return f"rows of {kv_cache.shape[-1]} elements for heads of {self.head_size}: scales within the rows"
        return serving.cache_refusal(self.head_size, kv_cache.shape[2], self.kv_cache_dtype) or serving.caches_refusal(
            *self._caches(kv_cache)
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of a batch into ``output`` and return it."""
        quantised = output_scale is not None
        other = output_block_scale is not None or (quantised and output.dtype != fp8_dtypes(output.device)[0])
        if attn_metadata is None or other or self.refusal(attn_metadata, kv_cache) is not None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        count, longest = attn_metadata.num_actual_tokens, attn_metadata.max_query_len
        starts = attn_metadata.query_start_loc
        equal = serving.tokens_per_sequence(count, starts.shape[0] - 1, longest) is not None
        k_cache, v_cache = self._caches(kv_cache)
        serving.attend(
            query[:count].view(count, self.num_heads, self.head_size), k_cache, v_cache, attn_metadata.block_table,
            attn_metadata.seq_lens, longest, scale=self.scale, k_scale=layer._k_scale, v_scale=layer._v_scale,
            window=self._window, sinks=self.sinks, softcap=self.logits_soft_cap,
            cu_seqlens_q=None if equal else starts, out_scale=output_scale, out=output[:count],
        )  # fmt: skip
        return output

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether rotation and write of the cache are one launch: for every cache that decode attention takes."""
        return serving.cache_refusal(self.head_size, None, self.kv_cache_dtype) is None

    def do_rope_and_kv_cache_update(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate ``query`` in place and write the rotated keys and the values into the cache."""
        k_cache, v_cache = self._caches(kv_cache)
        serving.rotate_and_store(
            query.view(-1, self.num_heads, self.head_size), key.view(-1, self.num_kv_heads, self.head_size),
            value.view(-1, self.num_kv_heads, self.head_size), cos_sin_cache, positions, k_cache, v_cache,
            layer_slot_mapping, neox=is_neox, k_scale=layer._k_scale, v_scale=layer._v_scale,
        )  # fmt: skip
