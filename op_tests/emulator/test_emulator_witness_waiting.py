"""Triton kernels that synchronise, under every checker: clean as they are, reported without one synchronisation.

What a kernel lacks is either written in it (a relaxed instead of a releasing atomic, no lock) or taken out of its
machine code: one barrier or wait at a time becomes a no-op. Compilers emit some that their neighbours make redundant,
so not every removal is reported; most are, and some of every kind.
"""

from __future__ import annotations

import pytest
from helpers.witnesses import attention, runner, sampling, scaled, synchronised
from helpers.witnesses.base import Omission, Witness, cases

WITNESSES = [witness for module in (synchronised, attention, sampling) for witness in module.witnesses()]

# What pairs of formats differ in is no synchronisation: one of each format stands for them all.
MULTIPLE_WAVES = [w for w in WITNESSES if not w.name.startswith("odd_atomic")] + scaled.pairs()[::6]


@pytest.mark.parametrize(("witness", "arch"), cases(WITNESSES))
def test_witness(witness: Witness, arch: str) -> None:
    runner.run(witness, arch)


@pytest.mark.parametrize(("witness", "arch", "omission"), cases(WITNESSES, broken=True))
def test_a_version_that_lacks_a_synchronisation_is_reported(witness: Witness, arch: str, omission: Omission) -> None:
    runner.run_broken(witness, arch, omission)


@pytest.mark.parametrize(("witness", "arch"), cases(MULTIPLE_WAVES))
def test_machine_code_without_a_barrier_or_a_wait_is_reported(witness: Witness, arch: str) -> None:
    found = runner.reports_without(witness, arch, most=3)
    reported = {left_out.kind for left_out, report in found.items() if report}
    assert reported == {left_out.kind for left_out in found}, found
    assert 2 * sum(report is not None for report in found.values()) > len(found), found
