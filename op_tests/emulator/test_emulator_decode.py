"""The emulator's decoder and disassembler against llvm-objdump: every row of the table, and random words."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path

import pytest
from helpers.decoding.encodings import FORMS, base_mnemonic, sample, table
from helpers.decoding.llvm import disagreements, llvm_texts, report
from helpers.decoding.ours import ARCHS, decoder


@pytest.mark.parametrize("arch", ARCHS)
def test_every_row_of_the_table_reads_as_llvm_does(arch: str, tmp_path: Path) -> None:
    rows = table()
    assert len(rows) > 1200
    wrong, agreed = disagreements(sample(rows, arch, 16), arch, decoder(), tmp_path)
    assert not wrong, report(wrong)
    # No row may go untested because LLVM refused all its samples.
    expected = {row.name for row in rows if row.exists_on(arch)}
    assert expected - {base_mnemonic(name) for name in agreed} == set()


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
def test_many_encodings_of_every_row(arch: str, tmp_path: Path) -> None:
    for encoding in sorted({form.encoding for form in FORMS}):
        rows = [row for row in table() if row.encoding == encoding]
        wrong, _ = disagreements(sample(rows, arch, 150), arch, decoder(), tmp_path)
        assert not wrong, report(wrong)


@pytest.mark.parametrize("arch", ARCHS)
def test_only_floating_point_sources_take_modifiers(arch: str, tmp_path: Path) -> None:
    # LLVM refuses neg and abs on integers, so the samples above cannot show that we print them there.
    items = []
    for row in table():
        forms = [form for form in FORMS if form.encoding == row.encoding and form.base == 0xD0000000]
        if not row.exists_on(arch) or not forms or "bitop" in row.arguments or "e32_only" in row.arguments:
            continue
        first = 0 if row.encoding == "VOPC" else 1
        for source in range(3):
            if row.operand(first + source) is None:
                continue
            registers = sum(256 << 9 * i for i in range(3) if row.operand(first + i) is not None)
            carry = 106 << 18 if "carry_in" in row.arguments else 0
            word = 0xD0000000 | row.opcode + forms[0].opcode_offset << 16
            negated = (registers | carry | 1 << 29 + source) << 32 | word
            items.append(negated.to_bytes(8, "little"))
    refused = [item for item, line in zip(items, llvm_texts(items, arch, tmp_path), strict=True) if line is None]
    assert len(refused) > 200
    printed = [text for text in (decoder()(item, arch)[1] for item in refused) if re.search(r"[ ,]-v", text)]
    assert printed == []


def stops_llvm(item: bytes) -> bool:
    """Tell whether LLVM 22's disassembler crashes on these bytes instead of refusing them."""
    low, high = struct.unpack_from("<2I", item)
    top = low >> 26
    literal = any((high >> bit & 511) == 255 for bit in (0, 9, 18))
    compare_beyond = top == 0x34 and (low >> 16 & 1023 < 256 or low >> 16 & 1023 in (0x289, 0x1E0, 0x1E1)) and low & 128
    matrix_format = low >> 16 in (0xD3AC, 0xD3AD, 0xD3AE)
    return bool((top == 0x34 and (literal or matrix_format)) or compare_beyond or (top == 0x38 and high >> 24 == 255))


@pytest.mark.parametrize("arch", ARCHS)
def test_random_words_read_as_llvm_does(arch: str, tmp_path: Path) -> None:
    rng = random.Random(942)
    items = [rng.randbytes(8) for _ in range(20_000)]
    # Uniform words are mostly VOP2: the other half begins with a byte of the rarer encodings.
    rare = (
        0x80,
        0xB0,
        0xBE,
        0xBF,
        0xC0,
        0xD0,
        0xD1,
        0xD2,
        0xD3,
        0xD8,
        0xD9,
        0xDA,
        0xDB,
        0xDC,
        0xDD,
        0xE0,
        0xE1,
        0x7C,
        0x7E,
    )
    items = [item if i % 2 else item[:3] + bytes([rng.choice(rare)]) + item[4:] for i, item in enumerate(items)]
    wrong, agreed = disagreements([item for item in items if not stops_llvm(item)], arch, decoder(), tmp_path)
    assert not wrong, report(wrong)
    assert len(agreed) > 500
