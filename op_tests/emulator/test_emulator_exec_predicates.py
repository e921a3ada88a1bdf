"""Scalar operations on EXEC, SCC and single bits."""

from __future__ import annotations

from collections.abc import Callable

from helpers.exec_one import EXEC, Machine
from helpers.exec_registry import holds, holds_each

MASK32, MASK64 = 2**32 - 1, 2**64 - 1


@holds("s_cmov_b32", "s_cmov_b64", "s_cmovk_i32")
def test_conditional_moves_look_at_scc(arch: str) -> None:
    machine = Machine(arch)
    for scc in (0, 1):
        machine.scc = scc
        machine.set64(4, 0x0123456789ABCDEF)
        machine.set64(10, 7)
        assert machine.run("s_cmov_b32 s10, s4").s[10] == (0x89ABCDEF if scc else 7)
        machine.set64(10, 7)
        assert machine.run("s_cmov_b64 s[10:11], s[4:5]").get64(10) == (0x0123456789ABCDEF if scc else 7)
        machine.set64(10, 7)
        assert machine.run("s_cmovk_i32 s10, 0x8000").s[10] == (0xFFFF8000 if scc else 7)
        assert machine.scc == scc


@holds("s_bitcmp0_b64", "s_bitcmp1_b64", "s_bitset0_b64")
def test_single_bits_of_64(arch: str) -> None:
    machine = Machine(arch)
    value = 0x8000000100000001
    for amount in (0, 1, 31, 32, 33, 63, 64, 95):
        machine.set64(4, value)
        machine.s[6] = amount
        bit = value >> (amount & 63) & 1
        assert machine.run("s_bitcmp1_b64 s[4:5], s6").scc == bit
        assert machine.run("s_bitcmp0_b64 s[4:5], s6").scc == 1 - bit
        machine.set64(10, MASK64)
        assert machine.run("s_bitset0_b64 s[10:11], s6").get64(10) == MASK64 & ~(1 << (amount & 63))
        assert machine.scc == 1 - bit


@holds_each("value", [0, 1, 0x80000000, 0xDEADBEEF, MASK32], lambda value: ["s_bitreplicate_b64_b32"])
def test_bitreplicate_doubles_each_bit(value: int, arch: str) -> None:
    machine = Machine(arch)
    machine.s[4] = value
    want = int("".join(2 * digit for digit in format(value, "032b")), 2)
    assert machine.run("s_bitreplicate_b64_b32 s[10:11], s4").get64(10) == want


@holds_each(
    "name, function",
    [("andn1", lambda s, e: ~s & e), ("andn2", lambda s, e: s & ~e)],
    lambda name, function: [f"s_{name}_wrexec_b64"],
)
def test_wrexec_writes_the_new_mask_to_both(name: str, function: Callable[[int, int], int], arch: str) -> None:
    machine = Machine(arch)
    for source in (0, 1, MASK64, 0x0123456789ABCDEF, 1 << 63):
        for mask in (MASK64, 0, 0x00FF00FF00FF00FF):
            machine.set64(4, source)
            machine.set64(EXEC, mask)
            machine.run(f"s_{name}_wrexec_b64 s[10:11], s[4:5]")
            want = function(source, mask) & MASK64
            assert (machine.get64(10), machine.get64(EXEC), machine.scc) == (want, want, int(want != 0))
