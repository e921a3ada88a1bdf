"""A module in which a scaled MFMA takes a block scale from outside the vector registers is refused by its build."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.decoding.llvm import assemble as encode
from helpers.decoding.llvm import llvm_texts
from helpers.decoding.ours import decoder
from helpers.emulator_asm import Instruction, assemble
from helpers.jit_stand_in import StandIn

from hipforge import settings
from hipforge.errors import BuildError
from hipforge.jit import hip_module, obtain, registry, toolchain, why
from hipforge.jit.backends.amd.backend import VENDOR
from hipforge.jit.backends.amd.code_object import CodeObject, functions, read_code_objects
from hipforge.jit.backends.amd.scaled_mfma import ScaledMfma, operand_name, scaled_mfmas
from hipforge.jit.cache import cache_dir, prebuilt, store

SMALL, LARGE = "v_mfma_scale_f32_16x16x128_f8f6f4", "v_mfma_scale_f32_32x32x64_f8f6f4"
VGPR = 256
REFUSED = {
    "an SGPR": (5, "s5"),
    "vcc": (106, "vcc_lo"),
    "exec": (126, "exec_lo"),
    "m0": (124, "m0"),
    "scc": (253, "src_scc"),
    "an aperture": (235, "src_shared_base"),
    "a trap register": (108, "ttmp0"),
    "the integer 0": (128, "0"),
    "the integer 33": (161, "33"),
    "the integer -1": (193, "-1"),
    "1.0": (242, "1.0"),
    "1 / (2 pi)": (248, "0.15915494"),
    "a literal": (255, "a literal"),
}


def words(mnemonic: str, a_scale: int, b_scale: int) -> tuple[int, ...]:
    """Encode a scaled MFMA with any two source operands as scales; LLVM 22 assembles VGPRs only.

    All other bits are those that LLVM gives the same instruction with v7 and v9 as scales (see the first test).
    """
    second = {SMALL: (0xD3AD0850, 0x05422108), LARGE: (0xD3AE0850, 0x05422108)}[mnemonic]
    return 0xD3AC0000, a_scale | b_scale << 9, *second


def as_bytes(instruction: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(instruction)}I", *instruction)


Image = Callable[..., CodeObject]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return a function that makes a code object with a kernel for each run of instruction words.

    Assembled once with s_nop in their place: the tests below have a stand-in for a compiler.
    """
    folder, room = tmp_path_factory.mktemp("scaled_mfma"), 12
    marks = [[0xBF800001 + number] * room for number in range(4)]  # s_nop 1 to 4: padding is s_nop 0
    assemble("gfx950", [Instruction(".long " + ", ".join(map(hex, mark)), (), 1) for mark in marks], folder)
    template = (folder / "k.hsaco").read_bytes()

    def make(*kernels: tuple[int, ...]) -> CodeObject:
        elf = template
        for mark, kernel in zip(marks, kernels, strict=False):
            assert elf.count(as_bytes(tuple(mark))) == 1
            elf = elf.replace(as_bytes(tuple(mark)), as_bytes((*kernel, *mark[len(kernel) :])))
        (code,) = read_code_objects(elf)
        return code

    return make


def test_the_encoding_is_llvms(tmp_path: Path) -> None:
    for mnemonic, last in ((SMALL, 3), (LARGE, 15)):
        text = f"{mnemonic} v[80:{80 + last}], v[8:15], v[16:23], v[80:{80 + last}], v7, v9 op_sel_hi:[0,0,0]"
        assert encode(text, "gfx950", tmp_path) == as_bytes(words(mnemonic, VGPR + 7, VGPR + 9))


