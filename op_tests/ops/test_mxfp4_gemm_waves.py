"""The MXFP4 kernel of gfx950 whose waves split K: what it loads and multiplies, and its refusals."""

from __future__ import annotations

import pytest
import torch
from helpers.mxfp4_cases import BENCH, TASKS, assert_close, codes, operands
from helpers.mxfp8_grouped_cases import sparse_bytes

from hipforge import emulator, explain
from hipforge.errors import GuardError
from hipforge.ops import mxfp4_gemm as ops
from hipforge.ops.reference import shuffle_scale, shuffle_weight

pytestmark = pytest.mark.usefixtures("every_checker")


@pytest.mark.parametrize(("m", "n", "k", "seed"), [TASKS[1], (4, 2880, 512, 1)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_task_shapes_are_loaded_and_multiplied_once(m, n, k, seed, shuffled):
    check_task(m, n, k, seed, shuffled)


@pytest.mark.full
@pytest.mark.parametrize(("m", "n", "k", "seed"), TASKS + BENCH)
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_task_shape(m, n, k, seed, shuffled):
    check_task(m, n, k, seed, shuffled)


def ceil(count, by):
    return -(-count // by)


def check_task(m, n, k, seed, shuffled):
    parts, _ = operands(m, n, k, seed)
    xq, xs, wq, ws = parts
    weights = (shuffle_weight(wq), shuffle_scale(ws)) if shuffled else (wq, ws)
    with emulator.counters() as counted:
        got = ops.mxfp4_gemm(xq, xs, *weights, shuffled=shuffled)
    assert_close(got, parts, k)
    chosen = explain(ops.mxfp4_gemm, xq, xs, *weights, shuffled=shuffled).configuration
    assert counted.launches == 1
    if "tile" in chosen:
        rows, columns = divmod(chosen["tile"], 1000)
        assert counted.mfma_count == ceil(m, rows) * ceil(n, columns) * rows * columns // 1024 * 4 * ceil(k, 256)
        assert counted.tensors["Wq"].loaded == ceil(m, rows) * wq.numel()
        return
    m_sub, n_sub = chosen["m_sub"], chosen["n_sub"]
    assert counted.mfma_count == ceil(m, 16 * m_sub) * m_sub * ceil(n, 16 * n_sub) * n_sub * ceil(k, 128)
    assert counted.tensors["Wq"].loaded == ceil(m, 16 * m_sub) * wq.numel()


def test_refused_configurations():
    parts = codes(4, 32, 64, (127,))
    with pytest.raises(GuardError, match="m_sub"):
        ops.run_mxfp4(*parts, m_sub=3)
    with pytest.raises(GuardError, match="number of K steps"):
        ops.run_mxfp4(*parts, k_splits=2)
    with pytest.raises(GuardError, match=r"m_sub \* n_sub \* k_splits must be at most 64; got 4 \* 4 \* 8"):
        ops.run_mxfp4(*codes(4, 32, 1024, (127,)), m_sub=4, n_sub=4, k_splits=8)
    odd = codes(4, 24, 64, (127,))
    with pytest.raises(GuardError, match="N % 16 == 0"):
        ops.run_mxfp4(*odd, shuffled=True)


def test_an_output_inside_an_operand_is_refused():
    parts = codes(4, 32, 64, (127, 128))
    held = parts[2].view(-1)[:256].view(torch.bfloat16).view(4, 32)
    with pytest.raises(GuardError, match="out is written and must not share memory with Wq"):
        ops.mxfp4_gemm_out(held, *parts, False, 1, 1, 1)


def test_payloads_past_two_gigabytes_are_refused_by_the_kernel():
    rows, columns = 1 << 16, 1 << 15
    wq = sparse_bytes(rows, columns)
    ws = sparse_bytes(rows, columns // 16)
    xq, xs = torch.zeros(1, columns, dtype=torch.uint8), torch.zeros(1, columns // 16, dtype=torch.uint8)
    with pytest.raises(GuardError, match=r"Wq has 2147483648 bytes.*2 GB.*signed 32-bit"):
        ops.run_mxfp4(xq, xs, wq, ws)
