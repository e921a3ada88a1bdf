"""Source lines in faults, checker reports, counts and disassembly, from the code object's line table."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers.hip_compile import device_elf

from hipforge import emulator
from hipforge.cli.main import cli
from hipforge.emulator import report
from hipforge.errors import EmulatorFault
from hipforge.jit import hip_module, obtain, registry
from hipforge.jit.cache import cache_dir

SOURCE = r"""
#include "hip.h"
__device__ __attribute__((noinline)) void leave(int* y, int at) {
  y[at] = 1;  // the store
}
extern "C" __global__ void outside(int* y, int at) {
  leave(y, at);
}
extern "C" __global__ void race(int* y) {
  __shared__ int slots[128];
  slots[threadIdx.x] = threadIdx.x;  // the write
  asm volatile("" : : "v"(slots) : "memory");  // the compiler may not read first
  y[threadIdx.x] = slots[threadIdx.x ^ 64];  // the read
}
extern "C" __global__ void stuck(int* y, int* flag) {
  while (__hip_atomic_load(flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) == 0) {}  // the wait
  y[0] = 1;
}
"""


def line_of(mark: str) -> int:
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if line.endswith("// " + mark))


@pytest.fixture(scope="module", params=["-gdwarf-5", "-gdwarf-4"])
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> emulator.CodeObject:
    folder = tmp_path_factory.mktemp("lines")
    return emulator.CodeObject(device_elf(SOURCE, folder, flags=["-gline-tables-only", request.param]))


def ints(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def test_a_fault_names_its_line(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault, match=rf"\n  source \S*device\.hip:{line_of('the store')}\n"):
        emulator.launch(code.kernels["outside"], 1, 64, [ints(4), 99])


def test_a_race_names_both_lines(code: emulator.CodeObject) -> None:
    with emulator.options(checks="memory", check_races=True), pytest.raises(EmulatorFault) as caught:
        emulator.launch(code.kernels["race"], 1, 128, [ints(128)])
    lines = {int(line) for line in re.findall(r"device\.hip:(\d+)", str(caught.value))}
    assert lines == {line_of("the write"), line_of("the read")}


def test_a_deadlock_names_its_line(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault, match=rf"waits for .* in \S*device\.hip:{line_of('the wait')}"):
        emulator.launch(code.kernels["stuck"], 1, 64, [ints(1), ints(1)])


def test_counts_and_disassembly_have_lines(code: emulator.CodeObject) -> None:
    with emulator.options(checks="memory"), emulator.counters(per_pc=True) as counted:
        emulator.launch(code.kernels["race"], 1, 128, [ints(128)])
    write = next(row for row in counted.result.per_pc if row.text.startswith("ds_write"))
    assert write.source.endswith(f"device.hip:{line_of('the write')}")
    assert f"device.hip:{line_of('the read')}\n" in report.listing(counted.result)
    kernel = code.kernels["race"]
    pairs = zip(kernel.disassembly().splitlines(), kernel.source_lines(), strict=True)
    assert {line.rsplit(":", 1)[1] for text, line in pairs if "ds_read" in text} == {str(line_of("the read"))}


def test_a_line_table_changes_no_code_and_its_absence_no_message(code: emulator.CodeObject, tmp_path: Path) -> None:
    plain = emulator.CodeObject(device_elf(SOURCE, tmp_path))
    for name in ("outside", "race", "stuck"):
        with_lines, without = code.kernels[name], plain.kernels[name]
        assert with_lines.disassembly() == without.disassembly()
        assert set(without.source_lines()) == {""}
        for field in dataclasses.fields(without):
            if field.name != "code_object":
                assert getattr(with_lines, field.name) == getattr(without, field.name)
    with pytest.raises(EmulatorFault) as caught:
        emulator.launch(plain.kernels["outside"], 1, 64, [ints(4), 99])
    assert "source" not in str(caught.value)


def test_a_damaged_line_table_is_ignored(tmp_path: Path) -> None:
    whole = device_elf(SOURCE, tmp_path, flags=["-gline-tables-only"]).read_bytes()
    at = whole.index(b"device.hip\0")
    begin = whole.rindex(b"\x05\x00\x08\x00", 0, len(whole))  # version 5, addresses of 8 bytes
    for damage in (begin, begin + 4, begin + 12, at):
        image = bytearray(whole)
        image[damage : damage + 4] = b"\xff\xff\xff\xff"
        code = emulator.CodeObject(bytes(image))
        y = ints(4)
        emulator.launch(code.kernels["outside"], 1, 64, [y, 1])
        assert y.tolist() == [0, 1, 0, 0]


def test_disasm_prints_instructions_under_their_lines(tmp_path: Path) -> None:
    path = device_elf(SOURCE, tmp_path, flags=["-gline-tables-only"])
    done = CliRunner().invoke(cli, ["disasm", str(path), "--kernel", "race"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "race (gfx950):" in done.output
    assert "outside" not in done.output
    assert re.search(rf"; \S*device\.hip:{line_of('the read')}\n  [0-9a-f]+: ds_read_b32", done.output)
    missing = CliRunner().invoke(cli, ["disasm", str(path), "--kernel", "nothing"])
    assert missing.exit_code == 1
    assert "no kernel whose name contains 'nothing'" in missing.output


def test_modules_are_built_with_lines_and_no_path_of_this_machine() -> None:
    wanted = hip_module.request(registry.module("module_rmsnorm_fp8"), {"HF_INPUT": "bf16"}, "gfx950")
    library = obtain.module(wanted).entry.library
    (kernel,) = [k for k in emulator.CodeObject(library).kernels.values() if k.source_lines()][:1]
    lines = [line for line in kernel.source_lines() if line]
    assert len(lines) > 0.8 * len(kernel.source_lines())
    # Of the folder that describes the module, whichever that was for the first build with this key.
    assert any(re.match(r"(\./)+(csrc/rmsnorm_fp8/)?rmsnorm_fp8\.cu:\d+$", line) for line in lines)
    assert {line.split("/")[0] for line in lines} <= {".", "csrc", "rocm", ""}
    held = library.read_bytes()
    for place in (str(cache_dir.writing_root()), str(Path(__file__).parents[2])):
        assert place.encode() not in held


def test_trace_prints_what_a_wave_executes() -> None:
    shape = "1,256,1024"
    whole = CliRunner().invoke(cli, ["trace", "mxfp8_gemv", shape, "--lane", "3"], catch_exceptions=False)
    lines = whole.output.splitlines()
    assert "s_endpgm" in lines[-1]
    assert any("| v" in line for line in lines)
    address = "0x" + lines[20].split()[0]
    arguments = ["trace", "mxfp8_gemv", shape, "--from", address, "--count", "4"]
    part = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert [line.split("|")[0] for line in part.output.splitlines()] == [line.split("|")[0] for line in lines[20:24]]
    nothing = CliRunner().invoke(cli, ["trace", "mxfp8_gemv", shape, "--wave", "99"])
    assert nothing.exit_code == 1
    assert "no instruction of work-group 0, wave 99" in nothing.output
