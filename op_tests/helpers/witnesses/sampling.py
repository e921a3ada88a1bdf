"""Random numbers and selection: Philox dropout, and sorts over several waves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .base import Problem, Witness

LOW32 = 0xFFFFFFFF


@triton.jit
def dropout(x_ptr, y_ptr, keep_ptr, N, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    x = tl.load(x_ptr + at, mask=mask)
    keep = tl.rand(seed, at) > p
    tl.store(y_ptr + at, tl.where(keep, x / (1 - p), 0.0), mask=mask)
    tl.store(keep_ptr + at, keep.to(tl.int8), mask=mask)


@triton.jit
def random_blocks(y_ptr, seed, first, BLOCK: tl.constexpr):
    """Four results of each Philox call, transposed through LDS, for offsets that need 64 bits."""
    at = first + tl.arange(0, BLOCK).to(tl.int64)
    a, b, c, d = tl.randint4x(seed, at)
    rows = tl.join(tl.join(a, c), tl.join(b, d)).reshape((BLOCK, 4))
    tl.store(y_ptr + tl.arange(0, 4)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], tl.trans(rows))


@triton.jit
def sort_keys(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, DESCENDING: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + at, tl.sort(tl.load(x_ptr + at), dim=1, descending=DESCENDING))


def philox(seed: int, offsets: torch.Tensor) -> torch.Tensor:
    """Philox 4x32-10 (Salmon et al., SC 2011): [4, n] words of counters (low, high, 0, 0) under a 64-bit key."""
    c = [offsets & LOW32, offsets >> 32 & LOW32, torch.zeros_like(offsets), torch.zeros_like(offsets)]
    key = [seed & LOW32, seed >> 32 & LOW32]

    def product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # 32 x 32 bits in halves of b, because int64 has no unsigned product of 64 bits.
        low, high = a * (b & 0xFFFF), a * (b >> 16)
        middle = (low >> 16) + high
        return middle >> 16, (low & 0xFFFF) | (middle & 0xFFFF) << 16

    for _ in range(10):
        (high0, low0), (high1, low1) = product(0xD2511F53, c[0]), product(0xCD9E8D57, c[2])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & LOW32, (key[1] + 0xBB67AE85) & LOW32]
    return torch.stack(c)


def as_int32(words: torch.Tensor) -> torch.Tensor:
    """The same 32 bits as signed integers."""
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)


def dropout_problem(dtype: torch.dtype, n: int, p: float, seed: int):
    def problem(arch: str, g: torch.Generator) -> Problem:
        x = torch.randint(-8, 9, (n,), generator=g).to(dtype)
        word = as_int32(philox(seed, torch.arange(n))[0])
        # tl.rand: a word's magnitude (its complement if negative) times the float32 just below 2^-31.
        uniform = torch.where(word < 0, -word - 1, word).float() * torch.tensor(4.6566127342e-10)
        keep = uniform > p
        want = torch.where(keep, x.double() / (1 - p), 0.0)
        args = {"x_ptr": x, "y_ptr": torch.full((n,), 7.0).to(dtype), "keep_ptr": torch.full((n,), 7, dtype=torch.int8),
                "N": n, "p": p, "seed": seed, "BLOCK": 512}  # fmt: skip
        return Problem(args, (triton.cdiv(n, 512),), {"y_ptr": want, "keep_ptr": keep.to(torch.int8)})

    return problem


def random_problem(arch: str, g: torch.Generator) -> Problem:
    seed, first, block = 0x123456789ABCDEF, (5 << 32) - 100, 256
    want = as_int32(philox(seed, first + torch.arange(block)))
    args = {"y_ptr": torch.zeros((4, block), dtype=torch.int32), "seed": seed, "first": first, "BLOCK": block}
    return Problem(args, (1,), {"y_ptr": want})


def sort_problem(dtype: torch.dtype, m: int, n: int, descending: bool):
    def problem(arch: str, g: torch.Generator) -> Problem:
        x = torch.randint(-3000, 3000, (m, n), generator=g).to(dtype)
        args = {"x_ptr": x, "y_ptr": torch.zeros_like(x), "M": m, "N": n, "DESCENDING": descending}
        return Problem(args, (1,), {"y_ptr": x.sort(1, descending=descending).values})

    return problem


def witnesses() -> list[Witness]:
    """Every witness of random numbers and selection."""
    two, four = {"num_warps": 2}, {"num_warps": 4}
    through_lds = {"": ("ds_write", "ds_read", "s_barrier")}
    return [
        Witness("philox_dropout_f32", dropout, dropout_problem(torch.float32, 1500, 0.5, 42), options=two,
                contains={"": ("v_mul_hi_u32",)}),
        Witness("philox_dropout_bf16_quarter", dropout, dropout_problem(torch.bfloat16, 1023, 0.75, 1 << 40),
                options=four, contains={"": ("v_mul_hi_u32",)}),
        Witness("philox_words", random_blocks, random_problem, options=four, contains=through_lds),
        Witness("sort_i32_waves", sort_keys, sort_problem(torch.int32, 1, 512, False), options=four,
                contains=through_lds),
        Witness("sort_f32_descending_one_wave", sort_keys, sort_problem(torch.float32, 4, 128, True),
                options={"num_warps": 1}),
        Witness("sort_f16_descending_waves", sort_keys, sort_problem(torch.float16, 1, 512, True), options=two,
                contains=through_lds),
    ]  # fmt: skip
