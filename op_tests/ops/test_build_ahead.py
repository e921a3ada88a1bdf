"""What is built ahead of a first call is what tuned tables and default rules choose, no less and no more."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from hipforge.jit import registry
from hipforge.ops.core.tuned import load_table
from hipforge.ops.decode_attention import family as attention
from hipforge.ops.decode_attention.kernels import FP8
from hipforge.ops.fp8_skinny_gemm.family import FAMILY, TABLE
from hipforge.ops.fp8_skinny_gemm.kernels.queue import QUEUE, default_configuration
from hipforge.ops.fp8_skinny_gemm.raw import ARCHS, MAX_M


def variant_of(configuration: Mapping[str, int]) -> int:
    op_m, a_lanes, b_lanes, ops = (configuration[name] for name in ("op_m", "a_lanes", "b_lanes", "ops"))
    return 1000 * op_m + 100 * a_lanes + 10 * b_lanes + ops


@pytest.mark.parametrize("arch", ARCHS)
def test_the_skinny_gemm_is_built_for_what_its_table_and_default_rule_choose(arch):
    rows = [FAMILY.choice_of(row) for row in load_table(TABLE).rows if row.values["gfx"] == arch]
    tuned = {variant_of(choice.configuration) for choice in rows if choice.kernel == QUEUE.name}
    untuned = {variant_of(default_configuration(m, 4096, 4096, 256).parameters()) for m in range(1, MAX_M + 1)}
    ahead = [variant["HF_TILE"] for variant in registry.module("module_fp8_skinny_gemm_queue").ahead_variants(arch)]
    assert ahead == sorted(tuned | untuned)


@pytest.mark.parametrize("arch", attention.ARCH_DTYPES)
def test_attention_over_fp8_is_built_for_what_its_table_and_default_rule_choose(arch):
    rows = [row for row in load_table(attention.TABLE).rows if row.values["gfx"] == arch]
    chosen = {(row.values["D"], attention.FAMILY.choice_of(row).configuration["block_n"]) for row in rows}
    for head_dim in attention.HEAD_DIMS:
        cell = SimpleNamespace(key=(8, 4, 8, head_dim, 2048, 64), batch=8, kv_heads=4, max_keys=2048, d=head_dim)
        chosen |= {(head_dim, found["block_n"]) for _, found in FP8.default(cell, arch, 132)}
    ahead = [tuple(variant.values()) for variant in registry.module("module_decode_attention_fp8").ahead_variants(arch)]
    assert sorted(ahead) == sorted((d, dtype, n) for d, n in chosen for dtype in attention.INPUTS.values())
    assert len(ahead) == len(set(ahead))


@pytest.mark.parametrize("arch", registry.module("module_moe_combine").archs)
def test_the_combine_is_built_for_results_of_the_dtype_of_its_rows(arch):
    entry = registry.module("module_moe_combine")
    same = [variant for variant in entry.all_variants() if variant["HF_INPUT"] == variant["HF_OUTPUT"]]
    assert list(entry.ahead_variants(arch)) == same


def test_modules_that_state_nothing_are_built_whole():
    for name, entry in registry.shipped().items():
        for arch in entry.archs:
            if name not in ("module_fp8_skinny_gemm_queue", "module_decode_attention_fp8", "module_moe_combine"):
                assert list(entry.ahead_variants(arch)) == list(entry.all_variants())
