"""Run the decode ops on the GPU that torch sees, whatever its vendor, against the references on the CPU.

Where no HIP kernel runs (an NVIDIA GPU) this compares the Triton path, and the torch path where Triton does not apply,
with the same results. Needs only torch and triton: no compiler, no emulator. Ends with status 1 at the first
disagreement.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import hipforge
from hipforge.ops import reference
from hipforge.ops.core.fp8 import fp8_dtypes

DEVICE = "cuda"
# A few roundings in fp32; and where a last bit decides a rounding to 16 or 8 bits, few elements differ.
MAX_ERROR = 2e-6
MAX_DIFFERENT = 0.01


def there(values: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with tensors copied to the GPU."""
    return {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in values.items()}


def near(what: str, got: torch.Tensor, want: torch.Tensor, limit: float = MAX_ERROR) -> None:
    """Compare by relative Frobenius error."""
    error = float((got.cpu().double() - want.double()).norm() / want.double().norm())
    sys.stdout.write(f"{what}: error {error:.2g}\n")
    if not error <= limit:
        sys.exit(f"{what} disagrees with the reference")


def few(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare by the share of elements, or bytes of fp8 and words, that differ."""
    if want.dtype != torch.bfloat16:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    different = float((got.cpu() != want).float().mean())
    sys.stdout.write(f"{what}: {different:.2%} differ\n")
    if different > MAX_DIFFERENT:
        sys.exit(f"{what} disagrees with the reference")


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare bit for bit."""
    if not torch.equal(got.cpu(), want):
        sys.exit(f"{what} disagrees with the reference")


def routing() -> None:
    """Check the ops of a router."""
    logits, bias = torch.randn(9, 256), torch.randn(256) * 0.1
    options: tuple[dict[str, Any], ...] = (
        {"scoring": "sigmoid", "bias": bias, "groups": 8, "topk_groups": 4, "scale": 2.5},
        {"shared_experts": 2, "renormalize": False},
        {"scoring": "sigmoid", "bias": bias},
    )
    for chosen in options:
        weights, ids = hipforge.topk_gating(logits.to(DEVICE), 8, **there(chosen))
        want, want_ids = reference.topk_gating(logits, 8, **chosen)
        same("ids", ids, want_ids)
        near("weights", weights, want)
    for block_m in (1, 64):
        slots = torch.randint(-1, 40, (33, 8)).int()
        got = hipforge.moe_align_block_size(slots.to(DEVICE), block_m, 39)
        for one, other in zip(got, reference.moe_align_block_size(slots, block_m, 39), strict=True):
            same("sorted slots", one, other)
    rows, weights = torch.randn(40, 520).bfloat16(), torch.rand(10, 4)
    given = {"weights": weights, "ids": torch.randint(0, 9, (10, 4)), "expert_map": torch.randint(-1, 5, (8,))}
    near(
        "moe_combine", hipforge.moe_combine(rows.to(DEVICE), **there(given)), reference.moe_combine(rows, 4, **given), 0
    )
    x, w, bias = torch.randn(9, 640).bfloat16(), torch.randn(19, 640), torch.randn(19)
    got_logits = hipforge.router_gemm(*(part.to(DEVICE) for part in (x, w, bias)))
    near("router_gemm", got_logits, reference.router_gemm(x, w, bias))


def rope(storage: str, style: str) -> None:
    """Check RoPE with norms into one kind of cache."""
    tokens, dim, shape = 7, 128, (3, 16, 2)
    fp8 = fp8_dtypes(torch.device(DEVICE))[0]
    dtype = {"half": torch.bfloat16, "int4": torch.int32}.get(storage, fp8)
    width = 1 + dim // 8 if storage == "int4" else dim
    q, k, v = torch.randn(tokens, 8, dim).bfloat16().split((4, 2, 2), 1)
    slots = torch.randperm(48)[:tokens]
    slots[2] = -1
    caches = [torch.zeros(*shape, width * dtype.itemsize, dtype=torch.uint8).view(dtype) for _ in "kv"]
    scales: dict[str, Any] = {}
    if storage == "fp8":
        scales = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.03, 0.01])}
    elif storage == "rows":
        scales = {name: torch.zeros(shape, dtype=torch.int32) for name in ("k_scale_shift", "v_scale_shift")}
    elif storage == "int4":
        scales = {"num_groups": 1}
    weight = torch.randn(dim).bfloat16()
    norm = {"q_weight": weight, "k_weight": weight, "weight_offset": 1.0}
    operands = (q, k, v, torch.randn(40, dim), torch.randint(0, 40, (tokens,)), *caches, slots)
    on_gpu, scales_on_gpu = [part.to(DEVICE) for part in operands], there(scales)
    got = hipforge.rope_and_cache(*on_gpu, style=style, **scales_on_gpu, **there(norm))
    want = reference.rope_and_cache(*operands, interleaved=style == "interleaved", fp8_dtype=fp8, **scales, **norm)
    few(f"rope_and_cache {storage} {style}: q", got, want)
    for one, other in zip(on_gpu[5:7], caches, strict=True):
        few("    cache", one, other)
    for name in (name for name in scales if name.endswith("shift")):
        few("    words", scales_on_gpu[name], scales[name])
    sys.stdout.write(f"{hipforge.explain('rope_and_cache', *on_gpu, style=style, **scales_on_gpu)}\n")


def main() -> None:
    """Check every op; the last line says that all agree."""
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    torch.manual_seed(0)
    routing()
    for storage in ("half", "fp8", "rows", "int4"):
        for style in ("neox", "interleaved"):
            rope(storage, style)
    sys.stdout.write(f"all agree on {torch.cuda.get_device_name()}\n")


if __name__ == "__main__":
    main()
