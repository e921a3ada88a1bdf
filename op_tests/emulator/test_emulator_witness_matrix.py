"""Matrix instructions in kernels that Triton laid out: tl.dot and tl.dot_scaled in every operand format and tile shape.

The references know nothing of lanes and registers, so a layout that the emulator and its own tests both misread
cannot pass here. Integer data must come out exactly.
"""

from __future__ import annotations

import pytest
from helpers.witnesses import dots, runner, scaled
from helpers.witnesses.base import Witness, cases

from hipforge.errors import EmulatorFault

MODULES = (dots, scaled)
CASES = cases(witness for module in MODULES for witness in module.witnesses())


@pytest.mark.parametrize(("witness", "arch"), CASES)
def test_witness(witness: Witness, arch: str) -> None:
    if witness.fault is None:
        runner.run(witness, arch)
        return
    with pytest.raises(EmulatorFault, match=witness.fault):
        runner.run(witness, arch)
