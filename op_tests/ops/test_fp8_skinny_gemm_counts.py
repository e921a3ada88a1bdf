"""The skinny fp8 GEMM beside Triton's fp8 dot on one instrument: fewer instructions, and the same weights read once."""

from __future__ import annotations

import pytest
import torch
from bench_fp8_skinny_gemm import run_triton
from helpers.errors import relative
from helpers.fp8_skinny_cases import normals
from helpers.witnesses.base import TRITON

from hipforge import emulator
from hipforge.ops import fp8_skinny_gemm as ops
from hipforge.ops.fp8_skinny_gemm.kernels.queue import default_configuration
from hipforge.ops.reference.skinny import skinny_gemm as reference

pytestmark = pytest.mark.gfx942

N, K, COMPUTE_UNITS = 576, 8192, 72  # an eighth of the QKV projection: the same work for each of fewer compute units


@pytest.mark.parametrize("m", [1, 8, 16, 32])
def test_fewer_instructions_than_the_compiled_dot(m):
    a, b, scale = normals(m, N, K, seed=m)
    configuration = default_configuration(m, N, K, COMPUTE_UNITS)
    with emulator.counters() as ours:
        got = ops.run_skinny_gemm(a, b, scale, workgroups=COMPUTE_UNITS, **configuration.parameters())
    with emulator.counters() as theirs:
        theirs_result = run_triton(a, b, scale, configuration.split_k)
    want = reference(a, b, scale, None, torch.float64, torch.float64)
    for result in (got, theirs_result):
        # One fp16 rounding is at most 2^-11 of each value; fp32 sums of 2^13 products stay below half of that.
        assert relative(result, want) <= 2.0**-11 + 2.0**-12
    # At the size of the model 0.45 to 0.74 of Triton's; the ends of these shorter tiles weigh more. Triton 3.7 makes
    # shorter code than 3.9 for 32 rows: recorded 1.081 of it.
    most = 1.09 if m == 32 and TRITON <= (3, 7) else 1.0
    assert ours.wave_instructions < most * theirs.wave_instructions
    # Triton's four waves repeat the rows, and it pads m to 16.
    assert ours.mfma_cycles <= 0.25 * theirs.mfma_cycles
    assert ours.tensors["b"].loaded == N * K
