"""The list of faults to plant keeps up with the package: each still has its line and its tests."""

from __future__ import annotations

from mutants import put_back
from mutants.faults import FAULTS
from mutants.run import problem


def test_every_fault_can_be_planted() -> None:
    wrong = {fault.name: why for fault in FAULTS if (why := problem(fault)) is not None}
    assert not wrong, f"correct op_tests/mutants/faults.py: {wrong}"
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_every_former_fault_can_be_put_back() -> None:
    wrong = {fault.name: why for fault in put_back.PUT_BACK if (why := put_back.misplaced(fault)) is not None}
    assert not wrong, f"correct op_tests/mutants/put_back.py: {wrong}"
