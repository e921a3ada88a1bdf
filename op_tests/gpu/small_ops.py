"""What ``bench_gpu.py`` measures besides products: the ops that move memory, and decode attention over its caches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from helpers import bench

import hipforge
from hipforge.cli import read_floor
from hipforge.ops.triton import decode_attention_fp8 as peer
from hipforge.tuning import timing

OPS = ("norms", "routing", "attention")
COLUMNS = 8192
ROWS = (1, 64, 1024, 16384)
PAGE = 64
# (B, Hkv, query heads per KV head, D, keys): a decode step's, from a quarter to one GB, then heads and groups.
SHAPES = (
    *((batch, kv_heads, 32 // kv_heads, 128, 2048) for kv_heads in (4, 8) for batch in (1, 8, 64)),
    (16, 8, 8, 128, 8192), (1, 8, 8, 128, 131072), (64, 8, 4, 128, 8192),
    *((64, 8, 4, d, 2048 * 128 // d) for d in (64, 192, 256)),
    *((64, 8, group, 128, 2048) for group in (1, 16)),
)  # fmt: skip
# (hidden, experts, chosen ones, groups) of models.
ROUTERS = ((2048, 128, 8, 1), (4096, 128, 8, 1), (2880, 32, 4, 1), (7168, 256, 8, 8), (2048, 512, 10, 1))
CACHES = ("fp8", "rows", "half", "int4")
PEER_SPLITS, PEER_BLOCKS, PEER_WARPS, PEER_STAGES = (1, 2, 4, 16, 64), (32, 64), (1, 2, 4), (1, 3)
Call = Callable[[int], Any]


@torch.compile(dynamic=False)
def compiled_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the norm as torch.compile makes it."""
    return torch.nn.functional.rms_norm(x, (COLUMNS,), weight, 1e-6)


