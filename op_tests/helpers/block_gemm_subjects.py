"""The dense GEMMs whose operands have a scale per 32 elements: their formats, kernels and instances, and calls of one.

A kernel is a value (hipforge.ops.core.kernel); a new one is a line of SUBJECTS. ``every`` are all instances that are
compiled, together in all ways to share K; ``few`` has one for each path: one and several tiles, waves, parts of K and
stages in LDS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import pytest
import torch

from helpers import mxfp4_cases, mxfp8_cases
from helpers.mxfp8_cases import BYTE_OF_INTEGER, Operands, assert_bits, nan_byte
from hipforge import devices, emulator
from hipforge.ops.core.kernel import Configuration, Kernel, spelled
from hipforge.ops.mxfp4_gemm.kernels import tiles as mxfp4_tiles
from hipforge.ops.mxfp4_gemm.kernels import waves as mxfp4_waves
from hipforge.ops.mxfp8_gemm.kernels import gemv, group_split, k_packed, mfma, tiles, wave_split
from hipforge.ops.mxfp8_gemm.raw import ROWS

ARCH = devices.current().default_arch
Given = dict[str, int]


@dataclass(frozen=True)
class Format:
    """How elements are stored, and operands of whose sums float32 holds every one.

    ``numbers`` are elements whose values all differ, ``elements`` how many there are, ``one`` has the value 1, and
    ``nan`` is none where the format has none.
    """

    operands: type[Operands]
    exact: Callable[..., Operands]
    rounded: Callable[..., Operands]
    oracle: Callable[[Operands], torch.Tensor]
    among_nans: Callable[[Operands], tuple[Operands, torch.Tensor]]
    pack: Callable[[torch.Tensor], torch.Tensor]
    numbers: tuple[int, ...]
    elements: int
    one: int
    dtype: torch.dtype | None
    nan: int | None = None


def _normal_bytes(m: int, n: int, k: int) -> Operands:
    case = mxfp8_cases.normal(m, n, k)
    if ARCH == "gfx950":
        return case
    # Bytes that e4m3fnuz has too: no -0.
    return case.but(xq=case.xq.masked_fill(case.xq == 0x80, 0), wq=case.wq.masked_fill(case.wq == 0x80, 0))


def _codes_far_apart(m: int, n: int, k: int) -> Operands:
    """Scales so far apart that sums are rounded."""
    case = mxfp4_cases.random_codes(m, n, k)
    drawn = torch.randint(90, 160, case.xs.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return case.but(xs=drawn)


MXFP8 = Format(
    Operands, mxfp8_cases.integers, _normal_bytes, partial(mxfp8_cases.oracle, arch=ARCH),
    partial(mxfp8_cases.among_nans, arch=ARCH), lambda elements: elements.to(torch.uint8),
    numbers=tuple(BYTE_OF_INTEGER[value] for value in range(-8, 9)), elements=256, one=BYTE_OF_INTEGER[1],
    dtype=torch.float8_e4m3fn if ARCH == "gfx950" else torch.float8_e4m3fnuz, nan=nan_byte(ARCH),
)  # fmt: skip
MXFP4 = Format(
    mxfp4_cases.Operands, mxfp4_cases.random_codes, _codes_far_apart, mxfp4_cases.oracle, mxfp4_cases.among_nans,
    mxfp4_cases.pack, numbers=(*range(8), *range(9, 14)), elements=16, one=mxfp4_cases.CODE_OF_ONE,
    dtype=getattr(torch, "float4_e2m1fn_x2", None),
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A kernel, its instances, the rows and columns of a work-group's tile, and what N and K must be multiples of."""

    kernel: Kernel
    every: tuple[Given, ...]
    few: tuple[Given, ...]
    tile: Callable[[Given], tuple[int, int]]
    k_step: Callable[[Given], int] = lambda given: 32
    most_m: Callable[[Given], int] = lambda given: 1 << 14
    scale_alignment: int = 1  # in bytes
    n_step: int = 1
    format: Format = MXFP8
    shuffled: bool = False

    def run(self, given: Configuration, case: Operands, bias: Any = None, out: Any = None) -> torch.Tensor:
        out = case.out() if out is None else out
        space: tuple[torch.Tensor | None, ...] = ()
        if self.kernel.workspace is not None:
            space = (self.kernel.workspace(given, case.mnk, case.xq.device),)
            if space[0] is not None:
                space[0].fill_(float("nan"))  # what is in it beforehand must not matter
        args = (*case.args(), bias) if self.format is MXFP8 else (*case.args(self.shuffled), self.shuffled)
        self.kernel.launch(out, *args, *space, *self.kernel.choice(given).configuration.values())
        return out

    def takes(self, given: Given, m: int, n: int, k: int) -> bool:
        own = k % self.k_step(given) == 0 and m <= self.most_m(given)
        return own and self.kernel.needs(given, (m, n, k), ARCH) is None

    def shape(self, given: Given, m: int, n: int, k: int) -> tuple[int, int, int]:
        """The nearest shape that it takes: no more rows than it has, N and K rounded up, enough steps for its parts."""
        step = self.k_step(given)
        if step > 64:
            step = max(step, 128 if k >= 128 else 32)
        m, n, k = min(m, self.most_m(given)), ceil(n / self.n_step) * self.n_step, ceil(k / step) * step
        while not self.takes(given, m, n, k):
            k += step
        return m, n, k

    def check(self, given: Given, m: int, n: int, k: int, **options: Any) -> None:
        """Integers, or all codes, give the bits of the oracle."""
        case = self.format.exact(*self.shape(given, m, n, k), scales=(126, 128))
        with emulator.options(**options):
            assert_bits(self.run(given, case), self.format.oracle(case))


