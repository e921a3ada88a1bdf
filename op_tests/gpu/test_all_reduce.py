"""The sums over GPUs on GPUs: ranks as streams of one, and a process on each of several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hipforge
from hipforge.nn import Peers

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
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        kept = base.clone()
        want = hipforge.residual_rms_mxfp8(total.to(dtype), kept, weight, 1e-6)
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
