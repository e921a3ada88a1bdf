"""The sums over GPUs and their choice of tokens on GPUs: ranks as streams of one, and a process on each of several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.peer_parts import summed

import hipforge
from hipforge.nn import Peers
from hipforge.ops import summed_linear
from hipforge.ops.argmax import argmax_of_ranks
from hipforge.ops.fused_linear import residual_rms_mxfp8_linear, swiglu_mxfp8_linear
from hipforge.ops.mxfp8_gemm.kernels import row_stream, row_stream_made

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("columns", [4096, 6144, 16384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ranks_in_streams_of_one_gpu_get_the_bits_of_the_ops_one_by_one(
    ranks: int, columns: int, dtype: torch.dtype
) -> None:
    peers, rows = Peers.on_one_device(ranks, 4, columns, "cuda"), 3
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    weight, base = (torch.randn(*size, device="cuda").to(dtype) for size in ((columns,), (rows, columns)))
    for number in range(5):
        parts = [torch.randn(rows, columns, device="cuda").to(dtype) for _ in range(ranks)]
        residuals = [base.clone() for _ in range(ranks)]
        kept = base.clone()
        want = hipforge.residual_rms_mxfp8(summed(parts), kept, weight, 1e-6)
        torch.cuda.synchronize()
        got = []
        for own, stream, part, residual in zip(peers, streams, parts, residuals, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1000 * (number * own.rank % 7))
                got.append(hipforge.all_reduce_residual_rms_mxfp8(part, residual, weight, 1e-6, *own))
        torch.cuda.synchronize()
        for results in got:
            for result, right in zip(results, want, strict=True):
                assert torch.equal(result.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "columns"), [(5, 700), (2, 40_001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ranks_in_streams_of_one_gpu_choose_what_all_columns_would(
    dtype: torch.dtype, rows: int, columns: int, ranks: int
) -> None:
    peers = Peers.on_one_device(ranks, rows, 8, "cuda")
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    for number in range(6):
        parts = [torch.randn(rows, columns, device="cuda").to(dtype) for _ in range(ranks)]
        if number % 2:
            parts = [part.round() for part in parts]  # the largest on several ranks
        if number > 3:
            parts[-1][0, columns // 2] = float("nan")
        want = torch.argmax(torch.cat(parts, 1), 1)
        torch.cuda.synchronize()
        found = []
        for own, stream, part in zip(peers, streams, parts, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1000 * (number * own.rank % 7))
                found.append(argmax_of_ranks(part, own))
        torch.cuda.synchronize()
        assert all(torch.equal(got, want) for got in found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 4096), (2, 2048), (1, 8192)])
def test_products_around_a_sum_have_the_bits_of_those_one_by_one(rows: int, hidden: int, ranks: int) -> None:
    inner = 512
    up, *down = (hipforge.mxfp8_quantize(torch.randn(*size, device="cuda").bfloat16()) for size in (
        (2 * inner, hidden), *[(hidden, inner)] * ranks
    ))  # fmt: skip
    weight = torch.randn(hidden, device="cuda").bfloat16()
    peers = Peers.on_one_device(ranks, rows, hidden, "cuda")
    residual = torch.randn(rows, hidden, device="cuda").bfloat16()
    for number in range(4):
        parts = []
        for own, by in zip(peers, down, strict=True):
            if number % 2:
                gate_up = torch.randn(rows, 2 * inner, device="cuda").bfloat16()
                summed_linear.send_swiglu_mxfp8_linear(gate_up, *by, own)
                parts.append(swiglu_mxfp8_linear(gate_up, *by))
            else:
                x = hipforge.mxfp8_quantize(torch.randn(rows, inner, device="cuda").bfloat16())
                summed_linear.send_mxfp8_linear(*x, *by, own)
                part = torch.empty_like(residual)
                given = row_stream_made.configuration(hidden, inner, 132).values()
                row_stream.mxfp8_row_stream_out(part, *x, *by, None, 8, *given, False)
                parts.append(part)
        want = residual_rms_mxfp8_linear(summed(parts), residual, weight, 1e-6, *up)
        torch.cuda.synchronize()  # a rank that waits here could keep another's product from starting
        for own in peers:
            got = summed_linear.summed_rms_mxfp8_linear(own, residual, weight, 1e-6, *up)
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_on_each_gpu_gets_the_bits_of_the_ops_one_by_one() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("all_reduce_ranks.py"))
    done = subprocess.run([*command, script], capture_output=True, text=True)
    assert done.returncode == 0 and "all right" in done.stdout, done.stdout + done.stderr[-3000:]


def test_a_rank_that_does_not_come_is_an_error_of_the_device() -> None:
    code = """
import torch, hipforge
from hipforge.nn import Peers
own = Peers.on_one_device(2, 1, 32, "cuda", polls=1000)[0]
hipforge.all_reduce(torch.ones(1, 32, device="cuda").half(), *own)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("refused", str(error).splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "refused" in done.stdout, done.stdout + done.stderr[-2000:]
