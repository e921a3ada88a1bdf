"""Every instruction of compiled programs must read as llvm-objdump reads it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import triton
import triton.language as tl
from helpers.decoding.encodings import base_mnemonic
from helpers.decoding.llvm import objdump, report
from helpers.decoding.ours import ARCHS, decoder
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hipforge.jit import hip_module, obtain, registry, toolchain
from hipforge.jit.backends.amd import code_object

HIP_SOURCE = """
#include <hip/hip_runtime.h>
struct Node { double weight; long long key; unsigned short tag; signed char step; };

__global__ void scalars_and_branches(int* out, const int* in, int n, unsigned long long seed) {
  int lookup[16];
  for (int i = 0; i < 16; ++i) lookup[i] = in[i] * i;
  unsigned long long state = seed;
  long long sum = 0;
  for (int i = 0; i < n; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    sum += lookup[(state >> 33) & 15] / (in[i] | 1);
    switch (in[i] & 7) {
      case 0: sum <<= 3; break;
      case 1: sum ^= state; break;
      case 2: sum = __builtin_bitreverse64(sum); break;
      case 3: sum += __builtin_popcountll(state); break;
      case 4: sum -= __builtin_clzll(state | 1); break;
      default: sum = sum % 1000003; break;
    }
  }
  out[threadIdx.x + blockIdx.x * blockDim.x] = static_cast<int>(sum);
}

__global__ void floating_point(float* out, const float* x, double* d, _Float16* h, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  out[i] = expf(v) / logf(fabsf(v) + 1.0f) + sqrtf(v) * sinf(v) + powf(v, 1.7f) + fmodf(v, 3.0f) + ldexpf(v, 3);
  d[i] = d[i] / 3.7 + sqrt(d[i]) - floor(d[i]) * 1e300 + (double)v + exp(d[i]);
  h[i] = h[i] * (_Float16)v + (_Float16)3.5 - (h[i] > (_Float16)0 ? (_Float16)1 : (_Float16)-2);
  out[i + n] = (float)h[i] + (float)(long long)v + (float)(unsigned)v + (v != v ? 0.15915494f : 4.0f);
}

__global__ void memory(Node* nodes, unsigned char* bytes, short* shorts, unsigned* counter, float* f,
                       unsigned long long* w) {
  __shared__ int tile[256];
  __shared__ unsigned short half_tile[64];
  extern __shared__ double dynamic[];
  int t = threadIdx.x;
  tile[t] = bytes[t] + shorts[t];
  half_tile[t & 63] = static_cast<unsigned short>(shorts[t] * 3);
  dynamic[t] = nodes[t].weight;
  __syncthreads();
  Node node = nodes[tile[t ^ 1] & 63];
  node.key += half_tile[(t + 1) & 63];
  node.step = static_cast<signed char>(node.tag >> 3);
  node.weight = dynamic[t ^ 3] * 2;
  nodes[t] = node;
  bytes[t] = static_cast<unsigned char>(tile[255 - t]);
  atomicAdd(counter, 1u);
  atomicMax(counter + 1, (unsigned)t);
  atomicCAS(counter + 2, 0u, (unsigned)t);
  atomicExch(counter + 3, (unsigned)t);
  atomicAdd(f, 1.5f);
  atomicAdd(w, 5ull);
  atomicAdd(&tile[t & 3], t);
  __threadfence();
  shorts[t] = static_cast<short>(__shfl_xor(tile[t], 5) + __shfl_down(t, 3) + __popcll(__ballot(t & 1)));
}