def _product(**values: Iterable[int]) -> Iterator[Given]:
    names, rest = list(values), [{}]
    for name in names:
        rest = [{**one, name: value} for one in rest for value in values[name]]
    return iter(rest)


def _given(kernel: Kernel, *values: tuple[int, ...]) -> tuple[Given, ...]:
    return tuple(dict(zip(kernel.parameters, each, strict=True)) for each in values)


# Of the kernel that splits K over waves: rows, columns, waves. gfx942 has 16 columns alone.
PATHS = (
    (16, 16, 1), (16, 16, 4), (32, 16, 2), (64, 16, 4), (16, 36, 4), (16, 76, 2), (32, 24, 1), (32, 64, 4), (64, 48, 2),
)  # fmt: skip


def _waves(waves: Iterable[int]) -> tuple[Given, ...]:
    found = _product(rows=ROWS, columns=(16, 24, 32, 36, 48, 64, 76) if ARCH == "gfx950" else (16,), waves=waves)
    return tuple(one for one in found if one["waves"] <= wave_split.max_waves(one["rows"], one["columns"]))


def _tiles(kernel: Kernel) -> tuple[Given, ...]:
    """Every tile; the parts of K are no matter of an instance's code."""
    return tuple({"tile": tile, "k_splits": 1 << i % 4} for i, tile in enumerate(kernel.parameters["tile"]))


def _of_tile(given: Given) -> tuple[int, int]:
    return divmod(given["tile"], 1000)


def _mxfp4(shuffled: bool) -> tuple[Subject, Subject]:
    """Rings of four steps and of two; two stages in LDS and eight waves, three, four, and two waves."""
    of_layout: dict[str, Any] = {"format": MXFP4, "shuffled": shuffled}
    if shuffled:
        of_layout |= {"n_step": 16, "k_step": lambda given: 64, "scale_alignment": 4}
        in_waves, in_tiles = ((2, 4, 1), (1, 1, 8), (4, 4, 4)), ((64064, 1), (192256, 2), (32064, 8))
    else:
        in_waves = (2, 4, 1), (1, 1, 1), (4, 2, 2), (1, 1, 8), (4, 4, 4)
        in_tiles = (64064, 1), (256256, 1), (128192, 2), (64064, 4), (32064, 8)
    every_wave = _product(m_sub=mxfp4_waves.SUB_TILES, n_sub=mxfp4_waves.SUB_TILES)
    return (
        Subject(
            mxfp4_waves.WAVES, tuple({**one, "k_splits": 1 << i % 3} for i, one in enumerate(every_wave)),
            _given(mxfp4_waves.WAVES, *in_waves), lambda given: (16 * given["m_sub"], 16 * given["n_sub"]), **of_layout,
        ),
        Subject(
            mxfp4_tiles.TILES, _tiles(mxfp4_tiles.TILES), _given(mxfp4_tiles.TILES, *in_tiles), _of_tile, **of_layout,
        ),
    )  # fmt: skip


