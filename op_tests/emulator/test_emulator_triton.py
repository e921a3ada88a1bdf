"""Triton on the emulator: Triton's own grid syntax and specialisation, on CPU tensors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from hipforge import emulator, settings
from hipforge.emulator import triton as emulated
from hipforge.errors import ConfigError, EmulatorFault, GuardError


@triton.jit
def axpy(y, x, a, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(y + offsets, tl.load(y + offsets, inside) + a * tl.load(x + offsets, inside), inside)


@triton.jit
def programs(out, n1, n2):
    i = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + n1 * tl.program_id(2))
    tl.store(out + i, tl.program_id(0) + 10 * tl.program_id(1) + 100 * tl.program_id(2) + 1000 * n2)


@triton.jit
def row_sums(out, x, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, tl.sum(tl.load(x + row * stride + tl.arange(0, COLUMNS)), 0))


@triton.jit
def matmul(c, a, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    product = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]))
    tl.store(c + m[:, None] * N + n[None, :], product)


@triton.jit
def scalars(out, half, brain, single, double, wide, flag):
    tl.store(out + 0, half.to(tl.float32))
    tl.store(out + 1, brain.to(tl.float32))
    tl.store(out + 2, single.to(tl.float32))
    tl.store(out + 3, double.to(tl.float32))
    tl.store(out + 4, (wide >> 32).to(tl.float32))
    tl.store(out + 5, flag.to(tl.float32))


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_a_kernel_on_either_architecture(arch: str) -> None:
    x, y = torch.arange(1000.0), torch.ones(1000)
    counts = emulated.jit(axpy, arch=arch)[(4,)](y, x, 2.0, 1000, BLOCK=256)
    assert torch.equal(y, 1 + 2 * torch.arange(1000.0))
    assert counts.workgroups == 4
    assert counts.tensors["x"].unique_loaded == 4000


def test_the_architecture_follows_the_setting() -> None:
    kernel = emulated.jit(axpy)
    x, y = torch.ones(64), torch.ones(64)
    for arch in ("gfx942", "gfx950"):
        with settings.scope(EMULATE=arch):
            assert kernel.arch == arch
            assert kernel.compile(y, x, 2.0, 64, BLOCK=64).kernel.code_object.arch == arch


def test_grids_of_three_dimensions_and_callable_grids() -> None:
    out = torch.zeros(24, dtype=torch.int32)
    emulated.jit(programs)[(4, 3, 2)](out, 3, 7)
    expected = [x + 10 * y + 100 * z + 7000 for z in range(2) for y in range(3) for x in range(4)]
    assert out.tolist() == expected
    x, y = torch.ones(1000), torch.ones(1000)
    counts = emulated.jit(axpy)[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](y, x, 1.0, 1000, BLOCK=128)
    assert counts.workgroups == 8


def test_warps_per_program_are_waves_per_block() -> None:
    x, y = torch.ones(1024), torch.ones(1024)
    for warps in (1, 4, 8):
        counts = emulated.jit(axpy)[(1,)](y, x, 1.0, 1024, BLOCK=1024, num_warps=warps)
        assert counts.waves == warps
        assert counts.kernels[0].block == (64 * warps, 1, 1)


def widths(kernel: emulator.Kernel) -> set[str]:
    return {line.split()[1] for line in kernel.disassembly().splitlines() if "_load" in line and "s_load" not in line}


def test_alignment_of_pointers_and_sizes_is_specialised() -> None:
    base = torch.ones(1040)
    aligned, shifted = base[:1024], base[1:1025]
    assert aligned.data_ptr() % 16 == 0
    kernel = emulated.jit(axpy)
    wide = kernel.compile(aligned, aligned, 1.0, 1024, BLOCK=1024)
    narrow = kernel.compile(shifted, shifted, 1.0, 1024, BLOCK=1024)
    assert any(name.endswith("dwordx4") for name in widths(wide.kernel))
    assert not any(name.endswith("dwordx4") for name in widths(narrow.kernel))
    for tensor in (aligned, shifted):
        y = torch.zeros(1040)[: tensor.numel()]
        kernel[(1,)](y, tensor, 3.0, 1000, BLOCK=1024)
        assert y.tolist() == [3.0] * 1000 + [0.0] * 24


def test_tensors_below_two_gib_use_buffer_instructions() -> None:
    x = torch.ones(256)
    kernel = emulated.jit(axpy).compile(x, x, 1.0, 256, BLOCK=256).kernel
    assert all(name.startswith("buffer_") for name in widths(kernel))


def test_an_integer_equal_to_one_becomes_a_constant() -> None:
    x, out = torch.arange(128.0).view(2, 64), torch.zeros(2)
    kernel = emulated.jit(row_sums)
    one, other = kernel.compile(out, x, 1, COLUMNS=64), kernel.compile(out, x, 64, COLUMNS=64)
    assert len(other.kernel.explicit_args) == len(one.kernel.explicit_args) + 1
    kernel[(2,)](out, x, 64, COLUMNS=64)
    assert out.tolist() == [2016.0, 6112.0]
    kernel[(2,)](out, x, 1, COLUMNS=64)
    assert out.tolist() == [2016.0, 2080.0]


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_a_matrix_product_of_integers_is_exact(arch: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (64, 64), generator=generator).to(torch.float16)
    b = torch.randint(-4, 5, (64, 32), generator=generator).to(torch.float16)
    c = torch.zeros(64, 32)
    counts = emulated.jit(matmul, arch=arch)[(1,)](c, a, b, M=64, N=32, K=64)
    assert torch.equal(c, a.float() @ b.float())
    assert counts.mfma_count > 0


def test_scalars_arrive_in_their_own_types() -> None:
    @triton.jit
    def annotated(out, half: tl.float16, brain: tl.bfloat16, single: tl.float32, double: tl.float64, wide: tl.int64,
                  flag: tl.int1):  # fmt: skip
        scalars(out, half, brain, single, double, wide, flag)

    out = torch.zeros(6)
    emulated.jit(annotated)[(1,)](out, 1.5, -2.5, 0.1, 3.25, 5 << 32, True)
    assert out.tolist() == [1.5, -2.5, torch.tensor(0.1).item(), 3.25, 5.0, 1.0]


def test_a_plain_function_and_the_decorator_form() -> None:
    @emulated.jit(arch="gfx942")
    def copy(out, x, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.load(x + i))

    x, out = torch.arange(32.0), torch.zeros(32)
    copy[(1,)](out, x, N=32)
    assert torch.equal(out, x)
    assert copy.arch == "gfx942"


def test_heuristics_work() -> None:
    chosen = triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})(axpy)
    x, y = torch.ones(100), torch.zeros(100)
    emulated.jit(chosen)[(1,)](y, x, 1.0, 100)
    assert y.eq(1).all()


def test_a_store_past_a_tensor_names_the_parameter() -> None:
    x, y = torch.ones(256), torch.zeros(200)
    with emulator.options(checks="memory"), pytest.raises(EmulatorFault) as caught:
        # Buffer descriptors made by Triton cover 2 GiB, so only the extent of `y` can stop this.
        emulated.jit(axpy)[(1,)](y, x, 1.0, 256, BLOCK=256)
    assert "axpy" in str(caught.value)
    assert " y" in str(caught.value)


def test_the_checkers_pass_a_kernel_with_lds_and_barriers() -> None:
    x, out = torch.arange(4096.0).view(2, 2048), torch.zeros(2)
    with emulator.options(checks="all"):
        counts = emulated.jit(row_sums)[(2,)](out, x, 2048, COLUMNS=2048, num_warps=4)
    assert out.tolist() == [2096128.0, 6290432.0]
    assert counts.lds_bytes > 0


def test_an_empty_grid_runs_nothing() -> None:
    y = torch.ones(64)
    assert emulated.jit(axpy)[(0,)](y, y, 1.0, 64, BLOCK=64).launches == 0
    assert y.eq(1).all()


def test_gpu_and_meta_tensors_are_refused() -> None:
    with pytest.raises(GuardError, match="axpy, argument y: a tensor on meta"):
        emulated.jit(axpy)[(1,)](torch.empty(64, device="meta"), torch.ones(64), 1.0, 64, BLOCK=64)


def test_autotuning_over_several_configurations_is_refused() -> None:
    tuned = triton.autotune([triton.Config({"BLOCK": size}) for size in (64, 128)], key=["n"])(axpy)
    y = torch.ones(64)
    with pytest.raises(ConfigError, match="no times to autotune by"):
        emulated.jit(tuned)[(1,)](y, y, 1.0, 64)


def test_the_process_is_left_as_it_was(isolated_cache: Path) -> None:
    active, environment = driver._active, dict(os.environ)
    y = torch.ones(64)
    emulated.jit(axpy)[(1,)](y, y, 3.5, 64, BLOCK=64, num_warps=2)
    assert driver._active is active
    assert dict(os.environ) == environment
    assert any((isolated_cache / "triton").rglob("axpy.hsaco"))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown architecture 'gfx90a'"):
        emulated.jit(axpy, arch="gfx90a")


def test_uncounted_launches_return_empty_counters_and_the_same_result() -> None:
    x, y = torch.arange(1000.0), torch.ones(1000)
    with emulator.uncounted():
        counted = emulated.jit(axpy)[(4,)](y, x, 2.0, 1000, BLOCK=256)
    assert counted.wave_instructions == 0 and counted.launches == 0
    assert torch.equal(y, 1 + 2 * torch.arange(1000.0))
