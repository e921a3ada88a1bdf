"""Random shapes and configurations of the skinny GEMM on integers, exactly, with every memory checker on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hipforge import devices, emulator
from hipforge.ops.fp8_skinny_gemm import run_skinny_gemm
from hipforge.ops.fp8_skinny_gemm.family import FORMATS
from hipforge.ops.fp8_skinny_gemm.space import MAX_WAVES, TILES, Configuration, refusal
from hipforge.ops.reference.skinny import skinny_gemm as reference

pytestmark = pytest.mark.gfx942("any_call_is")

ARCH = devices.current().default_arch
CHECKS = {"checks": "all"}


@st.composite
def calls(draw):
    """Return (m, n, k, configuration, other arguments) of a call that the rules accept."""
    k = 32 * draw(st.integers(1, 50))
    tile = Configuration(*draw(st.sampled_from(TILES)))
    qsize = draw(st.integers(1, 4))
    waves = (
        draw(st.integers(1, qsize * tile.a_lanes)),
        draw(st.integers(1, qsize * tile.b_lanes)),
        draw(st.integers(1, qsize)),
    )
    assume(sum(waves) <= MAX_WAVES)
    split_k = draw(st.integers(1, min(4, tile.blocks(k))))
    configuration = Configuration(tile.op_m, tile.a_lanes, tile.b_lanes, tile.ops, *waves, qsize, split_k)
    assume(refusal(configuration, ARCH, k) is None)
    m, n = draw(st.integers(1, 40)), draw(st.integers(1, 150))
    deterministic = n % 2 == 1 or draw(st.booleans())
    return m, n, k, configuration, deterministic


def check(call, workgroups, order, seed, padding):
    m, n, k, configuration, deterministic = call
    generator = torch.Generator().manual_seed(seed)
    # Integers from -1 to 1: sums of at most 1600 products and what they are added to are below 2^11, exact in fp16,
    # and so is every partial sum.
    a = torch.randint(-1, 2, (m, k), generator=generator).float().to(FORMATS[ARCH])
    stored = torch.full((n, k + padding), 0x7F, dtype=torch.uint8)  # NaN in e4m3fn, 240 in e4m3fnuz
    values = torch.randint(-1, 2, (n, k), generator=generator).float().to(FORMATS[ARCH])
    stored[:, :k] = values.view(torch.uint8)
    b = stored.view(FORMATS[ARCH])[:, :k].t()
    output = torch.randint(-9, 10, (m, n), generator=generator).half()
    want = reference(a, values.t(), torch.ones(1), output, torch.float64, torch.float64)
    assert want.abs().max() < 2**11
    with emulator.options(**CHECKS, wave_order=order, seed=seed):
        how = {"deterministic": deterministic, "workgroups": workgroups, **configuration.parameters()}
        got = run_skinny_gemm(a, b, torch.ones(1), output, **how)
    assert torch.equal(got.double(), want)


ARGUMENTS = {
    "workgroups": st.integers(1, 7),
    "order": st.sampled_from(["forward", "reverse", "random"]),
    "seed": st.integers(0, 2**16),
    "padding": st.sampled_from([0, 16, 64]),
}
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow]}


@settings(max_examples=60, derandomize=True, **COMMON)
@given(call=calls(), **ARGUMENTS)
def test_any_call_is_exact(call, workgroups, order, seed, padding):
    check(call, workgroups, order, seed, padding)


@pytest.mark.full
@settings(max_examples=400, **COMMON)
@given(call=calls(), **ARGUMENTS)
def test_more_calls_are_exact(call, workgroups, order, seed, padding):
    check(call, workgroups, order, seed, padding)
