"""What is built ahead of a first call is what tuned tables and default rules choose, no less and no more."""

from __future__ import annotations

import pytest

from hipforge.jit import registry
from hipforge.ops.core.tuned import load_table
from hipforge.ops.fp8_skinny_gemm.family import ARCHS, MAX_M, TABLE, configuration_of, default_configuration
from hipforge.ops.fp8_skinny_gemm.space import Configuration


def variant_of(configuration: Configuration) -> tuple[int, ...]:
    return (configuration.op_m, configuration.a_lanes, configuration.b_lanes, configuration.ops)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_skinny_gemm_is_built_for_what_its_table_and_default_rule_choose(arch):
    tuned = {variant_of(configuration_of(row)) for row in load_table(TABLE).rows if row.values["gfx"] == arch}
    untuned = {variant_of(default_configuration(m, 4096, 4096, 256)) for m in range(1, MAX_M + 1)}
    ahead = [tuple(variant.values()) for variant in registry.module("module_skinny_gemm_fp8").ahead_variants(arch)]
    assert ahead == sorted(tuned | untuned)


def test_modules_that_state_nothing_are_built_whole():
    for name, entry in registry.shipped().items():
        for arch in entry.archs:
            if name != "module_skinny_gemm_fp8":
                assert list(entry.ahead_variants(arch)) == list(entry.all_variants())
