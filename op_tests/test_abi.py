"""The C ABI from Python: what arrives in C++, what comes back, and what is refused before anything runs."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from hipforge.errors import ArchError, ConfigError, EmulatorFault, GuardError, HipforgeError, LaunchError
from hipforge.jit import abi, host_library
from hipforge.jit.signature import signature_of

SOURCE = r"""
#include <signal.h>
#include <time.h>
#include <stdexcept>
#include "hipforge/export.h"

// facts: [dtype, ndim, address, contiguous, numel, element bytes, device type, device index, sizes..., strides...]
static void describe(hf::Tensor out, hf::Tensor x) {
  int64_t* facts = out.data<int64_t>();
  *facts++ = x.dtype();
  *facts++ = x.dim();
  *facts++ = reinterpret_cast<int64_t>(x.data());
  *facts++ = x.is_contiguous();
  *facts++ = x.numel();
  *facts++ = x.element_bytes();
  *facts++ = x.view().device_type;
  *facts++ = x.device_index();
  for (int64_t i = 0; i < x.dim(); ++i) *facts++ = x.size(i);
  for (int64_t i = 0; i < x.dim(); ++i) *facts++ = x.stride(i);
}
HF_EXPORT(describe);

static void scalars(hf::Tensor out, hf::OptionalTensor maybe, int64_t i, double d, bool b, const char* s) {
  double* values = out.data<double>();
  values[0] = maybe ? 1 : 0;
  values[1] = static_cast<double>(i);
  values[2] = d;
  values[3] = b;
  int64_t length = 0;
  while (s[length]) ++length;
  values[4] = static_cast<double>(length);
  out.data<int64_t>()[5] = i;
}
HF_EXPORT(scalars);

static void fail_with(hf::Tensor out, int64_t kind, const char* text) {
  if (kind == 10) throw std::runtime_error(text);
  if (kind == 11) throw 5;
  HF_FAIL(static_cast<hf_error_kind>(kind), text, " with ", out, " ", -7, " ", 7u, " ", 0.5, " ", true);
}
HF_EXPORT(fail_with);

static void guard(hf::Tensor out, int64_t axis) {
  HF_CHECK(out.dim() == 2, "out must be [M, K]; got ", out);
  HF_CHECK(out.is_shape(2, 3), "out must be 2 by 3");
  (void)out.size(axis);
}
HF_EXPORT(guard);

// Waits until another thread writes out[0]: impossible while the caller holds the GIL.
static void wait_for_write(hf::Tensor out) {
  volatile int64_t* flag = out.data<int64_t>();
  for (int i = 0; i < 2000; ++i) {
    if (*flag) return;
    timespec pause = {0, 1000000};
    nanosleep(&pause, nullptr);
  }
  HF_FAIL(HF_ERROR_OTHER, "nobody wrote");
}
HF_EXPORT(wait_for_write);

static void interrupted(hf::Tensor out) {
  (void)out;
  raise(SIGINT);
  HF_FAIL(HF_ERROR_LAUNCH, "aborted");
}
HF_EXPORT(interrupted);

// What the emulator's poll does when a signal handler raises in mid-launch.
extern "C" {
extern void* PyExc_OSError;
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_SetString(void*, const char*);
}
static void handler_raised(hf::Tensor out) {
  const int state = PyGILState_Ensure();
  PyErr_SetString(PyExc_OSError, "from a signal handler");
  PyGILState_Release(state);
  HF_CHECK(out.numel() == 0, "aborted");
}
HF_EXPORT(handler_raised);

static void add(hf::Tensor out, hf::Tensor x, int64_t n) {
  for (int64_t i = 0; i < out.numel(); ++i) out.data<int64_t>()[i] = x.data<int64_t>()[i] + n;
}
HF_EXPORT_AS(renamed_add, add);

static int64_t last_stream;
static void with_stream(hf::Tensor out, ihipStream_t* stream) {
  (void)out;
  last_stream = reinterpret_cast<int64_t>(stream);
}
HF_EXPORT(with_stream);
extern "C" HF_API int64_t seen_stream() { return last_stream; }

