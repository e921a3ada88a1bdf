"""The plans of the dense MX-FP8 kernels of sm_90, which need no GPU: what the default rule names, a kernel takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipforge.errors import GuardError
from hipforge.ops.core import programmatic
from hipforge.ops.core.kernel import best
from hipforge.ops.mxfp8_gemm.kernels import KERNELS
from hipforge.ops.mxfp8_gemm.kernels.row_stream import ROW_STREAM, SHARED_BYTES, blocks_for, shared_bytes
from hipforge.ops.mxfp8_gemm.kernels.wgmma_tiles import WGMMA_TILES

HOPPER = "sm_90"
UNITS = 132


def problem(m: int, n: int, k: int) -> SimpleNamespace:
    return SimpleNamespace(m=m, n=n, k=k, key=(m, n, k))


# From one row and one column to the largest of a language model's heads; K also where it is no multiple of 128.
@given(st.integers(1, 300), st.integers(1, 300_000), st.integers(1, 1024).map(lambda blocks: 32 * blocks))
def test_every_default_and_every_candidate_is_accepted(m: int, n: int, k: int) -> None:
    cell = problem(m, n, k)
    for kernel in (ROW_STREAM, WGMMA_TILES):
        for _, configuration in kernel.default(cell, HOPPER, UNITS):
            assert kernel.needs(configuration, cell.key, HOPPER) is None
        for configuration in kernel.candidates(cell, HOPPER):
            assert kernel.needs(configuration, cell.key, HOPPER) is None


@pytest.mark.parametrize(
    ("key", "kernel"),
    [((1, 2304, 6144), ROW_STREAM), ((32, 4096, 4096), ROW_STREAM), ((64, 28672, 4096), WGMMA_TILES),
     ((4096, 4096, 4096), WGMMA_TILES)],
)  # fmt: skip
def test_few_rows_stream_and_many_take_tiles(key, kernel) -> None:
    assert best(KERNELS, problem(*key), HOPPER, UNITS).kernel == kernel.name


def test_rows_of_w_are_spread_over_every_multiprocessor_until_there_are_fewer_rows() -> None:
    assert blocks_for(2304, 6144, UNITS) == UNITS
    assert blocks_for(7, 6144, UNITS) == 7
    # 972 rows of 128 bytes of scales are more than a block keeps: two blocks for each multiprocessor.
    assert blocks_for(128256, 4096, UNITS) == 2 * UNITS


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    few = {"rows": 8, "tiles": 3, "sharers": 16, "blocks": 1}
    assert "more blocks" in ROW_STREAM.needs(few, (1, 28672, 4096), HOPPER)
    assert shared_bytes(8, 3, 28672, 4096) > SHARED_BYTES
    assert "multiple of 128" in ROW_STREAM.needs({**few, "blocks": 132}, (1, 5120, 2880), HOPPER)
    assert "sharers" in ROW_STREAM.needs({**few, "rows": 32, "blocks": 132}, (32, 4096, 4096), HOPPER)
    assert "at most N" in ROW_STREAM.needs({**few, "blocks": 132}, (1, 64, 128), HOPPER)
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
