"""The tuned tables of the package: one schema per op family."""

from __future__ import annotations

from collections.abc import Mapping

from hipforge.errors import GuardError
from hipforge.ops.core.tuned import Column, TableSchema, Value
from hipforge.ops.decode_attention_fp8_kernels import CONFIGURATION, HEAD_DIMS, PAGE_MULTIPLE, check_configuration
from hipforge.ops.fp8_skinny_gemm.family import FAMILY as _SKINNY
from hipforge.ops.mxfp4_gemm.family import FAMILY as _MXFP4
from hipforge.ops.mxfp8_dense.family import TABLE
from hipforge.ops.mxfp8_grouped.family import TABLE as SMALLM_MXFP8_MOE

ANY_PAGE_SIZE = 0


MXFP4_GEMM = _MXFP4.table
SKINNY_GEMM_FP8 = _SKINNY.table

SMALLM_MXFP8 = TABLE


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
