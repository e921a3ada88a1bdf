"""The skinny GEMM's rules for configurations: each refuses what it must, with its reason, and all callers agree."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from hipforge import archs, devices
from hipforge.errors import ConfigError, GuardError
from hipforge.ops import fp8_skinny_gemm as ops
from hipforge.ops.core.kernel import spelled
from hipforge.ops.core.tuned import read_rows
from hipforge.ops.fp8_skinny_gemm.family import TABLE as FP8_SKINNY_GEMM
from hipforge.ops.fp8_skinny_gemm.raw import FORMATS
from hipforge.ops.fp8_skinny_gemm.space import (
    RULES,
    TILES,
    Configuration,
    refusal,
    require,
)

ARCH = devices.current().default_arch
K = 1024
LDS_BYTES = {arch: archs.get(arch).lds_bytes for arch in FORMATS}
TILE = f"(op_m, a_lanes, b_lanes, ops) must be one of {', '.join(map(str, TILES))}"
QUEUE = "qsize must be at least a_producers / a_lanes, b_producers / b_lanes and consumers"

# (what is changed in a configuration that every rule accepts, the whole reason)
REFUSED = [
    ({"op_m": 4}, f"{TILE}; got (4, 1, 2, 4)"),
    ({"a_lanes": 0}, f"{TILE}; got (8, 0, 2, 4)"),
    ({"b_lanes": 4}, f"{TILE}; got (8, 1, 4, 4)"),
    ({"ops": 6}, f"{TILE}; got (8, 1, 2, 6)"),
    ({"a_producers": 0}, "a_producers must be 1 to 16 waves; got 0"),
    ({"b_producers": 17}, "b_producers must be 1 to 16 waves; got 17"),
    ({"consumers": -1}, "consumers must be 1 to 16 waves; got -1"),
    (
        {"a_producers": 4, "b_producers": 10, "consumers": 3, "qsize": 5},
        "a_producers + b_producers + consumers must be at most 16 waves (1024 threads); got 17 (4 + 10 + 3)",
    ),
    (
        {"op_m": 32, "b_lanes": 5, "qsize": 2},
        "a_producers + b_producers + consumers must be at most 8 waves (a lane's 80 sums take the registers of more); "
        "got 10 (2 + 6 + 2)",
    ),
    (
        {"a_producers": 5},
        f"{QUEUE}, or waves have no slot of their own; got qsize 4 for 5 / 1, 6 / 2 and 2",
    ),
    (
        {"b_producers": 9},
        f"{QUEUE}, or waves have no slot of their own; got qsize 4 for 2 / 1, 9 / 2 and 2",
    ),
    (
        {"consumers": 5},
        f"{QUEUE}, or waves have no slot of their own; got qsize 4 for 2 / 1, 6 / 2 and 5",
    ),
    (
        {"qsize": 7},
        "the queue needs 10240 bytes of LDS per slot and its flags; qsize = 7 exceeds the 65536 bytes of a work-group "
        "on gfx942",
    ),
    ({"split_k": 0}, "split_k must be 1 to 4, the number of k blocks of k=1024; got 0"),
    ({"split_k": 5}, "split_k must be 1 to 4, the number of k blocks of k=1024; got 5"),
]

# The same rules, where they accept.
ACCEPTED = [
    {},
    {"op_m": 32, "ops": 8, "b_producers": 4, "qsize": 2},
    {"op_m": 16, "b_lanes": 3, "ops": 8, "qsize": 2},
    {"b_lanes": 5, "b_producers": 10, "qsize": 2},
    {"a_producers": 4, "b_producers": 8, "consumers": 4},
    {"op_m": 32, "b_lanes": 5, "b_producers": 4, "qsize": 2},
    {"a_producers": 8, "a_lanes": 3, "b_producers": 2},
    {"qsize": 6},
    {"split_k": 4},
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_each_rule_says_what_is_wrong_and_what_is_accepted(change, reason):
    assert refusal(dataclasses.replace(Configuration(), **change), "gfx942", K) == reason
    with pytest.raises(GuardError) as caught:
        require(dataclasses.replace(Configuration(), **change), "gfx942", K)
    assert str(caught.value) == reason


@pytest.mark.parametrize("change", ACCEPTED)
def test_the_rules_accept_what_is_at_their_edge(change):
    require(dataclasses.replace(Configuration(), **change), "gfx942", K)


def test_every_rule_has_a_refusal_of_its_own():
    broken = {
        next(rule for rule in RULES if rule(dataclasses.replace(Configuration(), **change), "gfx942", K))
        for change, _ in REFUSED
    }
    assert broken == set(RULES)
    assert len(TILES) <= 12, "each is a module to build"


def test_the_queue_fills_lds_to_the_last_slot():
    for arch, limit in LDS_BYTES.items():
        for tile in TILES:
            one = Configuration(*tile, 1, 1, 1, 1)
            elements, flags = (one.tile_m + one.tile_n) * one.block_k, 4 * (one.a_lanes + one.b_lanes)
            fits = max(q for q in range(1, 200) if q * elements + -(-flags * q // 16) * 16 <= limit)
            assert refusal(dataclasses.replace(one, qsize=fits), arch, K) is None
            assert "LDS" in refusal(dataclasses.replace(one, qsize=fits + 1), arch, K)


def read(tmp_path, arch, *columns, k=K):
    path = tmp_path / "t.csv"
    row = [arch, 304, 8, 2304, k, *columns, 1, "", "", "", "", "0.0002", "model:test"]
    path.write_text(",".join(FP8_SKINNY_GEMM.header) + "\n" + ",".join(map(str, row)) + "\n")
    return read_rows(FP8_SKINNY_GEMM, path)[0]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_a_row_of_the_table_is_held_to_the_same_rules(change, reason, tmp_path):
    values = dataclasses.replace(Configuration(), **change).parameters()
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "gfx942", "skinny_gemm_fp8", spelled(values))
    assert str(caught.value).startswith(f"{tmp_path}/t.csv:2: ")
    assert reason in str(caught.value) or min(values.values()) < 1  # which a column's own minimum refuses first


def test_a_row_with_more_k_than_the_kernel_takes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs K of at most 16777216"):
        read(tmp_path, "gfx942", "skinny_wave_split", "rows=8;columns=16;waves=4;split_k=2", k=1 << 25)


def test_a_row_for_another_architecture_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"t\.csv:2: column gfx must be one of .*gfx942.*; got .gfx90a"):
        read(tmp_path, "gfx90a", "skinny_gemm_fp8", spelled(Configuration().parameters()))


@pytest.mark.parametrize("tile", [(8, 1, 2, 4), (8, 3, 2, 4)])
def test_the_modules_guards_refuse_exactly_what_the_rules_refuse(tile):
    """The stub checks no rules in Python, so what it raises comes from the module."""
    generator = random.Random(0)
    m, n, k = 3, 40, K
    a, b = torch.ones(m, k).to(FORMATS[ARCH]), torch.ones(n, k).to(FORMATS[ARCH]).t()
    slots = (LDS_BYTES[ARCH] - 512) // Configuration(*tile).slot_bytes
    blocks = Configuration(*tile).blocks(k)
    rules = set()
    for _ in range(120):
        waves = generator.choice([0, 1, 2, 3, 4]), generator.choice([1, 2, 4, 6, 8, 11]), generator.choice([1, 1, 2, 4])
        qsize = generator.choice([3, 4, 4, 6, slots, slots, slots + 1])
        split_k = generator.choice([0, 1, 1, 1, 2, 3, blocks, blocks, blocks + 1])
        c = Configuration(*tile, *waves, qsize, split_k)
        out, workspace = torch.zeros(m, n).half(), torch.empty(max(split_k * c.consumers, 1), m, n)
        try:
            ops.skinny_gemm_fp8_out(
                out, a, b, torch.ones(1), workspace, False, split_k, *tile, *waves, qsize, 2
            )  # fmt: skip
        except GuardError:
            assert refusal(c, ARCH, k) is not None, c
        else:
            assert refusal(c, ARCH, k) is None, c
            assert torch.equal(out, torch.full((m, n), float(k)).half())
        rules.add(next((rule for rule in RULES if rule(c, ARCH, k)), None))
    assert rules == {None, *RULES[1:]}  # the first is about what the variant fixes
