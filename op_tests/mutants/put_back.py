"""Puts faults back that the package had, one at a time, and lets the generator of calls (``make adversary``) find them.

    python op_tests/mutants/put_back.py [--only PATTERN ...] [--size DRAWS ...] [--seed N] [--first]

The working tree is copied first. Prints a table of how many draws noticed each fault, and how, and on standard error an
example of each; exit status 1 if one was not noticed. What the same draws find without any fault does not count. With
several sizes a fault that the first one does not notice is drawn for again in the next.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mutants.run import LEFT_OUT, ROOT


@dataclass(frozen=True)
class PutBack:
    """A fault that the package had: edits, each (file, text that occurs in it once, what takes its place)."""

    name: str
    edits: tuple[tuple[str, str, str], ...]


PUT_BACK = [
    PutBack(name, edits)
    for name, *edits in (
        ("storage/shortened_is_read", ("jit/call/tensors.py", "    if held < needed:\n", "    if False:\n")),
        ("storage/freed_is_copied",
         ("ops/core/alignment.py", "    require_copyable(x, *written)\n", ""),
         ("ops/core/operator.py", "            require_sound(name, used(given), writes)\n            require_f",
          "            require_f")),
        ("refused/after_attention_wrote",
         ("ops/decode_attention/__init__.py", "    return_lse = bool(return_lse) ", "    return_lse = return_lse ")),
        ("refused/after_zeros_were_written",
         ("ops/mxfp8_grouped_gemm/__init__.py", "        check_indices(parts)\n", "        pass\n")),
        ("sharing/outputs_over_inputs",
         ("ops/core/arguments.py", "if other == parameter or not tensors.may_share(value, read):", "if True:")),
        ("sharing/unseen_by_the_binding",
         ("jit/call/binding_overlap.h", "if (!self->writable[i] || begin[i] == end[i]) continue;", "continue;")),
        ("sharing/workspace_over_an_operand",
         ("ops/decode_attention/operation.py", 'outs=("out", "lse_out", "workspace")', 'outs=("out", "lse_out")'),
         ("jit/call/binding_overlap.h", "    if (!self->writable[i] || begin[i] == end[i]) continue;",
          '    if (!self->writable[i] || begin[i] == end[i] || !strncmp(self->texts[i], "partial", 7)) continue;')),
        ("window/length_beyond_the_table",
         ("ops/reference/attention.py", ".to(torch.int64).clamp(max=block_tables.shape[1] * page_size)",
          ".to(torch.int64)")),
        ("experts/place_beyond_the_weights",
         ("ops/moe.py", "        _check_places(expert_map, experts)\n", ""),
         ("ops/moe.py", " num_local_experts=self.experts,", "")),
        ("experts/rows_of_other_ranks_are_summed",
         ("csrc/moe_routing/moe_combine.cu", "counts = own >= 0 && (a.local < 0 || own < a.local);",
          "counts = own >= 0;")),
        ("sinks/large_ones_are_infinite",
         ("csrc/decode_attention/amd/row_end.h",
          "const float product = sinks[head] * kLog2E, weight = product > __FLT_MAX__ ? __FLT_MAX__ : product;",
          "const float weight = sinks[head] * kLog2E;")),
        ("graphs/tensors_are_let_go",
         ("emulator/graphs.py", "                self._kept.append(leaf)\n", ""),
         ("emulator/graphs.py",
          "self._memory.setdefault(storage._cdata, (storage, storage.data_ptr(), storage.nbytes()))", "pass")),
        ("graphs/freed_storage_is_replayed",
         ("emulator/graphs.py", "if storage.data_ptr() != address or storage.nbytes() < size:", "if False:")),
        ("values/pending_sign_ignored", ("jit/call/tensors.py", "    if tensor.is_neg():\n", "    if False:\n")),
        ("values/beyond_float32",
         ("ops/core/operator.py", "            require_float32(name, signature, given)\n", "")),
        ("values/below_float32", ("ops/core/checks.py", "    if 0 < size < _FLOAT32_LEAST:\n", "    if False:\n")),
        ("values/infinite_scale_of_k",
         ("csrc/decode_attention/problem.h", "return scale + (scale - scale);", "return scale;")),
        ("values/infinite_shift",
         ("csrc/rope_and_cache/store.h", "x > kLargest ? kLargest : x < -kLargest ? -kLargest : x", "x")),
        ("layers/buffers_are_cast",
         ("src/hipforge/nn/payload.py", "None if buffer is None else _moved(buffer, fn)",
          "None if buffer is None else fn(buffer)")),
        ("errors/number_without_memory",
         ("ops/core/operator.py", "            require_readable_numbers(name, given, numbers)\n", "")),
        ("errors/uninitialized_parameter",
         ("ops/core/arguments.py", "    if torch.nn.parameter.is_lazy(value):\n", "    if False:\n")),
    )
]  # fmt: skip


def misplaced(fault: PutBack, root: Path = ROOT) -> str | None:
    """Return why a fault cannot be put back, or None."""
    counts = [((root / file).read_text().count(text), file, text) for file, text, _ in fault.edits]
    return "; ".join(f"{text!r} occurs {n} times in {file}" for n, file, text in counts if n != 1) or None


_HEAD = "| fault put back | draws that noticed it | how |\n|---|---|---|"
_Draw = tuple[str, str]  # where, and its number


def found_by(seed: int, size: int, first: bool = False) -> tuple[int, dict[_Draw, str]]:
    """Draw calls; returns how many were made, and those that were wrong with what was said of each."""
    from stress.run import drawn  # the copy's

    ended, wrong = drawn(seed, size, threading.Event() if first else None)
    said: dict[_Draw, str] = {}
    for text in wrong:
        number, where = (re.search(rf"^ *{name}: (.*)$", text, re.MULTILINE) for name in ("number", "where"))
        said[where[1] if where else "", number[1] if number else ""] = text
    return sum(ended.values()), said


def noticed(root: Path, fault: PutBack, size: int, seed: int, first: bool, without: Collection[_Draw]) -> str | None:
    """Put a fault back in a copy and draw calls; returns the row of the table, or None where no draw noticed it."""
    before = {root / file: (root / file).read_text() for file, _, _ in fault.edits}
    for file, text, becomes in fault.edits:
        (root / file).write_text((root / file).read_text().replace(text, becomes))
    started = time.monotonic()
    try:
        made, said = found_by(seed, size, first)
    finally:
        for path, content in before.items():
            path.write_text(content)
    wrong = [text for draw, text in said.items() if draw not in without]
    ways = Counter(match[1] for text in wrong if (match := re.search(r"^ *ended: (.*)$", text, re.MULTILINE)))
    how = ", ".join(f"{number} {way}" for way, number in sorted(ways.items()))
    example = wrong[0][:600] if wrong else f"none of {made} draws noticed it"
    print(f"{fault.name}, {time.monotonic() - started:.0f} s: {example}", file=sys.stderr, flush=True)
    return f"| {fault.name} | {len(wrong)} of {made} | {how} |" if wrong else None


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of faults, as sinks/*")
    parser.add_argument("--size", nargs="+", type=int, default=[10_000], help="draws for each, and if none notices it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", action="store_true", help="end a fault's draws with the first that is wrong")
    given = parser.parse_args()
    chosen = [fault for fault in PUT_BACK if any(fnmatch.fnmatch(fault.name, pattern) for pattern in given.only)]
    wrong = {fault.name: why for fault in chosen if (why := misplaced(fault)) is not None}
    without: dict[int, Collection[_Draw]] = {}
    print(_HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="hipforge-put-back-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        sys.path.insert(0, str(root / "op_tests"))
        os.environ["PYTHONPATH"] = str(root / "src")  # of the processes that draw
        for fault in chosen:
            for size in given.size if fault.name not in wrong else ():
                if not given.first and size not in without:
                    without[size] = found_by(given.seed, size)[1].keys()
                row = noticed(root, fault, size, given.seed, given.first, without.get(size, ()))
                if row is not None:
                    print(row, flush=True)
                    break
            else:
                wrong.setdefault(fault.name, "no draw noticed it")
    for name, why in wrong.items():
        print(f"NOT NOTICED {name}: {why}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
