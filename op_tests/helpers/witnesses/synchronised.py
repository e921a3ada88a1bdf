"""Programs that wait for each other: stream-K tiles, spin locks, atomics of every type on tensors of odd sizes.

Each kernel takes how it synchronises as compile-time arguments, so that a version which lacks one synchronisation is
the same kernel with another constant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .base import EXACT, TRITON, Approximate, Omission, Problem, Witness, integers, normal

RELAXED = "relaxed"


@triton.jit
def stream_k(
    a_ptr, b_ptr, c_ptr, partial_ptr, flag_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    RELEASE: tl.constexpr, ACQUIRE: tl.constexpr,
):  # fmt: skip
    """C = A @ B over an equal share of all k blocks per program, wherever tiles begin.

    The program that has a tile's first k block owns the tile. It waits for the later programs that have the rest, each
    of which leaves its sum in its own slot of `partial_ptr` and raises its flag.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles_n, blocks = N // BLOCK_N, K // BLOCK_K
    total = (M // BLOCK_M) * tiles_n * blocks
    share = tl.cdiv(total, programs)
    at, end = program * share, tl.minimum(program * share + share, total)
    slots = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    while at < end:
        tile = at // blocks
        first, last = at - tile * blocks, tl.minimum(end - tile * blocks, blocks)
        rows = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(first, last):
            ks = block * BLOCK_K + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + rows[:, None] * K + ks[None, :])
            b = tl.load(b_ptr + ks[:, None] * N + cols[None, :])
            acc = tl.dot(a, b, acc)
        if first > 0:
            tl.store(partial_ptr + program * BLOCK_M * BLOCK_N + slots, acc)
            tl.atomic_xchg(flag_ptr + program, 1, sem=RELEASE)  # begins with a barrier of the program's waves
        else:
            have, other = last, program
            while have < blocks:
                other += 1
                while tl.atomic_cas(flag_ptr + other, 1, 1, sem=ACQUIRE) != 1:
                    pass
                acc += tl.load(partial_ptr + other * BLOCK_M * BLOCK_N + slots)
                have = tl.minimum((other + 1) * share - tile * blocks, blocks)
            tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc.to(c_ptr.dtype.element_ty))
        at = tile * blocks + last


@triton.jit
def layer_norm_backward(
    dx_ptr, dw_ptr, db_ptr, lock_ptr, dy_ptr, x_ptr, w_ptr, mean_ptr, inverse_ptr, N,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    RELEASE: tl.constexpr, ACQUIRE: tl.constexpr, LOCK: tl.constexpr,
):  # fmt: skip
    """One row's dx; its share of dw and db is added to one of `GROUPS` rows of sums, each under a spin lock."""
    row = tl.program_id(0)
    group = row % GROUPS
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.load(inverse_ptr + row)
    hat = tl.where(mask, (x - tl.load(mean_ptr + row)) * inverse, 0.0)
    wdy = w * dy
    along, mean = tl.sum(hat * wdy, axis=0) / N, tl.sum(wdy, axis=0) / N
    tl.store(dx_ptr + row * N + cols, (wdy - (hat * along + mean)) * inverse, mask=mask)
    if LOCK:
        while tl.atomic_cas(lock_ptr + group, 0, 1, sem=ACQUIRE) == 1:
            pass
    dw = tl.load(dw_ptr + group * N + cols, mask=mask, other=0.0) + dy * hat
    db = tl.load(db_ptr + group * N + cols, mask=mask, other=0.0) + dy
    tl.store(dw_ptr + group * N + cols, dw, mask=mask)
    tl.store(db_ptr + group * N + cols, db, mask=mask)
    if LOCK:
        tl.debug_barrier()  # Triton 3.7 lets one wave open the lock while others still write
        tl.atomic_xchg(lock_ptr + group, 0, sem=RELEASE)


