"""Calls of RoPE and the cache write, and what the reference makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from helpers.fused_fp8_cases import normal
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference import rope_and_cache as reference

FP8 = fp8_dtypes("cpu")[0]
MAX_POS = 40


@dataclass
class Case:
    """Operands of one call; caches start with a pattern, so that a row written by mistake is seen."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    options: dict[str, object] = field(default_factory=dict)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k, self.v, self.cos_sin, self.positions, self.k_cache, self.v_cache, self.slots)

    def copy(self) -> Case:
        words = {n: x.clone() for n, x in self.options.items() if n.endswith("shift") and torch.is_tensor(x)}
        return replace(
            self, q=self.q.clone(), k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone(),
            options={**self.options, **words},
        )  # fmt: skip

    def written(self) -> list[torch.Tensor]:
        words = [x for n, x in self.options.items() if n.endswith("shift")]
        return [self.k_cache, self.v_cache, *words]


def angles(width, dtype=torch.float32, exact=False):
    """cos and sin by position; ``exact``: quarter turns, by which a rotation only moves elements and changes signs."""
    turn = torch.arange(MAX_POS)[:, None] * torch.arange(1, width // 2 + 1)
    if exact:
        table = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]])[turn % 4]
        return torch.cat((table[..., 0], table[..., 1]), dim=-1).to(dtype)
    angle = turn * 0.37
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)


def integers(shape, dtype, seed):
    return torch.randint(-12, 13, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(
    storage="fp8", dtype=torch.bfloat16, tokens=3, q_heads=4, kv_heads=2, dim=128, rotary_dim=None, exact=False,
    angle_dtype=torch.float32, groups=1, pages=3, page_size=16, fused=True, seed=0, **options,
):  # fmt: skip
    """A call whose q, k and v are slices of one fused projection."""
    heads = q_heads + 2 * kv_heads
    make = integers if exact else normal
    if fused:
        whole = make((tokens, heads, dim), dtype, seed)
        q, k, v = whole.split((q_heads, kv_heads, kv_heads), dim=1)
    else:
        q, k, v = (make((tokens, n, dim), dtype, seed + i) for i, n in enumerate((q_heads, kv_heads, kv_heads)))
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(seed))[:tokens]
    width = groups + dim // 8 if storage == "int4" else dim
    kind = {"half": dtype, "fp8": FP8, "rows": FP8, "int4": torch.int32}[storage]
    shape = (pages, page_size, kv_heads, width)
    fill = torch.full((math.prod(shape) * kind.itemsize,), 0x5A, dtype=torch.uint8)
    k_cache, v_cache = (fill.clone().view(kind).view(shape) for _ in "kv")
    if storage == "fp8":
        options = {"k_scale": 0.03125, "v_scale": torch.tensor([0.0625]), **options}
    elif storage == "rows":
        words = torch.full(shape[:3], 0x5A5A5A5A, dtype=torch.int32)
        options = {"k_scale_shift": words.clone(), "v_scale_shift": words.clone(), **options}
    elif storage == "int4":
        options["num_groups"] = groups
    positions = torch.randint(0, MAX_POS, (tokens,), generator=torch.Generator().manual_seed(seed + 9))
    table = angles(dim if rotary_dim is None else rotary_dim, angle_dtype, exact)
    return Case(q, k, v, table, positions, k_cache, v_cache, slots, options)


def expected(given):
    """The reference on copies: (q, what is written)."""
    given = given.copy()
    options = dict(given.options)
    style = options.pop("style", "neox")
    options.pop("rotary_dim", None)
    for name in ("k_scale", "v_scale"):
        if isinstance(options.get(name), float):
            options[name] = torch.tensor([options[name]])
    q = reference(*given.tensors(), interleaved=style == "interleaved", fp8_dtype=FP8, **options)
    return q, given.written()
