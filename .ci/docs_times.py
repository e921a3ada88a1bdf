"""Model every op at its example shape on both architectures and write docs/op_times.json, which the pages of ops show.

Run ``python .ci/docs_times.py`` again after a change of a kernel or of the model of time; it takes some minutes. Each
architecture is a process of its own, because a process has one device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "docs" / "op_times.json"
ARCHS = ("gfx950", "gfx942")


def of_one_arch() -> dict[str, dict[str, Any]]:
    """Return the modelled times of every op that runs a kernel on this process's device."""
    from hipforge import devices, emulator
    from hipforge.cli.profile_subjects import SUBJECTS
    from hipforge.emulator.timing import machine
    from hipforge.emulator.timing.context import gpu_of
    from hipforge.errors import HipforgeError

    of = machine(gpu_of(devices.current().arch_of()))
    found: dict[str, dict[str, Any]] = {}
    for op, subject in SUBJECTS.items():
        try:
            call = subject.call(*subject.example)
            with emulator.timed(of, "cold") as timed:
                call()
        except HipforgeError as error:
            sys.stderr.write(f"{op}: {error}\n")
            continue
        if not timed.capture.launches():
            continue
        timing = timed.result
        sizes = zip(subject.shape, subject.example, strict=True)
        found[op] = {
            "shape": ",".join(f"{name.lower()}={value}" for name, value in sizes),
            "gpu": timing.gpu,
            "kernel_us": round(timing.kernel_us, 2),
            "replay_us": round(timing.replay_us, 2),
            "bound": timing.bound,
            "launches": len(timed.capture.launches()),
        }
        sys.stderr.write(f"{op}: {found[op]['kernel_us']} us\n")
    return found


def main() -> None:
    """Command-line entry."""
    if sys.argv[1:] == ["--one"]:
        sys.stdout.write(json.dumps(of_one_arch()))
        return
    times: dict[str, Any] = {}
    for arch in ARCHS:
        environment = {**os.environ, "HIPFORGE_DEVICE": "emulator", "HIPFORGE_EMULATE": arch, "HIPFORGE_QUIET": "1"}
        command = [sys.executable, __file__, "--one"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        times[arch] = json.loads(done.stdout)
    TIMES.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
