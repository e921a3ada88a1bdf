"""The emulator's HIP runtime: captures, graphs, streams and events, called as a C program would call them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import hip_compile

from hipforge.emulator import library, runtime

MODULE = r"""
#include "hip.h"
#define API extern "C" __attribute__((visibility("default")))
__global__ void scale_add(int* data, int factor, int term) { data[threadIdx.x] = data[threadIdx.x] * factor + term; }
API hipError_t scale_add_on(hipStream_t stream, int* data, int n, int factor, int term) {
  scale_add<<<1, n, 0, stream>>>(data, factor, term);
  return hipGetLastError();
}
API hipError_t too_large(hipStream_t stream, int* data) {
  scale_add<<<1, 2048, 0, stream>>>(data, 1, 1);
  return hipGetLastError();
}
"""

INVALID_VALUE, INVALID_CONFIGURATION, INVALID_HANDLE, ILLEGAL_STATE, ILLEGAL_ADDRESS, NOT_SUPPORTED = (
    1, 9, 400, 401, 700, 801,
)  # fmt: skip
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = range(
    900, 909
)
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NONE, ACTIVE, DEAD = range(3)
NON_BLOCKING = 1
N = 8
LEGACY, PER_THREAD = ctypes.c_void_p(1), ctypes.c_void_p(2)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    runtime.load()
    return ctypes.CDLL(str(hip_compile.shared_library(MODULE, tmp_path_factory.mktemp("graphs"))))


class Hip:
    """The runtime's functions, with the handles that a test makes; all of them are destroyed after it."""

    def __init__(self, module: ctypes.CDLL) -> None:
        self.native, self.module = runtime.load().library, module
        self.streams: list[ctypes.c_void_p] = []
        self.events: list[ctypes.c_void_p] = []
        self.data = torch.arange(N, dtype=torch.int32)
        self.extent = (library.Extent * 1)(library.Extent(b"data", self.data.data_ptr(), 4 * N, 1, 0))

    def stream(self, flags: int = 0) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert self.native.hipStreamCreateWithFlags(ctypes.byref(made), flags) == 0
        self.streams.append(made)
        return made

    def event(self, flags: int = 0) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert self.native.hipEventCreateWithFlags(ctypes.byref(made), flags) == 0
        self.events.append(made)
        return made

    def begin(self, stream: ctypes.c_void_p, mode: int = GLOBAL) -> int:
        return self.native.hipStreamBeginCapture(stream, mode)

    def end(self, stream: ctypes.c_void_p) -> tuple[int, ctypes.c_void_p]:
        graph = ctypes.c_void_p()
        return self.native.hipStreamEndCapture(stream, ctypes.byref(graph)), graph

    def ended(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        status, graph = self.end(stream)
        assert status == 0, library.last_error()
        executable = ctypes.c_void_p()
        assert self.native.hipGraphInstantiate(ctypes.byref(executable), graph, None, None, ctypes.c_size_t(0)) == 0
        assert self.native.hipGraphDestroy(graph) == 0
        return executable

    def replay(self, executable: ctypes.c_void_p, stream: ctypes.c_void_p | None = None) -> int:
        return self.native.hipGraphLaunch(executable, stream)

    def kernel(self, stream: ctypes.c_void_p | None, factor: int, term: int) -> int:
        self.native.hfemu_clear_error()  # hipGetLastError would return an earlier call's
        self.native.hfemu_push_extents(self.extent, 1)
        try:
            return self.module.scale_add_on(stream, ctypes.c_void_p(self.data.data_ptr()), N, factor, term)
        finally:
            self.native.hfemu_pop_extents()

    def status(self, stream: ctypes.c_void_p | None) -> int:
        value = ctypes.c_int(-1)
        assert self.native.hipStreamIsCapturing(stream, ctypes.byref(value)) == 0
        return value.value

    def elapsed(self, start: ctypes.c_void_p, stop: ctypes.c_void_p) -> tuple[int, float]:
        milliseconds = ctypes.c_float(-1)
        return self.native.hipEventElapsedTime(ctypes.byref(milliseconds), start, stop), milliseconds.value


@pytest.fixture
def hip(module: ctypes.CDLL) -> Iterator[Hip]:
    hip = Hip(module)
    hip.native.hfemu_clear_error()
    yield hip
    for stream in hip.streams:
        hip.native.hipStreamDestroy(stream)  # ends what a test left open
    for event in hip.events:
        hip.native.hipEventDestroy(event)
    assert hip.status(PER_THREAD) == NONE
    hip.native.hfemu_clear_error()


def report() -> str:
    return library.last_error() or ""


def test_a_capture_runs_nothing_and_its_graph_replays_on_what_the_memory_holds_then(hip: Hip) -> None:
    stream = hip.stream()
    assert hip.status(stream) == NONE
    assert hip.begin(stream) == 0
    assert hip.status(stream) == ACTIVE
    assert hip.kernel(stream, 2, 1) == hip.kernel(stream, 3, 0) == 0
    assert hip.data.tolist() == list(range(N))
    graph = hip.ended(stream)
    assert hip.status(stream) == NONE
    assert hip.data.tolist() == list(range(N))
    assert hip.replay(graph) == hip.replay(graph, stream) == 0
    assert hip.data.tolist() == [3 * (2 * 3 * (2 * i + 1) + 1) for i in range(N)]
    hip.data.fill_(1)
    assert hip.replay(graph) == 0
    assert hip.data.tolist() == [9] * N
    assert hip.native.hipGraphExecDestroy(graph) == 0
    assert hip.replay(graph) == INVALID_VALUE
    assert "is destroyed" in report()


def test_copies_fills_and_host_functions_are_nodes_in_their_order(hip: Hip) -> None:
    stream, copy, called = hip.stream(), torch.zeros(N, dtype=torch.int32), []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: called.append((data, copy.tolist())))
    data, to = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (hip.data, copy))
    assert hip.begin(stream) == 0
    assert hip.native.hipMemcpyAsync(to, data, ctypes.c_size_t(4 * N), 4, stream) == 0
    assert hip.native.hipLaunchHostFunc(stream, function, ctypes.c_void_p(5)) == 0
    assert hip.native.hipMemsetAsync(data, 0, ctypes.c_size_t(8), stream) == 0
    assert hip.kernel(stream, 1, 1) == 0
    status, graph = hip.end(stream)
    assert status == 0
    assert (copy.sum(), called) == (0, [])
    count = ctypes.c_size_t()
    assert hip.native.hipGraphGetNodes(graph, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert hip.native.hipGraphGetNodes(graph, nodes, ctypes.byref(count)) == 0
    types = []
    for before, node in zip((None, *nodes), nodes, strict=False):
        kind, one, found = ctypes.c_int(), ctypes.c_size_t(1), ctypes.c_void_p()
        assert hip.native.hipGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        types.append(kind.value)
        args = (ctypes.c_void_p(node), ctypes.byref(found), ctypes.byref(one))
        assert hip.native.hipGraphNodeGetDependencies(*args) == 0
        assert (one.value, found.value) == ((0, None) if before is None else (1, before))
    assert types == [1, 3, 2, 0]  # memcpy, host, memset, kernel
    executable = ctypes.c_void_p()
    assert hip.native.hipGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0
    assert hip.native.hipGraphDestroy(graph) == 0
    assert hip.replay(executable) == 0
    assert called == [(5, list(range(N)))]
    assert hip.data.tolist() == [1, 1, *range(3, N + 1)]
    assert hip.native.hipGraphExecDestroy(executable) == 0


def test_a_graph_may_be_captured_in_another(hip: Hip) -> None:
    stream = hip.stream()
    assert hip.begin(stream) == hip.kernel(stream, 2, 0) == 0
    inner = hip.ended(stream)
    assert hip.begin(stream) == hip.kernel(stream, 1, 1) == hip.replay(inner, stream) == 0
    outer = hip.ended(stream)
    assert hip.native.hipGraphExecDestroy(inner) == 0
    assert hip.replay(outer) == 0
    assert hip.data.tolist() == [2 * (i + 1) for i in range(N)]
    assert hip.native.hipGraphExecDestroy(outer) == 0


def test_a_fault_in_a_replay_is_reported_with_the_arguments_name(hip: Hip) -> None:
    stream = hip.stream()
    assert hip.begin(stream) == 0
    hip.extent[0].bytes = 4 * N - 4
    assert hip.kernel(stream, 2, 0) == 0
    graph = hip.ended(stream)
    assert hip.native.hfemu_graph_launch(graph, None) == ILLEGAL_ADDRESS
    assert "data" in report()
    assert hip.native.hipGraphExecDestroy(graph) == 0


def test_a_launch_that_could_never_run_is_refused_while_capturing(hip: Hip) -> None:
    stream = hip.stream()
    assert hip.begin(stream) == 0
    assert hip.module.too_large(stream, ctypes.c_void_p(hip.data.data_ptr())) == INVALID_CONFIGURATION
    assert "at most 1024" in report()


def test_streams_join_a_capture_by_its_events_and_must_come_back(hip: Hip) -> None:
    first, second, fork, join = hip.stream(), hip.stream(), hip.event(), hip.event()
    assert hip.begin(first) == hip.kernel(first, 1, 1) == 0
    assert hip.native.hipEventRecord(fork, first) == hip.native.hipStreamWaitEvent(second, fork, 0) == 0
    assert (hip.status(second), hip.kernel(second, 5, 0)) == (ACTIVE, 0)
    ids = [ctypes.c_ulonglong() for _ in range(2)]
    for stream, number in zip((first, second), ids, strict=True):
        status = ctypes.c_int()
        assert hip.native.hipStreamGetCaptureInfo(stream, ctypes.byref(status), ctypes.byref(number)) == 0
    assert ids[0].value == ids[1].value > 0
    assert hip.end(second)[0] == UNMATCHED
    assert hip.native.hipEventRecord(join, second) == hip.native.hipStreamWaitEvent(first, join, 0) == 0
    assert hip.kernel(first, 1, 7) == 0
    graph = hip.ended(first)
    assert hip.status(second) == NONE
    assert hip.replay(graph) == 0
    assert hip.data.tolist() == [5 * (i + 1) + 7 for i in range(N)]
    assert hip.native.hipGraphExecDestroy(graph) == 0
    # The same, but the second stream is not joined to the first again.
    assert hip.begin(first) == hip.native.hipEventRecord(fork, first) == 0
    assert hip.native.hipStreamWaitEvent(second, fork, 0) == hip.kernel(second, 5, 0) == 0
    status, graph = hip.end(first)
    assert (status, graph.value) == (UNJOINED, None)
    assert hip.status(first) == hip.status(second) == NONE


def test_dependencies_that_no_graph_can_hold_invalidate_the_capture(hip: Hip) -> None:
    first, second, outside, inside = hip.stream(), hip.stream(), hip.event(), hip.event()
    wait, record = hip.native.hipStreamWaitEvent, hip.native.hipEventRecord
    assert record(outside, second) == hip.begin(first) == 0
    assert wait(first, hip.event(), 0) == 0  # nothing waits for an event that was never recorded
    assert wait(first, outside, 0) == ISOLATION
    assert hip.end(first)[0] == INVALIDATED

    assert hip.begin(first) == hip.begin(second) == record(inside, first) == 0
    assert wait(second, inside, 0) == MERGE
    assert hip.end(first)[0] == hip.end(second)[0] == INVALIDATED

    assert hip.begin(first) == record(inside, first) == 0
    assert wait(None, inside, 0) == IMPLICIT
    assert hip.end(first)[0] == INVALIDATED
    assert wait(second, inside, 0) == CAPTURED_EVENT  # its capture has ended


def test_events_of_a_capture_never_happen(hip: Hip) -> None:
    stream, event, plain = hip.stream(), hip.event(), hip.event()
    assert hip.native.hipEventRecord(plain, stream) == 0
    assert hip.begin(stream) == hip.native.hipEventRecord(event, stream) == 0
    for call in (hip.native.hipEventQuery, hip.native.hipEventSynchronize):
        assert call(event) == CAPTURED_EVENT
        assert call(plain) == 0
    assert hip.elapsed(plain, event)[0] == CAPTURED_EVENT
    assert hip.end(stream)[0] == 0  # the query changed nothing
    assert hip.native.hipEventRecord(event, stream) == hip.native.hipEventQuery(event) == 0


def test_an_external_event_is_recorded_by_the_replay(hip: Hip) -> None:
    stream, before, inside = hip.stream(), hip.event(), hip.event()
    assert hip.native.hipEventRecord(before, stream) == hip.begin(stream) == 0
    assert hip.native.hipEventRecordWithFlags(inside, stream, 1) == 0
    assert hip.native.hipStreamWaitEvent(stream, before, 1) == 0
    graph = hip.ended(stream)
    assert hip.elapsed(before, inside)[0] == INVALID_HANDLE
    assert hip.replay(graph) == 0
    status, milliseconds = hip.elapsed(before, inside)
    assert (status, milliseconds > 0) == (0, True)
    assert hip.native.hipGraphExecDestroy(graph) == 0


def _malloc(hip: Hip) -> int:
    block = ctypes.c_void_p()
    status = hip.native.hipMalloc(ctypes.byref(block), ctypes.c_size_t(64))
    if not status:
        hip.native.hipFree(block)
    return status


def _copy(hip: Hip) -> int:
    data = ctypes.c_void_p(hip.data.data_ptr())
    return hip.native.hipMemcpy(data, data, ctypes.c_size_t(4), 4)


def _copy_on_the_null_stream(hip: Hip) -> int:
    data = ctypes.c_void_p(hip.data.data_ptr())
    return hip.native.hipMemcpyAsync(data, data, ctypes.c_size_t(4), 4, None)


CALLS: dict[str, tuple[Callable[[Hip], int], dict[tuple[int, int], int]]] = {
    # call: by (mode of the capture, flags of its stream); calls that are missing here return UNSUPPORTED
    "hipMalloc": (_malloc, {(RELAXED, 0): 0, (RELAXED, NON_BLOCKING): 0}),
    "hipMemcpy": (_copy, {(mode, 0): IMPLICIT for mode in range(3)} | {(RELAXED, NON_BLOCKING): 0}),
    "hipMemcpyAsync on the null stream": (
        _copy_on_the_null_stream,
        {(mode, 0): IMPLICIT for mode in range(3)} | {(mode, NON_BLOCKING): 0 for mode in range(3)},
    ),
    "a launch on the null stream": (
        lambda hip: hip.kernel(None, 1, 0),
        {(mode, 0): IMPLICIT for mode in range(3)} | {(mode, NON_BLOCKING): 0 for mode in range(3)},
    ),
    "hipDeviceSynchronize": (lambda hip: hip.native.hipDeviceSynchronize(), {}),
    "hipStreamSynchronize": (lambda hip: hip.native.hipStreamSynchronize(hip.streams[0]), {}),
    "hipStreamQuery": (lambda hip: hip.native.hipStreamQuery(hip.streams[0]), {}),
    "hipStreamSynchronize of another stream": (
        lambda hip: hip.native.hipStreamSynchronize(hip.streams[1]),
        {(mode, flags): 0 for mode in range(3) for flags in range(2)},
    ),
}


@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_graph_cannot_replay_is_refused_and_invalidates(hip: Hip, name: str, mode: int, flags: int) -> None:
    call, results = CALLS[name]
    expected = results.get((mode, flags), UNSUPPORTED)
    stream, _ = hip.stream(flags), hip.stream()
    assert call(hip) == 0
    assert hip.begin(stream, mode) == 0
    assert call(hip) == expected
    if expected:
        assert hip.status(stream) == DEAD
        assert name.split()[0] in report() or "launch" in report()
        assert hip.kernel(stream, 1, 0) == INVALIDATED
    status, graph = hip.end(stream)
    assert status == (INVALIDATED if expected else 0)
    assert (graph.value is None) == bool(expected)
    assert call(hip) == 0
    assert hip.begin(stream, mode) == 0  # the stream can be captured again


@pytest.mark.parametrize(
    ("mode", "asking", "refused"),
    [
        (GLOBAL, GLOBAL, True),
        (THREAD_LOCAL, GLOBAL, False),
        (RELAXED, GLOBAL, False),
        (GLOBAL, THREAD_LOCAL, False),
        (GLOBAL, RELAXED, False),
    ],
)
def test_another_threads_capture_counts_as_both_modes_say(hip: Hip, mode: int, asking: int, refused: bool) -> None:
    stream, seen = hip.stream(), []

    def ask() -> None:
        own = ctypes.c_int(asking)
        assert hip.native.hipThreadExchangeStreamCaptureMode(ctypes.byref(own)) == 0
        seen.append((own.value, _malloc(hip)))

    assert hip.begin(stream, mode) == 0
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [(GLOBAL, UNSUPPORTED if refused else 0)]
    assert hip.status(stream) == (DEAD if refused else ACTIVE)


@pytest.mark.parametrize(("mode", "expected"), [(GLOBAL, WRONG_THREAD), (THREAD_LOCAL, WRONG_THREAD), (RELAXED, 0)])
def test_only_a_relaxed_capture_ends_in_another_thread(hip: Hip, mode: int, expected: int) -> None:
    stream, seen = hip.stream(), []
    assert hip.begin(stream, mode) == 0
    thread = threading.Thread(target=lambda: seen.append(hip.end(stream)[0]))
    thread.start()
    thread.join()
    assert seen == [expected]
    assert hip.status(stream) == (ACTIVE if expected else NONE)


def test_a_thread_that_captures_can_relax_itself(hip: Hip) -> None:
    stream, mode = hip.stream(), ctypes.c_int(RELAXED)
    assert hip.begin(stream) == 0
    assert hip.native.hipThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    assert _malloc(hip) == 0
    assert hip.native.hipThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    assert mode.value == RELAXED
    assert hip.end(stream)[0] == 0


def test_which_streams_capture_and_from_which_state(hip: Hip) -> None:
    stream = hip.stream()
    assert hip.begin(ctypes.c_void_p(), GLOBAL) == hip.begin(LEGACY) == UNSUPPORTED
    assert hip.begin(stream, 3) == INVALID_VALUE
    assert hip.end(stream)[0] == hip.end(ctypes.c_void_p())[0] == ILLEGAL_STATE
    assert hip.begin(stream) == 0
    assert hip.begin(stream) == ILLEGAL_STATE
    asked = ctypes.c_int()
    assert hip.native.hipStreamIsCapturing(None, ctypes.byref(asked)) == IMPLICIT
    assert hip.end(stream)[0] == 0
    assert hip.begin(PER_THREAD) == hip.kernel(PER_THREAD, 2, 0) == 0
    graph = hip.ended(PER_THREAD)
    assert hip.replay(graph) == 0
    assert hip.data.tolist() == [2 * i for i in range(N)]
    assert hip.native.hipGraphExecDestroy(graph) == 0


def test_destroying_a_capturing_stream_ends_its_capture(hip: Hip) -> None:
    first, second, fork = hip.stream(), hip.stream(), hip.event()
    assert hip.begin(first) == hip.native.hipEventRecord(fork, first) == 0
    assert hip.native.hipStreamWaitEvent(second, fork, 0) == 0
    assert hip.native.hipStreamDestroy(first) == 0
    assert hip.status(second) == NONE
    assert _malloc(hip) == 0
    assert hip.end(first)[0] == INVALID_HANDLE


def test_callbacks_and_allocations_on_a_capturing_stream(hip: Hip) -> None:
    stream, block = hip.stream(), ctypes.c_void_p()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(lambda *_: None)
    assert hip.begin(stream) == 0
    assert hip.native.hipMallocAsync(ctypes.byref(block), ctypes.c_size_t(64), stream) == NOT_SUPPORTED
    assert hip.native.hipStreamAddCallback(stream, callback, None, 0) == UNSUPPORTED
    assert hip.end(stream)[0] == INVALIDATED


# --- streams and events without captures ---


def test_work_of_a_stream_is_done_before_what_waits_for_its_event(hip: Hip) -> None:
    first, second, start, done = hip.stream(), hip.stream(NON_BLOCKING), hip.event(), hip.event()
    assert hip.native.hipEventRecord(start, first) == hip.kernel(first, 1, 1) == 0
    assert hip.native.hipEventRecord(done, first) == hip.native.hipStreamWaitEvent(second, done, 0) == 0
    assert hip.kernel(second, 10, 0) == hip.native.hipEventQuery(done) == hip.native.hipStreamQuery(second) == 0
    assert hip.data.tolist() == [10 * (i + 1) for i in range(N)]
    status, milliseconds = hip.elapsed(start, done)
    assert (status, milliseconds > 0) == (0, True)
    assert hip.elapsed(done, start)[1] == -milliseconds


def test_threads_order_their_streams_by_events(hip: Hip) -> None:
    """One thread launches and records; the other's stream waits for that event and launches."""
    first, second, event, recorded = hip.stream(), hip.stream(), hip.event(), threading.Event()
    seen = []

    def wait() -> None:
        recorded.wait(60)
        seen.append(hip.native.hipStreamWaitEvent(second, event, 0) or hip.kernel(second, 10, 0))

    thread = threading.Thread(target=wait)
    thread.start()
    assert hip.kernel(first, 1, 1) == hip.native.hipEventRecord(event, first) == 0
    recorded.set()
    thread.join()
    assert seen == [0]
    assert hip.data.tolist() == [10 * (i + 1) for i in range(N)]


def test_handles_that_are_not_alive_are_refused(hip: Hip) -> None:
    native, stream, event = hip.native, hip.stream(), hip.event()
    live_stream, live_event = hip.stream(), hip.event()  # made first, or they could get the addresses of destroyed ones
    assert native.hipEventDestroy(event) == native.hipStreamDestroy(stream) == 0
    refused = [
        hip.kernel(stream, 1, 1),
        native.hipStreamDestroy(stream),
        native.hipStreamDestroy(None),
        native.hipStreamQuery(stream),
        native.hipStreamSynchronize(stream),
        native.hipStreamWaitEvent(stream, live_event, 0),
        native.hipStreamWaitEvent(live_stream, event, 0),
        native.hipEventRecord(event, live_stream),
        native.hipEventRecord(live_event, stream),
        native.hipEventQuery(event),
        native.hipEventSynchronize(event),
        native.hipEventDestroy(event),
        native.hipEventDestroy(None),
        native.hipLaunchHostFunc(stream, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None), None),
        hip.begin(stream),
        hip.elapsed(event, live_event)[0],
        hip.elapsed(live_event, live_event)[0],  # never recorded
    ]
    assert refused == [INVALID_HANDLE] * len(refused)
    assert hip.data.tolist() == list(range(N))
    assert native.hipStreamCreateWithFlags(ctypes.byref(ctypes.c_void_p()), 2) == INVALID_VALUE
    assert native.hipEventRecordWithFlags(live_event, live_stream, 2) == INVALID_VALUE
    assert native.hipEventQuery(live_event) == 0  # what HIP returns for one that was never recorded


def test_an_event_without_timing_has_no_elapsed_time(hip: Hip) -> None:
    stream, plain, untimed = hip.stream(), hip.event(), hip.event(2)
    for event in (plain, untimed):
        assert hip.native.hipEventRecord(event, stream) == 0
    assert hip.elapsed(plain, plain) == (0, 0.0)
    assert hip.elapsed(plain, untimed)[0] == INVALID_HANDLE
