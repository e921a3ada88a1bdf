"""A decode-time linear layer with MX-FP8 weights: quantise once, call per token batch, fall back where asked to.

    python examples/mxfp8_decode_layer.py

Runs on an MI355X if torch sees one, else on the emulator.
"""

from __future__ import annotations

import torch

import hipforge
from hipforge import devices
from hipforge.ops.reference import dequantize_mxfp8, quantize_mxfp8


class MxFp8Linear(torch.nn.Module):
    """``y = x W^T`` with W kept as e4m3 payload and e8m0 scales per 1x32 block: 33 bytes for 32 weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        payload, scale = quantize_mxfp8(weight)
        self.register_buffer("payload", payload)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xq, x_scale = quantize_mxfp8(x)
        y = hipforge.mxfp8_gemv(xq, x_scale, self.payload, self.scale)
        if y is None:  # outside the envelope (a prefill batch, another GPU): the caller's own path
            return x @ dequantize_mxfp8(self.payload, self.scale).to(x.dtype).t()
        return y


def main() -> None:
    torch.manual_seed(0)
    place = "cuda" if devices.current().is_gpu else "cpu"
    weight = (torch.randn(768, 1024) * 0.1).bfloat16().to(place)
    layer = MxFp8Linear(weight)
    for batch in (1, 4, 16, 300):
        x = torch.randn(batch, 1024, device=place).bfloat16()
        y, exact = layer(x), x.double() @ weight.double().t()
        error = ((y.double() - exact).norm() / exact.norm()).item()
        path = hipforge.explain(hipforge.mxfp8_gemv, *quantize_mxfp8(x), layer.payload, layer.scale)
        print(f"{batch:4} rows: {path.kernel or 'own path':18} relative error against bf16 weights {error:.3f}")


if __name__ == "__main__":
    main()
