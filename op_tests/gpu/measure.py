"""Times of the simple ops on this machine's GPU: µs per launch in a graph, and the bandwidth that the bytes make.

    PYTHONPATH=src python op_tests/gpu/measure.py [ops] [calls]

The inputs of neighbouring launches differ and together exceed L2, so that memory is what is measured; a device copy in
the same run is what bandwidth is compared with. Medians of 15 replays.
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
from hipforge.tuning import timing

COLUMNS = 8192
CALLS = 300  # of a round on the host: below the length of a stream's queue, so that the GPU does not hold up the host
BEYOND_L2 = 200_000_000  # bytes over which neighbouring launches rotate


def replay_us(launches: list[Callable[[], object]]) -> float:
    """Return the median time of one of the launches, captured in a graph one after the other."""
    return timing.microseconds_per_call(lambda i: launches[i](), len(launches))


def copies(*shape: int) -> list[torch.Tensor]:
    """Return enough bfloat16 tensors of a shape to exceed L2."""
    bytes_each = 2 * torch.Size(shape).numel()
    count = max(2, min(64, BEYOND_L2 // bytes_each))
    return [torch.randn(*shape, device="cuda").bfloat16() for _ in range(count)]


def line(name: str, rows: int, moved: int, us: float) -> None:
    sys.stdout.write(f"{name:28} {rows:6} rows {us:9.2f} us {moved / us * 1e-6:6.2f} TB/s\n")


@torch.compile(dynamic=False)
def compiled_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm as torch.compile makes it."""
    return torch.nn.functional.rms_norm(x, (COLUMNS,), weight, 1e-6)


