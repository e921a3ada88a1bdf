"""Every option of decode attention beside a witness in float64 that shares no code with it: kernels and torch."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from stress import attention
from stress.case import Rng

import hipforge

OPS = {op.name: op for op in attention.OPS if op.name.startswith("decode_attention")}
NOT_DRAWN = {"force_kernel_config", "workspace"}  # they change no result


@pytest.mark.parametrize("first", range(0, 60, 20))
@pytest.mark.parametrize("name", OPS)
def test_draws_of_all_options_are_right(name: str, first: int, path: str) -> None:
    op = OPS[name]
    for number in range(first, first + 20):
        given = op.make(Rng(34, number))
        before = copy.deepcopy(given)
        complaint = op.judge(before, getattr(hipforge, name)(**given), given)
        assert complaint is None, f"draw {number}: {complaint}"


@pytest.mark.parametrize("name", OPS)
def test_the_draws_have_every_option(name: str) -> None:
    function = getattr(hipforge, name)
    drawn = {
        key
        for number in range(60)
        for key, value in OPS[name].make(Rng(34, number)).items()
        if value is not None and value is not inspect.signature(function).parameters[key].default
    }
    assert set(inspect.signature(function).parameters) - drawn <= NOT_DRAWN


@pytest.mark.parametrize("page_size", [16, 8])
def test_a_window_counts_back_from_the_last_key_that_the_tables_hold(page_size: int, path: str) -> None:
    fp8 = attention.own_fp8()
    cache = (torch.arange(8.0).view(8, 1, 1, 1) / 8).expand(8, page_size, 1, 64).contiguous().to(fp8)
    tables = torch.tensor([[3, 4]], dtype=torch.int32)
    for length in (2 * page_size, 40, 2**31 - 1):
        lengths = torch.tensor([length], dtype=torch.int32)
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.ones(1, 1, 2, 64, dtype=dtype)
            out = hipforge.decode_attention_fp8(q, cache, cache, tables, lengths, window=4)
            assert out.eq(0.5).all(), f"{length} {dtype}"  # of page 4


@pytest.mark.parametrize("sink", [1e9, 1e10, 1e30, 2e38, 3e38, -1e10, -3e38])
def test_a_finite_sink_of_any_size_gives_finite_results(sink: float, path: str) -> None:
    q, cache = torch.ones(1, 1, 2, 64).bfloat16(), torch.ones(1, 40, 1, 64).to(attention.own_fp8())
    lengths, sinks = torch.tensor([40], dtype=torch.int32), torch.tensor([sink, 0.0])
    for splits in (1, 2):
        out, lse = hipforge.decode_attention_fp8(
            q, cache, cache, None, lengths, sinks=sinks, return_lse=True, split_k=splits
        )
        assert out[0, 0, 0].eq(0.0 if sink > 0 else 1.0).all()
        plain = math.log(40) + 8.0
        if path == "kernel":  # the log-sum-exp is kept in powers of 2
            sink = min(sink, torch.finfo(torch.float32).max * math.log(2))
        assert lse[0, :, 0].tolist() == pytest.approx([max(sink, plain), math.log(math.exp(plain) + 1)], rel=1e-6)
