"""Random programs, compiled for the GPU at three levels and for the host: all four must agree bit for bit.

-O0 code runs through FLAT accesses, scratch and calls; -O3 code through vectors, scalar registers and folded
constants. The host's x86 code is the reference; only the front end is common to it and the emulator.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import hip_compile, random_programs
from helpers.clang import clang

from hipforge import emulator

ITEMS = 128
LEVELS = ("-O0", "-O1", "-O3")
STRICT = ("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
# Half-precision operations are rounded one by one, as the GPU does, also where x86 computes them in float.
HALVES = ("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none")


def inputs(seed: int) -> torch.Tensor:
    """Words of every kind: random, small, floats of moderate size, and the extremes."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (ITEMS, 4), generator=g)
    small = torch.randint(-8, 9, (ITEMS, 4), generator=g)
    floats = (torch.randn((ITEMS, 4), generator=g) * 10).view(torch.int32).long()
    extremes = torch.tensor([0, -1, 2**31 - 1, -(2**31), 0x7F800000, 0x7FC00001, 1, 0x00800000])
    special = extremes[torch.randint(0, len(extremes), (ITEMS, 4), generator=g)]
    kind = torch.randint(0, 4, (ITEMS, 4), generator=g)
    picked = torch.where(kind == 0, words, torch.where(kind == 1, small, torch.where(kind == 2, floats, special)))
    return picked.to(torch.int32)


def host_results(
    programs: list[tuple[str, str]], words: torch.Tensor, memory: torch.Tensor, directory: Path
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each program's results and what it leaves in global memory."""
    source, library = directory / "host.cpp", directory / "host.so"
    source.write_text(random_programs.host_source(programs))
    command = [clang(), *STRICT, *HALVES, "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-lm"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    found = {}
    for name, _ in programs:
        out, left = torch.zeros(ITEMS, dtype=torch.int32), memory.clone()
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (words, left, out)]
        getattr(loaded, f"{name}_host")(*pointers, ITEMS)
        found[name] = out, left
    return found


def check(arch: str, seed: int, count: int, directory: Path) -> None:
    """Compare `count` programs with the host's results at every level.

    Raises:
        AssertionError: with the program and the inputs of the first item that differs.
    """
    programs = random_programs.functions(seed, count)
    words = inputs(seed)
    memory = inputs(seed + 1)[:, [0, 1, 2, 3, 0, 1, 2, 3]].contiguous()
    expected = host_results(programs, words, memory, directory)
    text = random_programs.device_source(programs)
    for level in LEVELS:
        elf = hip_compile.device_elf(text, directory, arch, [*STRICT, level, "-nogpuinc"])
        code = emulator.CodeObject(elf)
        for name, program in programs:
            out, left = torch.full((ITEMS,), -1, dtype=torch.int32), memory.clone()
            emulator.launch(code.kernels[f"{name}_kernel"], ITEMS // 64, 64, [words, left, out])
            want, want_left = expected[name]
            wrong = ((out != want) | (left != want_left).any(1)).nonzero()[:, 0].tolist()
            assert not wrong, (
                f"{arch} {level}, {name}: {len(wrong)} items differ from the host, first item {wrong[0]} with inputs "
                f"{words[wrong[0]].tolist()}\n{program}"
            )


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_random_programs_agree_with_the_host_at_every_level(arch: str, tmp_path: Path) -> None:
    check(arch, 1, 6, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_many_random_programs(arch: str, seed: int, tmp_path: Path) -> None:
    check(arch, seed, 25, tmp_path)
