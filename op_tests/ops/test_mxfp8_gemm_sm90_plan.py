"""The plans of the dense kernels of sm_90, which need no GPU: what the default rule names, a kernel takes."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import hipforge
import hipforge.csrc
from hipforge.errors import GuardError
from hipforge.jit import toolchain
from hipforge.ops.core import dispatch, programmatic
from hipforge.ops.core.checks import TensorSpec
from hipforge.ops.core.kernel import best
from hipforge.ops.core.row_stream import LONG_RUN_BYTES, SHARED_BYTES, TILES, blocks_for, fewest, shared_bytes, warps
from hipforge.ops.fp8_skinny_gemm.kernels.row_stream import ROW_STREAM as SKINNY
from hipforge.ops.mxfp4_gemm.family import FAMILY as FAMILY4
from hipforge.ops.mxfp4_gemm.kernels import CODE_STREAM, code_stream
from hipforge.ops.mxfp4_gemm.kernels.row_stream import ROW_STREAM as MXFP4
from hipforge.ops.mxfp8_gemm.kernels import KERNELS
from hipforge.ops.mxfp8_gemm.kernels.half_tiles import HALF_TILES
from hipforge.ops.mxfp8_gemm.kernels.ring_tiles import RING_TILES, workspace_bytes
from hipforge.ops.mxfp8_gemm.kernels.row_copied import ROW_COPIED
from hipforge.ops.mxfp8_gemm.kernels.row_stream import ROW_STREAM, ROWS
from hipforge.ops.mxfp8_gemm.kernels.span_tiles import SPAN_TILES

HOPPER = "sm_90"
UNITS = 132


def problem(m: int, n: int, k: int) -> SimpleNamespace:
    return SimpleNamespace(m=m, n=n, k=k, key=(m, n, k), bf16=True)


# From one row and one column to the largest of a language model's heads; K also where it is no multiple of 128.
@example(17, 1, 288)  # 3 steps of K, between two numbers of warps that share them
@given(st.integers(1, 1200), st.integers(1, 300_000), st.integers(1, 1024).map(lambda blocks: 32 * blocks))
def test_every_default_and_every_candidate_is_accepted(m: int, n: int, k: int) -> None:
    cell = problem(m, n, k)
    for kernel in (ROW_STREAM, ROW_COPIED, SPAN_TILES, HALF_TILES, RING_TILES, MXFP4, CODE_STREAM, SKINNY):
        for _, configuration in kernel.default(cell, HOPPER, UNITS):
            assert kernel.needs(configuration, cell.key, HOPPER) is None
        for configuration in kernel.candidates(cell, HOPPER):
            assert kernel.needs(configuration, cell.key, HOPPER) is None


@pytest.mark.parametrize(
    ("key", "kernel"),
    [((1, 2304, 6144), ROW_STREAM), ((2, 28672, 4096), ROW_STREAM), ((3, 28672, 4096), ROW_COPIED),
     ((8, 24576, 4096), ROW_COPIED), ((8, 28672, 4224), ROW_STREAM), ((8, 6144, 4096), ROW_COPIED),
         ((3, 4096, 4096), ROW_COPIED), ((2, 4096, 4096), ROW_STREAM), ((8, 5120, 2048), ROW_STREAM),
     ((16, 4096, 4096), ROW_STREAM), ((17, 4096, 4096), SPAN_TILES),
     ((64, 2304, 6144), SPAN_TILES), ((128, 4096, 4096), HALF_TILES), ((256, 2304, 6144), HALF_TILES),
     ((1024, 4096, 4096), HALF_TILES), ((1025, 4096, 4096), RING_TILES), ((256, 2304, 6176), RING_TILES),
     ((32, 5120, 2880), ROW_STREAM), ((64, 5120, 2880), RING_TILES), ((64, 28672, 4096), RING_TILES),
     ((24, 28672, 4096), RING_TILES), ((256, 4096, 4096), RING_TILES), ((8192, 4096, 4096), RING_TILES)],
)  # fmt: skip
def test_few_rows_stream_some_share_spans_and_many_are_multiplied_in_tiles(key, kernel) -> None:
    assert best(KERNELS, problem(*key), HOPPER, UNITS).kernel == kernel.name


@given(st.integers(1, 300), st.integers(1, 30_000), st.integers(1, 32).map(lambda spans: 512 * spans))
def test_blocks_that_share_k_are_at_work_at_once_and_each_has_a_span(m: int, n: int, k: int) -> None:
    for given_to in SPAN_TILES.candidates(problem(m, n, k), HOPPER):
        rows, k_splits = given_to["rows"], given_to["k_splits"]
        assert k_splits <= k // 512
        assert k_splits == 1 or -(-m // rows) * -(-n // 64) * k_splits <= UNITS


@pytest.mark.parametrize(
    ("key", "tiles", "sharers"),
    [((8, 4096, 4096), 2, 8), ((8, 6144, 4096), 3, 8), ((8, 28672, 4096), 2, 16), ((1, 28672, 4096), 2, 16),
     ((8, 128256, 4096), 3, 16), ((16, 28672, 4096), 4, 2)],
)  # fmt: skip
def test_all_warps_share_k_where_passes_are_many(key, tiles: int, sharers: int) -> None:
    """As an H100 was fastest with up to 8 rows (csrc/mxfp8_gemm/NOTES.md); others were not measured."""
    found = best([ROW_STREAM], problem(*key), HOPPER, UNITS).configuration
    assert (found["tiles"], found["sharers"]) == (tiles, sharers)


@pytest.mark.parametrize(("m", "n", "shared"), [(256, 4096, 0), (8192, 4096, 1), (8192, 262144 + 1, 0)])
def test_scales_of_w_are_shared_where_rows_are_many_and_memory_is_not(m: int, n: int, shared: int) -> None:
    assert best(KERNELS, problem(m, n, 4096), HOPPER, UNITS).configuration["shared"] == shared


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 512).map(lambda blocks: 32 * blocks))
def test_a_workspace_holds_what_a_launch_writes_there(m: int, n: int, k: int) -> None:
    steps = -(-k // 128)
    for tile in RING_TILES.parameters["tile"]:
        for shared in (0, 1):
            rows = tile // 1000
            least = m * k + 4 * steps * rows * -(-m // rows) + n * 16 * -(-steps // 4) + shared * n * k
            assert least <= workspace_bytes(m, n, k, tile, shared) <= least + 4 * 256


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """Decisions as on an sm_90 GPU."""
    monkeypatch.setattr(dispatch, "target_of", lambda device: (HOPPER, UNITS))
    dispatch.clear_decisions()
    yield
    dispatch.clear_decisions()


@pytest.mark.parametrize("m", [1, 16, 17, 300])
@pytest.mark.parametrize("invariant", [False, True])
def test_mxfp4_weights_stream_past_both_kinds_of_activations(m: int, invariant: bool, hopper: None) -> None:
    n, k = 4096, 4096
    # Few rows of W for each multiprocessor are not worth making more than 8 rows of bfloat16 float16.
    of_bf16 = MXFP4 if m > 8 and not invariant else CODE_STREAM
    w = torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k // 32, dtype=torch.uint8)
    for bits, kernel, x in (
        (4, CODE_STREAM, (torch.zeros(m, k // 2, dtype=torch.uint8), torch.zeros(m, k // 32, dtype=torch.uint8))),
        (16, of_bf16, (torch.zeros(m, k, dtype=torch.bfloat16), None)),
    ):
        with hipforge.batch_invariant() if invariant else contextlib.nullcontext():
            found = hipforge.explain(hipforge.mxfp4_gemm, *x, *w)
        assert found.kernel == kernel.name and kernel.needs(found.configuration, (m, n, k), HOPPER) is None
        if invariant:
            assert {**found.configuration, "rows": 16} == code_stream.best(16, n, k, UNITS, bits)
        left = hipforge.explain(hipforge.mxfp4_linear, *x, *w, shuffled=True)
        assert left.path == "torch" and "shuffled weights are for gfx950" in left.refused["kernel"]


@pytest.mark.parametrize("key", [(1 << 20, 96, 64), (1, 96, (1 << 21) + 32)])
def test_mxfp4_past_the_kernels_limits_is_left_to_torch(key, hopper: None) -> None:
    m, n, k = key
    shapes = (m, k // 2), (m, k // 32), (n, k // 2), (n, k // 32)
    decided = FAMILY4.decide(FAMILY4.problem(*(TensorSpec(shape, torch.uint8) for shape in shapes)))
    assert decided.accepted is None and "M at most 1048560, N at most" in decided.refused[0].reason


def test_the_skinny_product_streams_and_split_k_is_left_to_torch(hopper: None) -> None:
    a, b = torch.zeros(3, 96).to(torch.float8_e4m3fn), torch.zeros(40, 96).to(torch.float8_e4m3fn).t()
    scale = torch.ones(1)
    found = hipforge.explain(hipforge.skinny_gemm, a, b, scale)
    assert found.kernel == SKINNY.name and SKINNY.needs(found.configuration, (3, 40, 96), HOPPER) is None
    with hipforge.batch_invariant():
        fixed = [hipforge.explain(hipforge.skinny_gemm, a[:m], b, scale).configuration for m in (1, 3)]
    assert fixed[0] == fixed[1]
    left = hipforge.explain(hipforge.skinny_gemm, a, b, scale, None, 2)
    assert left.path == "torch"
    assert "split_k is for the queue kernel, which sm_90 does not have" in left.refused["kernel"]


def test_rows_of_w_are_spread_over_every_multiprocessor_until_there_are_fewer_rows() -> None:
    assert blocks_for(2304, 6144, UNITS) == UNITS
    assert blocks_for(7, 6144, UNITS) == 7
    # 972 rows of 128 bytes of scales are more than a block keeps: two blocks for each multiprocessor.
    assert blocks_for(128256, 4096, UNITS) == 2 * UNITS


@given(st.integers(1, 300_000), st.integers(0, 20_000), st.integers(1, 300), st.sampled_from(TILES))
def test_fewer_blocks_are_chosen_where_none_makes_more_passes(n: int, k: int, most: int, tiles: int) -> None:
    blocks = min(n, most)
    found = fewest(n, k, blocks, tiles)
    rows, before = -(-n // found), -(-n // blocks)
    assert blocks / 2 <= found <= blocks and -(-rows // (8 * tiles)) == -(-before // (8 * tiles))
    assert rows * (k // 32) <= max(LONG_RUN_BYTES, before * (k // 32))


def test_fewer_blocks_of_the_measured_shapes() -> None:
    # Two passes of 16 rows each, and one of 24; 17 rows in one pass of 24; with 16 columns all blocks have a row.
    assert [fewest(n, 4096, UNITS, tiles) for n, tiles in ((4096, 2), (2304, 3), (28672, 2))] == [128, 96, 128]
    assert fewest(132, 4096, UNITS, 2) == UNITS



def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    few = {"rows": 8, "tiles": 3, "sharers": 16, "blocks": 1}
    assert "more blocks" in ROW_STREAM.needs(few, (1, 28672, 4096), HOPPER)
    assert shared_bytes(8, 3, 28672, 4096) > SHARED_BYTES
    assert "multiple of 128" in ROW_STREAM.needs({**few, "blocks": 132}, (1, 5120, 2880), HOPPER)
    assert "sharers" in ROW_STREAM.needs({**few, "rows": 32, "blocks": 132}, (32, 4096, 4096), HOPPER)
    assert "at most N" in ROW_STREAM.needs({**few, "blocks": 132}, (1, 64, 128), HOPPER)
    copied = {"tiles": 2, "sharers": 8, "blocks": 132}
    assert "X of at most 32768 bytes" in ROW_COPIED.needs(copied, (8, 28672, 4224), HOPPER)
    assert "multiple of 128" in ROW_COPIED.needs(copied, (8, 28672, 96), HOPPER)
    assert "more blocks" in ROW_COPIED.needs({**copied, "blocks": 20}, (8, 28672, 4096), HOPPER)
    assert "at most N" in ROW_COPIED.needs(copied, (1, 64, 128), HOPPER)
    assert "multiple of 512" in SPAN_TILES.needs({"rows": 64, "k_splits": 1}, (64, 4096, 2880), HOPPER)
    assert "k_splits of at most 2" in SPAN_TILES.needs({"rows": 64, "k_splits": 3}, (64, 4096, 1024), HOPPER)
    with pytest.raises(GuardError, match="tiles must be 1, 2, 3 or 4; got 5"):
        ROW_STREAM.require(rows=8, tiles=5, sharers=1, blocks=1)


def test_a_programmatic_launch_is_a_promise_of_one_thread_and_of_its_block() -> None:
    import threading

    seen = []
    assert not programmatic.active()
    with programmatic.programmatic_launch(), programmatic.programmatic_launch():
        other = threading.Thread(target=lambda: seen.append(programmatic.active()))
        other.start()
        other.join()
        assert programmatic.active() and seen == [False]
    assert not programmatic.active()
    with pytest.raises(KeyError), programmatic.programmatic_launch():
        raise KeyError
    assert not programmatic.active()


def test_the_shared_memory_that_plans_reckon_with_is_the_kernel_s(tmp_path: Path) -> None:
    asserted = [
        f"static_assert(Layout<{rows}, {tiles}>::kWarps == {warps(rows, tiles)}"
        f" && shared_bytes<{rows}, {tiles}>({block_rows}, {k}) == {shared_bytes(rows, tiles, block_rows, k)});"
        for rows, tiles, (block_rows, k) in itertools.product(ROWS, TILES, ((1, 32), (37, 4096), (260, 2880)))
    ]
    csrc = Path(hipforge.csrc.__path__[0])
    source = tmp_path / "layout.cu"
    source.write_text(
        f'#include "{csrc}/mxfp8_gemm/nvidia/row_stream_kernel.h"\nusing namespace hf::row_stream;\n'
        f"static_assert(hf::kMostShared == {SHARED_BYTES});\n" + "\n".join(asserted)
    )
    found = toolchain.select("sm_90").tool.path
    flags = (
        "-std=c++17",
        "-arch=sm_90a",
        "-DHF_VENDOR=nvidia",
        f"-I{csrc}/include",
        f"-I{csrc}/include/hipforge/nvidia/include",
    )

    def compiled() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [found, *flags, "-ptx", source, "-o", tmp_path / "layout.ptx"], capture_output=True, text=True
        )

    ran = compiled()
    assert ran.returncode == 0, ran.stderr
    source.write_text(source.read_text().replace(f"(1, 32) == {shared_bytes(8, 1, 1, 32)})", "(1, 32) == 1)"))
    assert compiled().returncode != 0  # the assertions are seen
