"""SGLang's attention backend ``hipforge``: decode steps by hipforge, everything else by SGLang's Triton backend.

Both use one pool of keys and values, [slots, Hkv, D] per layer, which decode attention reads as pages of ``page_size``
slots, on sm_90 where that is a multiple of 16 (``--page-size 16`` or more).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from hipforge.integrations import serving

_CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class HipforgeAttnBackend(TritonAttnBackend):
    """Selected by ``--attention-backend hipforge``."""

    _step: Any = None  # the batch whose page table is held
    _last_layer = -1
    _tables: torch.Tensor
    _lengths: torch.Tensor

    def refusal(self, layer: Any, forward_batch: Any, **options: Any) -> str | None:
        """Return why a layer's decode step is left to Triton, or None."""
        if self.use_mla or layer.qk_head_dim != layer.v_head_dim:
            return "MLA, or heads of K and V of two sizes"
        if self.dcp_size > 1 or self.use_sliding_window_kv_pool:
            return "a pool of keys that is shared out or has windows of its own"
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            return "a layer with a window, which SGLang gives its own list of slots"
        if forward_batch.spec_info is not None:
            return "a step of speculative decoding"
        if layer.xai_temperature_len > 0 or any(value is not None for value in options.values()):
            return "scores that are changed by more than a cap"
        k_pool, v_pool = (
            read(layer.layer_id)
            for read in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer)
        )
        if k_pool.dtype not in _CACHE_DTYPES or k_pool.dim() != 3 or v_pool.shape != k_pool.shape:
            return f"a pool of {k_pool.dtype} {tuple(k_pool.shape)}: 16-bit or e4m3 [slots, Hkv, D] is taken"
        if k_pool.shape[0] % self.page_size:
            return f"a pool of {k_pool.shape[0]} slots, not whole pages of {self.page_size}"
        return serving.cache_refusal(layer.qk_head_dim, self.page_size, None) or serving.caches_refusal(
            *(pool.unflatten(0, (-1, self.page_size)) for pool in (k_pool, v_pool))
        )

    def _read_pages(self, layer: Any, forward_batch: Any) -> None:
        """Make the page table of a step before its first layer; in a graph it is captured with that layer."""
        if forward_batch is not self._step or layer.layer_id <= self._last_layer:
            first_slots = self.req_to_token[:, :: self.page_size].index_select(0, forward_batch.req_pool_indices)
            self._tables = (first_slots // self.page_size).to(torch.int32)
            self._lengths = forward_batch.seq_lens.to(torch.int32)
        self._step, self._last_layer = forward_batch, layer.layer_id

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> torch.Tensor:
        """Store k and v, and return the attention of one token per sequence, [B, Hq * D]."""
        if self.refusal(layer, forward_batch, score_mod=score_mod, aux_tensors=aux_tensors) is not None:
            return super().forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, sinks=sinks, score_mod=score_mod, aux_tensors=aux_tensors
            )
        if save_kv_cache:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=self.forward_metadata.swa_out_cache_loc)
            self._set_kv_buffer(forward_batch, layer, where, k, v, layer.k_scale, layer.v_scale)
        self._read_pages(layer, forward_batch)
        pools = (
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        )
        k_cache, v_cache = (pool.unflatten(0, (-1, self.page_size)) for pool in pools)
        scaled = layer.k_scale is not None and layer.v_scale is not None
        out = serving.attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), k_cache, v_cache, self._tables, self._lengths, 1,
            scale=layer.scaling, k_scale=layer.k_scale_float if scaled else 1.0,
            v_scale=layer.v_scale_float if scaled else 1.0, sinks=sinks, softcap=layer.logit_cap or None,
        )  # fmt: skip
        return out.view(out.shape[0], -1)
