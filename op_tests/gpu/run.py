"""``make gpu-test``: tests of ops, models and :mod:`gpu.test_gpu` on this machine's GPU, then ``record.json``.

Needs no package index: the torch, the nvcc and the pytest that are there, and PYTHONPATH for hipforge itself. A failure
leaves the record of the variants that it touches as it was, and so does a test that does not end.

    python op_tests/gpu/run.py [-j PROCESSES] [-k EXPRESSION] [--seconds N] [--out FOLDER]
    python op_tests/gpu/run.py --read FOLDER     the record of such a run's FOLDER, on any machine
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OP_TESTS = Path(__file__).resolve().parent.parent
SOURCE = OP_TESTS.parent / "src"
sys.path[:0] = [str(SOURCE), str(OP_TESTS)]

import torch  # noqa: E402

from gpu import record  # noqa: E402

FILES = (
    "test_rmsnorm_fp8", "test_swiglu_fp8", "test_fp8_quant", "test_fp8_quant_rows", "test_mx_quantize",
    "test_rope_and_cache", "test_rope_and_cache_index",
    "test_router_gemm", "test_topk_gating", "test_argmax", "test_mxfp4_gemm",
    "test_moe_align", "test_moe_combine", "test_decode_attention_kinds", "test_decode_attention_fp8",
    "test_decode_attention_int4", "test_decode_attention_caches",
    "test_decode_attention_ragged", "test_decode_attention_hidden_keys", "test_decode_attention_sinks_window",
    "test_decode_attention_output", "test_decode_attention_workspace",
)  # fmt: skip
"""The tests of ops that have kernels for a GPU other than AMD's."""
MODELS = "nn/test_generate"
"""The tests of whole models, of all those kernels together."""
ON_GPU = (
    "test_mxfp8_gemm", "test_mxfp8_grouped_gemm", "test_mxfp4_gemm", "test_mxfp4_grouped_gemm", "test_fp8_skinny_gemm",
    "test_decode_attention", "test_fused_linear", "test_token_experts", "test_all_reduce",
)  # fmt: skip
"""The tests of kernels that only such a GPU has."""
DIGESTS, CARD = "digests.json", "card.json"
"""Files beside the outcomes: what was built, and where it ran."""


def pytest_run(arguments: list[str], folder: Path, processes: int, seconds: float | None) -> bool:
    """Run pytest, its outcomes written into ``folder``; returns whether all passed within ``seconds``."""
    parallel = ["-n", str(processes), "--dist", "worksteal"] if processes > 1 and _has("xdist") else []
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--durations=10", *parallel]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    path = os.pathsep.join([str(SOURCE), str(OP_TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ, "PYTHONPATH": path, "HIPFORGE_STAGE_RECORD": str(folder), "OMP_NUM_THREADS": "1",
        "HIPFORGE_DEVICE": "cuda",
    }  # fmt: skip
    process = subprocess.Popen(command, cwd=OP_TESTS, env=environment)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        sys.stdout.write(f"gpu-test: ended after {seconds:.0f} s; what was not reached is not recorded\n")
        return False


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("-j", type=int, default=max(1, cores - 1), help="processes of the ops' tests")
    parser.add_argument("-k", default="", help="only tests whose names match")
    parser.add_argument("--seconds", type=float, help="end each of the two parts after so long")
    parser.add_argument("--out", type=Path, help="keep the outcomes, the failures and both records in this folder")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="run nothing: read the outcomes kept there")
    options = parser.parse_args()
    if options.read:
        write_record(options.read, json.loads((options.read / DIGESTS).read_text()), None)
        return 0
    chosen = ["-k", options.k] if options.k else []
    with tempfile.TemporaryDirectory() as name:
        folder = options.out.resolve() if options.out else Path(name)  # what an ended run has found is there
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("calls-*.jsonl"), *folder.glob("outcomes.jsonl")):
            old.unlink()
        built = record.digests()  # every module, side by side, ahead of the tests
        (folder / DIGESTS).write_text(json.dumps(built))
        card = {"card": torch.cuda.get_device_name(0), "driver": _driver(), "date": datetime.date.today().isoformat()}
        (folder / CARD).write_text(json.dumps(card))
        files = [str(OP_TESTS / "ops" / f"{file}.py") for file in FILES]
        files += [str(OP_TESTS / f"{file}.py") for file in (MODELS, "jit/test_plain_hip")]
        files += [str(OP_TESTS / f"gpu/{file}.py") for file in ON_GPU]
        staged = pytest_run(["-p", "gpu.staging", *files, *chosen], folder, options.j, options.seconds)
        alone = pytest_run([str(OP_TESTS / "gpu/test_gpu.py"), *chosen], folder, min(4, options.j), options.seconds)
        write_record(folder, built, options.out)
    return 0 if staged and alone else 1


def _lines(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for file in folder.glob(pattern):
        yield from map(json.loads, file.read_text().splitlines())


def write_record(folder: Path, present: dict[str, str], out: Path | None) -> None:
    """Merge what this run tested into ``record.json``: of each variant, the tests that called it, if all passed.

    Of two runs of the same sources the one with more tests stays, so that a few tests once more do not hide many.
    Modules whose variants are then all covered leave ``pending.json``.
    """
    outcomes = {line["test"].rpartition("op_tests/")[2]: line for line in _lines(folder, "outcomes.jsonl")}
    failed = [line for line in outcomes.values() if line["outcome"] == "failed"]
    tests: dict[str, set[str]] = {}
    errors: dict[str, float] = {}
    for line in _lines(folder, "calls-*.jsonl"):
        for variant, error in line["variants"].items():
            tests.setdefault(variant, set()).add(line["test"].rpartition("op_tests/")[2])
            if error is not None:
                errors[variant] = max(error, errors.get(variant, 0.0))
    known = record.read(record.RECORD)
    where = json.loads((folder / CARD).read_text())
    for variant, names in tests.items():
        old = known.get(variant)
        if old and old["digest"] == present.get(variant) and old["tests"] > len(names):
            continue
        if variant in present and all(outcomes.get(name, {}).get("outcome") == "passed" for name in names):
            known[variant] = {
                "digest": present[variant],
                **where,
                "tests": len(names),
                "worst_error": errors.get(variant),
            }
    kept = {name: known[name] for name in sorted(known) if name in present}
    waiting = {
        module: reason
        for module, reason in record.read(record.PENDING).items()
        if record.unrecorded({name: of for name, of in present.items() if name.split("-", 1)[0] == module}, kept, {})
    }
    for file, content in ((record.RECORD, kept), (record.PENDING, waiting)):
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(of)}" for name, of in content.items())
        file.write_text(text := f"{{\n{lines}\n}}\n" if lines else "{}\n")
        if out:
            (out / file.name).write_text(text)
    words = "".join(f"==== {line['test']}\n{line['words']}\n" for line in failed)
    if out:
        (out / "failures.txt").write_text(words)
    covered = f"{len(kept)} of {len(present)} variants in the record, {len(waiting)} modules pending"
    sys.stdout.write(f"gpu-test: {len(outcomes)} tests, {len(failed)} failed; {covered}\n")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()


if __name__ == "__main__":
    sys.exit(main())
