"""The C ABI and devices: extents for the emulator, streams and devices of HIP, and what torch must see."""

from __future__ import annotations

import ctypes

import pytest
import torch
from helpers.abi_module import address, count_extents, describe, environment, fail_with, scalars, with_stream

from hipforge.errors import EmulatorFault, GuardError, LaunchError
from hipforge.jit.call import abi
from hipforge.jit.call.signature import signature_of

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


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no fp4")
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

    def bind(stub, **more):
        binder = abi.make_binder(environment(library, "hip", **more), reading="python")
        return abi.bind(library, stub.__name__, signature_of(stub, mutates=("out",)), binder=binder)

    return bind


@pytest.mark.parametrize("start", [0, 2])
def test_a_gpu_tensor_whose_storage_was_freed_is_refused(on_gpu, start):
    x = torch.zeros(4)
    view = x[start:]
    x.untyped_storage().resize_(0)
    with pytest.raises(GuardError, match="argument 'out' reaches byte 16 of a storage of 0 bytes"):
        on_gpu(with_stream)(view)


def test_a_gpu_tensor_with_its_negative_bit_set_is_refused(on_gpu):
    with pytest.raises(GuardError, match="argument 'out' has its negative bit set"):
        on_gpu(with_stream)(torch._neg_view(torch.ones(3)))


def test_an_emulators_call_gets_the_emulators_current_stream(bound, library):
    library.seen_stream.restype = ctypes.c_int64
    bound(with_stream, target="emulator")(torch.zeros(2))
    assert library.seen_stream() == 0x77


def test_a_gpu_call_gets_torchs_stream_on_the_tensors_own_device(on_gpu, library):
    library.seen_stream.restype = ctypes.c_int64
    on_gpu(with_stream)(torch.zeros(5))
    assert library.seen_stream() == 0x1005
    assert [library.device_change(i) for i in range(3)] == [5, 3, -1]  # there and back
    library.forget_changes()
    on_gpu(with_stream)(torch.zeros(3))
    assert library.device_change(0) == -1  # already current


def test_a_streams_handle_is_asked_for_when_its_name_is_another(on_gpu, library, monkeypatch):
    asked = []

    def read_stream(index):
        asked.append(index)
        return 0x1000 * len(asked)

    monkeypatch.setattr(abi, "read_stream", read_stream)
    library.seen_stream.restype = ctypes.c_int64
    call = on_gpu(with_stream, name_stream=address(library, "name_stream"))

    def seen(gpu, name):
        library.set_stream_id(gpu, ctypes.c_int64(name))
        call(torch.zeros(gpu))
        return library.seen_stream(), len(asked)

    assert [seen(3, 0), seen(3, 0), seen(5, 0), seen(3, 0)] == [(0x1000, 1), (0x1000, 1), (0x2000, 2), (0x1000, 2)]
    assert [seen(3, 1 << 40), seen(3, 1 << 40), seen(5, 0)] == [(0x3000, 3), (0x3000, 3), (0x2000, 3)]
    assert [seen(7, 0), seen(7, 0)] == [(0x4000, 4), (0x5000, 5)]  # it names another GPU's stream: not believed


def test_where_there_is_one_gpu_no_thread_is_asked_for_its_own(on_gpu, library):
    library.seen_stream.restype = ctypes.c_int64
    on_gpu(with_stream, hip=(0, 0))(torch.zeros(5))
    assert library.seen_stream() == 0x1005 and library.device_change(0) == -1


def test_tensors_of_two_gpus_are_refused(on_gpu):
    with pytest.raises(GuardError, match=r"'x' is on GPU 2, an earlier one on GPU 4"):
        on_gpu(describe)(torch.zeros(4), torch.zeros(2))


def test_a_device_that_hip_refuses_is_a_launch_error(on_gpu):
    with pytest.raises(LaunchError, match="HIP error 101 on making GPU 66 the current one"):
        on_gpu(with_stream)(torch.zeros(66))


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
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule, raising=False)
    library.forget_changes()
    library.seen_stream.restype = ctypes.c_int64
    binder = abi.make_binder(environment(library, "hip"), reading="table")
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
