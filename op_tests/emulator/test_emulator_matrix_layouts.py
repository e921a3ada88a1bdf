"""Where matrix instructions find their elements, slot by slot, against two witnesses from outside this project.

`ISA`: what the CDNA3 and CDNA4 ISA documents print about operands, 4:2 indices and block scales (sections "Sparse
Matrices" and "Block Scaled Matrices"). `SILICON`: the operand placements with which AMD's hip-fpsan tests
(github.com/ROCm/hip-fpsan, tests "LayoutMatchesHardware") demand exact results of the real instructions on MI300X and
MI350X. Each witness numbers k in its own way, and only which elements meet can be observed: so both are reduced to
pairs of slots, which must agree, and the emulator must multiply exactly these pairs. A slot is (lane group, item):
item n of b bits lies in bits n * b and up of the lane's registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.exec_one import Machine, assemble_all
from helpers.matrix_reference import BITS, FORMATS, Instruction, decode_table, pack, parse

Slot = tuple[int, int]  # lane group, item

# --- sparse: facts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    """One witness's description of an instruction, in its own names for A's stored columns and for k.

    Attributes:
        column: Stored column of A's slot. Column c holds one of the two elements of the group of four c // 2.
        k: Row of B's slot; group q is k = 4q .. 4q + 3.
        index: For a group of four: lane group and lowest bit of the four index bits (two for each stored column).
    """

    column: Callable[[int, int], int]
    k: Callable[[int, int], int]
    index: Callable[[int], tuple[int, int]]


def isa(stored: int, groups: int, chunk: int) -> Sparse:
    """A is packed in order, `stored` items per lane; B comes in chunks; index bits follow A's own registers."""
    return Sparse(
        column=lambda g, item: stored * g + item,
        k=lambda g, item: chunk * groups * (item // chunk) + chunk * g + item % chunk,
        index=lambda q: (2 * q // stored, 4 * (q % (stored // 2))),
    )


# (tile edge, bits of an element, doubled K): stored items of A per lane, lane groups, items of B that stay together
ISA = {
    (16, 16, False): isa(4, 4, 8),
    (32, 16, False): isa(4, 2, 8),
    (16, 16, True): isa(8, 4, 8),
    (32, 16, True): isa(8, 2, 8),
    (16, 8, False): isa(8, 4, 16),
    (32, 8, False): isa(8, 2, 16),
    (16, 8, True): isa(16, 4, 16),
    (32, 8, True): isa(16, 2, 16),
}
SILICON = {
    (16, 16, False): Sparse(lambda g, n: 4 * g + n, lambda g, n: 8 * g + n, lambda q: (q // 2, 4 * (q % 2))),
    (32, 16, False): Sparse(lambda g, n: 4 * g + n, lambda g, n: 8 * g + n, lambda q: (q // 2, 4 * (q % 2))),
    (16, 16, True): Sparse(
        lambda g, n: 8 * g + n, lambda g, n: 8 * g + n % 8 + 32 * (n // 8), lambda q: (q // 4, 4 * (q % 4))
    ),
    (32, 16, True): Sparse(
        lambda g, n: 8 * g + n, lambda g, n: 8 * g + n % 8 + 16 * (n // 8), lambda q: (q // 4, 4 * (q % 4))
    ),
    (16, 8, False): Sparse(
        lambda g, n: 4 * g + n % 4 + 16 * (n // 4),
        lambda g, n: 8 * g + n % 8 + 32 * (n // 8),
        lambda q: (q % 8 // 2, 4 * (q % 2 + 2 * (q // 8))),
    ),
    (32, 8, False): Sparse(
        lambda g, n: 4 * g + n % 4 + 8 * (n // 4),
        lambda g, n: 8 * g + n % 8 + 16 * (n // 8),
        lambda q: (q % 4 // 2, 4 * (q % 2 + 2 * (q // 4))),
    ),
    (16, 8, True): Sparse(
        lambda g, n: 8 * (g % 2) + 32 * (g // 2) + n % 4 + 16 * (n // 4 % 2) + 4 * (n // 8),
        lambda g, n: 8 * g + n % 8 + 32 * (n // 8),
        lambda q: (q // 4 % 2 + 2 * (q // 16), 4 * (q % 2 + 2 * (q // 8 % 2) + 4 * (q // 2 % 2))),
    ),
    (32, 8, True): Sparse(
        lambda g, n: 16 * g + n % 4 + 8 * (n // 4 % 2) + 4 * (n // 8),
        lambda g, n: 8 * g + n % 8 + 16 * (n // 8),
        lambda q: (q // 8, 4 * (q % 2 + 2 * (q // 4 % 2) + 4 * (q // 2 % 2))),
    ),
}
# What one stored element of A meets: (its slot, position among four) -> (lane group and bit of its index, B's slot).
Pairs = dict[tuple[Slot, int], tuple[tuple[int, int], Slot]]


def sparse_pairs(facts: Sparse, edge: int, depth: int) -> Pairs:
    groups = 64 // edge
    items = depth // groups
    where = {facts.k(g, n): (g, n) for g in range(groups) for n in range(items)}
    assert sorted(where) == list(range(depth)), "each k has one slot"
    pairs: Pairs = {}
    for g in range(groups):
        for n in range(items // 2):
            column = facts.column(g, n)
            lane_group, bit = facts.index(column // 2)
            for position in range(4):
                pairs[(g, n), position] = (
                    (lane_group, bit + 2 * (column % 2)),
                    where[4 * (column // 2) + position],
                )
    return pairs


# --- f8f6f4: facts ----------------------------------------------------------------------------------------------------


def eight_bit_k(edge: int, g: int, item: int) -> int:
    """Two stretches of 16, each interleaved over the lane groups (ISA tables "FP8"; hip-fpsan with block scales)."""
    return 16 * g + item % 16 + 16 * (64 // edge) * (item // 16)


def small_k(edge: int, g: int, item: int) -> int:
    """32 in order (ISA tables "FP4" and "FP6"; hip-fpsan's mixed operands, where an 8-bit partner fixes the names)."""
    return 32 * g + item


def k_rule(element: str) -> Callable[[int, int, int], int]:
    return eight_bit_k if BITS[element] == 8 else small_k


# --- running one-hot operands -----------------------------------------------------------------------------------------

A, B, D, INDEX, SCALE_A, SCALE_B = 0, 16, 64, 40, 42, 44


def codes_of_integers(element: str, fnuz: bool, count: int) -> list[int]:
    """Codes of 0, 1, ..., count - 1."""
    if element in ("f16", "bf16"):
        numbers = np.arange(count, dtype=np.float16 if element == "f16" else np.float32)
        return [int(x) for x in (numbers.view(np.uint16) if element == "f16" else numbers.view(np.uint32) >> 16)]
    table = decode_table(element, fnuz)
    return [int(np.flatnonzero(table == value)[0]) for value in range(count)]


RADIX = 4  # 0..3 are exact in every element


def result(machine: Machine, ins: Instruction) -> np.ndarray:
    """D as [row, column]: documented alike for dense and sparse tiles, and witnessed by compiled kernels."""
    registers = machine.v[D : D + ins.m * ins.n // 64]
    values = registers.view(np.int32 if ins.cd == "i32" else np.float32)
    out = np.zeros((ins.m, ins.n), np.int64)
    for register in range(len(values)):
        for lane in range(64):
            row = 8 * (register // 4) + 4 * (lane // 32) + register % 4 if ins.m == 32 else 4 * (lane // 16) + register
            out[row, lane % ins.n] = values[register, lane]
    return out


def met(machine: Machine, text: str, arch: str, ins: Instruction, items: int) -> np.ndarray:
    """Run with A as it stands and B numbered by slot and column, digit by digit; what each D[row, column] met."""
    fnuz = arch == "gfx942"
    groups, digits = 64 // ins.n, 1
    while RADIX**digits < groups * items * ins.n:
        digits += 1
    codes = np.array(codes_of_integers(ins.b, fnuz, RADIX), np.uint64)
    lane = np.arange(64)
    number = ((lane // ins.n)[:, None] * items + np.arange(items)) * ins.n + (lane % ins.n)[:, None]
    found = np.zeros((ins.m, ins.n), np.int64)
    for digit in range(digits):
        rows = pack(codes[number // RADIX**digit % RADIX], BITS[ins.b])
        machine.v[B : B + len(rows)] = rows
        machine.v[D : D + 16] = 0
        machine.run(text, arch)
        found += result(machine, ins) * RADIX**digit
    return found


def registers(first: int, count: int) -> str:
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


def sparse_text(ins: Instruction, modifiers: str = "") -> str:
    stored = ins.k // (64 // ins.m) // 2 * BITS[ins.a] // 32
    d = registers(D, ins.m * ins.n // 64)
    return f"{ins.name} {d}, {registers(A, stored)}, {registers(B, 2 * stored)}, v{INDEX}{modifiers}"


def one_hot(ins: Instruction, slots: list[Slot], items: int, code: int) -> np.ndarray:
    """A's registers with one element per row."""
    lanes = np.zeros((64, items), np.uint64)
    for row, (group, item) in enumerate(slots):
        lanes[row + ins.m * group, item] = code
    return pack(lanes, BITS[ins.a])


def in_rows(cases: list, rows: int) -> Iterator[list]:
    for start in range(0, len(cases), rows):
        yield cases[start : start + rows]


# --- sparse: the tests ------------------------------------------------------------------------------------------------

ONE_K = [f"v_smfmac_f32_{shape}_{kind}" for shape in ("16x16x32", "32x32x16") for kind in ("f16", "bf16")]
ONE_K += [
    f"v_smfmac_{kind.format(shape)}"
    for shape in ("16x16x64", "32x32x32")
    for kind in ("i32_{}_i8", *(f"f32_{{}}_{a}_{b}" for a in ("fp8", "bf8") for b in ("fp8", "bf8")))
]
TWO_K = [f"v_smfmac_f32_{shape}_{kind}" for shape in ("16x16x64", "32x32x32") for kind in ("f16", "bf16")]
TWO_K += [name.replace("16x16x64", "16x16x128").replace("32x32x32", "32x32x64") for name in ONE_K[4:]]
SPARSE = [(name, arch) for name in ONE_K for arch in ("gfx950", "gfx942")] + [(name, "gfx950") for name in TWO_K]


def test_the_sparse_instructions_are_all_here() -> None:
    from .test_emulator_matrix import MNEMONICS

    assert sorted({name for name, _ in SPARSE}) == [name for name in MNEMONICS if "smfmac" in name]


@pytest.mark.parametrize("key", ISA)
def test_documents_and_silicon_agree_on_what_a_sparse_element_meets(key: tuple[int, int, bool]) -> None:
    edge, bits, doubled = key
    depth = (512 if edge == 16 else 256) // bits * (2 if doubled else 1)
    assert sparse_pairs(ISA[key], edge, depth) == sparse_pairs(SILICON[key], edge, depth)


@pytest.mark.parametrize(("name", "arch"), SPARSE)
def test_every_stored_element_meets_its_column_of_b(name: str, arch: str) -> None:
    ins = parse(name)
    items = ins.k // (64 // ins.n)
    pairs = sparse_pairs(SILICON[ins.m, BITS[ins.a], name in TWO_K], ins.m, ins.k)
    assert len(pairs) == 2 * ins.k  # K / 2 stored elements in four positions
    one = codes_of_integers(ins.a, arch == "gfx942", 2)[1]
    rng = np.random.default_rng(31)
    machine = Machine()
    for batch in in_rows(list(pairs.items()), ins.m):
        rows = one_hot(ins, [slot for (slot, _), _ in batch], items // 2, one)
        machine.v[A : A + len(rows)] = rows
        index = rng.integers(0, 2**32, 64, dtype=np.uint64)
        for row, ((_, position), ((group, bit), _)) in enumerate(batch):
            lane = row + ins.m * group
            index[lane] = int(index[lane]) & ~(3 << bit) | position << bit
        machine.v[INDEX] = index
        found = met(machine, sparse_text(ins), arch, ins, items)
        for row, ((slot, position), (_, (group, item))) in enumerate(batch):
            want = [(group * items + item) * ins.n + column for column in range(ins.n)]
            assert found[row].tolist() == want, (slot, position)


def test_a_nonzero_cbsz_takes_the_first_index_set() -> None:
    """On silicon with CBSZ 1 and ABID 3; without CBSZ, ABID 1 takes the upper half of the index register."""
    ins = parse("v_smfmac_f32_16x16x64_f16")
    machine = Machine()
    rows = one_hot(ins, [(0, 0)] * 16, 8, codes_of_integers("f16", False, 2)[1])
    machine.v[A : A + 4] = rows
    machine.v[INDEX] = 0x5555_0000 | 0xAAAA  # position 1 in the second set, 2 in the first
    for modifiers, position in (("", 2), (" cbsz:1 abid:3", 2), (" abid:1", 1)):
        found = met(machine, sparse_text(ins, modifiers), "gfx950", ins, 16)
        assert found.tolist() == [[position * 16 + column for column in range(16)]] * 16, modifiers


# --- f8f6f4: the tests ------------------------------------------------------------------------------------------------

PAIRS = [(a, b) for a in range(5) for b in range(5)]


def mixed_text(ins: Instruction, formats: tuple[int, int]) -> str:
    a, b = (registers(first, BITS[x]) for first, x in ((A, ins.a), (B, ins.b)))
    d = registers(D, ins.m * ins.n // 64)
    scales = f", v{SCALE_A}, v{SCALE_B}" if "scale" in ins.name else ""
    return f"{ins.name} {d}, {a}, {b}, {d}{scales} cbsz:{formats[0]} blgp:{formats[1]}"


MIXED = [f"v_mfma_{scale}f32_{shape}_f8f6f4" for shape in ("16x16x128", "32x32x64") for scale in ("", "scale_")]


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    for arch in ("gfx950", "gfx942"):
        assemble_all((sparse_text(parse(name)) for name, where in SPARSE if where == arch), arch)
    assemble_all(mixed_text(parse(name, *pair), pair) for name in MIXED for pair in PAIRS)


@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{FORMATS[pair[0]]}-{FORMATS[pair[1]]}")
@pytest.mark.parametrize("name", MIXED[::2])
def test_every_small_element_meets_the_same_k_of_b(name: str, formats: tuple[int, int]) -> None:
    ins = parse(name, *formats)
    groups = 64 // ins.m
    slots = [(g, n) for g in range(groups) for n in range(32)]
    of_k = {k_rule(ins.b)(ins.n, g, n): (g, n) for g, n in slots}
    one = codes_of_integers(ins.a, False, 2)[1]
    machine = Machine()
    for batch in in_rows(slots, ins.m):
        rows = one_hot(ins, batch, 32, one)
        machine.v[A : A + len(rows)] = rows
        found = met(machine, mixed_text(ins, formats), "gfx950", ins, 32)
        for row, slot in enumerate(batch):
            group, item = of_k[k_rule(ins.a)(ins.m, *slot)]
            assert found[row].tolist() == [(group * 32 + item) * ins.n + j for j in range(ins.n)], slot


@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{FORMATS[pair[0]]}-{FORMATS[pair[1]]}")
@pytest.mark.parametrize("name", MIXED[1::2])
def test_every_small_element_takes_the_scale_of_its_block(name: str, formats: tuple[int, int]) -> None:
    """All of B is 1: D[i, j] is 2^(sum of the scales of A's row and B's column), each from lane i + M * block."""
    ins = parse(name, *formats)
    slots = [(g, n) for g in range(64 // ins.m) for n in range(32)]
    one_a, one_b = (codes_of_integers(x, False, 2)[1] for x in (ins.a, ins.b))
    machine = Machine()
    everywhere = pack(np.full((64, 32), one_b, np.uint64), BITS[ins.b])
    machine.v[B : B + len(everywhere)] = everywhere
    lane = np.arange(64)
    scale_a, scale_b = lane, 3 * lane % 64  # exponents that differ from lane to lane, exact in f32
    machine.v[SCALE_A], machine.v[SCALE_B] = 127 - 32 + scale_a, 127 - 32 + scale_b
    for batch in in_rows(slots, ins.m):
        rows = one_hot(ins, batch, 32, one_a)
        machine.v[A : A + len(rows)] = rows
        machine.v[D : D + 16] = 0
        machine.run(mixed_text(ins, formats))
        registers_of_d = machine.v[D : D + ins.m * ins.n // 64].copy()
        machine.v[D : D + len(registers_of_d)] = (
            (registers_of_d.view(np.float32).view(np.uint32) >> 23).astype(np.float32).view(np.uint32)
        )
        exponents = result(machine, ins) - 127 + 64
        for row, slot in enumerate(batch):
            block = k_rule(ins.a)(ins.m, *slot) // 32
            want = [scale_a[row + ins.m * block] + scale_b[column + ins.n * block] for column in range(ins.n)]
            assert exponents[row].tolist() == want, slot
