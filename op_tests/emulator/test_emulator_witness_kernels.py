"""Whole kernels that Triton compiled: reductions, normalisations, sorts, atomics, conversions, locks and calls."""

from __future__ import annotations

import pytest
from helpers.witnesses import elementwise, memory, rows, runner
from helpers.witnesses.base import Witness, cases

MODULES = (elementwise, memory, rows)
CASES = cases(witness for module in MODULES for witness in module.witnesses())


@pytest.mark.parametrize(("witness", "arch"), CASES)
def test_witness(witness: Witness, arch: str) -> None:
    runner.run(witness, arch)