@torch.compile(dynamic=False)
def compiled_swiglu_fp8(gate_up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """SwiGLU and its quantisation as torch.compile makes them."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def op_times() -> None:
    """Print the times of the ops, and of two as torch.compile makes them."""
    print_card()
    weight, scale = torch.randn(COLUMNS, device="cuda").bfloat16(), torch.ones((), device="cuda")
    for rows in (1, 64, 1024, 16384):
        inputs = copies(rows, COLUMNS)
        outs = [torch.empty_like(x) for x in inputs]
        q = torch.empty(rows, COLUMNS, device="cuda", dtype=torch.float8_e4m3fn)
        e8m0 = torch.empty(rows, COLUMNS // 32, device="cuda", dtype=torch.uint8)
        pairs = list(zip(inputs, outs, strict=True))
        size = rows * COLUMNS
        line("copy", rows, 4 * size, replay_us([lambda x=x, o=o: o.copy_(x) for x, o in pairs]))
        line(
            "rms_norm",
            rows,
            4 * size,
            replay_us([lambda x=x, o=o: hipforge.rms_norm(x, weight, 1e-6, out=o) for x, o in pairs]),
        )
        line("… by torch.compile", rows, 4 * size, replay_us([lambda x=x: compiled_norm(x, weight) for x in inputs]))
        line(
            "rms_norm_fp8",
            rows,
            3 * size,
            replay_us([lambda x=x, q=q: hipforge.rms_norm_fp8(x, weight, 1e-6, scale, out=q) for x in inputs]),
        )
        line(
            "mxfp8_quantize",
            rows,
            3 * size,
            replay_us([lambda x=x, q=q, s=e8m0: hipforge.mxfp8_quantize(x, out=q, scale_out=s) for x in inputs]),
        )
        half = torch.empty(rows, COLUMNS // 2, device="cuda", dtype=torch.float8_e4m3fn)
        line(
            "swiglu_fp8",
            rows,
            2 * size + size // 2,
            replay_us([lambda x=x, h=half: hipforge.swiglu_fp8(x, scale, out=h) for x in inputs]),
        )
        line(
            "… by torch.compile",
            rows,
            2 * size + size // 2,
            replay_us([lambda x=x: compiled_swiglu_fp8(x, scale) for x in inputs]),
        )
    x = torch.randn(8, 6144, device="cuda").bfloat16()
    router = torch.randn(128, 6144, device="cuda")
    line("router_gemm 6144x128", 8, 4 * router.numel(), replay_us([lambda: hipforge.router_gemm(x, router)] * 20))
    wide = x.float()
    line("… by torch, float32", 8, 4 * router.numel(), replay_us([lambda: wide @ router.T] * 20))
    logits = torch.randn(8, 128, device="cuda")
    line("topk_gating 128, 8", 8, 4 * logits.numel(), replay_us([lambda: hipforge.topk_gating(logits, 8)] * 20))


def call_costs() -> None:
    """Print nanoseconds of a call on the host, five tensors and two integers, launch included: ours beside peers.

    A launch alone is timed in a loop of the module's own; what a call takes beyond it is the binding's. A peer that
    cannot be built says why.
    """
    from hipforge.jit import compile_ops, loader, registry

    print_card()
    sources = Path(__file__).parents[1] / "bench_sources"
    values = {"module_bench_call": {"srcs": [str(sources / "bench_call.cu")]}}
    registry.register_values(sources / "modules.json", values)

    @compile_ops("module_bench_call", mutates=("out",))
    def bench_guarded_out(
        out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, n: int, block: int
    ) -> None: ...

    m, k, n = 1, 1024, 256

    def operands(device: str) -> list[torch.Tensor]:
        shapes = (m, k), (m, k // 32), (n, k), (n, k // 32)
        out = torch.zeros(m, n, dtype=torch.bfloat16, device=device)
        return [out, *(torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes)]

    on_gpu = operands("cuda")
    x, weight = torch.randn(4, 64, device="cuda").bfloat16(), torch.ones(64, device="cuda").bfloat16()
    y = torch.empty_like(x)
    bench_guarded_out(*on_gpu, 64, 8)
    launches = loader.load("module_bench_call", {}, devices.current().arch_of()).library.bench_launches
    launches.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    addresses = on_gpu[0].data_ptr(), on_gpu[1].data_ptr()
    stream = torch.cuda.current_stream().cuda_stream
    launch = host_ns(lambda: launches(*addresses, 64, CALLS, stream), 1) / CALLS
    sys.stdout.write(f"{'a launch alone, in a loop in C++':36} {launch:8.0f} ns\n")

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

    calls: dict[str, Callable[[], Callable[[], object]]] = {
        "hipforge stub": lambda: lambda: bench_guarded_out(*on_gpu, 64, 8),
        "hipforge stub, no launch": lambda: lambda: bench_guarded_out(*on_gpu, -1, 8),
        "hipforge.rms_norm with out": lambda: lambda: hipforge.rms_norm(x, weight, 1e-6, out=y),
        "torch.empty on the CPU, no launch": lambda: lambda: torch.empty(m, n, dtype=torch.bfloat16),
        "torch: out.zero_()": lambda: lambda: on_gpu[0].zero_(),
        "Triton launcher, an empty kernel": triton_launcher,
        "torch extension, no launch": extension,
    }
    for name, made in calls.items():
        try:
            took = host_ns(made(), CALLS)
        except Exception as error:  # a peer that is not there must not hide the others
            sys.stdout.write(f"{name:36} {type(error).__name__}: {str(error).strip()[-300:]}\n")
            continue
        beyond = took if "no launch" in name else took - launch
        sys.stdout.write(f"{name:36} {took:8.0f} ns a call on the host, {beyond:6.0f} without the launch\n")
        sys.stdout.flush()
    for module in loader.loaded():
        how = "built and loaded" if module.built else "loaded from the cache"
        sys.stdout.write(f"{module.name} {how} in {module.seconds * 1e3:.1f} ms\n")


def host_ns(call: Callable[[], object], count: int) -> float:
    """Return the host's nanoseconds of a call, the least of 30 rounds of ``count``."""
    call()
    rounds = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter_ns() - began) / count)
    return min(rounds)


def print_card() -> None:
    """Print the card and its driver."""
    driver = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    sys.stdout.write(subprocess.run(driver, capture_output=True, text=True, check=False).stdout)


def main() -> None:
    """Print what the command line names, or everything."""
    parts = {"ops": op_times, "calls": call_costs}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
