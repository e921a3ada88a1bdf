"""Kernels whose work-groups share K: what the emulator cannot show, its stores being complete at once."""

from __future__ import annotations

import pytest

from hipforge import devices, emulator, jit
from hipforge.ops.core.tiles import tile_number
from hipforge.ops.mxfp8_gemm.kernels.tiles import TILED

pytestmark = pytest.mark.gfx942("skinny")

ARCH = devices.current().default_arch
MODULES = [
    *(("module_fp8_skinny_gemm_wave_split", {"HF_ROWS": rows}) for rows in (8, 16, 32)),
    *(("module_mxfp8_gemm_group_split", {"HF_ROWS": rows}) for rows in (16, 32, 64)),
    ("module_mxfp8_gemm_tiles", {"HF_TILE": tile_number(list(TILED.step_us)[-1])}),
]


@pytest.mark.parametrize(("name", "variant"), MODULES, ids=str)
def test_a_part_is_complete_and_past_the_caches_before_its_work_group_meets_another(name, variant):
    module = jit.load(name, variant, ARCH)
    kernels = [kernel for name, kernel in emulator.CodeObject(module.path / "module.so").kernels.items()]
    assert kernels
    for kernel in kernels:
        code = [line.split(": ", 1)[1] for line in kernel.disassembly().splitlines()]
        last = max(i for i, text in enumerate(code) if text.startswith("buffer_store") and text.endswith("sc1"))
        meeting = next(i for i, text in enumerate(code) if text.startswith("global_atomic_swap_x2"))
        barrier = next(i for i in range(last, meeting) if code[i] == "s_barrier")
        assert "s_waitcnt vmcnt(0)" in code[last:barrier]
        assert any(text.startswith("buffer_load") and text.endswith("sc0 sc1") for text in code[meeting:])
