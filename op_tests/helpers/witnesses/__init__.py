"""Kernels whose register layouts a compiler chose: the independent evidence that the emulator executes machine code.

`cases.WITNESSES` lists them; `op_tests/emulator/test_emulator_witness_*.py` run them against torch in float64.
"""
