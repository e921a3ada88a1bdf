"""What the JIT costs: cold, warm, at import, after an edit, and per call; beside torch's own ways, in one run.

    python op_tests/bench_jit.py [--sections cold,all,warm,import,edit,call] [--fresh] [--json FILE]

What is built once per machine (emulator, binding, ROCm tree) is taken from the cache directory in use and built there
if it is missing, half a minute or more; ``--fresh`` builds and times it. The section ``all`` takes minutes and is not
among the default ones.

Every number is measured in this run on this machine unless its note says "recorded" (a build that an earlier run did,
from the module's manifest). Each measurement is its own process with its own cache directory. Per-call numbers
are taken with the bench hook (``jit/call/bench_hook.py``): launches return at once, everything before them is real.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from helpers.bench import Figure, finish

from hipforge.cli.options import PICTURE_OPTION, Output

HERE = Path(__file__).parent
SOURCES = HERE / "bench_sources"
MODULE = "module_mxfp8_gemm_gemv"

CALL_TARGET_NS = 650.0
VARIANT_TARGET_NS = 800.0
OPERATOR_TARGET_NS = 3200.0
PEER_TARGET_RATIO = 1.0
WARM_TARGET_MS = 30.0
IMPORT_TARGET_MS = 50.0
COLD_TARGET_RATIO = 10.0
GEMV_TARGET_NS = 2000.0


def run(code: str, *, cache: Path, **environment: str) -> dict[str, object]:
    """Run ``code`` in a new process; it prints one line of JSON last."""
    env = {
        **os.environ,
        "HIPFORGE_CACHE_DIR": str(cache),
        "HIPFORGE_EMULATOR_QUIET": "1",
        "CCACHE_DISABLE": "1",  # a compiler behind ccache would not compile on either side
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"a measurement failed:\n{done.stderr[-4000:]}")
    report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return report


# ---- cold -----------------------------------------------------------------------------------------------------------

FIRST_CALL = """
import json, resource, time, torch
from hipforge.ops.reference import quantize_mxfp8
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv
x, w = torch.randn(1, 1024).bfloat16(), torch.randn(256, 1024).bfloat16()
operands = (*quantize_mxfp8(x), *quantize_mxfp8(w))
start = time.perf_counter()
smallm_mxfp8_gemv(*operands, torch.bfloat16)
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"seconds": seconds, "cpu": used.ru_utime + used.ru_stime}))
"""

PREPARE = """
import json, time
from hipforge import devices
from hipforge.jit import obtain, registry, toolchain
from hipforge.jit.call import abi, bench_hook
start = time.perf_counter()
abi.process_binder()
bench_hook.library()
toolchain.select(devices.current().arch_of())
print(json.dumps({"seconds": time.perf_counter() - start, "library": str(bench_hook.library())}))
"""

# Many short rounds: the best one falls into a moment when nothing else ran on the core.
MEASURE = """
import timeit
def measure(function, *args):
    function(*args)
    timer = timeit.Timer("function(*args)", globals={"function": function, "args": args})
    loop = timeit.Timer("args", globals={"args": args})
    return (min(timer.repeat(200, 500)) - min(loop.repeat(200, 500))) / 500 * 1e9
