"""Whole kernels that Triton compiled: reductions, scans, transposes, loops and calls.

Arithmetic of single elements is not among them: each instruction has exact tests of its own (test_emulator_exec_*).
"""

from __future__ import annotations

import pytest
from helpers.witnesses import memory, rows, runner
from helpers.witnesses.base import Witness, cases

MODULES = (memory, rows)
CASES = cases(witness for module in MODULES for witness in module.witnesses())


@pytest.mark.parametrize(("witness", "arch"), CASES)
def test_witness(witness: Witness, arch: str) -> None:
    runner.run(witness, arch)
