"""The stub of the decode attention module, and its call: workspaces allocated, an explicit configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops

ARCH_DTYPES = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
# dtype of q -> the module's variant
INPUTS = {torch.float16: "f16", torch.bfloat16: "bf16"}
HEAD_DIMS = (64, 128, 256)
BLOCK_M = 16  # rows of one matrix instruction
PAGE_MULTIPLE = 16  # keys of one matrix instruction
BLOCKS_N = (16, 32, 64)
WAVES = (1, 2, 4)
PART_COLUMNS = 128  # of V that a wave owns; two waves share a key range at D = 256
MAX_SPLITS = 512
CONFIGURATION = ("block_n", "waves", "split_k")


@compile_ops(
    "module_decode_attention_fp8",
    variant=lambda out, lse, partial, partial_lse, q, *rest: {
        "HF_HEAD_DIM": q.shape[-1],
        "HF_INPUT": INPUTS[q.dtype],
        "HF_BLOCK_N": rest[-3],
    },
    mutates=("out", "lse", "partial", "partial_lse"),
)
def decode_attention_fp8_out(
    out: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor | None,
    partial_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    scale: float,
    causal: bool,
    block_n: int,
    waves: int,
    splits: int,
) -> None:
    """Write the attention into ``out`` [B, Mq, Hq, D] and its log-sum-exp into ``lse`` float32 [B, Hq, Mq]."""


def check_configuration(configuration: Mapping[str, int], head_dim: int) -> None:
    """Refuse a configuration that the kernel does not have.

    Raises:
        GuardError: a missing or unknown name, or a value outside what the kernel has.
    """
    if set(configuration) != set(CONFIGURATION):
        raise GuardError(f"a configuration has {', '.join(CONFIGURATION)}; got {', '.join(configuration) or 'nothing'}")
    waves = tuple(count for count in WAVES if count * PART_COLUMNS >= head_dim)
    for name, accepted in (("block_n", BLOCKS_N), ("waves", waves)):
        if configuration[name] not in accepted:
            raise GuardError(
                f"{name} must be one of {', '.join(map(str, accepted))} at D={head_dim}; got {configuration[name]}"
            )
    if not 1 <= configuration["split_k"] <= MAX_SPLITS:
        raise GuardError(f"split_k must be 1 to {MAX_SPLITS}; got {configuration['split_k']}")


def allocate_results(
    q: torch.Tensor, splits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return what a kernel writes for q [B, Mq, Hq, D]: out like q, float32 lse [B, Hq, Mq], and both of each split.

    The last two, float32 [splits, B, Hq * Mq, D] and [splits, B, Hq * Mq], are None where there is one split.
    """
    batch, mq, heads, d = q.shape
    out = torch.empty((batch, mq, heads, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, mq), dtype=torch.float32, device=q.device)
    if splits == 1:
        return out, lse, None, None
    partial = torch.empty((splits, batch, heads * mq, d), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((splits, batch, heads * mq), dtype=torch.float32, device=q.device)
    return out, lse, partial, partial_lse


def run_decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_scale_shift: torch.Tensor | None = None,
    v_scale_shift: torch.Tensor | None = None,
    *,
    scale: float,
    configuration: Mapping[str, int],
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel in one explicit configuration: what the planner calls, and a tuner.

    Args:
        q: bfloat16 or float16 [B, Mq, Hq, D].
        k: fp8 of the device or uint8 [pages, page_size, Hkv, D]; [B, Mkv, Hkv, D] without block tables.
        v: like ``k``.
        block_tables: int32 [B, max_pages], or None.
        seqlens: int32 [B].
        k_scale: float32 [1] or [Hkv]; None where rows have words of their own.
        v_scale: like ``k_scale``.
        k_scale_shift: int32 [pages, page_size, Hkv], float16 scale in the low half and float16 shift in the high
            half; None where ``k_scale`` is given.
        v_scale_shift: like ``k_scale_shift``.
        scale: factor of q.k.
        configuration: ``block_n``, ``waves`` and ``split_k``, all three.
        causal: token t of Mq sees keys up to seqlen - Mq + t; otherwise each sees all.

    Returns:
        (out like q, log-sum-exp float32 [B, Hq, Mq], natural logarithm).

    Raises:
        GuardError: operands or a configuration that the kernel does not take.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    if q.dim() != 4 or q.dtype not in INPUTS or q.shape[-1] not in HEAD_DIMS:
        raise GuardError(
            f"q must be float16 or bfloat16 [B, Mq, Hq, D] with D in {HEAD_DIMS}; got {q.dtype} {tuple(q.shape)}"
        )
    check_configuration(configuration, q.shape[-1])
    splits = configuration["split_k"]
    out, lse, partial, partial_lse = allocate_results(q, splits)
    decode_attention_fp8_out(
        out,
        lse,
        partial,
        partial_lse,
        q.contiguous(),
        k,
        v,
        None if block_tables is None else block_tables.contiguous(),
        seqlens.contiguous(),
        k_scale,
        v_scale,
        k_scale_shift,
        v_scale_shift,
        scale,
        causal,
        configuration["block_n"],
        configuration["waves"],
        splits,
    )
    return out, lse
