"""What a call costs the host on this machine's GPU; ``bench_gpu.py`` has the times of the kernels.

    PYTHONPATH=src python op_tests/gpu/measure.py [calls]
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hipforge
from hipforge import devices

CALLS = 300  # of a round on the host: below the length of a stream's queue, so that the GPU does not hold up the host


def call_costs() -> None:
    """Print nanoseconds of a call on the host, five tensors and two integers, launch included: ours beside peers.

    A launch alone is timed in a loop of the module's own; what a call takes beyond it is the binding's. The emulator's
    binding calls the same function of the same library with CPU tensors. A peer that cannot be built says why.
    """
    from hipforge.jit import compile_ops, loader, registry
    from hipforge.jit.call import abi
    from hipforge.jit.call.signature import signature_of

    print_card()
    sources = Path(__file__).parents[1] / "bench_sources"
    values = {"module_bench_call": {"srcs": [str(sources / "bench_call.cu")]}}
    registry.register_values(sources / "modules.json", values)

    def bench_guarded_out(
        out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, n: int, block: int
    ) -> None: ...

    stub = compile_ops("module_bench_call", mutates=("out",))(bench_guarded_out)
    m, k, n = 1, 1024, 256

    def operands(device: str) -> list[torch.Tensor]:
        shapes = (m, k), (m, k // 32), (n, k), (n, k // 32)
        out = torch.zeros(m, n, dtype=torch.bfloat16, device=device)
        return [out, *(torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes)]

    on_gpu = operands("cuda")
    x, weight = torch.randn(4, 64, device="cuda").bfloat16(), torch.ones(64, device="cuda").bfloat16()
    y = torch.empty_like(x)
    stub(*on_gpu, 64, 8)
    library = loader.load("module_bench_call", {}, devices.current().arch_of()).library
    launches = library.bench_launches
    launches.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    addresses = on_gpu[0].data_ptr(), on_gpu[1].data_ptr()
    stream = torch.cuda.current_stream().cuda_stream
    alone = "a launch alone, in a loop in C++"
    launch = host_ns({alone: lambda: launches(*addresses, 64, CALLS, stream)}, 1)[alone] / CALLS
    sys.stdout.write(f"{alone:36} {launch:8.0f} ns\n")

    def triton_launcher() -> Callable[[], object]:
        import triton

        @triton.jit
        def empty(out, a, b, c, d, n, block):
            pass

        return lambda: empty[(1,)](*on_gpu, 64, 8)

    def extension() -> Callable[[], object]:
        from torch.utils import cpp_extension

        built = cpp_extension.load("bench_extension", [str(sources / "bench_extension.cpp")])
        on_cpu = operands("cpu")  # it launches nothing and writes from the host
        return lambda: built.bench_guarded_out(*on_cpu, 64, 8)

    def emulators_binding() -> Callable[[], object]:
        from hipforge.emulator import runtime

        functions = {name: abi._address(runtime.load().library, name) for name in abi._EMULATOR_FUNCTIONS}
        binder = abi.make_binder(abi.Environment("emulator", emulator=tuple(functions.values())))
        signature = signature_of(bench_guarded_out, mutates=("out",))
        call = abi.bind(library, "bench_guarded_out", signature, divert=bench_guarded_out, binder=binder)
        on_cpu = operands("cpu")
        return lambda: call(*on_cpu, -1, 8)

    binding = stub.stub.eager
    calls: dict[str, Callable[[], Callable[[], object]]] = {
        "hipforge stub": lambda: lambda: stub(*on_gpu, 64, 8),
        "hipforge stub, no launch": lambda: lambda: stub(*on_gpu, -1, 8),
        "its binding, no launch": lambda: lambda: binding(*on_gpu, -1, 8),
        "emulator's binding, no launch": emulators_binding,
        "hipforge.rms_norm with out": lambda: lambda: hipforge.rms_norm(x, weight, 1e-6, out=y),
        "torch.empty on the CPU, no launch": lambda: lambda: torch.empty(m, n, dtype=torch.bfloat16),
        "torch: out.zero_()": lambda: lambda: on_gpu[0].zero_(),
        "Triton launcher, an empty kernel": triton_launcher,
        "torch extension, no launch": extension,
    }
    ready: dict[str, Callable[[], object]] = {}
    for name, made in calls.items():
        try:
            ready[name] = made()
            ready[name]()
        except Exception as error:  # a peer that is not there must not hide the others
            sys.stdout.write(f"{name:36} {type(error).__name__}: {str(error).strip()[-300:]}\n")
    for name, took in host_ns(ready).items():
        beyond = took if "no launch" in name else took - launch
        sys.stdout.write(f"{name:36} {took:8.0f} ns a call on the host, {beyond:6.0f} without the launch\n")
    for module in loader.loaded():
        how = "built and loaded" if module.built else "loaded from the cache"
        sys.stdout.write(f"{module.name} {how} in {module.seconds * 1e3:.1f} ms\n")


def host_ns(calls: dict[str, Callable[[], object]], count: int = CALLS) -> dict[str, float]:
    """Return the host's nanoseconds of each call, the least of 30 rounds of ``count``; the calls take turns.

    A host's speed changes within seconds: only what took turns may be compared.
    """
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(30):
        for name, call in calls.items():
            torch.cuda.synchronize()
            call()
            began = time.perf_counter_ns()
            for _ in range(count):
                call()
            rounds[name].append((time.perf_counter_ns() - began) / count)
    return {name: min(times) for name, times in rounds.items()}


def print_card() -> None:
    """Print the card and its driver."""
    driver = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    sys.stdout.write(subprocess.run(driver, capture_output=True, text=True, check=False).stdout)


def main() -> None:
    """Print what the command line names, or everything."""
    parts = {"calls": call_costs}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
