"""compute-sanitizer over every simple kernel, each of its tools; first a planted fault that the tool must find.

    python op_tests/gpu/sanitize.py [TOOL...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE_FOLDER), "HIPFORGE_DEVICE": "cuda"}
FOUND = 9  # the exit status that stands for a finding
FAULTS = {
    "memcheck": "out[1 << 22] = 1.f;",
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


def run(tool: str, script: Path, folder: Path) -> tuple[int, str]:
    """Return the exit status and the end of the report of a script under a tool."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr)[-1500:]


def main() -> int:
    """Run the tools; returns the exit status."""
    failed = False
    every = Path(__file__).with_name("every_kernel.py")
    subprocess.run([sys.executable, str(every)], env=ENVIRONMENT, check=True)  # builds what is missing, without a tool
    for tool in sys.argv[1:] or FAULTS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "planted.cu").write_text(SOURCE.replace("FAULT", FAULTS[tool]))
            (folder / "modules.json").write_text(json.dumps({"module_planted": {"srcs": ["planted.cu"]}}))
            (folder / "child.py").write_text(CHILD)
            found, _ = run(tool, folder / "child.py", folder)
        clean, report = run(tool, every, every.parent)
        failed = failed or found != FOUND or clean != 0
        sys.stdout.write(f"{tool}: planted fault {'found' if found == FOUND else f'NOT found ({found})'}; ")
        sys.stdout.write("every kernel clean\n" if clean == 0 else f"every kernel ended with {clean}:\n{report}\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
