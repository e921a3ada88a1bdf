"""``@compile_ops``: what a stub may look like, what its first call does, and what torch sees of it."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import typing
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import hipforge.csrc
import hipforge.ops
from hipforge.errors import ArchError, BuildError, ConfigError, EmulatorFault, GuardError, LaunchError
from hipforge.jit import loader, registry
from hipforge.jit.call import bench_hook
from hipforge.jit.call.signature import signature_of
from hipforge.jit.compile_ops import Stub, compile_ops

SOURCE = r"""
#include "hipforge/module.h"

#ifndef FACTOR
#define FACTOR 1
#endif

__global__ void scale(const float* x, const float* bias, float* out, float factor, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = FACTOR * factor * x[i] + (bias ? bias[i] : 0.f);
}

void scale_out(hf::Tensor out, hf::Tensor x, hf::OptionalTensor bias, double factor, hipStream_t stream) {
  HF_CHECK_ARCH(out, "gfx950");
  HF_CHECK(x.numel() == out.numel(), "x must have as many elements as out; got ", x, " and ", out);
  const int64_t n = out.numel();
  scale<<<(n + 63) / 64, 64, 0, stream>>>(x.data<float>(), bias.data<float>(), out.data<float>(), factor, n);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(scale_out);

void only_gfx942_out(hf::Tensor out) { HF_CHECK_ARCH(out, "gfx942", "gfx90a"); }
HF_EXPORT(only_gfx942_out);

__global__ void overrun(float* out, int64_t n) { out[n] = 1; }
void overrun_out(hf::Tensor out, hipStream_t stream) {
  overrun<<<1, 1, 0, stream>>>(out.data<float>(), out.numel());
  HF_HIP(hipGetLastError());
}
HF_EXPORT(overrun_out);

__global__ void endless(float* out) {
  while (*static_cast<volatile float*>(out) == 0.f) {}
}
void endless_out(hf::Tensor out, hipStream_t stream) {
  endless<<<1, 64, 0, stream>>>(out.data<float>());
  HF_HIP(hipGetLastError());
}
HF_EXPORT(endless_out);

void bad_grid_out(hf::Tensor out, hipStream_t stream) {
  overrun<<<1, 4096, 0, stream>>>(out.data<float>(), 0);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(bad_grid_out);
"""

VALID = {
    "module_test_scale": {"srcs": ["scale.cu"], "bare": True},
    "module_test_scale_variants": {
        "srcs": ["scale.cu"], "bare": True, "archs": ["gfx950"], "variants": {"FACTOR": [1, 3]},
    },
    "module_test_other_arch": {"srcs": ["missing.cu"], "archs": ["gfx942"]},
    "module_test_broken": {"srcs": ["broken.cu"], "bare": True, "archs": ["gfx950"]},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "scale.cu").write_text(SOURCE)
    (folder / "missing.cu").write_text("this is never compiled")
    (folder / "broken.cu").write_text('#include "hipforge/module.h"\nvoid f() { undeclared(); }\n')
    path = folder / "modules.json"
    path.write_text(json.dumps(VALID))
    names = registry.register(path)
    yield path
    for name in names:
        registry._registered.pop(name, None)


@compile_ops("module_test_scale")
def scale_out(out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None, factor: float = 2.0) -> None: ...


@compile_ops("module_test_scale", fc_name="only_gfx942_out")
def wrong_arch_out(out: torch.Tensor) -> None: ...


@compile_ops("module_test_scale")
def overrun_out(out: torch.Tensor) -> None: ...


@compile_ops("module_test_scale")
def endless_out(out: torch.Tensor) -> None: ...


@compile_ops("module_test_scale")
def bad_grid_out(out: torch.Tensor) -> None: ...


by_rows = lambda out, x, bias, factor: {"FACTOR": x.shape[0]}
variant_out = compile_ops("module_test_scale_variants", fc_name="scale_out", variant=by_rows)(scale_out.__wrapped__)


# ---- decoration ----


def test_every_spelling_of_an_annotation_means_the_same():
    def stub(out, a, b, c, d, e, f, g): ...

    stub.__annotations__ = {
        "out": torch.Tensor, "a": "Tensor", "b": "torch.Tensor | None", "c": typing.Optional[torch.Tensor],  # noqa: UP045
        "d": "Optional[torch.Tensor]", "e": int, "f": "float", "g": torch.Tensor | None, "return": None,
    }  # fmt: skip
    assert signature_of(stub, mutates=("out",)).letters == "TTtttidt"


def test_the_schema_declares_mutations_optionals_and_defaults():
    def op(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None, n: int, f: float = 0.5, b: bool = True,
           s: str = 'a"b') -> None: ...  # fmt: skip

    schema = signature_of(op, mutates=("out", "y")).schema()
    arguments = 'Tensor(a0!) out, Tensor x, Tensor(a2!)? y, int n, float f=0.5, bool b=True, str s="a\\"b"'
    assert schema == f"op({arguments}) -> ()"
    assert torch._C.parse_schema("t::" + schema).is_mutable


def _stub(**annotations):
    def stub(out, x=None): ...

    stub.__annotations__ = {"out": torch.Tensor, "x": torch.Tensor | None, "return": None, **annotations}
    return stub


@pytest.mark.parametrize(
    ("stub", "mutates", "words"),
    [
        (_stub(x="list[int]"), ("out",), r"parameter 'x' is annotated 'list\[int\]'; accepted: torch.Tensor,"),
        (_stub(x="int | None"), ("out",), "parameter 'x' is annotated 'int | None'"),
        (_stub(x="torch.Tensor | int"), ("out",), "parameter 'x'"),
        (_stub(out=int), ("out",), "mutates names 'out', which is 'int', not a tensor"),
        (_stub(), ("result",), r"mutates names \['result'\], but the parameters are \['out', 'x'\]"),
        (_stub(), ("x",), r"first parameter must be the output, a torch.Tensor that mutates=\('x',\) names"),
        (_stub(**{"return": torch.Tensor}), ("out",), "must return None"),
        (_stub(x=torch.Tensor), ("out",), "default None of 'x' does not fit its annotation; it must be a torch.Tensor"),
        (_stub(x=int), ("out",), "default None of 'x' .*must be an int"),
        (lambda *args: None, (), "plain positional-or-keyword"),
        (lambda *, out: None, (), "plain positional-or-keyword"),
        (lambda out: None, ("out",), "parameter 'out' has no annotation"),
    ],
)
def test_a_stub_that_cannot_cross_the_abi_is_refused_at_decoration(stub, mutates, words):
    with pytest.raises(ConfigError, match=words):
        compile_ops("module_test_scale", mutates=mutates)(stub)


def test_a_decorated_stub_keeps_its_name_and_docstring():
    @compile_ops("module_test_scale")
    def documented_out(out: torch.Tensor) -> None:
        """Write nothing."""

    assert (documented_out.__name__, documented_out.__doc__) == ("documented_out", "Write nothing.")


def test_decorating_imports_neither_torch_nor_the_build_code():
    code = (
        "from __future__ import annotations\n"
        "import sys\n"
        "from hipforge.jit.compile_ops import compile_ops\n"
        "@compile_ops('module_nowhere')\n"
        "def op_out(out: torch.Tensor, x: torch.Tensor | None, n: int = 1) -> None: ...\n"
        "loaded = {'torch', 'ninja', 'filelock', 'hipforge.jit.build'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the first call and later ones ----


def test_a_stub_builds_runs_and_computes_exactly():
    x = torch.arange(100, dtype=torch.float32)
    out = torch.empty(100)
    assert scale_out(out, x) is None
    assert torch.equal(out, 2 * x)
    scale_out(out, x, torch.ones(100), factor=-0.5)
    assert torch.equal(out, 1 - 0.5 * x)
    scale_out(x=x, out=out)
    assert torch.equal(out, 2 * x)


def test_one_stub_loads_one_library_however_often_it_is_called():
    before = loader.load("module_test_scale", {}, "gfx950")
    scale_out(torch.empty(3), torch.ones(3))
    assert loader.load("module_test_scale", {}, "gfx950") is before


def test_a_variant_is_chosen_by_the_calls_own_arguments():
    out = torch.empty(3)
    variant_out(out, torch.ones(3))
    assert out.tolist() == [6, 6, 6]
    one = torch.empty(1)
    variant_out(one, torch.ones(1))
    assert one.tolist() == [2]


def test_an_undeclared_variant_value_is_a_guard_error_with_the_accepted_ones():
    with pytest.raises(GuardError, match="scale_out: FACTOR = 2 is not supported; accepted: 1, 3"):
        variant_out(torch.empty(2), torch.ones(2))


def test_a_variant_value_that_is_no_integer_is_a_guard_error_with_the_accepted_ones():
    variant = lambda out, x, bias, factor: {"FACTOR": factor}
    of_a_float = compile_ops("module_test_scale_variants", fc_name="scale_out", variant=variant)(scale_out.__wrapped__)

    with pytest.raises(GuardError, match=r"scale_out: FACTOR = 3\.0 is not supported; accepted: 1, 3"):
        of_a_float(torch.empty(2), torch.ones(2), None, 3.0)


def test_a_wrong_argument_is_named_before_the_variant_function_trips_over_it():
    variant_out(torch.empty(3), torch.ones(3))
    with pytest.raises(GuardError, match=r"scale_out: argument 'x' must be a torch\.Tensor; got int"):
        variant_out(torch.empty(3), 7)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        variant_out(torch.empty(3))


def test_a_wrong_argument_of_a_first_call_builds_nothing(isolated_cache):
    @compile_ops("module_test_broken")
    def never_built_out(out: torch.Tensor, n: int) -> None: ...

    with pytest.raises(GuardError, match="argument 'n' must be an int; got str"):
        never_built_out(torch.empty(1), "x")
    assert list(isolated_cache.rglob("*.so")) == []


def test_an_entry_that_the_source_does_not_export_is_told_with_its_module():
    @compile_ops("module_test_scale")
    def not_exported(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match=r"^module_test_scale exports no entry 'not_exported'; .*HF_EXPORT"):
        not_exported(torch.empty(1))


def test_variant_names_that_the_module_does_not_have_are_a_config_error():
    @compile_ops("module_test_scale_variants", fc_name="scale_out", variant=lambda out: {"WIDTH": 4})
    def misnamed_out(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match=r"chooses variant parameters \['WIDTH'\].*has FACTOR: 1, 3"):
        misnamed_out(torch.empty(1))

    @compile_ops("module_test_scale_variants", fc_name="scale_out")
    def undecided_out(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match=r"has variants FACTOR: 1, 3.*needs compile_ops\(variant=...\)"):
        undecided_out(torch.empty(1))


def test_the_arch_is_checked_in_python_before_any_build(isolated_cache):
    @compile_ops("module_test_other_arch")
    def other_arch_out(out: torch.Tensor) -> None: ...

    with pytest.raises(ArchError, match="has kernels for gfx942; the tensors' device is gfx950"):
        other_arch_out(torch.empty(1))
    assert list(isolated_cache.rglob("*")) == []


def test_the_arch_is_checked_in_cpp_before_any_launch():
    with pytest.raises(ArchError, match="wrong_arch_out: the kernel is for gfx942, gfx90a; device 0 is gfx950"):
        wrong_arch_out(torch.empty(1))


def test_a_guard_of_the_entry_is_raised_at_the_call_site():
    with pytest.raises(GuardError, match=r"got float32 \[3\] and float32 \[2\]"):
        scale_out(torch.empty(2), torch.ones(3))


def test_a_traceback_shows_no_line_that_did_not_run():
    with pytest.raises(GuardError) as raised:
        scale_out(torch.empty(2), torch.ones(3))
    (own,) = (frame for frame in traceback.extract_tb(raised.tb) if frame.name == "scale_out")
    assert not own.line and not Path(own.filename).is_file()  # its text is generated, in no file at that line


def test_a_module_nobody_registered_and_a_module_that_does_not_compile():
    @compile_ops("module_of_nobody")
    def nobody_out(out: torch.Tensor) -> None: ...

    @compile_ops("module_test_broken")
    def broken_out(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match="no module 'module_of_nobody'"):
        nobody_out(torch.empty(1))
    for _ in range(2):
        with pytest.raises(BuildError, match="use of undeclared identifier"):
            broken_out(torch.empty(1))


def test_a_stub_that_returns_a_value_needs_a_pybind11_module():
    @compile_ops("module_test_scale", mutates=())
    def returning(x: torch.Tensor) -> int: ...

    with pytest.raises(ConfigError, match=r"annotated to return int.*\(ffi abi\) return None"):
        returning(torch.empty(1))


def test_reference_runs_no_kernels_and_says_so():
    code = (
        "import torch\n"
        "from hipforge.jit.compile_ops import compile_ops\n"
        "@compile_ops('module_mxfp8_gemm_gemv')\n"
        "def op_out(out: torch.Tensor) -> None: ...\n"
        "op_out(torch.zeros(1))\n"
    )
    env = {**os.environ, "HIPFORGE_DEVICE": "reference"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "ConfigError: op_out needs a device, but HIPFORGE_DEVICE=reference" in done.stderr


def test_sixteen_threads_that_call_first_get_one_load(monkeypatch):
    loads = []
    real = loader.load

    def slow_load(*args):
        loads.append(args)
        time.sleep(0.05)  # long enough for every thread to come this far
        return real(*args)

    monkeypatch.setattr(loader, "load", slow_load)

    threaded_out = compile_ops("module_test_scale")(scale_out.__wrapped__)

    barrier = threading.Barrier(16)
    results: list[torch.Tensor] = []

    def work(number: int) -> None:
        out = torch.empty(5)
        barrier.wait()
        threaded_out(out, torch.full((5,), float(number)))
        results.append(out)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(out[0].item() for out in results) == [2.0 * number for number in range(16)]
    assert len(loads) == 1


def test_a_process_forked_before_the_first_call_calls(registered):
    """The parent decorates and forks while a thread holds a stub's lock; the child must not wait for that thread."""
    code = (
        "import os, sys, threading, torch\n"
        "from hipforge.jit import registry\n"
        "from hipforge.jit.compile_ops import compile_ops\n"
        f"registry.register({str(registered)!r})\n"
        "@compile_ops('module_test_scale')\n"
        "def scale_out(out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, factor: float) -> None: ...\n"
        "taken, done = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with scale_out.stub._lock: taken.set(); done.wait()\n"
        "threading.Thread(target=hold).start(); taken.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    out = torch.empty(2); scale_out(out, torch.ones(2), None, 4.0)\n"
        "    os._exit(0 if out.tolist() == [4, 4] else 1)\n"
        "status = os.waitpid(child, 0)[1]; done.set(); sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- the emulator ----


def test_one_element_past_the_end_is_a_fault_that_names_the_argument():
    with pytest.raises(EmulatorFault, match=r"overrun_out: (.|\n)*\bout\b"):
        overrun_out(torch.empty(8))


def test_a_refused_launch_is_a_launch_error_or_its_fault():
    with pytest.raises(LaunchError, match="bad_grid_out"):
        bad_grid_out(torch.empty(8))


def test_ctrl_c_ends_an_emulated_launch_and_the_next_call_works():
    endless_out(torch.ones(1))  # loaded, and ends at once
    out = torch.zeros(1)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            endless_out(out)
    finally:
        timer.cancel()  # an interrupt that came later would end pytest
    endless_out(torch.ones(1))


# ---- what a call costs ----


def run_with_hook(code, registered):
    prologue = (
        "import json, timeit, torch\n"
        "from hipforge.jit import register; from hipforge.jit.call import bench_hook\n"
        "from hipforge.jit.compile_ops import compile_ops\n"
        f"register({str(registered)!r})\n"
        "@compile_ops('module_test_scale')\n"
        "def scale_out(out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, factor: float) -> None: ...\n"
        "out, x = torch.zeros(3), torch.ones(3)\n"
        "scale_out(out, x, None, 2.0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prologue + code], env=bench_hook.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_bench_hook_replaces_only_the_launch(registered):
    """Guards still refuse; the kernel does not run."""
    code = (
        "try: scale_out(out, torch.ones(2), None, 2.0)\n"
        "except Exception as error: refused = type(error).__name__\n"
        "print(json.dumps([bench_hook.active(), out.tolist(), refused]))\n"
    )
    assert run_with_hook(code, registered) == [True, [0.0, 0.0, 0.0], "GuardError"]


def test_an_eager_call_costs_less_than_half_of_the_dispatchers(registered):
    """Measured side by side in one process, best of many short rounds: a ratio that a busy machine keeps (0.3)."""
    code = (
        "operator = scale_out.stub.operator()\n"
        "def best(call):\n"
        "    call(out, x, None, 2.0)\n"
        "    return min(timeit.repeat(lambda: call(out, x, None, 2.0), number=200, repeat=100))\n"
        "print(json.dumps(best(scale_out) / best(operator)))\n"
    )
    assert run_with_hook(code, registered) < 0.5


# ---- torch ----


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_a_stub_whole_and_gives_the_same(backend):
    torch._dynamo.reset()

    def function(x, bias):
        out = torch.empty_like(x)
        scale_out(out, x, bias, factor=4.0)
        variant_out(out, out)
        return out + 1

    x, bias = torch.arange(3, dtype=torch.float32), torch.ones(3)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x, bias), function(x, bias))
    assert torch.equal(compiled(x, bias), 24 * x + 7)


def test_torch_compile_may_be_the_first_to_call_a_stub():
    torch._dynamo.reset()

    first_out = compile_ops("module_test_scale")(scale_out.__wrapped__)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x):
        out = torch.zeros_like(x)
        first_out(out, x)
        return out

    assert function(torch.ones(4)).tolist() == [2, 2, 2, 2]


def test_the_operator_passes_opcheck():
    for x, bias in ((torch.ones(4), None), (torch.ones(4, requires_grad=True), torch.ones(4))):
        result = torch.library.opcheck(scale_out.stub.operator(), (torch.zeros(4), x, bias, 3.0))
        assert set(result.values()) == {"SUCCESS"}


def test_an_eager_call_never_enters_the_dispatcher(monkeypatch):
    scale_out(torch.empty(2), torch.ones(2))
    monkeypatch.setattr(scale_out.stub, "_run_kernel", None)
    monkeypatch.setattr(scale_out.stub, "kernel", None)
    out = torch.empty(2)
    scale_out(out, torch.ones(2))
    assert out.tolist() == [2, 2]


def test_fake_and_meta_tensors_run_no_kernel():
    with FakeTensorMode():
        out = torch.empty(5)
        scale_out(out, torch.empty(5))
        variant_out(torch.empty(3), torch.empty(3))
    assert out.shape == (5,)
    scale_out(torch.empty(5, device="meta"), torch.empty(5, device="meta"))


def test_a_first_call_on_fake_tensors_builds_nothing(isolated_cache):
    @compile_ops("module_test_broken")
    def fake_first_out(out: torch.Tensor) -> None: ...

    with FakeTensorMode():
        fake_first_out(torch.empty(1))
    assert list(isolated_cache.rglob("*")) == []


def test_two_stubs_of_one_name_get_two_operators():
    def twin_out(out: torch.Tensor) -> None: ...

    first, second = (compile_ops("module_test_scale")(twin_out).stub for _ in range(2))
    assert first.operator_name() == "twin_out" and second.operator_name() == "twin_out_2"
    assert first.operator() is not second.operator()


def test_dispatch_modes_see_the_operator_and_its_result():
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, out = torch.ones(3), torch.zeros(3)
    with Record():
        scale_out(out, x)
    assert scale_out.stub.operator() in seen
    assert out.tolist() == [2, 2, 2]


def test_a_subclass_without_its_own_dispatch_is_computed():
    class Named(torch.Tensor):
        pass

    out = torch.zeros(3).as_subclass(Named)
    scale_out(out, torch.ones(3))
    assert out.tolist() == [2, 2, 2]


def test_every_shipped_stub_names_a_module_whose_source_exports_its_entry_and_no_module_is_left():
    stubs = {}
    for info in pkgutil.walk_packages(hipforge.ops.__path__, "hipforge.ops."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(getattr(value, "stub", None), Stub):
                stubs[value.stub.entry] = value.stub
    csrc = Path(hipforge.csrc.__file__).parent
    for entry, stub in stubs.items():
        sources = [csrc / name.removeprefix("${CSRC}/") for name in registry.module(stub.module_name).srcs]
        exports = (f"HF_EXPORT({entry});", "HF_EXPORT(HF_ENTRY(HF_CACHE));")
        assert any(export in source.read_text() for source in sources for export in exports), entry
    assert registry.shipped().keys() == {stub.module_name for stub in stubs.values()}


def test_a_variant_is_taken_from_the_parameter_that_is_named_wherever_it_stands() -> None:
    @compile_ops("module_test_scale_variants", fc_name="scale_out", variant={"FACTOR": "factor"})
    def scaled(out: torch.Tensor, x: torch.Tensor, factor: int, last: bool) -> None: ...

    assert scaled.stub.variant("out", "x", 3, True) == {"FACTOR": 3}
    with pytest.raises(ConfigError, match=r"its parameter 'facto', which it has not; it has out, x"):

        @compile_ops("module_test_scale_variants", variant={"FACTOR": "facto"})
        def misspelt(out: torch.Tensor, x: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match=r"its parameter 'factor', a float; accepted: .* annotated int, bool or str"):

        @compile_ops("module_test_scale_variants", variant={"FACTOR": "factor"})
        def of_another_kind(out: torch.Tensor, x: torch.Tensor, factor: float) -> None: ...
