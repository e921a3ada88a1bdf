"""The skinny fp8 kernel of sm_90 in every configuration, beside float64. Run by ``make gpu-test``."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.errors import relative

import hipforge
from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.core.row_stream import SHARERS, TILES, warps
from hipforge.ops.fp8_skinny_gemm.kernels.row_stream import PLANS, ROW_STREAM, skinny_row_stream_out
from hipforge.ops.fp8_skinny_gemm.kernels.scaled_mm import SCALED_MM

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or devices.current().arch_of() != "sm_90", reason="needs an sm_90 GPU"
)

BOUND = 2.0**-11 + 2.0**-12  # one rounding to float16, and float32 sums far below it
STREAMS = [
    {"rows": rows, "tiles": tiles, "sharers": sharers}
    for rows, tiles, sharers in itertools.product(PLANS.rows, TILES, SHARERS)
    if sharers <= warps(rows, tiles)
]
# (m, n, k): one of everything; odd sizes; k of no whole line, shorter and longer than one; several passes and rounds.
SHAPES = [(1, 1, 32), (3, 77, 2880), (8, 1000, 4160), (13, 2304, 6144), (32, 640, 2048), (20, 300, 96)]


def operands(m: int, n: int, k: int, pitch: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, pitch or k, device="cuda").to(torch.float8_e4m3fn)[:, :k]
    return a, b.t(), torch.tensor([k**-0.5], device="cuda")


def exact(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double() * scale.double()


def runs(a, b, scale, output=None):
    """Every configuration, with its result."""
    for given in STREAMS:
        out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=torch.half, device="cuda")
        if output is not None:
            out.copy_(output)
        configuration = ROW_STREAM.require(**given, blocks=min(b.shape[1], 132))
        ROW_STREAM.run(configuration, (), out, a, b, scale, output is not None, True)
        yield given, out


@pytest.mark.parametrize("shape", SHAPES)
def test_every_configuration_is_within_one_rounding_of_float64(shape) -> None:
    for pitch in (None, shape[2] + 32):
        parts = operands(*shape, pitch)
        want = exact(*parts)
        for given, got in runs(*parts):
            assert relative(got, want) < BOUND, (given, pitch)


def test_integers_are_exact_and_added_to_the_output() -> None:
    a = torch.randint(-2, 3, (9, 288), device="cuda").float().to(torch.float8_e4m3fn)
    b = torch.randint(-2, 3, (40, 288), device="cuda").float().to(torch.float8_e4m3fn).t()
    scale, output = torch.tensor([0.5], device="cuda"), torch.arange(360, device="cuda").view(9, 40).half() / 4
    want = exact(a, b, scale)
    for given, got in runs(a, b, scale):
        assert torch.equal(got.double(), want), given
    want = (want + output.double()).half()
    for given, got in runs(a, b, scale, output):
        assert torch.equal(got, want), given


def test_the_librarys_product_is_rounded_and_added_once_also_from_a_graph() -> None:
    a, b, scale = operands(16, 64, 288)
    output = torch.randn(16, 64, device="cuda").half()
    want = (exact(a, b, scale) + output.double()).half()
    got = hipforge.skinny_gemm(a, b, scale, output.clone())
    assert relative(got, want.double()) < 2.0**-12  # where float32 sums round the other way
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hipforge.skinny_gemm(a, b, scale)
    graph.replay()
    assert torch.equal(captured, hipforge.skinny_gemm(a, b, scale))


def test_a_nan_element_is_a_nan_of_its_row_or_column_alone() -> None:
    a, b, scale = operands(20, 96, 384)
    a.view(torch.uint8)[7, 300] = 0x7F
    b.view(torch.uint8)[5, 50] = 0xFF
    want = torch.zeros(20, 96, dtype=torch.bool, device="cuda")
    want[7] = want[:, 50] = True
    for given, got in runs(a, b, scale):
        assert torch.equal(got.isnan(), want), given


def test_results_do_not_change_from_run_to_run_nor_with_the_batch_where_that_is_asked_for() -> None:
    a, b, scale = operands(32, 2304, 6144)
    for (given, one), (_, other) in zip(list(runs(a, b, scale)), runs(a, b, scale), strict=True):
        assert torch.equal(one, other), given
    with hipforge.batch_invariant():
        whole = hipforge.skinny_gemm(a, b, scale)
        for m in (1, 8, 9, 16, 17):
            assert torch.equal(hipforge.skinny_gemm(a[:m], b, scale), whole[:m]), m


@pytest.mark.parametrize("m", [1, 8, 16, 17, 32])
def test_the_public_op_takes_every_m_by_the_kernel(m) -> None:
    parts = operands(m, 784, 1056)
    assert hipforge.explain(hipforge.skinny_gemm, *parts).kernel == (ROW_STREAM if m <= 8 else SCALED_MM).name
    assert relative(hipforge.skinny_gemm(*parts), exact(*parts)) < BOUND
    wide = torch.zeros(784, 1056 + 8, dtype=torch.uint8, device="cuda")[:, 1:1057].view(torch.float8_e4m3fn)
    wide.view(torch.uint8).copy_(parts[1].t().view(torch.uint8))  # a pitch and a start that are no multiple of 16
    assert torch.equal(hipforge.skinny_gemm(parts[0], wide.t(), parts[2]), hipforge.skinny_gemm(*parts))


def test_what_the_kernel_does_not_take_is_refused_or_left_to_torch() -> None:
    a, b, scale = operands(4, 64, 256)
    out = torch.empty(4, 64, dtype=torch.half, device="cuda")
    with pytest.raises(GuardError, match="blocks must be between 1 and n = 64; got 132"):
        skinny_row_stream_out(out, a, b, scale, False, 8, 2, 1, 132, False)
    with pytest.raises(GuardError, match="sharers must be a power of two up to 8; got 16"):
        skinny_row_stream_out(out, a, b, scale, False, 32, 2, 16, 64, False)
    with pytest.raises(GuardError, match="b must be column-major"):
        skinny_row_stream_out(out, a, b.contiguous(), scale, False, 8, 2, 1, 64, False)
    found = hipforge.explain(hipforge.skinny_gemm, a, b, scale, None, 2)
    assert found.path == "torch" and "sm_90 does not have" in found.refused["kernel"]
    assert relative(hipforge.skinny_gemm(a, b, scale, None, 2), exact(a, b, scale)) < BOUND
