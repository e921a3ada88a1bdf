"""The MXFP4 GEMM that quantises X in its launch, as a family: its table and the choice of a configuration.

:mod:`hipforge.ops.fused_linear` asks it; ``csrc/mxfp4_gemm/NOTES.md`` has the kernel. A row decides the configuration
of the one launch. Whether there are one or two is decided by rough times, or by a row that was measured, whose
``use_hip`` says which way was faster.
"""

from __future__ import annotations

from hipforge.ops.core.family import Family
from hipforge.ops.core.kernel import kernel_table
from hipforge.ops.mxfp4_gemm.kernels import made
from hipforge.ops.mxfp4_gemm.raw import Problem

FAMILY = Family(
    problem=Problem.of_floats,
    table=kernel_table("mxfp4_made", (made.MADE,)),
    kernels=(made.MADE,),
    archs=made.MADE.archs,
    envelope=lambda problem, arch: made.refusal(*problem.key),
    reference="mxfp4_mm_packed",
)
