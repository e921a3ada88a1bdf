"""One decode step of a Llama-3.1-405B MLP under TP8, in four launches: the way the MI300X kernels are meant to be used.

    residual_rms ──► skinny gate/up GEMM ──► swiglu_fp8 ──► skinny down GEMM

The norm zeroes the buffer that the gate/up GEMM adds into, and the activation that of the down GEMM (``next_buffer``),
so neither GEMM needs a launch to clear its output.

    python examples/decode_mlp.py [--rows 1] [--full]

Small matrices by default; --full takes the model's own (hidden 16384, intermediate 53248 / 8: 330 MB of weights). Every
stage is compared with float64 over the same quantised operands.
"""

from __future__ import annotations

import argparse

import torch

from hipforge import devices, residual_rms, skinny_gemm, swiglu_fp8
from hipforge.ops.fp8_linear import fp8_dtypes, to_fp8

EPSILON = 1e-5


def quantised_weight(rows: int, columns: int, seed: int, place: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an fp8 weight [columns, rows] in column-major order, as the GEMM takes it, and its scale."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    payload, scale = to_fp8(weight, fp8_dtypes(place)[0])
    return payload.to(place).t(), scale.to(place)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def product(q: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return scale * q @ weight in float64, some columns at a time."""
    left = q.float().double()
    parts = [left @ piece.float().double() for piece in weight.split(1024, dim=1)]
    return torch.cat(parts, dim=1) * scale.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1, help="tokens in the batch, 1 to 32")
    parser.add_argument("--full", action="store_true", help="the model's own matrices")
    options = parser.parse_args()
    hidden, intermediate = (16384, 6656) if options.full else (1024, 416)
    place = "cuda" if devices.current().is_gpu else "cpu"
    rows = options.rows

    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(rows, hidden, generator=generator).half().to(place) for _ in range(2))
    norm_weight = torch.ones(hidden, dtype=torch.float16, device=place)
    w_gate_up, s_gate_up = quantised_weight(2 * intermediate, hidden, 1, place)
    w_down, s_down = quantised_weight(hidden, intermediate, 2, place)
    s_norm, s_act = torch.tensor([0.02], device=place), torch.tensor([0.05], device=place)  # calibrated beforehand

    gate_up = torch.empty(rows, 2 * intermediate, dtype=torch.float16, device=place)
    down = torch.empty(rows, hidden, dtype=torch.float16, device=place)
    before = (x + residual).double()
    q, residual = residual_rms(x, residual, norm_weight, EPSILON, s_norm, next_buffer=gate_up)
    skinny_gemm(q, w_gate_up, s_norm * s_gate_up, output=gate_up)
    act = swiglu_fp8(gate_up, s_act, next_buffer=down)
    skinny_gemm(act, w_down, s_act * s_down, output=down)

    normed = before / (before.square().mean(1, keepdim=True) + EPSILON).sqrt()
    gate, up = gate_up.double().chunk(2, dim=1)
    stages = {
        "residual + RMSNorm": (q.float() * s_norm, normed, 0.04),  # e4m3: half a step is 2^-4, 2.6 % in the mean square
        "gate/up GEMM": (gate_up, product(q, w_gate_up, s_norm * s_gate_up), 2e-3),  # one fp16 rounding and fp32 sums
        "SwiGLU": (act.float() * s_act, gate * torch.sigmoid(gate) * up, 0.04),
        "down GEMM": (down, product(act, w_down, s_act * s_down), 2e-3),
    }
    for name, (got, want, bound) in stages.items():
        error = relative(got, want)
        print(f"{name:20} {'x'.join(map(str, got.shape)):>12}   relative error {error:.2e} (bound {bound:g})")
        if not error <= bound:
            raise SystemExit(f"{name} is wrong")


if __name__ == "__main__":
    main()