SUBJECTS = {
    subject.kernel.name + "-shuffled" * subject.shuffled: subject
    for subject in (
        Subject(
            gemv.GEMV, tuple(_product(block_n=gemv.BLOCK_N)), ({"block_n": 8}, {"block_n": 64}),
            lambda given: (8, given["block_n"]), most_m=lambda given: gemv.MAX_M,
        ),
        Subject(
            mfma.MFMA, tuple(_product(n_sub=mfma.N_SUB, k_splits=mfma.K_SPLITS)),
            _given(mfma.MFMA, (1, 1), (4, 1), (2, 4)),
            lambda given: (16, 16 * given["n_sub"]), most_m=lambda given: mfma.MAX_M,
        ),
        Subject(
            wave_split.WAVE_SPLIT, _waves(wave_split.WAVES),
            tuple(one for one in _waves((1, 2, 4)) if tuple(one.values()) in PATHS),
            lambda given: (given["rows"], given["columns"]),
        ),
        Subject(
            group_split.GROUP_SPLIT,
            tuple(_product(rows=ROWS, columns=group_split.COLUMNS, k_splits=group_split.K_SPLITS)),
            _given(group_split.GROUP_SPLIT, (16, 24, 4), (32, 16, 2), (32, 48, 2), (64, 48, 4)),
            lambda given: (given["rows"], given["columns"]),
        ),
        Subject(
            k_packed.K_PACKED,
            _given(k_packed.K_PACKED, (4, 1, 1), (4, 3, 2), (4, 4, 4), (8, 1, 16), (8, 2, 8), (8, 3, 1), (8, 16, 1)),
            _given(k_packed.K_PACKED, (4, 2, 2), (8, 3, 1)),
            lambda given: (given["columns"], given["columns"] * given["groups"]),
            k_step=lambda given: k_packed.k_step(given["columns"]), most_m=lambda given: given["columns"],
            scale_alignment=4,
        ),
        Subject(
            tiles.TILES, _tiles(tiles.TILES), _given(tiles.TILES, (64064, 1), (64064, 4), (128192, 1), (256256, 1)),
            _of_tile,
        ),
        *_mxfp4(shuffled=False),
        *_mxfp4(shuffled=True),
    )
    if ARCH in subject.kernel.archs
}  # fmt: skip


def check_tile(cases: list[Operands], run: Callable[[Operands], object], most: float) -> None:
    """Two problems of one tile, of a K and of a longer one: what is loaded, multiplied and, in the loop, executed."""
    conflicts, issued = set(), []
    for case in cases:
        m, n, k = case.mnk
        with emulator.counters() as counters:
            run(case)
        assert counters.mfma_count == m // 32 * (n // 32) * (k // 64)
        assert counters.tensors["Xq"].loaded == case.xq.numel()
        assert counters.tensors["Wq"].loaded == case.wq.numel()
        assert counters.scratch_bytes == 0 and counters.launches == 1
        conflicts.add(counters.lds_bank_conflicts)
        issued.append((counters.wave_instructions, counters.mfma_count))
    (few, few_matrix), (more, more_matrix) = issued
    # ``most`` as clang 22 compiles the loop, per matrix instruction; another compiler may need a few more.
    assert (more - few) / (more_matrix - few_matrix) < 1.1 * most
    assert len(conflicts) == 1, "only results on their way out may meet in a bank, not operands"


def instances(which: str, form: Format | None = None) -> pytest.MarkDecorator:
    """Parametrise by subject and configuration: of ``every``, ``few`` or ``one`` of each kernel (of a format)."""
    found = []
    for name, subject in SUBJECTS.items():
        if form in (None, subject.format):
            chosen = subject.few[:1] if which == "one" else getattr(subject, which)
            found += [pytest.param(subject, given, id=f"{name}-{spelled(given)}") for given in chosen]
    return pytest.mark.parametrize(("subject", "given"), found)