@triton.jit
def odd_atomics(x_ptr, y_ptr, N, BLOCK: tl.constexpr, OPERATION: tl.constexpr, ATOMIC: tl.constexpr):
    """`y = y OPERATION x` for two programs per element; N is odd, so that the last dword of a half ends outside."""
    at = tl.program_id(0) // 2 * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    x = tl.load(x_ptr + tl.program_id(0) % 2 * N + at, mask=mask)
    if not ATOMIC:
        tl.store(y_ptr + at, tl.load(y_ptr + at, mask=mask) + x, mask=mask)
    elif OPERATION == "add":
        tl.atomic_add(y_ptr + at, x, mask=mask)
    elif OPERATION == "max":
        tl.atomic_max(y_ptr + at, x, mask=mask)
    elif OPERATION == "min":
        tl.atomic_min(y_ptr + at, x, mask=mask)
    elif OPERATION == "and":
        tl.atomic_and(y_ptr + at, x, mask=mask)
    elif OPERATION == "or":
        tl.atomic_or(y_ptr + at, x, mask=mask)
    elif OPERATION == "xor":
        tl.atomic_xor(y_ptr + at, x, mask=mask)
    else:
        tl.atomic_xchg(y_ptr + at, x, mask=mask)


@triton.jit
def odd_compare_and_swap(x_ptr, y_ptr, N, BLOCK: tl.constexpr, OPERATION: tl.constexpr, ATOMIC: tl.constexpr):
    """The element-wise compare-and-swap, which takes no mask: the last block begins at N - BLOCK."""
    at = tl.minimum(tl.program_id(0) // 2 * BLOCK, N - BLOCK) + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) % 2 * N + at)
    if ATOMIC:
        tl.atomic_cas(y_ptr + at, tl.zeros_like(x), x)
    else:
        tl.store(y_ptr + at, tl.load(y_ptr + at) + x)


def stream_k_problem(programs: int, dtype: torch.dtype):
    def problem(arch: str, g: torch.Generator) -> Problem:
        m, n, k = 64, 96, 320
        a, b = integers(g, (m, k), dtype), integers(g, (k, n), dtype)
        c = torch.full((m, n), 77.0)
        args = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "partial_ptr": torch.zeros(programs, 32, 32),
                "flag_ptr": torch.zeros(programs, dtype=torch.int32), "M": m, "N": n, "K": k, "BLOCK_M": 32,
                "BLOCK_N": 32, "BLOCK_K": 32, "RELEASE": "release", "ACQUIRE": "acquire"}  # fmt: skip
        return Problem(args, (programs,), {"c_ptr": a.double() @ b.double()})

    return problem


def layer_norm_problem(rows: int, n: int, block: int, groups: int):
    def problem(arch: str, g: torch.Generator) -> Problem:
        x, dy, w = (
            normal(g, (rows, n), torch.float32),
            normal(g, (rows, n), torch.float32),
            normal(g, (n,), torch.float32),
        )
        wide, mean = x.double(), x.double().mean(1)
        inverse = (wide.var(1, correction=0) + 1e-5).rsqrt()
        hat = (wide - mean[:, None]) * inverse[:, None]
        wdy = w.double() * dy.double()
        dx = (wdy - hat * (hat * wdy).mean(1, keepdim=True) - wdy.mean(1, keepdim=True)) * inverse[:, None]
        sums = lambda t: torch.stack([t[i::groups].sum(0) for i in range(groups)])
        args = {"dx_ptr": torch.zeros_like(x), "dw_ptr": torch.zeros(groups, n), "db_ptr": torch.zeros(groups, n),
                "lock_ptr": torch.zeros(groups, dtype=torch.int32), "dy_ptr": dy, "x_ptr": x, "w_ptr": w,
                "mean_ptr": mean.float(), "inverse_ptr": inverse.float(), "N": n, "BLOCK": block, "GROUPS": groups,
                "RELEASE": "release", "ACQUIRE": "acquire", "LOCK": True}  # fmt: skip
        # Values below 8 and sums of at most max(rows, n) of them in f32, each step within half an ulp of its result.
        bound = Approximate(2.0**-20, 64 * max(rows, 32) * 2.0**-24)
        return Problem(args, (rows,), {"dx_ptr": dx, "dw_ptr": sums(hat * dy.double()), "db_ptr": sums(dy.double()),
                                       "lock_ptr": torch.zeros(groups, dtype=torch.int32)}, bound)  # fmt: skip

    return problem


