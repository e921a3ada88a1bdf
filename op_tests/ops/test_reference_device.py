"""HIPFORGE_DEVICE=reference: total functions compute in torch; stress/calls.py calls every op in such a process.

That torch gives what the kernels give is asked within one process too, by tests with ``path``.
"""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch, hipforge
try:
    hipforge.explain("nothing")  # before any op is imported
except hipforge.GuardError as error:
    known = str(error).replace(",", " ").replace(";", " ").split()
    missing = set(hipforge.ops.public_names()).difference(known)
    assert {op for op in missing if not op.startswith(("Float8", "fused_moe"))} == {
        "convert_to_float8_training", "disable_fp8", "scaled_mm"
    }, error
x, w = torch.ones(2, 4), torch.ones(3, 4)
assert hipforge.explain("router_gemm", x, w).path == "torch"
assert torch.equal(hipforge.router_gemm(x, w, torch.ones(3)), torch.full((2, 3), 5.0))
"""


def test_ops_are_known_and_compute_in_torch() -> None:
    environment = {**os.environ, "HIPFORGE_DEVICE": "reference"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
