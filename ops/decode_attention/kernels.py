"""The kernels of decode attention, one per cache format: stubs, values, and a call in an explicit configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict

import torch

from hipforge import archs
from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core import programmatic
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.arguments import require_sound
from hipforge.ops.core.checks import require_device, require_dtype, require_rank
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.kernel import Configuration, Kernel, Timed

ARCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, archs.get(name).fp8_e4m3) for name in ("gfx950", "gfx942", "sm_90")}
)
# dtype of q -> the module's variant
INPUTS = {torch.float16: "f16", torch.bfloat16: "bf16"}
STREAM_ARCH = "sm_90"
HEAD_DIMS = (64, 128, 192, 256)
BLOCK_M = 16  # rows of one matrix instruction
PAGE_MULTIPLE = 16  # keys of one matrix instruction
BLOCKS_N = (16, 32, 64)
BLOCK_N = 64  # without a tuned row, and the heuristic's grain
WAVES = (1, 2, 4)
MAX_SPLITS = 512
MAX_TILE = 64  # of BLOCK_M and BLOCK_N; larger tiles keep too much in registers
MAX_WAVES = 4
ANY_PAGE_SIZE = 0
INT4_BLOCK_N = 32  # keys of the int4 kernel's blocks
GATHERED_BLOCK_N = 32
GATHERED_ARCHS = ("gfx950", "gfx942")
GATHERED_DIMS = range(16, 513, 8)
GATHERED_RULE = f"a multiple of {GATHERED_DIMS.step} from {GATHERED_DIMS[0]} to {GATHERED_DIMS[-1]}"
PART_COLUMNS = 128  # of D that a wave of the gathered kernel owns
# S = 2^i and 3 * 2^i: finer steps make no difference that the model sees.
SPLITS = tuple(sorted({base << shift for base in (1, 3) for shift in range(10) if base << shift <= MAX_SPLITS}))

FLOAT_BYTES = 4
WORKSPACE_ALIGNMENT = 16


def waves_per_range(head_dim: int) -> int:
    """Return how many waves of the fp8 kernel share a key range, each with its part of V's columns."""
    return 2 if head_dim == 256 else 1


def gathers(head_dim: int, page_size: int, num_groups: int | None = None) -> bool:
    """Return whether kernels of whole tiles leave a head dimension or page size (0: no pages) to the gathered one.

    It takes int4 rows of which each of ``num_groups`` groups has whole words of eight.
    """
    others = head_dim not in HEAD_DIMS or page_size % PAGE_MULTIPLE != 0
    return others and (num_groups is None or head_dim % (8 * num_groups) == 0)


