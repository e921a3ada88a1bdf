"""Data movement: transposes, gathers, masked and unaligned accesses, calls and loops."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .base import Problem, Witness


@triton.jit
def transpose(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N))
    tl.store(y_ptr + n[:, None] * M + m[None, :], tl.trans(x), mask=(n[:, None] < N) & (m[None, :] < M))


@triton.jit
def shuffle_layout(x_ptr, permuted_ptr, woven_ptr, halves_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A), tl.arange(0, B), tl.arange(0, C)
    x = tl.load(x_ptr + a[:, None, None] * B * C + b[None, :, None] * C + c[None, None, :])
    tl.store(
        permuted_ptr + c[:, None, None] * A * B + a[None, :, None] * B + b[None, None, :], tl.permute(x, (2, 0, 1))
    )
    flat = tl.reshape(x, (A * B * C,))
    tl.store(woven_ptr + tl.arange(0, 2 * A * B * C), tl.interleave(flat, -flat))
    low, high = tl.split(tl.reshape(flat, (A * B * C // 2, 2)))
    tl.store(halves_ptr + tl.arange(0, A * B * C // 2), low * 3 + high)


@triton.jit
def gather_rows(x_ptr, index_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.load(index_ptr + tl.program_id(0))
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=(cols < N) & (row >= 0), other=-1)
    tl.store(y_ptr + tl.program_id(0) * N + cols, x, mask=cols < N)


@triton.jit
def gather_lanes(x_ptr, index_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + at, tl.gather(tl.load(x_ptr + at), tl.load(index_ptr + at), 1))


@triton.jit
def last_block_sums(x_ptr, partial_ptr, count_ptr, y_ptr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    x = tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(partial_ptr + block, tl.sum(x, axis=0))
    if tl.atomic_add(count_ptr, 1) == BLOCKS - 1:
        tl.store(y_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, BLOCKS), volatile=True), axis=0))


@triton.jit
def strided_bytes(x_ptr, y_ptr, N, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * stride, mask=at < N, other=0)
    tl.store(y_ptr + at, x + 1, mask=at < N)


@triton.jit(noinline=True)
def _polynomial(x, degree):
    result = x * 0 + 1
    for _ in range(degree):
        result = result * x + 1
    return result


@triton.jit
def calls(x_ptr, y_ptr, degree, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first = _polynomial(tl.load(x_ptr), degree)
    second = _polynomial(tl.load(x_ptr + 1), degree + 1)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * first + second)


@triton.jit
def collatz(x_ptr, y_ptr):
    value = tl.load(x_ptr + tl.program_id(0))
    steps = 0
    while value != 1:
        if value % 2 == 0:  # noqa: SIM108 (a branch is what this kernel is about)
            value = value // 2
        else:
            value = 3 * value + 1
        steps += 1
    tl.store(y_ptr + tl.program_id(0), steps)


@triton.jit
def persistent(x_ptr, y_ptr, TILES, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), TILES, tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.load(x_ptr + at) * 2 + tile)


@triton.jit
def grid_3d(y_ptr, BLOCK: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(y_ptr + block * BLOCK + tl.arange(0, BLOCK), x + 100 * y + 10000 * z + tl.arange(0, BLOCK) * 0)


def transpose_problem(dtype: torch.dtype, m: int, n: int):
    def problem(arch: str, g: torch.Generator) -> Problem:
        x = torch.randint(-100, 100, (m, n), generator=g).to(dtype)
        y = torch.zeros((n, m), dtype=dtype)
        args = {"x_ptr": x, "y_ptr": y, "M": m, "N": n, "BLOCK_M": 32, "BLOCK_N": 64}
        return Problem(args, (triton.cdiv(m, 32), triton.cdiv(n, 64)), {"y_ptr": x.T.contiguous()})

    return problem


def shuffle_problem(arch: str, g: torch.Generator) -> Problem:
    a, b, c = 4, 16, 8
    x = torch.randint(-1000, 1000, (a, b, c), generator=g, dtype=torch.int32)
    flat = x.reshape(-1)
    want = {"permuted_ptr": x.permute(2, 0, 1).contiguous(), "woven_ptr": torch.stack([flat, -flat], 1).reshape(-1),
            "halves_ptr": flat[0::2] * 3 + flat[1::2]}  # fmt: skip
    args = {"x_ptr": x, "A": a, "B": b, "C": c} | {name: torch.zeros_like(value) for name, value in want.items()}
    return Problem(args, (1,), want)


def gather_rows_problem(arch: str, g: torch.Generator) -> Problem:
    x = torch.randint(-1000, 1000, (20, 100), generator=g, dtype=torch.int32)
    index = torch.tensor([3, 19, -1, 0, 7, 7], dtype=torch.int32)
    want = torch.where(index[:, None] >= 0, x[index.clamp(min=0).long()], -1)
    args = {"x_ptr": x, "index_ptr": index, "y_ptr": torch.zeros((6, 100), dtype=torch.int32), "N": 100, "BLOCK": 128}
    return Problem(args, (6,), {"y_ptr": want})


def gather_lanes_problem(arch: str, g: torch.Generator) -> Problem:
    x = torch.randint(-1000, 1000, (8, 64), generator=g, dtype=torch.int32)
    index = torch.randint(0, 64, (8, 64), generator=g, dtype=torch.int32)
    args = {"x_ptr": x, "index_ptr": index, "y_ptr": torch.zeros_like(x), "M": 8, "N": 64}
    return Problem(args, (1,), {"y_ptr": x.gather(1, index.long())})


def last_block_problem(arch: str, g: torch.Generator) -> Problem:
    x = torch.randint(-100, 100, (8, 256), generator=g, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    args = {"x_ptr": x, "partial_ptr": torch.zeros(8, dtype=torch.int32), "count_ptr": zero, "y_ptr": zero.clone(),
            "BLOCKS": 8, "BLOCK": 256}  # fmt: skip
    return Problem(args, (8,), {"y_ptr": x.sum().int().reshape(1), "partial_ptr": x.sum(1).int()})


def bytes_problem(arch: str, g: torch.Generator) -> Problem:
    x = torch.randint(-100, 100, (97 * 3,), generator=g).to(torch.int8)
    args = {"x_ptr": x, "y_ptr": torch.zeros(97, dtype=torch.int8), "N": 97, "stride": 3, "BLOCK": 128}
    return Problem(args, (1,), {"y_ptr": x[::3] + 1})


def calls_problem(arch: str, g: torch.Generator) -> Problem:
    x = torch.randint(-3, 4, (128,), generator=g, dtype=torch.int32)
    polynomial = lambda value, degree: sum(value**i for i in range(degree + 1))
    want = x * polynomial(x[0], 5) + polynomial(x[1], 6)
    return Problem({"x_ptr": x, "y_ptr": torch.zeros_like(x), "degree": 5, "BLOCK": 128}, (1,), {"y_ptr": want})


def collatz_problem(arch: str, g: torch.Generator) -> Problem:
    starts = [1, 2, 3, 7, 27, 97]
    steps = []
    for value in starts:
        count = 0
        while value != 1:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            count += 1
        steps.append(count)
    x, want = torch.tensor(starts, dtype=torch.int32), torch.tensor(steps, dtype=torch.int32)
    return Problem({"x_ptr": x, "y_ptr": torch.zeros_like(x)}, (len(starts),), {"y_ptr": want})


def persistent_problem(arch: str, g: torch.Generator) -> Problem:
    x = torch.randint(-1000, 1000, (11, 128), generator=g, dtype=torch.int32)
    want = x * 2 + torch.arange(11, dtype=torch.int32)[:, None]
    return Problem({"x_ptr": x, "y_ptr": torch.zeros_like(x), "TILES": 11, "BLOCK": 128}, (3,), {"y_ptr": want})


def grid_problem(arch: str, g: torch.Generator) -> Problem:
    z, y, x = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij")
    want = (x + 100 * y + 10000 * z).int().reshape(-1, 1).expand(24, 64).contiguous()
    return Problem({"y_ptr": torch.zeros((24, 64), dtype=torch.int32), "BLOCK": 64}, (4, 3, 2), {"y_ptr": want})


def witnesses() -> list[Witness]:
    """Every data-movement witness."""
    one, two, four = ({"num_warps": n} for n in (1, 2, 4))
    lds = {"": ("ds_write|ds_store", "ds_read|ds_load")}
    return [
        Witness("transpose_f32", transpose, transpose_problem(torch.float32, 64, 128), contains=lds),
        Witness("transpose_bf16_edges", transpose, transpose_problem(torch.bfloat16, 50, 70), contains=lds),
        Witness("transpose_i8", transpose, transpose_problem(torch.int8, 64, 64), contains=lds),
        Witness("shuffle_layout", shuffle_layout, shuffle_problem, options=two),
        Witness("gather_rows", gather_rows, gather_rows_problem, options=one),
        Witness("gather_lanes", gather_lanes, gather_lanes_problem, options=two),
        Witness("last_block_sums", last_block_sums, last_block_problem, options=four),
        Witness("strided_bytes", strided_bytes, bytes_problem, options=two),
        Witness("calls", calls, calls_problem, options=two, contains={"": ("s_swappc_b64",)}),
        Witness("collatz", collatz, collatz_problem, options=one),
        Witness("persistent", persistent, persistent_problem, options=two),
        Witness("grid_3d", grid_3d, grid_problem, options=one),
    ]
