"""Loads from a lane's private memory straight to LDS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.emulator_asm import whole_kernel
from helpers.exec_registry import ARCHS, on_each_arch

from hipforge import emulator
from hipforge.errors import EmulatorFault

BODY = """
  s_load_dwordx2 s[2:3], s[0:1], 0
  v_lshlrev_b32 v1, 2, v0
  v_mul_u32_u24 v2, 0x10203, v0
  scratch_store_dword off, v2, off offset:4
  s_mov_b32 m0, 0x100
  s_waitcnt vmcnt(0) lgkmcnt(0)
  {load}
  s_waitcnt vmcnt(0)
  ds_read_b32 v3, v1 offset:0x104
  s_waitcnt lgkmcnt(0)
  global_store_dword v1, v3, s[2:3]
"""
DIRECTIVES = """
  .amdhsa_private_segment_fixed_size 16
  .amdhsa_enable_private_segment 1
  .amdhsa_group_segment_fixed_size 1024
"""

WIDTHS = {
    "ubyte": lambda x: x & 0xFF,
    "sbyte": lambda x: (x & 0xFF ^ 0x80) - 0x80,
    "ushort": lambda x: x & 0xFFFF,
    "sshort": lambda x: (x & 0xFFFF ^ 0x8000) - 0x8000,
    "dword": lambda x: x,
}


def run(folder: Path, arch: str, load: str) -> np.ndarray:
    image = whole_kernel(BODY.format(load=load), folder, arch, DIRECTIVES, lds=1024, private=16)
    out = torch.zeros(64, dtype=torch.int32)
    with emulator.options(arch=arch, checks="all"):
        emulator.launch(emulator.CodeObject(image).kernels["k"], 1, 64, [out])
    return out.numpy()


HELD = {(f"scratch_load_lds_{width}", arch) for width in WIDTHS for arch in ARCHS}


@on_each_arch
@pytest.mark.parametrize("width", WIDTHS)
def test_private_memory_reaches_lds_lane_by_lane(tmp_path: Path, arch: str, width: str) -> None:
    got = run(tmp_path, arch, f"scratch_load_lds_{width} off, off offset:4")
    np.testing.assert_array_equal(got, WIDTHS[width](np.arange(64) * 0x10203).astype(np.int32))


def test_beyond_the_private_segment_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(EmulatorFault, match="scratch_load_lds_dword"):
        run(tmp_path, "gfx950", "scratch_load_lds_dword off, off offset:16")
