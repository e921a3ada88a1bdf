"""Killed and racing builders: whatever ends when, every survivor gets the library of its own sources.

The compiler is the stand-in of the tests of the build machinery, which takes tenths of a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from helpers.jit_stand_in import StandIn

BUILD = """
print("started", flush=True)
try:
    built = ensure()
except HipforgeError as error:
    print(type(error).__name__, str(error).splitlines()[-1])
else:
    import ctypes
    print(built.built, ctypes.CDLL(str(built.entry.library)).value(), flush=True)
"""
PATIENCE_S = 120


def stand_in(folder: Path, modules: int = 1) -> StandIn:
    """A stand-in compiler in a new folder, and modules of one source and one header each."""
    made = StandIn(folder)
    folder.mkdir(parents=True)
    made.install(before="sleep 0.05")
    for number in range(modules):
        write(made, number, 0)
        source = f'#include "value{number}.h"\nextern "C" int value() {{ return VALUE; }}\n'
        made.write(f"sample{number}.cu", source)
        entry = {"srcs": [f"sample{number}.cu"], "resource_limits": {"max_vgprs": 512}}
        made.write(f"sample{number}.json", json.dumps({f"sample{number}": entry}))
    return made


def write(box: StandIn, module: int, value: int) -> None:
    """Edit a module's header so that its ``value()`` changes."""
    path = box.sources / f"value{module}.h"
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(f"#define VALUE {value}\n")
    fresh.replace(path)


def start(box: StandIn, module: int = 0) -> subprocess.Popen[str]:
    """Start a process that builds or finds a module and calls it."""
    name = f"sample{module}"
    return subprocess.Popen(
        [sys.executable, "-c", box.child_code(BUILD, name)], env=box.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def outcome(process: subprocess.Popen[str], value: int) -> str:
    """How a process ended: ``built``, ``found``, or what is wrong with it."""
    try:
        out, errors = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"no answer within {PATIENCE_S} s"
    last = out.strip().splitlines()[-1] if out.strip() else ""
    if last == f"True {value}":
        return "built"
    if last == f"False {value}":
        return "found"
    return f"status {process.returncode}, said {last!r} for value {value}: {errors[-400:]}"


def working_in(folder: Path) -> list[str]:
    """The processes whose working directory is a folder or below it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if entry.readlink().is_relative_to(folder):
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def kills(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Kill a builder at a random moment, ``count`` times; then the next one must build or find what it asked for."""
    choose = random.Random(seed)
    box = stand_in(folder / "kills")
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    process = start(box)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    first = outcome(process, 0)
    if first != "built":
        wrong.append(f"the first build: {first}")
    longest = time.monotonic() - began  # from here on imports are behind a builder
    for number in range(1, count + 1):
        write(box, 0, number)
        victim = start(box)
        assert victim.stdout is not None
        victim.stdout.readline()  # it has started: imports are behind it
        time.sleep(choose.uniform(0, longest))
        finished = victim.poll() is not None
        if choose.random() < 0.5:
            victim.kill()  # alone: what it started has to end with it
        elif not finished:
            os.killpg(victim.pid, signal.SIGKILL)
        victim.communicate()
        ended["killed after its end" if finished else "killed"] += 1
        survivor = outcome(start(box), number)
        ended[survivor if survivor in ("built", "found") else "lost"] += 1
        if survivor not in ("built", "found"):
            wrong.append(f"seed {seed}, kill {number}: {survivor}")
    return ended, wrong + _left_over(box)


def _left_over(box: StandIn) -> list[str]:
    """What killed builds left behind after a last build has swept: nothing, in half a minute."""
    staging = box.cache / "staging"
    deadline = time.monotonic() + 30
    while working_in(box.cache) and time.monotonic() < deadline:
        time.sleep(0.1)
    still = working_in(box.cache)
    write(box, 0, 10**6)
    last = outcome(start(box), 10**6)
    wrong = [f"processes {still} work in the cache"] if still else []
    if last != "built":
        wrong.append(f"the last build: {last}")
    left = sorted(path.name for path in staging.iterdir())
    return [*wrong, f"left in staging: {left}"] if left else wrong


def races(seed: int, processes: int, rounds: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Start processes at once: for one module, for several, and for one whose builder is killed in between."""
    choose = random.Random(seed)
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(rounds):
        kind = ("one module", "four modules", "a killed builder")[number % 3]
        modules = 4 if kind == "four modules" else 1
        box = stand_in(folder / f"race{number}", modules)
        value = number + 1
        for module in range(modules):
            write(box, module, value)
        started = [(start(box, i % modules), i % modules) for i in range(processes)]
        killed = 0
        if kind == "a killed builder":
            for victim, _ in choose.sample(started, 3):
                time.sleep(choose.uniform(0.1, 0.6))
                if victim.poll() is None:
                    victim.kill()
                    killed += 1
        results = [outcome(process, value) for process, _ in started]
        good = [result for result in results if result in ("built", "found")]
        ended.update(f"{kind}: {result}" for result in good)
        bad = [result for result in results if result not in ("built", "found")]
        gone = [result for result in bad if result.startswith(f"status {-signal.SIGKILL}")]
        wrong += [f"seed {seed}, {kind}: {result}" for result in bad if result not in gone]
        if len(gone) > killed:
            wrong.append(f"seed {seed}, {kind}: {len(gone)} processes died of {killed} that were killed")
        compiles = len(box.compiles())
        if not modules <= compiles <= modules + killed:
            wrong.append(f"seed {seed}, {kind}: {compiles} compiles of {modules} modules, {killed} builders killed")
    return ended, wrong