__device__ __attribute__((noinline)) int recurse(int depth, int* path) {
  return depth == 0 ? path[depth] : recurse(depth - 1, path) + path[depth] * 3;
}
__global__ void calls(int* out, int depth) {
  int path[32];
  for (int i = 0; i < 32; ++i) path[i] = out[i];
  out[threadIdx.x] = recurse(depth, path);
}

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef short s16x2 __attribute__((ext_vector_type(2)));
__global__ void matrix(float* out, const long* a, const long* b, const f16x4* h, short* s) {
  int t = threadIdx.x;
  f32x4 c = {};
  f32x16 c16 = {};
  c = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a[t], b[t], c, 0, 0, 0);
  c = __builtin_amdgcn_mfma_f32_16x16x16f16(h[t], h[t + 64], c, 0, 0, 0);
  c16 = __builtin_amdgcn_mfma_f32_32x32x2f32(out[t], out[t + 64], c16, 0, 0, 0);
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = c[i] + c16[i];
  int packed = __builtin_amdgcn_cvt_pk_fp8_f32(out[t], out[t + 1], 0, false);
  packed = __builtin_amdgcn_cvt_pk_fp8_f32(out[t + 2], out[t + 3], packed, true);
  out[t] = __builtin_amdgcn_cvt_f32_fp8(packed, 2) + __builtin_amdgcn_mov_dpp(t, 0x111, 0xf, 0xf, true);
  s16x2 u = {s[t], s[t + 1]}, v = {s[t + 2], s[t + 3]};
  u = u * v + u;
  s[t] = u.x ^ u.y;
}
"""


def device_code(source: Path, arch: str, flags: Sequence[str], output: Path) -> Path:
    """Compile HIP to a bare code object with the package's own toolchain."""
    chosen = toolchain.select(arch)
    roots = chosen.roots()
    words = [re.sub(r"\$\{(\w+)\}", lambda m: roots[m[1]], word) for word in chosen.device_flags(arch)]
    command = [str(chosen.cxx.path), *words, *flags, "-c", "--no-gpu-bundle-output", str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    return output


def check_code_object(path: Path, arch: str) -> set[str]:
    """Compare every instruction with llvm-objdump; returns the mnemonics."""
    decode, lines = decoder(), objdump(path, arch)
    wrong = []
    for i, line in enumerate(lines):
        code = b"".join(later.code for later in lines[i : i + 4])
        size, text = decode(code, arch)
        if (size, text) != (len(line.code), line.text):
            wrong.append(f"{arch} {line.code.hex()}: LLVM '{line.text}', ours '{text}'")
    assert not wrong, report(wrong)
    assert len(lines) > 30
    return {base_mnemonic(line.text.split()[0]) for line in lines}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_compiled_hip_reads_as_llvm_does(level: str, arch: str, tmp_path: Path) -> None:
    (tmp_path / "kernels.hip").write_text(HIP_SOURCE)
    seen = check_code_object(device_code(tmp_path / "kernels.hip", arch, [level], tmp_path / "k.co"), arch)
    assert len(seen) > 150


@triton.jit
def triton_gemm(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        left = tl.load(a + rows[:, None] * k + (start + inner)[None, :], mask=(rows < m)[:, None], other=0.0)
        right = tl.load(b + (start + inner)[:, None] * n + columns[None, :], mask=(columns < n)[None, :], other=0.0)
        total = tl.dot(left, right, total)
    keep = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16), mask=keep)


@triton.jit
def triton_softmax(x, y, counter, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * n + at, mask=at < n, other=float("-inf")).to(tl.float32)
    shifted = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * n + at, (shifted / tl.sum(shifted, 0)).to(tl.float8e5), mask=at < n)
    tl.atomic_add(counter, 1)


@triton.jit
def triton_scaled(a, sa, b, sb, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner, blocks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    left = tl.load(a + rows[:, None] * K + inner[None, :])
    right = tl.load(b + inner[:, None] + columns[None, :] * K)
    left_scale = tl.load(sa + rows[:, None] * (K // 32) + blocks[None, :])
    right_scale = tl.load(sb + columns[:, None] * (K // 32) + blocks[None, :])
    out = tl.dot_scaled(left, left_scale, "e4m3", right, right_scale, "e4m3")
    tl.store(c + rows[:, None] * N + columns[None, :], out)


TRITON_KERNELS = (
    ("gemm-f16", triton_gemm, "*fp16 *fp16 *bf16 i32 i32 i32", {"BM": 64, "BN": 64, "BK": 32}, ARCHS),
    ("gemm-bf16", triton_gemm, "*bf16 *bf16 *bf16 i32 i32 i32", {"BM": 32, "BN": 128, "BK": 64}, ARCHS),
    ("softmax", triton_softmax, "*fp32 *fp8e5 *i32 i32", {"BLOCK": 1024}, ("gfx950",)),
    ("scaled", triton_scaled, "*fp8e4nv *u8 *fp8e4nv *u8 *fp32", {"M": 64, "N": 64, "K": 256}, ("gfx950",)),
)


@pytest.mark.parametrize(
    ("kernel", "types", "constants", "arch"),
    [
        pytest.param(kernel, types, constants, arch, id=f"{name}-{arch}")
        for name, kernel, types, constants, archs in TRITON_KERNELS
        for arch in archs
    ],
)
def test_triton_kernels_read_as_llvm_does(
    kernel: triton.JITFunction, types: str, constants: dict[str, int], arch: str, tmp_path: Path
) -> None:
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("hip", arch, 64))
    (tmp_path / "kernel.co").write_bytes(compiled.asm["hsaco"])
    check_code_object(tmp_path / "kernel.co", arch)


def shipped_variants() -> list[tuple[str, dict[str, int | str], str]]:
    """The first and the last variant of every HIP module, for each of its architectures."""
    found = []
    for entry in registry.modules().values():
        variants = list(entry.all_variants())
        chosen = variants if len(variants) == 1 else [variants[0], variants[-1]]
        found += [(entry.name, variant, arch) for variant in chosen for arch in entry.archs]
    return found


@pytest.mark.full
@pytest.mark.parametrize(("name", "variant", "arch"), shipped_variants())
def test_shipped_kernels_read_as_llvm_does(name: str, variant: dict[str, int | str], arch: str, tmp_path: Path) -> None:
    request = hip_module.request(registry.module(name), variant, arch)
    library = obtain.binary(hip_module.specification(request, toolchain.select(arch))).entry.library
    for _, image in code_object.device_images(library.read_bytes()):
        (tmp_path / "kernel.co").write_bytes(image)
        check_code_object(tmp_path / "kernel.co", arch)
