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
from helpers.abi_module import (
    describe,
    environment,
    fail_with,
    guard,
    handler_raised,
    interrupted,
    renamed_add,
    scalars,
    wait_for_write,
    with_stream,
)

from hipforge.errors import ArchError, ConfigError, GuardError, HipforgeError, LaunchError
from hipforge.jit import host_library
from hipforge.jit.call import abi
from hipforge.jit.call.signature import signature_of

NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
# An older torch lacks the last ones.
DTYPES = {getattr(torch, name): code for code, name in enumerate(NAMES, 1) if hasattr(torch, name)}


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
    if x.numel() == 0:  # the address of an empty tensor means nothing
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
        ({"i": torch.tensor([1, 2])}, "argument 'i' must be an int; got Tensor"),
        ({"i": 2**63}, "argument 'i' = 9223372036854775808 does not fit 64 bits"),
        ({"i": -(2**63) - 1}, "argument 'i' = -9223372036854775809 does not fit 64 bits"),
        ({"d": "0.5"}, "argument 'd' must be a float; got str"),
        ({"d": b"0.5"}, "argument 'd' must be a float; got bytes"),
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
    with pytest.raises(TypeError, match=words):  # as functions of pybind11 modules are bound
        signature_of(scalars, mutates=("out",)).bind(args, kwargs)


def test_a_gpu_tensor_on_the_emulator_is_told_about_the_setting(library, monkeypatch):
    monkeypatch.setattr(abi, "read_tensor", lambda tensor: (0, 6, True, 1, (2,), (1,)))
    binder = abi.make_binder(environment(library, "emulator"), reading="python")
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


# ---- variants ----


@pytest.mark.parametrize("names", [("A",), ("A", "B"), ()], ids=["one value", "two values", "no value"])
def test_a_variant_is_looked_up_once_and_then_found(library, reading, names):
    binder = abi.make_binder(environment(library, "host"), reading=reading)
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


def test_what_a_variant_function_or_a_load_raises_comes_out(library, reading):
    binder = abi.make_binder(environment(library, "host"), reading=reading)

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
        '#include "hipforge/host/abi.h"\n'
        'extern "C" { const char* hf_signature_f = "T"; extern const uint32_t hf_abi_version = HF_ABI_VERSION + 1;\n'
        "int hf_entry_f(hf_call*) { return 0; } }\n"
    )
    library = ctypes.CDLL(str(host_library.build("test_abi_future", sources=[source])))

    def f(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match="version 2 of the C ABI; this hipforge uses 1"):
        abi.bind(library, "f", signature_of(f, mutates=("out",)))


def test_python_and_c_agree_on_the_abi_version_and_dtype_codes():
    header = (abi.Path(abi.__file__).parents[2] / "csrc/include/hipforge/host/abi.h").read_text()
    assert f"#define HF_ABI_VERSION {abi.ABI_VERSION}\n" in header
    assert abi.dtype_codes() == DTYPES
    for code, name in [(2, "HF_U8"), (8, "HF_BF16"), (11, "HF_E4M3FN"), (15, "HF_E8M0FNU"), (16, "HF_E2M1FN_X2")]:
        assert f"{name} = {code}" in header


def test_a_machine_without_a_c_compiler_is_told_what_to_do(tmp_path):
    code = "from hipforge.jit.call import abi; abi.make_binder(abi.Environment('host'))"
    env = {**os.environ, "PATH": str(tmp_path), "HIPFORGE_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("CC", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == (
        "hipforge.errors.ToolchainError: the binding that calls kernels is compiled once per machine, and cannot be: "
        "no C compiler: looked for gcc, clang, cc on PATH; install g++ or set CC. A wheel of `make wheel` carries it "
        "compiled"
    )


def test_a_tensor_without_elements_is_contiguous_whatever_its_strides_are(bound):
    facts = torch.zeros(16, dtype=torch.int64)
    empty = torch.empty_strided((0, 4, 3), (7, 1, 9), dtype=torch.float16)
    bound(describe)(facts, empty)
    assert facts[3] == 1 and facts[8:14].tolist() == [0, 4, 3, 12, 3, 1]


@pytest.mark.parametrize("count", [17, 33, 64])
def test_a_function_of_many_arguments_gets_each_of_them(tmp_path, reading, count):
    names = [f"n{i}" for i in range(1, count)]
    source = tmp_path / "many.cpp"
    source.write_text(
        '#include "hipforge/host/export.h"\n'
        f"static void many(hf::Tensor out, {', '.join(f'int64_t {name}' for name in names)}) {{\n"
        + "".join(f"  out.data<int64_t>()[{i}] = {name};\n" for i, name in enumerate(names))
        + "}\nHF_EXPORT(many);\n"
        f"static void tensors({', '.join(f'hf::Tensor t{i}' for i in range(count))}) {{\n"
        + "".join(f"  t0.data<int64_t>()[{i}] = t{i}.size(0);\n" for i in range(count))
        + "}\nHF_EXPORT(tensors);\n"
    )
    path = host_library.build(f"test_many_{count}", sources=[source], cflags=["-std=c++17", "-O0"])
    many, tensors = _stub("many", count, "int"), _stub("tensors", count, "torch.Tensor")
    binder = abi.make_binder(abi.Environment("host"), reading=reading)
    bind = {
        stub.__name__: abi.bind(
            ctypes.CDLL(str(path)), stub.__name__, signature_of(stub, mutates=("out",)), binder=binder
        )
        for stub in (many, tensors)
    }
    out = torch.zeros(count, dtype=torch.int64)
    bind["many"](out, *range(100, 99 + count))
    assert out.tolist() == [*range(100, 99 + count), 0]
    bind["many"](out, **{name: i for i, name in enumerate(names)})
    assert out.tolist()[:-1] == list(range(count - 1))
    bind["tensors"](out, *(torch.zeros(i) for i in range(1, count)))
    assert out.tolist() == [count, *range(1, count)]


def _stub(name, count, kind):
    scope = {"torch": torch}
    parameters = ", ".join(f"n{i}: {kind}" for i in range(1, count))
    exec(f"def {name}(out: torch.Tensor, {parameters}) -> None: ...", scope)
    return scope[name]


def test_more_arguments_than_cross_the_abi_are_refused_by_name():
    with pytest.raises(ConfigError, match="stub wide: has 65 parameters; at most 64 cross the C ABI"):
        signature_of(_stub("wide", 65, "int"), mutates=("out",))
