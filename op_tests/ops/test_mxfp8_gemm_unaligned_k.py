"""K that is no multiple of 128: a scale row has 1, 2 or 3 bytes past whole words, and begins at any of four bytes."""

from __future__ import annotations

import os

import pytest
from helpers.mxfp8_cases import among_nans, assert_bits, integers

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.mxfp8_gemm.kernels import K_PACKED, KERNELS, launch, wave_split
from hipforge.tuning.cases import Cell

pytestmark = pytest.mark.gfx942("not without_tails")  # gfx950 has that kernel alone

ARCH = os.environ.get("HIPFORGE_EMULATE", "gfx950")
DENSE = [kernel for kernel in KERNELS if ARCH in kernel.archs and kernel is not K_PACKED]


@pytest.mark.parametrize("k", (2880, 1504, 1056, 4160))  # 90, 47, 33 and 130 blocks
@pytest.mark.parametrize("kernel", DENSE, ids=lambda kernel: kernel.name)
def test_every_kernel_is_exact_and_reads_no_neighbour(kernel, k):
    for m, n in ((3, 19), (17, 50)):
        found = [kernel.choice(given) for given in kernel.candidates(Cell(n, k, m), ARCH)]
        found = [one for one in found if kernel.needs(one.configuration, (2 * m, n, k), ARCH) is None]
        for choice in found[:: max(1, len(found) // 5)]:
            case, want = among_nans(integers(m, n, k, scales=(126, 128)), ARCH)
            with emulator.options(checks="all"):
                assert_bits(launch(choice, case.out(), *case.args()), want)


@pytest.mark.parametrize("rows", (16, 32, 64))
@pytest.mark.parametrize("k", (*range(160, 1088, 96), 2880))
def test_every_number_of_steps_of_the_loop_is_exact(rows, k):
    # One wave has all steps: runs of straight code with every rest. Five tiles of columns are the widest.
    for n, columns in ((17, 16), (50, 48), (85, 80)) if ARCH == "gfx950" else ((17, 16),):
        case, want = among_nans(integers(5, n, k, scales=(126, 128)), ARCH)
        with emulator.options(checks="all"):
            got = wave_split.mxfp8_wave_split(*case.args(), rows=rows, columns=columns, waves=1)
        assert_bits(got, want)


def test_such_a_k_is_about_as_fast_as_the_next_aligned_one():
    # 22.5 and 23 steps (modelled); where each step waits for its own loads, it takes half as long again.
    def us(k):
        case = integers(1, 64, k, scales=(126, 128))
        wave_split.mxfp8_wave_split(*case.args(), waves=1)
        with emulator.timed() as timed:
            wave_split.mxfp8_wave_split(*case.args(), waves=1)
        return timed.result.replay_us

    assert us(2880) < 1.25 * us(2944)


def test_the_kernel_without_tails_refuses_such_k():
    case = integers(3, 19, 2880)
    with pytest.raises(GuardError, match="K must be a multiple of 256 with 8 columns"):
        launch(K_PACKED.choice({"columns": 8, "groups": 1, "waves": 1}), case.out(), *case.args())
