"""The LDS queue of the skinny fp8 GEMM: clean under every order of waves, and caught when one of its waits is gone."""

from __future__ import annotations

import json
import re

import pytest
import torch
from helpers.fp8_skinny_cases import ARCH, ONE, exact, integers

from hipforge import archs, emulator
from hipforge.errors import EmulatorFault
from hipforge.jit import registry
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops import fp8_skinny_gemm as ops
from hipforge.ops.fp8_skinny_gemm.space import Configuration

pytestmark = pytest.mark.gfx942

CHECKS = {"checks": "all"}
ORDERS = [("forward", 0), ("reverse", 0), *(("random", seed) for seed in range(4))]
MUTANT = "module_skinny_queue_without"
RACE = r"LDS race at 0x\w+: this (write and a read|read and a write) by wave \d"
UNWAITED = r"wave \d did signal or reach a barrier, but without waiting for that {} before \(s_waitcnt lgkmcnt\)"
IN_FLIGHT = r"before wave \d has waited \(s_waitcnt lgkmcnt\) for its write"
PRODUCER_WAIT, CONSUMER_WAIT, PRODUCER_DRAIN, CONSUMER_DRAIN = 1, 2, 3, 4  # queue.h


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("tile", [(8, 1, 2, 4), (8, 2, 5, 8), (8, 3, 2, 4), (16, 1, 2, 4), (32, 1, 2, 8)])
@pytest.mark.parametrize(
    "waves",
    [
        {"a_producers": 1, "b_producers": 1, "consumers": 1, "qsize": 1},
        {"a_producers": 2, "b_producers": 2, "consumers": 2, "qsize": 2},
        {"a_producers": 3, "b_producers": 3, "consumers": 3, "qsize": 3},
    ],
)
def test_the_queue_under_every_order_of_waves(order, tile, waves):
    a, b = integers(11, 50, 1312)
    chosen = dict(zip(("op_m", "a_lanes", "b_lanes", "ops"), tile, strict=True))
    # As many slots as LDS has room for: of the widest tile one on gfx942.
    slots = archs.get(ARCH).lds_bytes // Configuration(*tile, 1, 1, 1, 1, 1).slot_bytes
    most = {"a_producers": slots * chosen["a_lanes"], "b_producers": slots * chosen["b_lanes"]}
    waves = {name: min(count, most.get(name, slots)) for name, count in waves.items()}
    for seed in range(2 if order == "random" else 1):
        with emulator.options(**CHECKS, wave_order=order, seed=seed):
            got = ops.run_skinny_gemm(a, b, ONE, split_k=2, workgroups=2, **chosen, **waves)
        assert torch.equal(got, exact(a, b))


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Entries of the kernel for op_m 8 and two B lanes, built without one of the waits (0: whole)."""
    shipped = registry.module("module_fp8_skinny_gemm_queue")
    modules = {
        f"{MUTANT}_{omitted}": {
            "srcs": [str(source) for source in shipped.srcs],
            "archs": [ARCH],
            "flags_extra_hip": [f"-DHF_SKINNY_OMIT={omitted}"],
            "variants": {"HF_TILE": [8124]},
        }
        for omitted in range(5)
    }
    path = tmp_path_factory.mktemp("mutants") / "modules.json"
    path.write_text(json.dumps(modules))
    registry.register(path)
    stub = ops.skinny_gemm_fp8_out.stub
    return [
        compile_ops(name, fc_name="skinny_gemm_fp8_out", variant=stub.variant, mutates=("out", "workspace"))(
            ops.skinny_gemm_fp8_out.__wrapped__
        )
        for name in modules
    ]


def is_right(entry, order, seed):
    """Run one tile of 16 blocks through a queue of one slot, so that both sides wait for each other at every block."""
    m, n, k = 8, 32, 16 * Configuration(8).block_k
    a, b = integers(m, n, k)
    out, workspace = torch.zeros(m, n).half(), torch.zeros(1, m, n)
    with emulator.options(**CHECKS, wave_order=order, seed=seed, instruction_budget=200_000):
        entry(out, a, b, ONE, workspace, False, 1, 8, 1, 2, 4, 1, 2, 1, 1, 1)
    return torch.equal(out, exact(a, b))


def test_the_harness_of_the_removed_waits_accepts_the_queue_itself(without):
    assert all(is_right(without[0], *order) for order in ORDERS)


@pytest.mark.parametrize(
    ("omitted", "message"),
    [
        # A producer that waits for no free slot overwrites what its consumer reads, or moves the flag past the value
        # that the consumer waits for.
        (PRODUCER_WAIT, f"instruction budget|{RACE}"),
        # A consumer that does not wait for data reads LDS that nothing has written yet, or that is being written.
        (CONSUMER_WAIT, f"never written|{RACE}|{IN_FLIGHT}"),
        # A signal that does not wait for the LDS writes before it.
        (PRODUCER_DRAIN, f"{IN_FLIGHT}|{UNWAITED.format('write')}"),
        # Data handed back while its reads are still under way.
        (CONSUMER_DRAIN, UNWAITED.format("read")),
    ],
)
def test_each_removed_wait_is_caught(omitted, message, without):
    caught = []
    for order in ORDERS:
        try:
            assert is_right(without[omitted], *order), "a wrong result is no fault: the checkers should have seen it"
        except EmulatorFault as fault:
            caught.append(str(fault))
    assert len(caught) == len(ORDERS), "caught under some orders only"
    others = [text for text in caught if not re.search(message, text)]
    assert not others, others[0]
