"""Total functions without kernels: with HIPFORGE_DEVICE=reference each gives in torch what its kernel gives.

A process has one device, so all of them run in one other process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CASES = {
    "explain of no op, before any other is imported": """
try:
    hipforge.explain("nothing")
except hipforge.GuardError as error:
    known = str(error).replace(",", " ").replace(";", " ").split()
    missing = set(hipforge.ops.public_names()).difference(known)
    assert {op for op in missing if not op.startswith(("Float8", "fused_moe"))} == {
        "convert_to_float8_training", "disable_fp8", "scaled_mm"
    }, error
""",
    "router_gemm": """
got = hipforge.router_gemm(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3))
assert torch.equal(got, torch.full((2, 3), 5.0))
""",
    "moe_align_block_size": """
s = hipforge.moe_align_block_size(torch.tensor([[0, 2], [2, -1]]), 2, 3, torch.tensor([0, -1, 1]))
assert s.sorted_token_ids.tolist() == [0, 4, 1, 2, 4, 4, 4, 4], s
assert s.expert_ids.tolist() == [0, 1, -1, -1] and s.num_tokens_post_padded.tolist() == [4]
""",
    "rope_and_cache": """
q, k = torch.randn(2, 4, 64).half(), torch.randn(2, 2, 64).half()
cache = torch.zeros(2, 16, 2, 64, dtype=torch.float8_e4m3fn)
table = torch.randn(8, 64)
positions, slots, scales = torch.tensor([3, 5]), torch.tensor([17, -1]), dict(k_scale=1.0, v_scale=1.0)
want = hipforge.ops.reference.rotate(q, table, positions, False)
call = (q, k, k, table, positions, cache, cache.clone(), slots)
assert hipforge.explain('rope_and_cache', *call, **scales).path == 'torch'
got = hipforge.rope_and_cache(*call, **scales)
assert got is q and torch.equal(q, want) and cache[1, 1].float().any() and not cache[0].float().any()
""",
    "residual_rms_mxfp8 and swiglu_mxfp8": """
x, r, w = torch.randn(2, 64).half(), torch.randn(2, 64).half(), torch.randn(64).half()
want, n = x + r, torch.ones(2, 3).half()
q, s, k = hipforge.residual_rms_mxfp8(x, r, w, 1e-5, n)
assert k is r and torch.equal(r, want) and not n.any() and s.shape == (2, 2)
q, s = hipforge.swiglu_mxfp8(x)
assert q.shape == (2, 32) and s.shape == (2, 1) and q.dtype == torch.float8_e4m3fn
""",
    "swiglu_fp8": """
x, n = torch.randn(2, 40).half(), torch.ones(2, 3).half()
q = hipforge.swiglu_fp8(x, torch.tensor([0.5]), n)
assert q.shape == (2, 20) and q.dtype == torch.float8_e4m3fn and not n.any()
want = torch.nn.functional.silu(x[:, :20].float()) * x[:, 20:].float()
assert torch.allclose(q.float() * 0.5, want, rtol=2**-4, atol=2**-10)  # half a step of e4m3, subnormal
""",
    "moe_combine": """
out = torch.empty(1, 8)
rows, ids = torch.arange(16.0).view(2, 8), torch.tensor([[1, 5]])
got = hipforge.moe_combine(rows, ids=ids, num_experts=4, out=out)
assert got is out and torch.equal(got, torch.arange(8.0)[None])
""",
    "topk_gating": """
w, i = hipforge.topk_gating(torch.tensor([[0.0, 2.0, 1.0]]), 2, shared_experts=1)
assert i.tolist() == [[1, 2, 3]] and w[0, 2] == 1
""",
    "residual_rms": """
x, r, w = torch.randn(2, 40).half(), torch.randn(2, 40).half(), torch.randn(40).half()
want, n = x + r, torch.ones(2, 3).half()
q, k = hipforge.residual_rms(x, r, w, 1e-5, torch.tensor([0.5]), n)
assert k is r and torch.equal(r, want) and not n.any() and q.dtype == torch.float8_e4m3fn
""",
}

EACH = """
import json, sys, traceback
import torch, hipforge
said = {}
for name, code in json.load(sys.stdin).items():
    try:
        exec(code, {"torch": torch, "hipforge": hipforge})
    except Exception:
        said[name] = traceback.format_exc()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """The traceback of each case that failed."""
    environment = {**os.environ, "HIPFORGE_DEVICE": "reference"}
    command = [sys.executable, "-c", EACH]
    done = subprocess.run(command, input=json.dumps(CASES), env=environment, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("ops", CASES)
def test_the_reference_device_gives_the_same(errors: dict[str, str], ops: str) -> None:
    assert ops not in errors, errors[ops]