@pytest.mark.parametrize("mnemonic", [SMALL, LARGE])
@pytest.mark.parametrize("side", ["A", "B"])
def test_every_source_operand_reads_as_the_emulators_decoder_reads_it(mnemonic: str, side: str) -> None:
    """All 512 codes: the same ones are vector registers, and those that the decoder prints have the same name."""
    decode = decoder()
    printed = 0
    for code in range(512):
        pair = (code, VGPR + 9) if side == "A" else (VGPR + 9, code)
        item = as_bytes(words(mnemonic, *pair))
        fields = dict(part.split("=") for part in decode.operands(item, "gfx950").split())
        is_vgpr = fields.get(f"scale_{side.lower()}", " ")[0] == "v"
        found = ScaledMfma("", 0, mnemonic, *(operand_name(value) for value in pair))
        assert bool(found.misplaced) != is_vgpr == (code >= VGPR), operand_name(code)
        _, text = decode(item, "gfx950")
        if text:
            assert text.split(" op_sel")[0].split(", ")[4 if side == "A" else 5].split()[0] == operand_name(code)
            printed += 1
    assert printed > 2 * VGPR - 50, "the decoder prints scalar registers and constants too"


def test_every_source_operand_has_the_name_that_llvm_gives_it(tmp_path: Path) -> None:
    """Read from v_bfe_u32, which takes every source operand; LLVM 22 cannot print a scaled MFMA with a scalar one."""
    first, second = struct.unpack("<2I", encode("v_bfe_u32 v0, v0, v2, v3", "gfx950", tmp_path))
    items = [struct.pack("<2I", first, second & ~511 | code) for code in range(512)]
    printed = 0
    for code, line in enumerate(llvm_texts(items, "gfx950", tmp_path)):
        # 125, 230 and 231 are sources of later architectures; 255 is followed by a literal, which LLVM prints instead.
        if line is not None and "/*" not in line.text and code not in (125, 230, 231, 255):
            assert line.text.split(", ")[1] == operand_name(code)
            printed += 1
    assert printed > 2 * VGPR - 50


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_hand_assembled_module_is_refused_for_each_kind_of_operand(
    stand_in: StandIn,
    image: Image,
    kind: str,
    side: str,
) -> None:
    operand, name = REFUSED[kind]
    good = words(SMALL, VGPR, VGPR + 1)
    bad = words(LARGE, *((operand, VGPR + 1) if side == "A" else (VGPR, operand)))
    code = image(good, (*good, *bad))
    (stand_in.hipcc.parent / "gfx950.co").write_bytes(code.image)
    with pytest.raises(BuildError) as caught:
        stand_in.build()
    kernel = list(code.kernels)[1]
    found = next(item for item in scaled_mfmas(code) if item.misplaced)
    assert str(caught.value).splitlines()[-1] == (
        f"{kernel}: {LARGE} at byte {found.offset:#x}: the scale of {side} is {name}"
    )
    assert len([line for line in str(caught.value).splitlines() if " at byte " in line]) == 1, "the others are good"
    assert "hf::dev::scale_in_vgpr" in str(caught.value) and "HIP version: 7.0.51831" in str(caught.value)
    assert not (stand_in.cache / "gfx950").exists(), "nothing is published"
    with pytest.raises(BuildError, match="the scale of"):
        stand_in.build()
    assert len(stand_in.compiles()) == 1, "a refusal is remembered"


def test_both_scales_are_named_where_both_are_wrong(image: Image) -> None:
    (found,) = scaled_mfmas(image(words(SMALL, 242, 6)))
    assert found.misplaced == ["the scale of A is 1.0", "the scale of B is s6"]


def test_nothing_else_is_taken_for_a_scaled_mfma(image: Image) -> None:
    """Unscaled MFMA back to back, their words as literals, and a scale half that no scaled MFMA follows."""
    unscaled = (0xD3AD0050, 0x05422108)
    literal = 0xBE8000FF  # s_mov_b32 s0, literal
    code = image(
        (*unscaled, *unscaled),
        (literal, 0xD3AC0000, 0xBF800000, *unscaled),
        (literal, 0xD3AC0000, literal, 0xD3AD0050),
        (0xBF800000, *words(SMALL, VGPR, VGPR + 1)),
    )
    found = list(scaled_mfmas(code))
    assert [(item.symbol, item.mnemonic) for item in found] == [(list(code.kernels)[3], SMALL)]


