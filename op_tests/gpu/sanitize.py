"""compute-sanitizer over every kernel, each of its tools; first a planted fault that the tool must find.

    python op_tests/gpu/sanitize.py [-j PROCESSES] [--seconds N] [--parts TEXT] [TOOL...]

Each part of ``every_kernel.py`` runs under each tool in a process of its own, several at once. torch caches no memory
there: every tensor is an allocation, so that memcheck finds a step over the end of one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

OP_TESTS = Path(__file__).resolve().parents[1]
SOURCE_FOLDER = OP_TESTS.parent / "src"
sys.path[:0] = [str(SOURCE_FOLDER), str(OP_TESTS)]

ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(SOURCE_FOLDER), "HIPFORGE_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
EVERY = Path(__file__).with_name("every_kernel.py")
# racecheck follows no __syncwarp() before an arrival at a barrier by one lane, and miscounts meetings at named barriers
# of which some teams of a block have more. For it these modules are built with an arrival of each lane, and as many
# meetings of each team, which order the same accesses (csrc/mxfp8_gemm/nvidia: tma.h, tile_ring.h;
# csrc/mxfp8_grouped_gemm/nvidia/token_down_kernel.h).
FOR_RACECHECK = {**ENVIRONMENT, "NVCC_APPEND_FLAGS": "-DHF_FOR_RACECHECK"}
# Parts that launch them, and their modules.
PARTS_FOR_RACECHECK = "products", "ring_tiles", "span_tiles", "half_tiles", "tile_stream", "made"
BUILT_FOR_RACECHECK = [
    *(f"module_mxfp8_gemm_{name}" for name in ("half_tiles", "ring_tiles", "row_stream", "span_tiles")),
    *(f"module_mxfp8_grouped_gemm_{name}" for name in ("tile_stream", "token_passes")),
    "module_mx_quantize",
]
BARRIERS = 512  # in shared memory: synccheck loses count of as many as these kernels have unless it is told
FOUND = 9  # the exit status that stands for a finding
FAULTS = {
    "memcheck": "out[64 + threadIdx.x] = 1.f;",
    "racecheck": "__shared__ float s[64]; s[threadIdx.x] = out[threadIdx.x]; out[threadIdx.x] = s[63 - threadIdx.x];",
    "initcheck": "out[threadIdx.x] = in[threadIdx.x] + 1.f;",
    "synccheck": "__syncwarp(0xFFFFu); if (threadIdx.x < 48) __syncthreads(); out[threadIdx.x] = 1.f;",
}
SOURCE = """
#include <hip/hip_runtime.h>
#include "hipforge/module.h"
__global__ void planted_kernel(float* out, const float* in) { FAULT }
void planted_out(hf::Tensor out, hf::Tensor in, hipStream_t stream) {
  planted_kernel<<<1, 64, 0, stream>>>(out.data<float>(), in.data<const float>());
  HF_HIP(hipGetLastError());
}
HF_EXPORT(planted_out);
"""
CHILD = """
import torch
from hipforge.jit import register
from hipforge.jit.compile_ops import compile_ops
register("modules.json")

@compile_ops("module_planted", mutates=("out",))
def planted_out(out: torch.Tensor, given: torch.Tensor) -> None: ...

planted_out(torch.zeros(64, device="cuda"), torch.empty(64, device="cuda"))
torch.cuda.synchronize()
"""


def run(
    tool: str, arguments: list[str], folder: Path, seconds: float | None, environment: dict[str, str] = ENVIRONMENT
) -> tuple[int, str]:
    """Return the exit status of a script under a tool and the end of its report; -1 where it took too long."""
    more = ["--num-cuda-barriers", str(BARRIERS)] if tool == "synccheck" else []
    command = ["compute-sanitizer", "--tool", tool, *more, "--error-exitcode", str(FOUND), sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return -1, f"ended after {seconds:.0f} s"
    return done.returncode, f"{done.stdout}{done.stderr}exit status {done.returncode}\n"


def environment_of(tool: str, part: str) -> dict[str, str]:
    """Return what a part runs in under a tool."""
    return FOR_RACECHECK if tool == "racecheck" and part.startswith(PARTS_FOR_RACECHECK) else ENVIRONMENT


def planted(tool: str, seconds: float | None) -> tuple[bool, str]:
    """Return whether a tool finds its fault in a kernel, and what it said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "planted.cu").write_text(SOURCE.replace("FAULT", FAULTS[tool]))
        (folder / "modules.json").write_text(json.dumps({"module_planted": {"srcs": ["planted.cu"]}}))
        (folder / "child.py").write_text(CHILD)
        status, report = run(tool, ["child.py"], folder, seconds)
    return status == FOUND and "planted_kernel" in report, report


def main() -> int:
    """Run the tools; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("-j", type=int, default=8, help="processes at once")
    parser.add_argument("--seconds", type=float, help="end a process after so long")
    parser.add_argument("--parts", default="", help="only parts whose names contain one of these, by commas")
    parser.add_argument("--out", type=Path, help="keep the whole reports in this folder")
    options = parser.parse_args()
    if unknown := sorted({*options.tools} - {*FAULTS}):
        parser.error(f"a tool is one of {', '.join(FAULTS)}; got {unknown[0]!r}")
    build = [sys.executable, "-m", "hipforge", "build", "--arch", "sm_90"]
    subprocess.run([*build, "--all"], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*build, *BUILT_FOR_RACECHECK], env=FOR_RACECHECK, check=True, stdout=subprocess.DEVNULL)
    from gpu import every_kernel

    parts = [name for name in every_kernel.parts() if any(wanted in name for wanted in options.parts.split(","))]
    began, failed = time.monotonic(), False
    with ThreadPoolExecutor(options.j) as pool:
        tools = options.tools or list(FAULTS)
        faults = {pool.submit(planted, tool, options.seconds): tool for tool in tools}
        jobs = {
            pool.submit(run, tool, [str(EVERY), part], EVERY.parent, options.seconds, environment_of(tool, part)):
                (tool, part)
            for part in parts
            for tool in tools
        }  # fmt: skip
        for done in as_completed([*faults, *jobs]):
            at = time.monotonic() - began
            if done in faults:
                found, report = done.result()
                words = "planted fault found" if found else f"planted fault NOT found:\n{report[-1500:]}"
                sys.stdout.write(f"{at:4.0f} s {faults[done]}: {words}\n")
                failed = failed or not found
            else:
                tool, part = jobs[done]
                status, report = done.result()
                if options.out:
                    options.out.mkdir(parents=True, exist_ok=True)
                    (options.out / f"{tool}-{part}.txt").write_text(report)
                words = "clean" if status == 0 else f"ended with {status}:\n{report[:3000]}\n...\n{report[-1000:]}"
                sys.stdout.write(f"{at:4.0f} s {tool}, {part}: {words}\n")
                failed = failed or status != 0
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
