"""The list of faults to plant keeps up with the package: each still has its line and its tests."""

from __future__ import annotations

import subprocess
import sys

from mutants import put_back
from mutants.faults import FAULTS
from mutants.run import problem

QUICK = "layers/buffers_are_cast"  # nearly every good call of a layer finds it


def test_every_fault_can_be_planted() -> None:
    wrong = {fault.name: why for fault in FAULTS if (why := problem(fault)) is not None}
    assert not wrong, f"correct op_tests/mutants/faults.py: {wrong}"
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_every_former_fault_can_be_put_back() -> None:
    wrong = {fault.name: why for fault in put_back.PUT_BACK if (why := put_back.misplaced(fault)) is not None}
    assert not wrong, f"correct op_tests/mutants/put_back.py: {wrong}"


def test_a_fault_that_is_put_back_is_found_by_few_draws() -> None:
    """As many as the suite makes (``stress/test_stress.py``), which find nothing in the package as it is."""
    command = [sys.executable, put_back.__file__, "--only", QUICK, "--size", "270", "--seed", "20261122", "--first"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
