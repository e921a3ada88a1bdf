"""The half and bfloat16 headers that a tree without ROCm gets: every value, against torch's conversions."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from hipforge.jit import compile_ops, register

SOURCE = r"""
#include <hip/hip_bf16.h>
#include <hip/hip_bfloat16.h>
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

#include "hipforge/module.h"

// Row r of out is what function r makes of x[i] (as float) and y[i].
__global__ void convert(const float* x, const float* y, float* out, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const __half a = __float2half(x[i]), b = __float2half_rn(y[i]);
  const __hip_bfloat16 c = __float2bfloat16(x[i]), d = __float2bfloat16(y[i]);
  const hip_bfloat16 e(x[i]), f = hip_bfloat16::round_to_bfloat16(y[i]);
  const __half2 ab = __halves2half2(a, b);
  union {
    half2 pair;
    uint32_t bits;
  };
  pair = ab;
  const __half2_raw raw = __builtin_bit_cast(__half2_raw, bits);
  const __hip_bfloat162 cd = __float22bfloat162_rn(make_float2(x[i], y[i]));
  const float results[] = {
      __half2float(a), __half2float(__hadd(a, b)), __half2float(a * b), __half2float(__hfma(a, b, a)),
      __low2float(__hmul2(ab, __lowhigh2highlow(ab))), __half2float(__hmax(a, b)), __hlt(a, b) ? 1.0f : 0.0f,
      __half2float(__ushort_as_half(__half_as_ushort(__habs(a)))), __half2float(__float2half_rz(x[i])),
      __bfloat162float(c), __bfloat162float(__hadd(c, d)), __bfloat162float(c * d), __bfloat162float(__hfma(c, d, c)),
      __high2float(__hadd2(cd, cd)), __bfloat162float(__hmin(c, d)), c < d ? 1.0f : 0.0f,
      float(e), float(e + f), float(-e),
      float(hip_bfloat16(x[i], hip_bfloat16::truncate)), __half2float(hsqrt(__habs(a))),
      __half2float(__ushort_as_half(raw.x.x)), __half2float(__half(raw.y)),
      __high2float(__hmax2(cd, __lowhigh2highlow(cd))), __low2float(__hmin2(cd, __lowhigh2highlow(cd))),
      __low2float(h2rcp(cd)),
  };
  for (int r = 0; r < int(sizeof(results) / sizeof(float)); ++r) out[r * n + i] = results[r];
}

void convert_out(hf::Tensor out, hf::Tensor x, hf::Tensor y, hipStream_t stream) {
  const int64_t n = x.numel();
  HF_CHECK(out.numel() == 26 * n, "out must have 26 rows");
  convert<<<(n + 255) / 256, 256, 0, stream>>>(x.data<float>(), y.data<float>(), out.data<float>(), n);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(convert_out);
"""


@compile_ops("module_test_hip_headers")
def convert_out(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None: ...


def expected(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    def truncated(value: torch.Tensor) -> torch.Tensor:
        return (value.view(torch.int32) & -65536).view(torch.float32)

    def towards_zero(value: torch.Tensor) -> torch.Tensor:
        near = value.half()
        below = (near.view(torch.int16) - 1).view(torch.float16)
        return torch.where(near.float().abs() > value.abs(), below, near).float()

    a, b, c, d = x.half(), y.half(), x.bfloat16(), y.bfloat16()
    wide: Callable[[torch.Tensor], torch.Tensor] = lambda value: value.double()
    return [
        a.float(), (a + b).float(), (a * b).float(), (wide(a) * wide(b) + wide(a)).half().float(),
        (a * b).float(), torch.fmax(a, b).float(), (a < b).float(), a.abs().float(), towards_zero(x),
        c.float(), (c + d).float(), (c * d).float(), (wide(c) * wide(d) + wide(c)).float().bfloat16().float(),
        (d + d).float(), torch.fmin(c, d).float(), (c < d).float(), c.float(), (c + d).float(),
        (-c).float(), truncated(x), a.abs().double().sqrt().float().half().float(), a.float(), b.float(),
        torch.fmax(c, d).float(), torch.fmin(c, d).float(), (1 / c.float()).bfloat16().float(),
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("headers")
    (folder / "headers.cu").write_text(SOURCE)
    (folder / "modules.json").write_text(json.dumps({"module_test_hip_headers": {"srcs": ["headers.cu"]}}))
    register(folder / "modules.json")


def test_every_half_and_every_bfloat16_converts_adds_and_multiplies_as_in_torch() -> None:
    bits = torch.arange(65536, dtype=torch.int32)
    halves = bits.short().view(torch.float16).float()
    brains = (bits << 16).view(torch.float32)
    between = torch.randn(65536, generator=torch.Generator().manual_seed(0)) * 3
    x = torch.cat((halves, brains, between))
    # the partner of a value is never so large that a float32 product would be inexact and then rounded again
    y = torch.randint(-8, 9, x.shape, generator=torch.Generator().manual_seed(1)).float() / 4
    y[torch.arange(0, x.numel(), 1001)] = float("nan")
    out = torch.empty(26, x.numel())
    convert_out(out, x, y)
    for row, (got, want) in enumerate(zip(out, expected(x, y), strict=True)):
        same = (got == want) | (got.isnan() & want.isnan())
        wrong = (~same).nonzero().flatten()[:5]
        assert same.all(), (row, x[wrong].tolist(), y[wrong].tolist(), got[wrong].tolist(), want[wrong].tolist())
