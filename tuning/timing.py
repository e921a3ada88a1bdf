"""Microseconds on a GPU: graph replay over rotating buffers, so that neither launches nor caches are measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from hipforge.errors import ConfigError

if TYPE_CHECKING:
    import torch

LAST_LEVEL_CACHE_BYTES = 256 << 20  # MI300X and MI355X


CALLS, REPLAYS, WARMUP = 20, 15, 3  # calls of a graph at least, replays that are timed, and those before them


def rotation(bytes_per_call: int, free_bytes: int, cache_bytes: int = LAST_LEVEL_CACHE_BYTES) -> int:
    """Return how many copies of a call's operands to rotate over.

    Enough for twice the last-level cache, so that a copy has left it when its turn comes again; at most what half of
    the free memory holds, and at least 1.

    Args:
        bytes_per_call: bytes of the operands that one call reads.
        free_bytes: free device memory.
        cache_bytes: size of the last-level cache.

    Raises:
        ConfigError: ``bytes_per_call`` is not positive.
    """
    if bytes_per_call < 1:
        raise ConfigError(f"a call must read at least 1 byte; got {bytes_per_call}")
    wanted = -(-2 * cache_bytes // bytes_per_call) + 1
    return max(1, min(wanted, free_bytes // 2 // bytes_per_call))


def copies_for(bytes_per_call: int) -> int:
    """Return over how many copies of a call's operands to rotate on the current GPU; as :func:`rotation`."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    level_2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return rotation(bytes_per_call, free, level_2 if torch.version.hip is None else LAST_LEVEL_CACHE_BYTES)


def microseconds_per_call(call: Callable[[int], object], copies: int) -> float:
    """Return the median time of one ``call(i)``, in microseconds, from replays of a captured graph.

    Args:
        call: makes the launches for copy ``i`` of the operands, on the current stream; must not synchronise.
        copies: ``i`` runs from 0 to ``copies`` - 1, over and over.

    Returns:
        Median over replays of (time of a replay / its calls).

    Raises:
        ConfigError: torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("timing needs a GPU that torch sees; without one the tuners rank by the model")
    calls = max(CALLS, copies)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call builds or allocates must not happen during the capture
        for i in range(copies):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = captured(partial(call, i % copies) for i in range(calls))
    return replay_us(graph) / calls


def captured(calls: Iterable[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, each of which has run before."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a thread of NCCL's may ask for its own events
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return the median time of a replay, in microseconds."""
    import torch

    times = []
    for number in range(WARMUP + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= WARMUP:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measured_source(device_index: int = 0) -> str:
    """Return the ``source`` column of rows measured here: ``measured:<device>/<versions>``."""
    import torch

    name = torch.cuda.get_device_properties(device_index).name.replace(",", " ").replace("/", " ")
    runtime = getattr(torch.version, "hip", None) or torch.version.cuda
    versions = [f"torch-{torch.__version__}", f"runtime-{runtime}"]
    try:
        import triton

        versions.append(f"triton-{triton.__version__}")
    except ImportError:
        versions.append("triton-none")
    return f"measured:{name}/{' '.join(versions)}".replace(",", " ")