// Stand-ins for the emulator's and HIP's functions, recording what they are told.
struct Extent { const char* name; uint64_t base, bytes; uint32_t writable, reserved; };
static Extent live[16];
static int live_count, depth, deepest, cleared;
static const char* fault;
static void count_extents(hf::Tensor out, hf::OptionalTensor x, hf::OptionalTensor y) {
  (void)x, (void)y;
  int64_t* facts = out.data<int64_t>();
  facts[0] = live_count;
  for (int i = 0; i < live_count; ++i) {
    facts[1 + 4 * i] = live[i].name[0];
    facts[2 + 4 * i] = static_cast<int64_t>(live[i].base);
    facts[3 + 4 * i] = static_cast<int64_t>(live[i].bytes);
    facts[4 + 4 * i] = live[i].writable;
  }
}
HF_EXPORT(count_extents);
extern "C" {
HF_API void push(const Extent* extents, int32_t count) {
  live_count = count;
  for (int i = 0; i < count; ++i) live[i] = extents[i];
  ++depth;
  ++deepest;
}
HF_API void pop() { --depth; }
HF_API const char* last_error() { return fault; }
HF_API void clear_error() { ++cleared; }
HF_API void set_fault(const char* text) { fault = text; }
HF_API int open_scopes() { return depth; }
HF_API int scopes_so_far() { return deepest; }
HF_API int errors_cleared() { return cleared; }

static int current = 3;
static int history[8], changes;
HF_API int get_device(int* out) { *out = current; return 0; }
HF_API int set_device(int index) { if (index == 66) return 101; current = history[changes++ % 8] = index; return 0; }
HF_API int device_change(int i) { return i < changes ? history[i] : -1; }
HF_API void forget_changes() { changes = 0; current = 3; }
}
"""

DTYPES = {
    torch.bool: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 4, torch.int32: 5, torch.int64: 6, torch.float16: 7,
    torch.bfloat16: 8, torch.float32: 9, torch.float64: 10, torch.float8_e4m3fn: 11, torch.float8_e4m3fnuz: 12,
    torch.float8_e5m2: 13, torch.float8_e5m2fnuz: 14, torch.float8_e8m0fnu: 15, torch.float4_e2m1fn_x2: 16,
}  # fmt: skip


def describe(out: torch.Tensor, x: torch.Tensor) -> None: ...
def scalars(out: torch.Tensor, maybe: torch.Tensor | None, i: int, d: float = 0.5, b: bool = True, s: str = "abc") -> None: ...  # noqa: E501
def fail_with(out: torch.Tensor, kind: int, text: str) -> None: ...
def guard(out: torch.Tensor, axis: int) -> None: ...
def wait_for_write(out: torch.Tensor) -> None: ...
def interrupted(out: torch.Tensor) -> None: ...
def handler_raised(out: torch.Tensor) -> None: ...
def renamed_add(out: torch.Tensor, x: torch.Tensor, n: int) -> None: ...
def with_stream(out: torch.Tensor) -> None: ...
def count_extents(out: torch.Tensor, x: torch.Tensor | None, y: torch.Tensor | None) -> None: ...


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    source = tmp_path_factory.mktemp("abi") / "abi_module.cpp"
    source.write_text(SOURCE)
    path = host_library.build("test_abi_module", sources=[source], cflags=["-std=c++17", "-O1", "-Wall", "-Werror"])
    return ctypes.CDLL(str(path))


@pytest.fixture(params=["extension", "extension-without-table", "ctypes"])
def implementation(request):
    return request.param


def address(library, name):
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def environment(library, target):
    return abi.Environment(
        target,
        emulator=tuple(address(library, name) for name in ("push", "pop", "last_error", "clear_error")),
        hip=tuple(address(library, name) for name in ("get_device", "set_device")),
    )


@pytest.fixture
def bound(library, implementation):
    """Bind a stub of this file for a target, with the implementation under test."""

    def bind(stub, target="host", mutates=("out",), **options):
        binder = abi.make_binder(environment(library, target), implementation)
        return abi.bind(library, stub.__name__, signature_of(stub, mutates=mutates), binder=binder, **options)

    return bind


# ---- what arrives ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_as_its_own_code(bound, dtype):
    facts = torch.zeros(16, dtype=torch.int64)
    x = torch.zeros(24, dtype=torch.uint8).view(dtype)
    bound(describe)(facts, x)
    assert facts[:6].tolist() == [DTYPES[dtype], 1, x.data_ptr(), 1, x.numel(), x.element_size()]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:, 2:],
        lambda x: x[:, ::2],
        lambda x: x[0, 0],
        lambda x: x[:0],
        lambda x: x[:1].expand(5, 6),
        lambda x: x.view(2, 1, 2, 1, 6),
    ],
    ids=["whole", "transposed", "offset", "every second", "scalar", "empty", "expanded", "five axes"],
)
def test_shape_strides_and_offset_arrive_exactly(bound, view):
    x = view(torch.arange(24, dtype=torch.int32).view(4, 6))
    facts = torch.full((32,), -1, dtype=torch.int64)
    bound(describe)(facts, x)
    expected = [5, x.dim(), x.data_ptr(), int(x.is_contiguous()), x.numel(), 4, 0, 0, *x.shape, *x.stride()]
    if x.numel() == 0:  # an empty tensor has no address that means anything
        facts[2] = expected[2] = 0
    assert facts[: len(expected)].tolist() == expected


def test_scalars_strings_and_absent_tensors_arrive(bound):
    call = bound(scalars)
    out = torch.zeros(6, dtype=torch.float64)
    call(out, None, -3, 2.25, False, "grüße")
    assert out[:5].tolist() == [0, -3, 2.25, 0, 7]
    call(out, out, 2**62 + 1)
    assert out[:5].tolist() == [1, 2**62, 0.5, 1, 3]
    assert out.view(torch.int64)[5] == 2**62 + 1


def test_keywords_and_defaults_fill_in_any_order(bound):
    out = torch.zeros(6, dtype=torch.float64)
    bound(scalars)(out, s="x", i=4, maybe=None)
    assert out[:5].tolist() == [0, 4, 0.5, 1, 1]


def test_an_int_is_taken_from_anything_with_index_and_a_float_from_an_int(bound):
    out = torch.zeros(6, dtype=torch.float64)
    bound(scalars)(out, None, torch.tensor(9), 3)
    assert out[1:3].tolist() == [9, 3]


def test_parameters_and_tensors_that_require_grad_are_only_read(bound):
    out = torch.zeros(3, dtype=torch.int64)
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    call = bound(describe)
    facts = torch.zeros(16, dtype=torch.int64)
    call(facts, weight)
    assert facts[2] == weight.data_ptr()
    call(facts, torch.ones(2, requires_grad=True) * 2)  # not a leaf: has a grad_fn
    assert facts[0] == 9
    assert weight.grad is None and out.sum() == 0


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"out": 1}, "argument 'out' must be a torch.Tensor; got int"),
        ({"out": None}, "argument 'out' must be a torch.Tensor; got None"),
        ({"maybe": "x"}, "argument 'maybe' must be a torch.Tensor or None; got str"),
        ({"i": "8"}, "argument 'i' must be an int; got str"),
        ({"i": 1.5}, "argument 'i' must be an int; got float"),
        ({"i": 2**63}, "argument 'i' = 9223372036854775808 does not fit 64 bits"),
        ({"i": -(2**63) - 1}, "argument 'i' = -9223372036854775809 does not fit 64 bits"),
        ({"d": "0.5"}, "argument 'd' must be a float; got str"),
        ({"b": 1}, "argument 'b' must be True or False; got int"),
        ({"s": b"x"}, "argument 's' must be a str; got bytes"),
        ({"s": "a\0b"}, "argument 's' must be a str without zero characters"),
        ({"maybe": torch.zeros(2, dtype=torch.complex64)}, "argument 'maybe' has dtype torch.complex64"),
        ({"maybe": torch.zeros(2, dtype=torch.uint16)}, "argument 'maybe' has dtype torch.uint16"),
        ({"maybe": torch.zeros(2, 2).to_sparse()}, "argument 'maybe' is not a plain strided tensor"),
        ({"maybe": torch.zeros(2, device="meta")}, "argument 'maybe' is not a plain strided tensor"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_a_guard_error_that_names_it(bound, changed, words):
    arguments = {"out": torch.zeros(6, dtype=torch.float64), "maybe": None, "i": 1, "d": 1.0, "b": True, "s": "x"}
    with pytest.raises(GuardError) as caught:
        bound(scalars)(**{**arguments, **changed})
    assert str(caught.value).startswith("scalars: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing argument 'out'"),
        ((torch.zeros(6), None), {}, "missing argument 'i'"),
        ((torch.zeros(6), None, 1, 1.0, True, "x", 2), {}, "takes 6 arguments but 7 were given"),
        ((torch.zeros(6), None, 1), {"i": 2}, "multiple values for argument 'i'"),
        ((torch.zeros(6), None, 1), {"block": 2}, "unexpected keyword argument 'block'"),
    ],
)
def test_a_wrong_argument_list_is_a_type_error_as_for_any_function(bound, args, kwargs, words):
    with pytest.raises(TypeError, match=words):
        bound(scalars)(*args, **kwargs)


def test_a_gpu_tensor_on_the_emulator_is_told_about_the_setting(library, monkeypatch):
    monkeypatch.setattr(abi, "read_tensor", lambda tensor: (0, 6, True, 1, (2,), (1,)))
    for implementation in ("extension-without-table", "ctypes"):
        binder = abi.make_binder(environment(library, "emulator"), implementation)
        call = abi.bind(library, "wait_for_write", signature_of(wait_for_write, mutates=("out",)), binder=binder)
        with pytest.raises(GuardError, match=r"'out' is on GPU 1, but .*emulator.*HIPFORGE_DEVICE=hip"):
            call(torch.ones(2))


def test_a_cpu_tensor_on_a_gpu_is_told_about_the_setting(bound):
    with pytest.raises(GuardError, match=r"'out' is a CPU tensor.*GPU.*HIPFORGE_DEVICE=emulator"):
        bound(with_stream, target="hip")(torch.zeros(2))


# ---- what comes back ----


@pytest.mark.parametrize(
    ("kind", "error"), [(1, GuardError), (2, ArchError), (3, LaunchError), (4, HipforgeError)], ids=str
)
def test_the_error_kind_becomes_the_exception_of_that_kind(bound, kind, error):
    with pytest.raises(HipforgeError) as caught:
        bound(fail_with)(torch.zeros(2, 3), kind, "bad")
    assert type(caught.value) is error
    assert str(caught.value) == "fail_with: bad with float32 [2, 3] -7 7 0.5 true"


def test_foreign_cpp_exceptions_are_reported_not_fatal(bound):
    call = bound(fail_with)
    with pytest.raises(HipforgeError, match=r"C\+\+ exception: out of luck"):
        call(torch.zeros(1), 10, "out of luck")
    with pytest.raises(HipforgeError, match="unknown type"):
        call(torch.zeros(1), 11, "")


def test_a_message_longer_than_its_buffer_is_cut(bound):
    with pytest.raises(GuardError) as caught:
        bound(fail_with)(torch.zeros(1), 1, "x" * 10_000)
    assert str(caught.value) == "fail_with: " + "x" * 4095


def test_guards_read_the_tensor_that_was_passed(bound):
    call = bound(guard)
    with pytest.raises(GuardError, match=r"out must be \[M, K\]; got float32 \[4\]"):
        call(torch.zeros(4), 0)
    with pytest.raises(GuardError, match="out must be 2 by 3"):
        call(torch.zeros(2, 4), 0)
    with pytest.raises(GuardError, match=r"axis -3 of a tensor float32 \[2, 3\] that has 2 dimensions"):
        call(torch.zeros(2, 3), -3)
    assert call(torch.zeros(2, 3), -2) is None


def test_the_gil_is_free_while_the_entry_runs(bound):
    out = torch.zeros(1, dtype=torch.int64)
    started = threading.Event()

    def write():
        started.wait()
        out[0] = 1

    writer = threading.Thread(target=write)
    writer.start()
    started.set()
    bound(wait_for_write)(out)
    writer.join()


def test_ctrl_c_during_a_launch_is_a_keyboard_interrupt(bound):
    with pytest.raises(KeyboardInterrupt):
        bound(interrupted)(torch.zeros(1))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("target", ["host", "emulator"])
@pytest.mark.parametrize("size", [0, 1], ids=["entry succeeded", "entry failed"])
def test_an_exception_of_a_signal_handler_wins_over_the_entrys_own_result(bound, target, size):
    with pytest.raises(OSError, match="from a signal handler"):
        bound(handler_raised, target=target)(torch.zeros(size))


def test_many_threads_get_their_own_results(bound):
    call = bound(renamed_add)
    wrong = []

    def work(number):
        x = torch.arange(100)
        out = torch.empty_like(x)
        for step in range(200):
            call(out, x, number + step)
            if out[99] != 99 + number + step:
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(number * 1000,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- the emulator and HIP ----


def extents_of(bound, *args, mutates=("out",)):
    out = torch.zeros(64, dtype=torch.int64)
    bound(count_extents, target="emulator", mutates=mutates)(out, *args)
    count = int(out[0])
    rows = out[1 : 1 + 4 * count].view(count, 4).tolist()
    return out, [(chr(name), base, size, bool(writable)) for name, base, size, writable in rows]


def test_the_emulator_is_told_the_exact_extent_of_every_tensor(bound, library):
    x = torch.zeros(10, 7, dtype=torch.bfloat16)[2:9:3, 1:6:2]  # rows 2, 5, 8 and columns 1, 3, 5
    out, extents = extents_of(bound, x, None)
    last = (x.shape[0] - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1)
    assert extents == [("o", out.data_ptr(), 64 * 8, True), ("x", x.data_ptr(), (last + 1) * 2, False)]
    assert library.open_scopes() == 0


def test_extents_of_empty_scalar_expanded_and_fp4_tensors(bound):
    empty, scalar = torch.zeros(0, 5), torch.zeros(9)[4]
    assert [size for _, _, size, _ in extents_of(bound, empty, scalar)[1]] == [512, 0, 4]
    expanded = torch.zeros(1, 3, dtype=torch.float64).expand(100, 3)
    fp4 = torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert [size for _, _, size, _ in extents_of(bound, expanded, fp4)[1]] == [512, 24, 6]


def test_mutated_arguments_are_writable_extents(bound):
    y = torch.zeros(3)
    assert [row[3] for row in extents_of(bound, y, y, mutates=("out", "y"))[1]] == [True, False, True]


def test_extents_are_taken_back_when_the_entry_fails(bound, library):
    before = library.scopes_so_far()
    with pytest.raises(GuardError):
        bound(fail_with, target="emulator")(torch.zeros(1), 1, "no")
    assert library.scopes_so_far() == before + 1 and library.open_scopes() == 0


@pytest.mark.parametrize("kind", [None, 3], ids=["entry forgot to ask", "entry reported it"])
def test_an_emulator_fault_is_raised_with_the_emulators_report(bound, library, kind):
    report = ctypes.create_string_buffer(b"read one byte past 'x'")
    before = library.errors_cleared()
    library.set_fault(report)
    try:
        with pytest.raises(EmulatorFault, match="read one byte past 'x'"):
            if kind is None:
                extents_of(bound, None, None)
            else:
                bound(fail_with, target="emulator")(torch.zeros(1), kind, "launch failed")
    finally:
        library.set_fault(None)
    assert library.errors_cleared() == before + 1


def test_a_launch_error_without_a_fault_stays_a_launch_error(bound):
    with pytest.raises(LaunchError, match="launch failed") as caught:
        bound(fail_with, target="emulator")(torch.zeros(1), 3, "launch failed")
    assert type(caught.value) is LaunchError


@pytest.fixture
def on_gpu(library, monkeypatch):
    """Pretend that each tensor lives on the GPU whose index is its first size; streams are 0x1000 + index."""
    library.forget_changes()
    monkeypatch.setattr(abi, "read_tensor", lambda t: (t.data_ptr(), 9, True, t.shape[0], tuple(t.shape), t.stride()))
    monkeypatch.setattr(abi, "read_stream", lambda index: 0x1000 + index)

    def bind(stub, implementation):
        binder = abi.make_binder(environment(library, "hip"), implementation)
        return abi.bind(library, stub.__name__, signature_of(stub, mutates=("out",)), binder=binder)

    return bind


@pytest.mark.parametrize("implementation", ["extension-without-table", "ctypes"])
def test_a_gpu_call_gets_torchs_stream_on_the_tensors_own_device(on_gpu, library, implementation):
    library.seen_stream.restype = ctypes.c_int64
    on_gpu(with_stream, implementation)(torch.zeros(5))
    assert library.seen_stream() == 0x1005
    assert [library.device_change(i) for i in range(3)] == [5, 3, -1]  # there and back
    library.forget_changes()
    on_gpu(with_stream, implementation)(torch.zeros(3))
    assert library.device_change(0) == -1  # already current


@pytest.mark.parametrize("implementation", ["extension-without-table", "ctypes"])
def test_tensors_of_two_gpus_are_refused(on_gpu, implementation):
    with pytest.raises(GuardError, match=r"'x' is on GPU 2, an earlier one on GPU 4"):
        on_gpu(describe, implementation)(torch.zeros(4), torch.zeros(2))


@pytest.mark.parametrize("implementation", ["extension-without-table", "ctypes"])
def test_a_device_that_hip_refuses_is_a_launch_error(on_gpu, implementation):
    with pytest.raises(LaunchError, match="HIP error 101 on making GPU 66 the current one"):
        on_gpu(with_stream, implementation)(torch.zeros(66))


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_VIEW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DlTensor))
_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _Table(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p), ("from_object", ctypes.c_void_p), ("to_object", ctypes.c_void_p),
        ("view", _VIEW), ("stream", _STREAM),
    )  # fmt: skip


def test_the_exchange_table_of_a_rocm_torch_is_read_the_same_way(library, monkeypatch):
    """A table such as a ROCm torch publishes: device type ROCm, a byte offset, a stream per device."""
    dims = (ctypes.c_int64 * 1)(8)
    ones = (ctypes.c_int64 * 1)(1)
    asked = []

    def view(tensor, out):
        fields = (tensor.data_ptr() - 16, 10, 7, 1, 2, 32, 1, ctypes.addressof(dims), ctypes.addressof(ones), 16)
        out[0] = _DlTensor(*fields)
        return 0

    def stream(device_type, index, out):
        asked.append((device_type, index))
        out[0] = 0x7000
        return 0

    table = _Table(1, 3, None, None, None, None, _VIEW(view), _STREAM(stream))
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype, make_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make_capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
    library.forget_changes()
    library.seen_stream.restype = ctypes.c_int64
    binder = abi.make_binder(environment(library, "hip"), "extension")
    out = torch.zeros(8)
    abi.bind(library, "with_stream", signature_of(with_stream, mutates=("out",)), binder=binder)(out)
    assert library.seen_stream() == 0x7000 and asked == [(10, 7)] and library.device_change(0) == 7
    facts = torch.zeros(16, dtype=torch.int64)
    abi.bind(library, "describe", signature_of(describe, mutates=("out",)), binder=binder)(facts, out)
    assert facts.view(-1)[:8].tolist() == [9, 1, out.data_ptr(), 1, 8, 4, 1, 7]


# ---- what torch must see ----


def test_subclasses_meta_tensors_and_modes_are_diverted_with_all_arguments(bound):
    from torch._subclasses.fake_tensor import FakeTensorMode

    seen = []
    call = bound(scalars, divert=lambda *args: seen.append(args) or "diverted")
    plain, meta = torch.zeros(6, dtype=torch.float64), torch.zeros(6, device="meta")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(plain)
        assert call(plain, None, 1) == "diverted"  # the mode alone is enough
    assert call(fake, None, 2) == "diverted"
    assert call(plain, meta, i=3) == "diverted"
    assert [args[2:] for args in seen] == [(number, 0.5, True, "abc") for number in (1, 2, 3)]
    assert call(plain, None, 4) is None and plain[1] == 4


def test_without_a_dispatcher_a_subclass_is_taken_as_the_tensor_it_is(bound):
    class Named(torch.Tensor):
        pass

    facts = torch.zeros(16, dtype=torch.int64)
    x = torch.zeros(3).as_subclass(Named)
    bound(describe)(facts, x)
    assert facts[2] == x.data_ptr()


# ---- variants ----


@pytest.mark.parametrize("names", [("A",), ("A", "B"), ()], ids=["one value", "two values", "no value"])
def test_a_variant_is_looked_up_once_and_then_found(library, implementation, names):
    binder = abi.make_binder(environment(library, "host"), implementation)
    signature = signature_of(renamed_add, mutates=("out",))
    bound = abi.bind(library, "renamed_add", signature, binder=binder)
    entries, asked = {}, []

    def load(args):
        asked.append(args[2])
        entries[1 if names == ("A",) else (1, 1)[: len(names)]] = bound
        return bound

    def variant(out, x, n):
        return dict.fromkeys(names, x.shape[0] - 9)

    call = binder.dispatch("op", signature.names, (5,), variant, entries, load)
    out, x = torch.zeros(10, dtype=torch.int64), torch.arange(10)
    for n in (7, 8):
        call(out, n=n, x=x)
        assert torch.equal(out, x + n)
    call(out, x)
    assert torch.equal(out, x + 5) and asked == [7]


def test_what_a_variant_function_or_a_load_raises_comes_out(library, implementation):
    binder = abi.make_binder(environment(library, "host"), implementation)

    def load(args):
        raise GuardError(f"no variant for {args}")

    call = binder.dispatch("op", ("x",), (), lambda x: {"M": x.shape[0]}, {}, load)
    with pytest.raises(GuardError, match="no variant for"):
        call(3)  # an int has no shape: load() is asked, and says so
    with pytest.raises(TypeError, match="missing argument 'x'"):
        call()

    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        binder.dispatch("op", ("x",), (), interrupted, {}, load)(torch.zeros(1))


# ---- stub against module ----


def test_an_entry_that_is_not_there_names_what_to_do(library):
    def nowhere(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match=r"exports no entry 'nowhere'.*HF_EXPORT\(nowhere\).*fc_name"):
        abi.bind(library, "nowhere", signature_of(nowhere, mutates=("out",)))


def test_a_stub_that_disagrees_with_its_entry_is_told_the_first_difference(library):
    def scalars(out: torch.Tensor, maybe: torch.Tensor, i: int, d: float, b: bool, s: str) -> None: ...

    with pytest.raises(ConfigError, match=r"first difference: argument 1, 'maybe'"):
        abi.bind(library, "scalars", signature_of(scalars, mutates=("out",)))

    def guard(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match=r"\(torch.Tensor, int\).*2 arguments against 1"):
        abi.bind(library, "guard", signature_of(guard, mutates=("out",)))


def test_another_abi_version_is_refused(tmp_path):
    source = tmp_path / "future.cpp"
    source.write_text(
        '#include "hipforge/abi.h"\n'
        'extern "C" { const char* hf_signature_f = "T"; extern const uint32_t hf_abi_version = HF_ABI_VERSION + 1;\n'
        "int hf_entry_f(hf_call*) { return 0; } }\n"
    )
    library = ctypes.CDLL(str(host_library.build("test_abi_future", sources=[source])))

    def f(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match="version 2 of the C ABI; this hipforge speaks 1"):
        abi.bind(library, "f", signature_of(f, mutates=("out",)))


def test_python_and_c_agree_on_the_abi_version_and_dtype_codes():
    header = (abi.Path(abi.__file__).parent.parent / "csrc/include/hipforge/abi.h").read_text()
    assert f"#define HF_ABI_VERSION {abi.ABI_VERSION}\n" in header
    assert abi.dtype_codes() == DTYPES
    for code, name in [(2, "HF_U8"), (8, "HF_BF16"), (11, "HF_E4M3FN"), (15, "HF_E8M0FNU"), (16, "HF_E2M1FN_X2")]:
        assert f"{name} = {code}" in header


def test_a_machine_without_a_c_compiler_still_calls(tmp_path):
    """A process whose PATH has no compiler: one warning, then the same result through ctypes."""
    code = (
        "import logging, torch; from hipforge.jit import abi;"
        "logging.basicConfig(format='%(message)s');"
        "binder = abi.make_binder(abi.Environment('host')); print(type(binder).__name__)"
    )
    env = {**os.environ, "PATH": str(tmp_path), "HIPFORGE_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("CC", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "CtypesBinder", done.stderr
    assert done.stderr.count("the binding cannot be compiled: no C compiler") == 1
