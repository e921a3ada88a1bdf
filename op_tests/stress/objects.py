"""Damaged device code, read, loaded, disassembled and run by the emulator in a process with little memory.

Each object ends in kernels or in an exception of hipforge's; the process never dies, and nothing it is told makes it
take memory or time without bound.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers import hip_compile

from stress import supervised

SOURCE = """
#include <hip/hip_runtime.h>
__constant__ float table[4];
template <typename T> __global__ void scale(T* y, const T* x, T a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] * table[i & 3];
}
template __global__ void scale<float>(float*, const float*, float, int);
template __global__ void scale<double>(double*, const double*, double, int);
__global__ __launch_bounds__(128) void shared_sum(int* out) {
  __shared__ int s[128];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[threadIdx.x] += s[127 - threadIdx.x] * i;
}
"""
MEMORY = 1 << 30  # bytes that reading, loading and running one object may take
PATIENCE_S = 30
EXTREMES = (0, 1, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def make(folder: Path) -> list[Path]:
    """The kernels in every container in which device code travels: library, bundle, compressed bundles, bare ELF."""
    from hipforge.jit.backends.amd.code_object import device_images, fatbin

    folder.mkdir(parents=True, exist_ok=True)
    library = hip_compile.shared_library(SOURCE, folder, ("gfx950", "gfx942")).read_bytes()
    bundle = fatbin(library)
    packed = zlib.compress(bundle)
    containers = {
        "library": library,
        "bundle": bundle,
        "elf": next(image for target, image in device_images(bundle) if "gfx950" in target),
        "compressed 2": struct.pack("<4sHHIIQ", b"CCOB", 2, 0, 24 + len(packed), len(bundle), 0) + packed,
        "compressed 3": struct.pack("<4sHHQQQ", b"CCOB", 3, 0, 32 + len(packed), len(bundle), 0) + packed,
    }
    for name, data in containers.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in containers]


def damaged(choose: random.Random, whole: bytes) -> bytes:
    """Bytes with a few fields, runs or the end of them changed; most changes are where headers and tables stand."""
    raw = bytearray(whole)
    marks = [
        at
        for magic in (b"\x7fELF", b"__CLANG_OFFLOAD", b"CCOB", b"AMDGPU\0", b"amdhsa", b".kd")
        for at in _all(whole, magic)
    ]
    for _ in range(choose.choice((1, 1, 2, 3, 8))):
        if marks and choose.random() < 0.6:
            at = min(choose.choice(marks) + choose.randrange(0, 400), len(raw) - 1)
        else:
            at = choose.randrange(len(raw))
        kind = choose.randrange(6)
        if kind == 0:
            raw[at] ^= 1 << choose.randrange(8)
        elif kind == 1:
            raw[at] = choose.randrange(256)
        elif kind <= 3:
            form = choose.choice("BHIQ")
            size = struct.calcsize(form)
            at = min(at // size * size, len(raw) - size)
            value = choose.choice(EXTREMES) & (1 << 8 * size) - 1
            raw[at : at + size] = struct.pack(f"<{form}", value)
        elif kind == 4:
            source, length = choose.randrange(len(raw)), choose.randrange(1, 64)
            chunk = raw[source : source + length]
            raw[at : at + len(chunk)] = chunk
        elif choose.random() < 0.3:
            del raw[max(at, 8) :]
    return bytes(raw)


def _all(whole: bytes, magic: bytes) -> Iterator[int]:
    at = whole.find(magic)
    while at >= 0:
        yield at
        at = whole.find(magic, at + 1)


def use(raw: bytes) -> str:
    """Read an object and do with it what can be done; returns how far it got."""
    import torch

    from hipforge import emulator
    from hipforge.emulator import configuration
    from hipforge.errors import HipforgeError

    reached = "read"
    try:
        code = emulator.CodeObject(raw, arch="gfx950")
        for kernel in list(code.kernels.values())[:3]:
            kernel.disassembly()
            reached = "disassembled"
            size = max((arg.offset + arg.size for arg in kernel.explicit_args), default=0)
            rooms = {offset: torch.zeros(4096, dtype=torch.uint8) for offset in (0, 8) if offset + 8 <= size}
            with configuration.options(instruction_budget=20_000):
                emulator.launch(kernel, 1, 128, kernarg=bytes(min(size, 4096)), tensors=rooms)
            reached = "run"
    except HipforgeError as error:
        return f"{reached}, then {type(error).__name__}" if reached != "read" else type(error).__name__
    return reached


class TookTooLong(Exception):
    """An object that takes too long."""


def work(seed: int, first: int, end: int, files: list[str]) -> None:
    """Use objects ``first`` to ``end``, announcing each, under limits of memory and time."""
    import torch

    from hipforge import emulator

    torch.set_num_threads(1)
    wholes = [Path(name).read_bytes() for name in files]
    emulator.CodeObject(wholes[0], arch="gfx950")
    use(wholes[0])
    with Path("/proc/self/statm").open() as text:
        now = int(text.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))

    def late(*_: Any) -> None:
        raise TookTooLong

    signal.signal(signal.SIGALRM, late)
    for number in range(first, end):
        choose = random.Random(seed * 1_000_003 + number)
        raw = damaged(choose, choose.choice(wholes))
        supervised.say(begins=number)
        signal.alarm(PATIENCE_S)
        line: dict[str, Any] = {"number": number}
        try:
            line["ended"] = use(raw)
        except Exception:
            line |= {"ended": "raw exception", "details": traceback.format_exc()[-1500:]}
        signal.alarm(0)
        supervised.say(**line)


def run(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Use ``count`` damaged objects in their own processes; one that dies is replaced, and counts as a crash."""
    files = [str(path) for path in make(folder / "objects")]
    emulation = {"EMULATE": "gfx950", "EMULATOR_CHECKS": "all", "EMULATOR_QUIET": "1", "EMULATOR_THREADS": "1"}
    environment = {f"HIPFORGE_{name}": value for name, value in emulation.items()}
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    program = lambda first: f"from stress import objects\nobjects.work({seed}, {first}, {count}, {files!r})\n"
    for said in supervised.cases(program, 0, count, environment):
        ended[said["ended"]] += 1
        if "details" in said:
            wrong.append(f"seed {seed}, number {said['number']}: {said['details']}")
    return ended, wrong