@torch.compile(dynamic=False)
def compiled_swiglu_fp8(gate_up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return SwiGLU and its quantisation as torch.compile makes them."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _unjudged(of: dict[str, Any], moved: int, calls: dict[str, Call], copies: int) -> bench.Problem:
    """Return a problem whose results tests judge; ``mb`` are moved by each call."""
    return bench.Problem(of, calls, lambda got: 0.0, copies, {"mb": moved / 1e6})


def norms(rows: int) -> Iterator[bench.Problem]:
    """Yield the fused norms and quantisers over ``rows`` of 8,192 columns, beside a copy and torch.compile."""
    size = rows * COLUMNS
    count = max(2, min(64, timing.copies_for(2 * size)))
    inputs = [torch.randn(rows, COLUMNS, device="cuda").bfloat16() for _ in range(count)]
    outs = [torch.empty_like(x) for x in inputs]
    weight, scale = torch.randn(COLUMNS, device="cuda").bfloat16(), torch.ones((), device="cuda")
    q = torch.empty(rows, COLUMNS, device="cuda", dtype=torch.float8_e4m3fn)
    half, e8m0 = q[:, ::2].contiguous(), torch.empty(rows, COLUMNS // 32, device="cuda", dtype=torch.uint8)
    found: dict[str, tuple[float, dict[str, Call]]] = {
        "rms_norm": (4, {
            "hipforge": lambda i: hipforge.rms_norm(inputs[i], weight, 1e-6, out=outs[i]),
            "torch copy": lambda i: outs[i].copy_(inputs[i]),
            "compile": lambda i: compiled_norm(inputs[i], weight),
        }),
        "rms_norm_fp8": (3, {"hipforge": lambda i: hipforge.rms_norm_fp8(inputs[i], weight, 1e-6, scale, out=q)}),
        "mxfp8_quantize": (3, {"hipforge": lambda i: hipforge.mxfp8_quantize(inputs[i], out=q, scale_out=e8m0)}),
        "swiglu_fp8": (2.5, {
            "hipforge": lambda i: hipforge.swiglu_fp8(inputs[i], scale, out=half),
            "compile": lambda i: compiled_swiglu_fp8(inputs[i], scale),
        }),
    }  # fmt: skip
    for name, (bytes_each, calls) in found.items():
        yield _unjudged({"op": name, "m": rows}, int(bytes_each * size), calls, count)


def routing() -> Iterator[bench.Problem]:
    """Yield the router's product, the choice of experts, and both in a layer."""
    x, router = torch.randn(8, 6144, device="cuda").bfloat16(), torch.randn(128, 6144, device="cuda")
    wide, logits = x.float(), torch.randn(8, 128, device="cuda")
    product = {"hipforge": lambda i: hipforge.router_gemm(x, router), "torch float32": lambda i: wide @ router.T}
    yield _unjudged({"op": "router_gemm", "m": 8, "n": 128, "k": 6144}, 4 * router.numel(), product, 1)
    choice = {"hipforge": lambda i: hipforge.topk_gating(logits, 8)}
    yield _unjudged({"op": "topk_gating", "m": 8, "n": 128}, 4 * logits.numel(), choice, 1)
    for hidden, experts, choices, groups in ROUTERS:
        yield from (router_step(m, hidden, experts, choices, groups) for m in (1, 8))


def router_step(m: int, hidden: int, experts: int, choices: int, groups: int) -> bench.Problem:
    """Return a MoE layer's launches from its norm to the choice of experts, over routers that rotate past L2."""
    count = min(200, timing.copies_for(2 * experts * hidden))
    routers = [torch.randn(experts, hidden, device="cuda").bfloat16() for _ in range(count)]
    x, residual = (torch.randn(m, hidden, device="cuda").bfloat16() for _ in range(2))
    weight, copy = torch.ones(hidden, device="cuda").bfloat16(), torch.empty_like(x)
    options: dict[str, Any] = {"groups": groups, "topk_groups": max(1, groups // 2)} if groups > 1 else {}

    def step(i: int) -> Any:
        hipforge.residual_rms_mxfp8(x, residual, weight, 1e-6, also_out=copy)
        return hipforge.topk_gating(hipforge.router_gemm(copy, routers[i]), choices, **options)

    def programmatic(i: int) -> Any:
        with hipforge.programmatic_launch():
            return step(i)

    of = {"op": "norm, router and choice", "m": m, "n": experts, "k": hidden}
    return _unjudged(of, 2 * routers[0].numel(), {"hipforge": step, "hipforge programmatic": programmatic}, count)


def bytes_of(shape: tuple[int, ...], kind: str) -> int:
    """Return the bytes of the elements of K and V."""
    batch, kv_heads, _, d, keys = shape
    return int(2 * batch * kv_heads * keys * d * {"half": 2, "int4": 0.5}.get(kind, 1))


class Caches:
    """Copies of the caches of a shape, which together exceed L2, and the call over copy i."""

    def __init__(self, shape: tuple[int, ...], kind: str) -> None:
        batch, kv_heads, group, d, keys = shape
        self.shape, self.kind, self.pages = shape, kind, batch * -(-keys // PAGE)
        self.q = torch.randn(batch, 1, kv_heads * group, d, device="cuda").bfloat16()
        self.seqlens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        self.copies = max(2, min(24, timing.copies_for(bytes_of(shape, kind))))
        self.sides = [(self._side(), self._side()) for _ in range(self.copies)]
        self.tables = torch.randperm(self.pages, device="cuda").view(batch, -1).int()
        words = torch.tensor([0.02, 0.0], dtype=torch.float16).view(torch.int32).item()  # scale and shift
        self.words = torch.full((self.pages, PAGE, kv_heads), words, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.q)

    def _side(self) -> torch.Tensor:
        _, kv_heads, _, d, _ = self.shape
        if self.kind == "half":
            return torch.randn(self.pages, PAGE, kv_heads, d, device="cuda").bfloat16()
        if self.kind == "int4":
            nibbles = torch.randint(-(2**31), 2**31, (self.pages, PAGE, kv_heads, 4 + d // 8), device="cuda")
            nibbles[..., :4] = torch.tensor([0.02, -0.15], dtype=torch.float16).view(torch.int32).item()
            return nibbles.int()
        return torch.randint(0, 120, (self.pages, PAGE, kv_heads, d), device="cuda", dtype=torch.uint8)

    def call(self, i: int) -> object:
        """Attend over copy ``i``."""
        k, v = self.sides[i]
        if self.kind in ("fp8", "half"):
            return hipforge.decode_attention_fp8(self.q, k, v, self.tables, self.seqlens, out=self.out)
        _, kv_heads, group, d, _ = self.shape
        q = self.q.view(1, -1, kv_heads, group, d)

        def wide(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, group, *x.shape[3:])

        sides = (wide(k), wide(v)) if self.kind == "int4" else (wide(k.view(torch.int32)), wide(v.view(torch.int32)))
        words = (None, None) if self.kind == "int4" else (wide(self.words), wide(self.words))
        return hipforge.decode_attention_splitk(
            q, *sides, *words, self.seqlens, self.tables, PAGE, num_groups=4 if self.kind == "int4" else None
        )

    def peers(self) -> dict[str, Call]:
        """Return the Triton kernels in every configuration that fills the GPU."""
        batch, kv_heads, _, d, _ = self.shape

        def prepared(i: int, splits: int, config: peer.SplitConfig) -> Callable[[], object]:
            k, v = (side.view(torch.int32) for side in self.sides[i])
            problem = peer.Problem(
                self.q, k, self.words, v, self.words, self.seqlens, self.tables, d**-0.5, splits, "sm_90"
            )
            return peer.prepare(problem, config).run

        found = {}
        for splits, block_n, warps, stages in itertools.product(PEER_SPLITS, PEER_BLOCKS, PEER_WARPS, PEER_STAGES):
            if not 64 <= batch * kv_heads * splits <= 4096:  # blocks: half of the multiprocessors, to 32 on each
                continue
            config = peer.SplitConfig(block_n, warps, num_stages=stages)
            runs = [prepared(i, splits, config) for i in range(self.copies)]
            found[f"triton {config} split_k={splits}"] = lambda i, runs=runs: runs[i]()
        return found


def attention() -> Iterator[bench.Problem]:
    """Yield decode attention: all shapes over fp8, those of 8 KV heads also over the other caches.

    The peer takes fp8 rows with a scale and a shift each, as the cache *rows* does.
    """
    for shape, kind in itertools.product(SHAPES, CACHES):
        if kind != "fp8" and shape[1:4] != (8, 4, 128):
            continue
        caches = Caches(shape, kind)
        flat = [torch.cat([side.view(torch.uint8).flatten() for side in sides]) for sides in caches.sides]
        of = dict(zip(("batch", "kv_heads", "group", "d", "keys"), shape, strict=True))
        problem = _unjudged(
            {"op": f"attention {kind}", **of},
            bytes_of(shape, kind),
            {"hipforge": caches.call, **(caches.peers() if kind == "rows" else {})},
            caches.copies,
        )
        yield dataclasses.replace(problem, known={**problem.known, "floor_us": read_floor.microseconds(flat)})


def problems(rows: Sequence[int]) -> dict[str, Iterator[bench.Problem]]:
    """Return the problems by op; ``rows`` of the norms, those of a decode step and of prefill where none are given."""
    return {
        "norms": (problem for count in rows or ROWS for problem in norms(count)),
        "routing": routing(),
        "attention": attention(),
    }