"""

EXTENSION = f"""
import json, resource, tempfile, time, torch
from torch.utils import cpp_extension
{MEASURE}
with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    module = cpp_extension.load("bench_extension", [{str(SOURCES / "bench_extension.cpp")!r}], build_directory=folder)
    m, k = 1, 1024
    out = torch.zeros(m, 256, dtype=torch.bfloat16)
    tensors = [torch.zeros(m, k, dtype=torch.uint8), torch.zeros(m, k // 32, dtype=torch.uint8),
               torch.zeros(256, k, dtype=torch.uint8), torch.zeros(256, k // 32, dtype=torch.uint8)]
    module.bench_guarded_out(out, *tensors, 64, 8)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    ns = measure(module.bench_guarded_out, out, *tensors, 64, 8)
print(json.dumps({{"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "ns": ns}}))
"""

WHOLE_MODULE = f"""
import json, time
from hipforge import devices
from hipforge.jit import loader, obtain, registry
devices.current().load_runtime()
arch = devices.current().arch_of()
start = time.perf_counter()
variants = list(registry.module({MODULE!r}).all_variants())
loaded = [loader.load({MODULE!r}, variant, arch) for variant in variants]
print(json.dumps({{"seconds": time.perf_counter() - start, "variants": len(variants),
                  "kernels": sum(len(module.manifest.kernels) for module in loaded)}}))
"""


HEADERS = """
import json, resource, tempfile
from pathlib import Path
from hipforge.jit import build, hip_module, obtain, register, registry
source = {"srcs": ["${CSRC}/moe_routing/moe_align.cu"]}
used = []
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "modules.json")
    path.write_text(json.dumps({"module_bare": {**source, "bare": True}, "module_whole": source}))
    for name in register(path):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        obtain.binary(hip_module.request(registry.module(name), None, "gfx950").specify())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
print(json.dumps({"bare": used[0], "whole": used[1]}))
"""


def machine_parts(base: Path, target: Path) -> None:
    """Copy what is built once per machine (runtime, binding, ROCm tree) from one cache to another, no module."""
    target.mkdir(mode=0o700)
    for name in ("host", "rocm-tree"):
        if (base / name).exists():
            shutil.copytree(base / name, target / name, symlinks=True)
    for name in ("digests.json", "toolchains.json"):
        if (base / name).exists():
            shutil.copy2(base / name, target / name)


def cold(base: Path, scratch: Path) -> tuple[list[Figure], float]:
    """Measure first calls with no module in the cache; returns rows and torch's extension's ns per call."""
    calls = []
    for number in range(3):
        cache = scratch / f"cold{number}"
        machine_parts(base, cache)
        calls.append(run(FIRST_CALL, cache=cache))
    extension = run(EXTENSION, cache=base)
    cache = scratch / "whole"
    machine_parts(base, cache)
    whole = run(WHOLE_MODULE, cache=cache)
    headers = run(HEADERS, cache=cache)
    bare, with_headers = float(headers["bare"]), float(headers["whole"])
    ours, theirs = min(float(call["seconds"]) for call in calls), float(extension["seconds"])
    our_cpu, their_cpu = min(float(call["cpu"]) for call in calls), float(extension["cpu"])
    rows = [
        Figure("cold", "first call of smallm_mxfp8_gemv, one variant", ours, "s", "build, load, run; best of 3"),
        Figure("cold", "torch cpp_extension.load of one function", theirs, "s", "torch/extension.h; build, load, call"),
        Figure("cold", "ratio", theirs / ours, "x", "", COLD_TARGET_RATIO, more_is_better=True),
        Figure("cold", "CPU seconds of the compilers, first call", our_cpu, "s", "a busy machine distorts it little"),
        Figure("cold", "CPU seconds of the compilers, cpp_extension", their_cpu, "s"),
        Figure("cold", "ratio of CPU seconds", their_cpu / our_cpu, "x"),
        Figure("cold", f"{MODULE}, all {whole['variants']} variants", float(whole["seconds"]), "s",
            f"one after another, {whole['kernels']} kernels"),
        Figure("cold", "CPU seconds with HIP's headers over a bare build", with_headers / bare, "x",
            f"moe_align: {with_headers:.2f} s, {bare:.2f} s"),
    ]  # fmt: skip
    return rows, float(extension["ns"])


# ---- all modules ----------------------------------------------------------------------------------------------------

ALL_MODULES = """
import json, time
from hipforge.jit import fleet, obtain, registry
wanted = fleet.requests(list(registry.modules()), ["gfx942", "gfx950"])
start = time.perf_counter()
outcomes = fleet.build_many(wanted, None, lambda event: None)
seconds = time.perf_counter() - start
failed = [outcome.planned.title for outcome in outcomes if outcome.status != "built"]
assert not failed, failed
each = {}
for outcome in outcomes:
    each.setdefault(f"{outcome.planned.request.entry.name} {outcome.planned.request.arch}", []).append(outcome.seconds)
print(json.dumps({"seconds": seconds, "each": each}))
"""


def all_modules(base: Path, scratch: Path) -> list[Figure]:
    """Build every shipped module with all variants for both architectures, as ``hipforge build --all`` does."""
    cache = scratch / "all"
    machine_parts(base, cache)
    report = run(ALL_MODULES, cache=cache)
    each: dict[str, list[float]] = report["each"]  # type: ignore[assignment]
    number = sum(len(seconds) for seconds in each.values())
    note = f"one ninja, {number} libraries, {os.cpu_count()} cores"
    return [
        *(
            Figure("all", name, sum(seconds), "s", f"{len(seconds)} variants, each from its start to its publication")
            for name, seconds in each.items()
        ),
        Figure("all", "every shipped module, gfx942 and gfx950", float(report["seconds"]), "s", note),
    ]  # fmt: skip


# ---- warm and import ------------------------------------------------------------------------------------------------

# Two checks that no process was started: Python's audit events, and the kernel's account of this process's children.
WARM = """
import json, resource, sys, time, torch
from hipforge import devices
started = []
sys.addaudithook(lambda event, args: started.append(event) if event in
                 ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec", "os.spawn") else None)
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv_out
begin = time.perf_counter()
devices.current().load_runtime()
runtime = time.perf_counter()
stub = smallm_mxfp8_gemv_out.stub
K, N = 1024, 256
values = (torch.zeros(1, N, dtype=torch.bfloat16), torch.zeros(1, K, dtype=torch.uint8),
          torch.zeros(1, K // 32, dtype=torch.uint8), torch.zeros(N, K, dtype=torch.uint8),
          torch.zeros(N, K // 32, dtype=torch.uint8), 8)
call = time.perf_counter()
from hipforge.jit import loader, obtain
loaded = loader.load(stub.module_name, stub.variant(*values), devices.current().arch_of())
end = time.perf_counter()
from hipforge.jit.call import abi
abi.process_binder()
binder = time.perf_counter()
children = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"runtime_ms": (runtime - begin) * 1e3, "ms": (end - call) * 1e3,
                  "binder_ms": (binder - end) * 1e3, "built": loaded.built, "started": started,
                  "child_faults": children.ru_minflt + children.ru_majflt}))
"""

IMPORT = """
import sys, time
begin = time.perf_counter()
import hipforge
end = time.perf_counter()
print('{"ms": %f, "torch": %d}' % ((end - begin) * 1e3, "torch" in sys.modules))
"""


def warm(base: Path) -> list[Figure]:
    """Measure a second process: call to loaded module."""
    run(FIRST_CALL, cache=base)
    reports = [run(WARM, cache=base) for _ in range(5)]
    for report in reports:
        if report["built"] or report["started"] or report["child_faults"]:
            raise click.ClickException(f"the warm path built or started something: {report}")
    best, runtime, binder = (
        min(float(report[name]) for report in reports) for name in ("ms", "runtime_ms", "binder_ms")
    )
    worst = max(float(report["ms"]) for report in reports)
    note = f"best of {len(reports)}, worst {worst:.1f}; 0 processes started (audit events, rusage of children)"
    return [
        Figure("warm", "second process: call to loaded module", best, "ms", note, WARM_TARGET_MS),
        Figure("warm", "… before it: device runtime (emulator library)", runtime, "ms", "once per process"),
        Figure("warm", "… after it: the binding extension", binder, "ms", "once per process"),
    ]


def import_time(base: Path) -> list[Figure]:
    """Measure ``import hipforge`` in fresh processes."""
    reports = [run(IMPORT, cache=base) for _ in range(10)]
    if any(report["torch"] for report in reports):
        raise click.ClickException("import hipforge imported torch")
    best = min(float(report["ms"]) for report in reports)
    return [Figure("import", "import hipforge", best, "ms", "best of 10; torch is not imported", IMPORT_TARGET_MS)]


# ---- edit -----------------------------------------------------------------------------------------------------------

EDITED = """
import json, sys, time, torch
from hipforge.jit import obtain, register
from hipforge.jit.compile_ops import compile_ops
register({folder!r} + "/modules.json")
@compile_ops("module_bench_edit")
def bench_guarded_out(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor,
                      n: int, block: int) -> None: ...
from hipforge import devices
devices.current().load_runtime()
a, b = torch.full((1, 64), 7, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.uint8)
out = torch.zeros(1, 64, dtype=torch.bfloat16)
start = time.perf_counter()
bench_guarded_out(out, a, b, a, b, 64, 8)
print(json.dumps({{"seconds": time.perf_counter() - start, "value": int(out.view(torch.int16)[0, 0])}}))
"""


def edit(base: Path, scratch: Path) -> list[Figure]:
    """Change one line of a kernel; measure a new process's call of it."""
    folder = scratch / "edit"
    folder.mkdir()
    source = folder / "bench_call.cu"
    text = (SOURCES / "bench_call.cu").read_text()
    source.write_text(text)
    (folder / "modules.json").write_text(json.dumps({"module_bench_edit": {"srcs": ["bench_call.cu"]}}))
    code = EDITED.format(folder=str(folder))
    before = run(code, cache=base)
    entries = set(base.glob("gfx*/*"))
    source.write_text(text.replace("= a[threadIdx.x];", "= a[threadIdx.x] + 1;"))
    start = time.perf_counter()
    after = run(code, cache=base)
    whole = time.perf_counter() - start
    new = set(base.glob("gfx*/*")) - entries
    if (before["value"], after["value"], len(new)) != (7, 8, 1):
        raise click.ClickException(f"the edit did not take: {before}, {after}, new entries {sorted(map(str, new))}")
    return [
        Figure("edit", "edited kernel: call to result", float(after["seconds"]), "s", "one module rebuilt, no other"),
        Figure("edit", "the same, with Python and torch starting", whole, "s"),
    ]


# ---- per call -------------------------------------------------------------------------------------------------------

CALLS = """
import ctypes, json, sys, timeit, torch
from hipforge import devices
from hipforge.jit import loader, obtain, register
from hipforge.jit.compile_ops import compile_ops
register({json!r})
T = torch.Tensor
@compile_ops("module_bench_call")
def bench_guarded_out(out: T, a: T, b: T, c: T, d: T, n: int, block: int) -> None: ...
@compile_ops("module_bench_call")
def bench_unguarded_out(out: T, a: T, b: T, c: T, d: T, n: int, block: int) -> None: ...
@compile_ops("module_bench_call_variants", fc_name="bench_guarded_out",
             variant=lambda out, a, b, c, d, n, block: {{"ROWS": a.shape[0]}})
def bench_variant_out(out: T, a: T, b: T, c: T, d: T, n: int, block: int) -> None: ...
m, k, n = 1, 1024, 256
out = torch.zeros(m, n, dtype=torch.bfloat16)
a, b = torch.zeros(m, k, dtype=torch.uint8), torch.zeros(m, k // 32, dtype=torch.uint8)
c, d = torch.zeros(n, k, dtype=torch.uint8), torch.zeros(n, k // 32, dtype=torch.uint8)
for stub in (bench_guarded_out, bench_unguarded_out, bench_variant_out):
    stub(out, a, b, c, d, 64, 8)
bound = bench_guarded_out.stub.eager
operator = bench_guarded_out.stub.operator()
operator(out, a, b, c, d, 64, 8)
@torch.library.custom_op("bench::guarded", mutates_args=("out",))
def custom(out: T, a: T, b: T, c: T, d: T, n: int, block: int) -> None:
    bound(out, a, b, c, d, n, block)
plain = loader.load("module_bench_call", {{}}, devices.current().arch_of()).library.bench_plain
plain.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
def through_ctypes(out, a, b, c, d, n, block):
    plain(out.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), n, block, None)
from hipforge.ops import smallm_gemm_mxfp8 as gemv
from hipforge.ops.core.dispatch import planner_of
from hipforge.ops.reference import quantize_mxfp8
operands = (*quantize_mxfp8(torch.randn(m, k).bfloat16()), *quantize_mxfp8(torch.randn(n, k).bfloat16()))
{measure}
call = (out, a, b, c, d, 64, 8)
peer = {peer!r} and __import__("tvm_ffi").load_module({peer!r}).bench_guarded_out
print(json.dumps({{
    "stub": measure(bench_guarded_out, *call),
    "peer": measure(peer, *call) if peer else 0,
    "unguarded": measure(bench_unguarded_out, *call),
    "variant": measure(bench_variant_out, *call),
    "bound": measure(bound, *call),
    "operator": measure(operator, *call),
    "custom_op": measure(custom, *call),
    "ctypes": measure(through_ctypes, *call),
    "planning": measure(planner_of("mxfp8_gemv"), *operands),
    "gemv": measure(gemv.mxfp8_gemv, *operands),
    "gemv_out": measure(gemv.smallm_mxfp8_gemv_out, out, *operands, 8),
    "empty": measure(lambda: torch.empty(m, n, dtype=torch.bfloat16, device=a.device)),
}}))
"""


def tvm_ffi_library(scratch: Path) -> str:
    """Build the function for apache-tvm-ffi; returns its library, empty where that is not installed."""
    try:
        from tvm_ffi import libinfo
    except ImportError:
        return ""
    out = scratch / "bench_tvm_ffi.so"
    folder = Path(libinfo.find_libtvm_ffi()).parent
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", SOURCES / "bench_tvm_ffi.cpp", "-o", out]
    command += [f"-I{path}" for path in libinfo.include_paths()]
    subprocess.run([*command, f"-L{folder}", "-ltvm_ffi", f"-Wl,-rpath,{folder}"], check=True)
    return str(out)


def per_call(base: Path, scratch: Path, extension_ns: float | None) -> list[Figure]:
    """Measure nanoseconds per call, launches replaced by nothing."""
    config = scratch / "call.json"
    source = {"srcs": [str(SOURCES / "bench_call.cu")]}
    variants = {**source, "variants": {"ROWS": [1, 2]}}
    config.write_text(json.dumps({"module_bench_call": source, "module_bench_call_variants": variants}))
    preload = str(run(PREPARE, cache=base)["library"])
    code = CALLS.format(json=str(config), measure=MEASURE, peer=tvm_ffi_library(scratch))
    ns = {
        name: float(value)
        for name, value in run(code, cache=base, LD_PRELOAD=preload).items()
    }
    label = "5 tensors + 2 ints"
    rows = [
        Figure("call", f"stub, {label}", ns["stub"], "ns", "decorated function, guards included", CALL_TARGET_NS),
        Figure("call", "… that chooses a variant by a shape", ns["variant"], "ns", "", VARIANT_TARGET_NS),
        Figure("call", "… the bound entry alone", ns["bound"], "ns", "no Python frame"),
        Figure("call", "guards in C++ (10 conditions, arch check)", ns["stub"] - ns["unguarded"], "ns", "difference"),
        Figure("call", "the same as torch.ops.hipforge", ns["operator"], "ns", "", OPERATOR_TARGET_NS),
        Figure("call", "the same through torch.library.custom_op", ns["custom_op"], "ns"),
        Figure("call", "the same through ctypes, 5 data_ptr()", ns["ctypes"], "ns", "no guards"),
        Figure("call", "planning mxfp8_gemv, once per shape", ns["planning"], "ns", "checks, envelope and table"),
        Figure("call", "smallm_mxfp8_gemv_out", ns["gemv_out"], "ns", "variant by M, guards", VARIANT_TARGET_NS),
        Figure("call", "torch.empty of the result", ns["empty"], "ns"),
        Figure("call", "mxfp8_gemv on top of torch.empty", ns["gemv"] - ns["empty"], "ns", "", GEMV_TARGET_NS),
    ]
    note = "guards included, no launch at all"
    if ns["peer"]:
        ratio = Figure("call", "stub beside it", ns["stub"] / ns["peer"], "x", "", PEER_TARGET_RATIO)
        rows[1:1] = [Figure("call", "the same through apache-tvm-ffi", ns["peer"], "ns", note), ratio]
    if extension_ns is not None:
        rows.insert(-5, Figure("call", "cpp_extension, pybind11 + torch/extension.h", extension_ns, "ns", note))
    return rows


@click.command()
@click.option(
    "--sections",
    default="cold,warm,import,edit,call",
    show_default=True,
    help="What to measure; 'all' builds every shipped module, which takes minutes.",
)
@click.option("--json", "json_path", type=Output(), help="Write the rows to a file too.")
@click.option("--fresh", is_flag=True, help="Build the machine's parts from nothing and time that.")
@PICTURE_OPTION
def main(sections: str, json_path: Path | None, fresh: bool, picture: Path | None) -> None:
    """Measure what the JIT costs; exit 1 if a target is missed."""
    wanted = sections.split(",")
    rows: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="hipforge-bench-") as folder:
        scratch = Path(folder)
        base = scratch / "base"
        if not fresh:
            from hipforge.jit.cache import cache_dir

            own = cache_dir.writing_root()
            run(PREPARE, cache=own)
            machine_parts(own, base)
        prepared = float(run(PREPARE, cache=base)["seconds"])
        note = "emulator library, binding, ROCm tree: " + ("built" if fresh else "found and loaded")
        rows.append(Figure("machine", "parts built once per machine", prepared, "s", note))
        rows.append(Figure("machine", "load average before the run", os.getloadavg()[0], "", f"{os.cpu_count()} cores"))
        extension_ns: float | None = None
        if "cold" in wanted:
            click.echo("measuring cold ...", err=True)
            found, extension_ns = cold(base, scratch)
            rows += found
        steps: dict[str, Callable[[], list[Figure]]] = {
            "all": lambda: all_modules(base, scratch),
            "warm": lambda: warm(base),
            "import": lambda: import_time(base),
            "edit": lambda: edit(base, scratch),
            "call": lambda: per_call(base, scratch, extension_ns),
        }
        for name, step in steps.items():
            if name in wanted:
                click.echo(f"measuring {name} ...", err=True)
                rows += step()
    finish(rows, f"JIT, {os.cpu_count()} cores of {platform.processor() or platform.machine()}", json_path, picture)


if __name__ == "__main__":
    main()
