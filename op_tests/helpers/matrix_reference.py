"""Operands and results of matrix instructions, placed lane by lane from the layout rules of the ISA documents."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch

from .small_float_reference import small

FORMATS = ["fp8", "bf8", "fp6", "bf6", "fp4"]
BITS = {
    "f64": 64,
    "f32": 32,
    "xf32": 32,
    "f16": 16,
    "bf16": 16,
    "i8": 8,
    "fp8": 8,
    "bf8": 8,
    "fp6": 6,
    "bf6": 6,
    "fp4": 4,
}

# --- encoders of operand elements, independent of formats.h ----------------------------------------------------------


def decode_table(element: str, fnuz: bool) -> np.ndarray:
    """The value of every code of an element of at most 8 bits."""
    if element == "i8":
        return np.arange(256).astype(np.uint8).view(np.int8).astype(np.float64)
    return small(element, "gfx942" if fnuz else "gfx950").values


def random_operand(rng, element: str, shape, fnuz=False, integers=True) -> tuple[np.ndarray, np.ndarray]:
    """(codes, values) of random elements; `integers` keeps them to small integers."""
    if element == "f64":
        values = rng.integers(-8, 9, shape).astype(np.float64) if integers else rng.standard_normal(shape)
        return values.view(np.uint64), values
    if element in ("f32", "xf32"):
        values = (rng.integers(-8, 9, shape) if integers else rng.standard_normal(shape)).astype(np.float32)
        if element == "xf32" and not integers:
            values = (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return values.view(np.uint32).astype(np.uint64), values.astype(np.float64)
    if element in ("f16", "bf16"):
        dtype = torch.float16 if element == "f16" else torch.bfloat16
        source = rng.integers(-8, 9, shape) if integers else rng.standard_normal(shape)
        tensor = torch.from_numpy(np.asarray(source, np.float64)).to(dtype)
        return tensor.view(torch.uint16).numpy().astype(np.uint64), tensor.double().numpy()
    table = decode_table(element, fnuz)
    usable = np.isfinite(table)
    if integers:
        usable &= (table == np.floor(table)) & (np.abs(table) <= 16)
    codes = rng.choice(np.flatnonzero(usable), shape)
    return codes.astype(np.uint64), table[codes]


# --- layout rules (ISA, "General input and output layout") -----------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    name: str
    m: int
    n: int
    k: int
    blocks: int
    a: str
    b: str
    cd: str
    sparse: bool


def parse(name: str, cbsz: int = 0, blgp: int = 0) -> Instruction:
    match = re.fullmatch(r"v_(smfmac|mfma|mfma_scale)_(f32|i32|f64)_(\d+)x(\d+)x(\d+)_(?:(\d+)b_)?(\w+)", name)
    kind, cd, m, n, k, blocks, types = match.groups()
    if types == "f8f6f4":
        a, b = FORMATS[cbsz], FORMATS[blgp]
    else:
        a, _, b = types.partition("_")
        b = b or a
    return Instruction(name, int(m), int(n), int(k), int(blocks or 1), a, b, cd, kind == "smfmac")


def k_of_item(bits: int, per_lane: int, groups: int, group: int, item: int) -> int:
    chunk = 128 // bits if bits >= 8 and per_lane * bits > 128 else per_lane
    return chunk * group + item % chunk + chunk * groups * (item // chunk)


def pack(codes_of_lane: np.ndarray, bits: int) -> np.ndarray:
    """[64, items] codes → [registers, 64] dwords, little-endian and dense."""
    items = codes_of_lane.shape[1]
    registers = -(-items * bits // 32)
    out = np.zeros((registers, 64), np.uint32)
    for lane in range(64):
        whole = 0
        for item in range(items):
            whole |= int(codes_of_lane[lane, item]) << (bits * item)
        for r in range(registers):
            out[r, lane] = whole >> (32 * r) & 0xFFFFFFFF
    return out


def operand_registers(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes[block, row, k] → registers."""
    blocks, edge, depth = codes.shape
    groups = 64 // (edge * blocks)
    per_lane = depth // groups
    lanes = np.zeros((64, per_lane), np.uint64)
    for block in range(blocks):
        for row in range(edge):
            for group in range(groups):
                for item in range(per_lane):
                    k = k_of_item(bits, per_lane, groups, group, item)
                    lanes[row + edge * (block + blocks * group), item] = codes[block, row, k]
    return pack(lanes, bits)


def result_position(ins: Instruction, b: int, i: int, j: int) -> tuple[int, int]:
    """(item, lane) of D[b, i, j]."""
    height = 1 if ins.cd == "f64" else 4
    per_item = max(1, -(-64 // (ins.n * ins.m // height)))
    rows = 64 // per_item // ins.n
    row_groups = ins.m // (height * rows)
    item = i % height + height * (i // (height * rows) + row_groups * (b // per_item))
    return item, j + ins.n * (i // height % rows + rows * (b % per_item))


def result_registers(ins: Instruction, values: np.ndarray) -> np.ndarray:
    words = 2 if ins.cd == "f64" else 1
    out = np.zeros((ins.m * ins.n * ins.blocks // 64 * words, 64), np.uint32)
    kind = {"f32": np.float32, "i32": np.int32, "f64": np.float64}[ins.cd]
    for b, i, j in np.ndindex(values.shape):
        item, lane = result_position(ins, b, i, j)
        raw = np.array([values[b, i, j]], kind).view(np.uint32)
        out[words * item : words * (item + 1), lane] = raw
    return out


def read_result(ins: Instruction, registers: np.ndarray) -> np.ndarray:
    words = 2 if ins.cd == "f64" else 1
    kind = {"f32": np.float32, "i32": np.int32, "f64": np.float64}[ins.cd]
    out = np.zeros((ins.blocks, ins.m, ins.n), np.float64)
    for b, i, j in np.ndindex(out.shape):
        item, lane = result_position(ins, b, i, j)
        out[b, i, j] = np.ascontiguousarray(registers[words * item : words * (item + 1), lane]).view(kind)[0]
    return out


def random_result(rng, ins: Instruction, integers=True) -> np.ndarray:
    shape = (ins.blocks, ins.m, ins.n)
    if integers:
        return rng.integers(-100, 100, shape).astype(np.float64)
    return rng.standard_normal(shape).astype(np.float32).astype(np.float64)


def dense_case(rng, ins, *, fnuz=False, integers=True):
    a_codes, a = random_operand(rng, ins.a, (ins.blocks, ins.m, ins.k), fnuz, integers)
    b_codes, b = random_operand(rng, ins.b, (ins.blocks, ins.n, ins.k), fnuz, integers)
    return a, b, operand_registers(a_codes, BITS[ins.a]), operand_registers(b_codes, BITS[ins.b])
