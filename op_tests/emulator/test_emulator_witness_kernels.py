"""Whole kernels that Triton compiled: reductions, normalisations, sorts, atomics, conversions, locks and calls."""

from __future__ import annotations

import pytest
from helpers.witnesses import elementwise, memory, rows, runner
from helpers.witnesses.base import Witness

MODULES = (elementwise, memory, rows)
CASES = [
    pytest.param(witness, arch, id=f"{witness.name}-{arch}")
    for module in MODULES
    for witness in module.witnesses()
    for arch in witness.archs
]


@pytest.mark.parametrize(("witness", "arch"), CASES)
def test_witness(witness: Witness, arch: str) -> None:
    runner.run(witness, arch)