FOLDS = {"add": torch.add, "max": torch.maximum, "min": torch.minimum, "and": torch.bitwise_and,
         "or": torch.bitwise_or, "xor": torch.bitwise_xor}  # fmt: skip
INTEGERS = (torch.int32, torch.uint32, torch.int64, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What tl.atomic_* accepts.
TYPES = {"add": (*FLOATS, *INTEGERS), "max": (torch.float32, torch.float64, *INTEGERS),
         "min": (torch.float32, torch.float64, *INTEGERS), "and": INTEGERS, "or": INTEGERS, "xor": INTEGERS,
         "xchg": (torch.float32, torch.float64, *INTEGERS), "cas": INTEGERS}  # fmt: skip


def atomic_problem(operation: str, dtype: torch.dtype, n: int = 333, block: int = 128):
    def problem(arch: str, g: torch.Generator) -> Problem:
        signed = dtype.is_floating_point or dtype.is_signed
        low, high = (-60, 60) if dtype.is_floating_point else (-1000, 1000) if signed else (1, 2000)
        x = torch.randint(low, high, (2, n), generator=g)
        start = torch.randint(low, high, (n,), generator=g)
        if operation == "xchg":  # either program may be the last: both bring the same
            x[1] = x[0]
        if operation == "cas":
            start, x = torch.zeros(n, dtype=torch.int64), x.abs() + 1
            x[1] = x[0]
        want = x[0] if operation in ("xchg", "cas") else FOLDS[operation](FOLDS[operation](start, x[0]), x[1])
        args = {"x_ptr": x.to(dtype), "y_ptr": start.to(dtype), "N": n, "BLOCK": block, "OPERATION": operation,
                "ATOMIC": True}  # fmt: skip
        return Problem(args, (2 * triton.cdiv(n, block),), {"y_ptr": want.to(dtype)}, EXACT)

    return problem


def atomic_witness(operation: str, dtype: torch.dtype) -> Witness:
    name = f"odd_atomic_{operation}_{str(dtype).removeprefix('torch.')}"
    kernel = odd_compare_and_swap if operation == "cas" else odd_atomics
    plain = Omission("plain", {"ATOMIC": False}, r"global race")
    # LLVM cannot select the exchange of a double through a buffer descriptor; Triton 3.7 cannot translate any.
    plain_pointer = operation == "xchg" and (dtype == torch.float64 or TRITON <= (3, 7))
    knobs = {"use_buffer_ops": False} if plain_pointer else {}
    pairs = {torch.float16: "atomic_pk_add_f16", torch.bfloat16: "atomic_pk_add_bf16"}
    return Witness(name, kernel, atomic_problem(operation, dtype), options={"num_warps": 2}, knobs=knobs,
                   contains={"": (pairs.get(dtype, "atomic"),)}, broken=(plain,))  # fmt: skip


def witnesses() -> list[Witness]:
    """Every witness whose programs depend on each other."""
    unreleased = Omission("relaxed_release", {"RELEASE": RELAXED}, r"global race.*release fence")
    unacquired = Omission("relaxed_acquire", {"ACQUIRE": RELAXED}, r"global race.*no buffer_inv sc1")
    unlocked = Omission("no_lock", {"LOCK": False}, r"global race")
    handing = (unreleased, unacquired)
    cas = {"": ("atomic_cmpswap", "buffer_wbl2", "buffer_inv")}
    return [
        Witness("stream_k_f16", stream_k, stream_k_problem(4, torch.float16), options={"num_warps": 4},
                contains=cas, broken=handing),
        Witness("stream_k_bf16_more_programs_than_tiles", stream_k, stream_k_problem(11, torch.bfloat16),
                options={"num_warps": 2}, contains=cas, broken=handing),
        Witness("layer_norm_backward", layer_norm_backward, layer_norm_problem(12, 300, 512, 3),
                options={"num_warps": 4}, contains=cas, broken=(*handing, unlocked)),
        Witness("layer_norm_backward_one_lock", layer_norm_backward, layer_norm_problem(7, 97, 128, 1),
                options={"num_warps": 2}, contains=cas, broken=(*handing, unlocked)),
        *(atomic_witness(operation, dtype) for operation, dtypes in TYPES.items() for dtype in dtypes),
    ]  # fmt: skip