def split_k_heuristic(batch: int, kv_heads: int, max_keys: int, page_size: int | None = None) -> int:
    """Return the number of splits for a shape without a tuned row, 1 to 512.

    Args:
        batch: sequences.
        kv_heads: KV heads; the queries of each are folded into rows, so that the head count of the formula is 1.
        max_keys: keys that a sequence may have.
        page_size: keys of a page for a kernel whose splits must not cross pages. Those of this module do.
    """
    rows = max(batch, 1)
    split = min(max(max_keys + rows - 1, 1024) // rows, max_keys // BLOCK_N + 1)
    enough = max(1024 // max(batch * kv_heads, 1), 1)
    while split > enough:
        split //= 2
    split = max(split, 1)
    if math.ceil(max_keys / split) % BLOCK_N:
        split += 1
    split = min(max(split, 1), MAX_SPLITS)
    if page_size is not None and math.ceil(max_keys / split) > page_size:
        split = math.ceil(max_keys / page_size)
    return split


def accepts_configuration(block_m: int, block_n: int, waves: int) -> bool:
    """Return whether a tuner may try a configuration: tiles up to 64 x 64 and at most four waves."""
    return 1 <= block_m <= MAX_TILE and 1 <= block_n <= MAX_TILE and 1 <= waves <= MAX_WAVES


def ranges(configuration: Mapping[str, int], d: int) -> int:
    """Return into how many parts the waves of a work-group cut its keys; a wave of the int4 kernel owns all columns."""
    return configuration["waves"] // (waves_per_range(d) if "block_n" in configuration else 1)


def blocks_per_wave(configuration: Mapping[str, int], d: int, keys: int) -> int:
    """Return the blocks of the first wave, which has the most."""
    blocks = math.ceil(keys / configuration.get("block_n", INT4_BLOCK_N))
    return math.ceil(blocks / (configuration["split_k"] * ranges(configuration, d)))


def refusal(given: Configuration, key: Sequence[int], arch: str = "") -> str | None:
    """Return what a kernel needs of a configuration for a row's key (B, Hkv, G, D, Mkv, page_size), or None."""
    *_, d, _, page_size = key
    if "block_n" in given and given["waves"] < waves_per_range(d):
        return f"waves of {waves_per_range(d)} or 4 at D={d}"
    if page_size % PAGE_MULTIPLE:
        return f"page_size of a multiple of {PAGE_MULTIPLE}, or {ANY_PAGE_SIZE} for any"
    return None


def _gathered_refusal(given: Configuration, key: Sequence[int], arch: str = "") -> str | None:
    """Return what the gathered kernel needs of a configuration for a row's key, or None."""
    parts = math.ceil(key[3] / PART_COLUMNS)
    accepted = [parts * ranges for ranges in (1, 2, 4) if parts * ranges <= MAX_WAVES]
    if given["waves"] not in accepted:
        return f"waves of {' or '.join(map(str, accepted))} at D={key[3]}"
    return None


def checked(kernel: Kernel, configuration: Mapping[str, int], head_dim: int) -> Configuration:
    """Return a caller's configuration of a kernel, in its order.

    Raises:
        GuardError: a missing or unknown name, or a value outside what the kernel has.
    """
    if configuration.keys() != kernel.parameters.keys():
        names, given = ", ".join(kernel.parameters), ", ".join(configuration) or "nothing"
        raise GuardError(f"a configuration has {names}; got {given}")
    found = kernel.require(**configuration)
    reason = kernel.refusal(found, (1, 1, 1, head_dim, 1, ANY_PAGE_SIZE), "")
    if reason is not None:
        raise GuardError(f"{kernel.name} needs {reason}; got {', '.join(f'{name}={at}' for name, at in found.items())}")
    return found


class Options(TypedDict, total=False):
    """What the public functions and the kernels take by name, as :func:`run_decode_attention` says."""

    causal: bool
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    sinks: torch.Tensor | None
    window: int | None
    softcap: float | None
    out_scale: torch.Tensor | None
    scale_out: torch.Tensor | None
    out: torch.Tensor | None
    lse_out: torch.Tensor | None
    workspace: torch.Tensor | None


def _variant(
    out: torch.Tensor, lse: torch.Tensor, partial: object, partial_lse: object, q: torch.Tensor, *rest: object
) -> dict[str, int | str]:
    return {"HF_HEAD_DIM": q.shape[-1], "HF_INPUT": INPUTS[q.dtype]}


def _stub(cache: str, variant: Callable[..., Mapping[str, int | str]]) -> Callable[..., None]:
    """Return the stub of a cache format's module; formats differ in their scales and in the last three."""

    def entry(
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
        cu_seqlens_q: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out_scale: torch.Tensor | None,
        scale_out: torch.Tensor | None,
        groups: int,
        scale: float,
        max_seqlen_q: int,
        causal: bool,
        window: int,
        softcap: float,
        programmatic: bool,
        new_keys: int,
        block_n: int,
        waves: int,
        splits: int,
    ) -> None:
        """Write the attention into ``out`` [B, Mq, Hq, D] and its log-sum-exp into ``lse`` float32 [B, Hq, Mq].

        With ``cu_seqlens_q`` int32 [B + 1] they are [tokens, Hq, D] and [Hq, tokens]; ``max_seqlen_q`` is 0 otherwise.
        A ``window`` or ``softcap`` of 0 is none. ``out`` is of q's dtype, float32, fp8 by ``out_scale`` float32 [1], or
        MX-FP8 with ``scale_out`` uint8 [tokens, Hq * D / 32]. An int4 cache has ``groups`` scales in each row.
        """

    entry.__name__ = f"decode_attention_{cache}_out"
    mutates = ("out", "lse", "partial", "partial_lse", "scale_out")
    return compile_ops(f"module_decode_attention_{cache}", variant=variant, mutates=mutates)(entry)


decode_attention_fp8_out = _stub("fp8", lambda *args: {**_variant(*args), "HF_BLOCK_N": args[-3]})
decode_attention_int4_out = _stub("int4", _variant)
decode_attention_half_out = _stub("half", _variant)
_CACHES = {torch.float16: "half", torch.bfloat16: "half", torch.int32: "int4"}  # others are fp8 or its bytes
decode_attention_gathered_out = _stub(
    "gathered",
    lambda *args: {"HF_CACHE": _CACHES.get(args[5].dtype, "fp8"), "HF_INPUT": INPUTS[args[4].dtype]},
)


def _candidates(cell: Any, arch: str, blocks_n: Sequence[int | None]) -> Iterator[Configuration]:
    """Yield what the tuner may try and leaves no split empty: fewest splits and waves and the largest block first."""
    for split_k in SPLITS:
        for waves in WAVES:
            for block_n in blocks_n:
                given = {**({} if block_n is None else {"block_n": block_n}), "waves": waves, "split_k": split_k}
                if not accepts_configuration(BLOCK_M, block_n or INT4_BLOCK_N, waves) or refusal(given, cell.key):
                    continue
                of_a_split = blocks_per_wave(given, cell.d, cell.keys) * ranges(given, cell.d)
                if math.ceil(cell.keys / (block_n or INT4_BLOCK_N) / of_a_split) == split_k:
                    yield given


def _default(problem: Any, **tile: int) -> Iterator[Timed]:
    yield 0.0, {**tile, "split_k": split_k_heuristic(problem.batch, problem.kv_heads, problem.max_keys)}


# Of a multiprocessor: so many warps have enough bytes under way for an H100, and twice as many read more slowly.
STREAM_WARPS = 8
# Keys of a warp, at least: 64, or 16 in up to 16 splits; with fewer, adding up the sums takes longer than the keys.
STREAM_KEYS, FEW_KEYS, FEW_SPLITS = 64, 16, 16


def _stream_default(problem: Any, cu_count: int, **tile: int) -> Iterator[Timed]:
    """Yield the configuration whose warps are nearest to STREAM_WARPS of each multiprocessor.

    Only the number of sequences, heads and tokens decides on ``waves``, so that a sequence of its own has four.
    """
    batch, kv_heads, group, d, keys, _ = problem.key
    wanted = STREAM_WARPS * cu_count / max(batch * kv_heads * math.ceil(group / BLOCK_M), 1)  # of a KV head's rows
    waves = next((each for each in (4, 2) if wanted >= each / math.sqrt(2)), waves_per_range(d))
    able = min(keys // (FEW_KEYS * waves), max(FEW_SPLITS, keys // (STREAM_KEYS * waves)))
    most = max(min(able, MAX_SPLITS), 1).bit_length() - 1
    yield 0.0, {**tile, "waves": waves, "split_k": 1 << max(min(round(math.log2(wanted / waves)), most), 0)}


_ROW_PARAMETERS = MappingProxyType({"waves": WAVES, "split_k": range(1, MAX_SPLITS + 1)})
FP8 = Kernel(
    "decode_attention_fp8",
    archs=tuple(ARCH_DTYPES),
    parameters=MappingProxyType({"block_n": BLOCKS_N, **_ROW_PARAMETERS}),
    launch=lambda *given: decode_attention_fp8_out(*given),
    candidates=lambda cell, arch: _candidates(cell, arch, BLOCKS_N[::-1]),
    refusal=refusal,
    default=lambda problem, arch, cu_count: (
        _stream_default(problem, cu_count, block_n=32 if problem.d == 64 else 16)
        if arch == STREAM_ARCH
        else _default(problem, block_n=BLOCK_N, waves=waves_per_range(problem.d))
    ),
)


def _row_default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    return _stream_default(problem, cu_count) if arch == STREAM_ARCH else _default(problem, waves=1)


# A wave of these owns all columns of its keys, in blocks of one size.
INT4, HALF = (
    Kernel(
        f"decode_attention_{cache}",
        archs=tuple(ARCH_DTYPES),
        parameters=_ROW_PARAMETERS,
        launch=launch,
        candidates=candidates,
        refusal=refusal,
        default=_row_default,
    )
    for cache, launch, candidates in (
        (
            "int4",
            lambda *given: decode_attention_int4_out(*given[:-2], 0, *given[-2:]),
            lambda cell, arch: _candidates(cell, arch, (None,)),
        ),
        (
            "half",
            lambda *given: decode_attention_half_out(*given[:-2], 0, *given[-2:]),
            lambda cell, arch: (),
        ),
    )
)


# Rows of any page size and of other head dimensions, found one by one; a wave owns a part of D.
GATHERED = Kernel(
    "decode_attention_gathered",
    archs=GATHERED_ARCHS,
    parameters=MappingProxyType({"waves": tuple(range(1, MAX_WAVES + 1)), "split_k": range(1, MAX_SPLITS + 1)}),
    launch=lambda *given: decode_attention_gathered_out(*given[:-2], 0, *given[-2:]),
    candidates=lambda cell, arch: (),
    refusal=_gathered_refusal,
    default=lambda problem, arch, cu_count: _gathered_default(problem),
)


def _gathered_default(problem: Any) -> Iterator[Timed]:
    """Yield the heuristic's splits with as many ranges as have a block of keys each: waves wait for memory by turns."""
    parts, (_, given) = math.ceil(problem.d / PART_COLUMNS), next(_default(problem))
    blocks = math.ceil(problem.max_keys / GATHERED_BLOCK_N)
    able = [ranges for ranges in (4, 2) if parts * ranges <= MAX_WAVES and ranges * given["split_k"] <= blocks]
    yield 0.0, {"waves": parts * max(able, default=1), **given}


def empty_output(q: torch.Tensor, quantised: bool) -> torch.Tensor:
    """Return memory for the attention of q [..., Hq, D]: of q's dtype, or fp8 of its device."""
    return torch.empty(q.shape, dtype=fp8_dtypes(q.device)[0] if quantised else q.dtype, device=q.device)


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """Return memory for the log-sum-exp of q, float32 of :func:`lse_shape`."""
    return torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the log-sum-exp of q: [B, Hq, Mq] of q [B, Mq, Hq, D], [Hq, tokens] of [tokens, Hq, D]."""
    *batch, tokens, heads, _ = q.shape
    return (*batch, heads, tokens)


def workspace_bytes(q: torch.Tensor, splits: int) -> int:
    """Return the bytes that the parts of ``splits`` splits take for q [..., Hq, D]: none for one split."""
    return 0 if splits == 1 else FLOAT_BYTES * splits * (q.numel() + q.numel() // q.shape[-1])


def _parts_in(workspace: torch.Tensor, q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and log-sum-exps of the splits as views of ``workspace``."""
    needed = workspace_bytes(q, splits)
    require_dtype("workspace", workspace, (torch.uint8,))
    require_rank("workspace", workspace, 1, "[bytes]")
    require_device("workspace", workspace, q.device)
    if not workspace.is_contiguous() or workspace.data_ptr() % WORKSPACE_ALIGNMENT:
        raise GuardError(f"workspace must be contiguous and start at a multiple of {WORKSPACE_ALIGNMENT} bytes")
    if workspace.numel() < needed:
        raise GuardError(
            f"workspace must have at least {needed} bytes for split_k={splits}, as attention_workspace_size says; "
            f"got {workspace.numel()}"
        )
    values = FLOAT_BYTES * splits * q.numel()
    partial = workspace[:values].view(torch.float32).view(splits, q[..., 0].numel(), q.shape[-1])
    return partial, workspace[values:needed].view(torch.float32).view(splits, q[..., 0].numel())


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
    num_groups: int | None = None,
    scale: float,
    configuration: Mapping[str, int],
    causal: bool = True,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel in one explicit configuration: what the planner calls, and a tuner.

    Args:
        q: bfloat16 or float16 [B, Mq, Hq, D]; with ``cu_seqlens_q`` [tokens, Hq, D].
        k: fp8 of the device or uint8 [pages, page_size, Hkv, D]; [B, Mkv, Hkv, D] without block tables. Of q's dtype:
            a cache that is not quantised. With ``num_groups`` int32 [pages, page_size, Hkv, num_groups + D/8].
        v: like ``k``.
        block_tables: int32 [B, max_pages], or None.
        seqlens: int32 [B].
        k_scale: float32 [1] or [Hkv]; None where rows have words of their own.
        v_scale: like ``k_scale``.
        k_scale_shift: int32 [pages, page_size, Hkv], float16 scale in the low half and float16 shift in the high
            half; None where ``k_scale`` is given.
        v_scale_shift: like ``k_scale_shift``.
        num_groups: scales in each row of an int4 cache; None for the others.
        scale: factor of q.k.
        configuration: ``waves``, ``split_k`` and, of an fp8 cache, ``block_n``.
        causal: token t of Mq sees keys up to seqlen - Mq + t; otherwise each sees all.
        cu_seqlens_q: contiguous int32 [B + 1], the first token of each sequence in q, and the end.
        max_seqlen_q: the most tokens of a sequence, 1 to 16; only with ``cu_seqlens_q``.
        sinks: float32 [Hq], contiguous, or None.
        window: keys that a token sees, its own the last one; None for all.
        softcap: c of c tanh(score / c); None for none.
        out_scale: float32 [1]: out is fp8 of the device, of the float32 result over this scale.
        scale_out: uint8 or float8_e8m0fnu [tokens, Hq * D / 32], written: out is MX-FP8 of the float32 result.
        out: contiguous, of q's shape, to write into: of q's dtype, or float32 for the result before any rounding; fp8
            with a scale.
        lse_out: contiguous float32 [B, Hq, Mq] ([Hq, tokens]) to write into.
        workspace: uint8 [bytes] for what the splits give, at least :func:`workspace_bytes`; allocated if None.

    Returns:
        (out like q, log-sum-exp float32 [B, Hq, Mq] or [Hq, tokens], natural logarithm).

    Raises:
        GuardError: operands or a configuration that the kernel does not take.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    gathered = gathers(q.shape[-1], 0 if block_tables is None else k.shape[1], num_groups)
    if q.dim() not in (3, 4) or q.dtype not in INPUTS or q.shape[-1] not in (GATHERED_DIMS if gathered else HEAD_DIMS):
        dims = f"in {HEAD_DIMS}, or {GATHERED_RULE} and of 8 * num_groups"
        raise GuardError(
            f"q must be float16 or bfloat16 [B, Mq, Hq, D], or [tokens, Hq, D], with D {dims}; got {q.dtype} "
            f"{tuple(q.shape)}"
        )
    kernel = GATHERED if gathered else INT4 if num_groups is not None else HALF if k.dtype in INPUTS else FP8
    configuration = checked(kernel, configuration, q.shape[-1])
    splits = configuration["split_k"]
    out = empty_output(q, out_scale is not None or scale_out is not None) if out is None else out
    lse = empty_lse(q) if lse_out is None else lse_out
    partial = partial_lse = None
    if workspace is not None:  # looked at here, since a kernel gets the part of it that its splits need, or nothing
        require_sound("decode_attention", {"workspace": workspace})
    if splits > 1 and workspace is None:
        rows = q.numel() // q.shape[-1]
        partial = torch.empty((splits, rows, q.shape[-1]), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, rows), dtype=torch.float32, device=q.device)
    elif splits > 1 and workspace is not None:
        partial, partial_lse = _parts_in(workspace, q, splits)
    writes = (out, lse, scale_out, workspace)
    block_tables = None if block_tables is None else packed(block_tables, *writes)
    kernel.run(
        configuration, (), out, lse, partial, partial_lse, packed(q, *writes), k, v, block_tables,
        packed(seqlens, *writes), k_scale, v_scale, k_scale_shift, v_scale_shift, cu_seqlens_q, sinks, out_scale,
        scale_out, num_groups or 0, scale, max_seqlen_q or 0, causal, window or 0, softcap or 0.0,
        programmatic.active(), programmatic.promised_new_keys(),
    )  # fmt: skip
    return out, lse