def test_a_module_in_vector_registers_is_published_with_the_check_in_its_manifest(
    stand_in: StandIn,
    image: Image,
) -> None:
    (stand_in.hipcc.parent / "gfx950.co").write_bytes(image(words(LARGE, VGPR, VGPR + 255)).image)
    built = stand_in.build()
    assert built.entry.manifest.checks == list(VENDOR.code_checks) == ["scaled MFMA operands"]
    assert not stand_in.build().built


def without_checks(entry: store.Entry) -> None:
    """Rewrite a manifest as a hipforge that made fewer checks would have written it."""
    (entry.path / store.MANIFEST).write_text(dataclasses.replace(entry.manifest, checks=[]).to_json())


def test_an_unchecked_cached_module_is_built_again(stand_in: StandIn) -> None:
    without_checks(stand_in.build().entry)
    assert why.explain("sample", None, "gfx950").status == "miss"
    assert stand_in.build().built
    assert not stand_in.build().built


def test_an_unchecked_prebuilt_module_is_not_used(stand_in: StandIn, tmp_path: Path) -> None:
    (exported,) = prebuilt.export([stand_in.build().entry], tmp_path / "prebuilt")
    wanted = hip_module.request(registry.module("sample"), None, "gfx950")

    def find() -> store.Entry | None:
        return prebuilt.find(wanted)

    with settings.scope(PREBUILT_DIR=[tmp_path / "prebuilt"]):
        assert find() is not None
        entry = store.read_entry(exported)
        assert entry is not None
        without_checks(entry)
        assert find() is None
        unchecked = store.read_entry(exported)
        assert unchecked is not None
        reason = prebuilt.misfit(unchecked, wanted)
        assert reason == "its device code was not checked for: scaled MFMA operands"


def disassembly(code: CodeObject) -> Iterator[str]:
    """Yield every instruction of a code object as the emulator's decoder reads it."""
    decode = decoder()
    for function in functions(code.image):
        at = 0
        while at < len(function.code):
            size, text = decode(function.code[at : at + 20].ljust(20, b"\0"), "gfx950")
            assert size, f"{function.symbol} at {at}"
            yield text
            at += size


SCALED = (
    ("module_mxfp8_gemm_mfma", {"HF_N_SUB": 4}),
    ("module_mxfp8_grouped_gemm_split", {"HF_ROWS": 16}),
    ("module_mxfp4_gemm", {"HF_M_SUB": 1, "HF_N_SUB": 1}),
    ("module_mxfp4_gemm_made", {"HF_INPUT": "bf16", "HF_M_SUB": 2}),
    ("module_decode_attention_fp8", {"HF_HEAD_DIM": 128, "HF_INPUT": "bf16", "HF_BLOCK_N": 16}),
)
UNSCALED = ("module_fp8_skinny_gemm_queue", {"HF_TILE": 16124})


@pytest.mark.parametrize(("module", "variant"), [*SCALED, UNSCALED])
def test_the_check_sees_each_scaled_mfma_of_the_shipped_kernels(module: str, variant: dict[str, int | str]) -> None:
    """As many as the emulator's decoder finds by reading the code instruction by instruction, all in VGPRs."""
    wanted = hip_module.request(registry.module(module), variant, "gfx950")
    entry = obtain.binary(hip_module.specification(wanted, toolchain.select("gfx950"))).entry
    cache_dir.digests().save()
    (code,) = read_code_objects(entry.library)
    found = list(scaled_mfmas(code))
    texts = [text for text in disassembly(code) if text.startswith("v_mfma_")]
    assert len(found) == sum(text.startswith("v_mfma_scale_") for text in texts)
    assert bool(found) == ((module, variant) != UNSCALED)
    assert not [item for item in found if item.misplaced]
    if (module, variant) == UNSCALED:
        assert any("f8f6f4" in text for text in texts), "the constant 0 for both scales is the unscaled instruction"
