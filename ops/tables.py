"""The tuned tables of the package: one schema per op family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hipforge.errors import GuardError
from hipforge.ops.core.tuned import ANY_CU, Column, TableSchema, Value
from hipforge.ops.decode_attention_fp8_kernels import CONFIGURATION, HEAD_DIMS, PAGE_MULTIPLE, check_configuration
from hipforge.ops.mxfp4_gemm.family import FAMILY as _MXFP4
from hipforge.ops.skinny_gemm_fp8_space import LDS_BYTES, Configuration, refusal

GEMV_MAX_M = 16
GEMV_BLOCK_N = (4, 8, 16, 32, 64)
MFMA_MAX_M = 64
MFMA_K_STEP = 128
MFMA_N_SUB = (1, 2, 4)
MFMA_K_SPLITS = (1, 2, 4, 8)
DEFAULT_BLOCK_N = 8
MOE_BLOCK_N = (8, 16)
ANY_PAGE_SIZE = 0


def mfma_k_steps(k: int) -> int:
    """Return how many 128-wide K steps the MFMA kernel takes (the last may be partial)."""
    return -(-k // MFMA_K_STEP)


def _check_smallm(values: Mapping[str, Value]) -> str | None:
    m, k, n_sub, k_splits = (int(values[name] or 0) for name in ("M", "K", "n_sub", "k_splits"))
    block_n = values["block_n"]
    given = f"got M={m}, K={k}, block_n={block_n}, n_sub={n_sub}, k_splits={k_splits}"
    if values["kernel"] == "gemv":
        if m > GEMV_MAX_M:
            return f"a gemv row needs M of at most {GEMV_MAX_M}; {given}"
        if block_n not in (*GEMV_BLOCK_N, None) or (n_sub, k_splits) != (0, 0):
            return f"a gemv row needs block_n in {GEMV_BLOCK_N} and n_sub=k_splits=0; {given}"
        return None
    if m > MFMA_MAX_M:
        return f"an mfma row needs M of at most {MFMA_MAX_M}; {given}"
    if n_sub not in MFMA_N_SUB or k_splits not in MFMA_K_SPLITS or block_n not in (0, None):
        return f"an mfma row needs n_sub in {MFMA_N_SUB}, k_splits in {MFMA_K_SPLITS} and block_n=0; {given}"
    if k_splits > mfma_k_steps(k):
        return f"k_splits cannot exceed the {mfma_k_steps(k)} K steps of {MFMA_K_STEP}; {given}"
    return None


MXFP4_GEMM = _MXFP4.table

SMALLM_MXFP8 = TableSchema(
    family="smallm_mxfp8",
    config=(
        Column("kernel", str, accepted=("gemv", "mfma")),
        Column("block_n", int, minimum=0),
        Column("n_sub", int, minimum=0),
        Column("k_splits", int, minimum=0),
        Column("use_hip", int, accepted=(0, 1)),
    ),
    check=_check_smallm,
    # The format of earlier small-M kernels: always gfx950, no block_n column.
    legacy={
        ("K", "N", "M", "kernel", "n_sub", "k_splits", "use_hip"): {
            "gfx": "gfx950",
            "cu_num": ANY_CU,
            "block_n": None,
            "source": "legacy",
        }
    },
)


def _check_moe(values: Mapping[str, Value]) -> str | None:
    if values["block_n"] not in MOE_BLOCK_N:
        return f"block_n must be one of {MOE_BLOCK_N}; got {values['block_n']}"
    return None


# A row speaks for every number of routed slots from the next smaller M of its key, exclusive, to its own M.
SMALLM_MXFP8_MOE = TableSchema(
    family="smallm_mxfp8_moe",
    extra_key=(Column("a_div", int, minimum=1), Column("has_weight", int, accepted=(0, 1))),
    config=(
        Column("block_n", int, minimum=1),
        Column("min_experts", int, minimum=0),
        Column("use_hip", int, accepted=(0, 1)),
    ),
    check=_check_moe,
)


def _check_skinny(values: Mapping[str, Value]) -> str | None:
    arch = str(values["gfx"])
    if arch not in LDS_BYTES:
        return f"the kernel is for {', '.join(LDS_BYTES)}; got {arch}"
    names = [parameter.name for parameter in dataclasses.fields(Configuration)]
    return refusal(Configuration(**{name: int(values[name] or 0) for name in names}), arch, int(values["K"] or 0))


# A row speaks for every m without a row of its own from the next smaller M of its shape, exclusive, to its own M.
SKINNY_GEMM_FP8 = TableSchema(
    family="skinny_gemm_fp8",
    config=(
        *(Column(parameter.name, int, minimum=1) for parameter in dataclasses.fields(Configuration)),
        Column("use_hip", int, accepted=(0, 1)),
    ),
    check=_check_skinny,
)


def _check_attention(values: Mapping[str, Value]) -> str | None:
    for name in ("B", "G", "Mkv"):
        if (number := int(values[name] or 0)) & (number - 1):
            return f"{name} is a bucket, the power of two that ends it; got {number}"
    if values["D"] not in HEAD_DIMS:
        return f"D must be one of {', '.join(map(str, HEAD_DIMS))}; got {values['D']}"
    if int(values["page_size"] or 0) % PAGE_MULTIPLE:
        return f"page_size must be a multiple of {PAGE_MULTIPLE}, or {ANY_PAGE_SIZE} for any; got {values['page_size']}"
    try:
        check_configuration({name: int(values[name] or 0) for name in CONFIGURATION}, int(values["D"] or 0))
    except GuardError as refusal:
        return str(refusal)
    return None


# A row speaks for every B, G and Mkv from half of its own, exclusive, to its own. G is rows per KV head, query heads
# times tokens. A page_size of 0 speaks for caches without pages, and for every page size without a row of its own.
DECODE_ATTENTION_FP8 = TableSchema(
    family="decode_attention_fp8",
    shape=(
        *(Column(name, int, minimum=1) for name in ("B", "Hkv", "G", "D", "Mkv")),
        Column("page_size", int, minimum=0),
    ),
    config=tuple(Column(name, int, minimum=1) for name in CONFIGURATION),
    check=_check_attention,
)

SCHEMAS = {
    schema.family: schema
    for schema in (SMALLM_MXFP8, SMALLM_MXFP8_MOE, MXFP4_GEMM, SKINNY_GEMM_FP8, DECODE_ATTENTION_FP8)
}
