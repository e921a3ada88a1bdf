"""The formats of the MoE grouped GEMM as values: data whose sums are exact in any order, an oracle, and the entries.

A problem is a ``Moe`` whose operands have the types of the architecture that runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import hipforge
from helpers import fp8_cases
from helpers.mxfp4_cases import dequantize as dequantize_fp4
from helpers.mxfp8_cases import SCALE_NAN, dequantize, embedded, nan_byte
from helpers.mxfp8_grouped_cases import Moe, exact
from hipforge import devices
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_grouped_gemm import fp8_gate_up_out, fp8_grouped_split_out, grouped_swiglu_fp8
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8, mxfp8_gate_up_out, split_workspace
from hipforge.ops.mxfp4_grouped_gemm import grouped_swiglu_mxfp4, mxfp4_gate_up_out
from hipforge.ops.mxfp4_grouped_gemm.family import mxfp4_grouped_split_out, mxfp4_grouped_stream_out
from hipforge.ops.mxfp8_grouped_gemm.kernels.stream import mxfp8_grouped_stream_out
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import mxfp8_grouped_split_out

ARCH = devices.current().default_arch
FP8 = fp8_dtypes("cpu")[0]
SPLIT = {"mxfp8": mxfp8_grouped_split_out, "mxfp4": mxfp4_grouped_split_out, "fp8": fp8_grouped_split_out}
STREAM = {"mxfp8": mxfp8_grouped_stream_out, "mxfp4": mxfp4_grouped_stream_out}
GATE_UP = {"mxfp8": mxfp8_gate_up_out, "mxfp4": mxfp4_gate_up_out, "fp8": fp8_gate_up_out}
SWIGLU = {"mxfp8": grouped_swiglu_mxfp8, "mxfp4": grouped_swiglu_mxfp4, "fp8": grouped_swiglu_fp8}
Pair = tuple[torch.Tensor, torch.Tensor]


def operands(case: Moe) -> tuple[torch.Tensor, ...]:
    return case.a, case.a_scale, case.w, case.w_scale, *case.sorted()


def counts(case: Moe) -> tuple[int, int, int]:
    return case.slots, case.block_m, case.a_div


def sizes(case: Moe) -> tuple[int, ...]:
    return *case.w.shape[:2], case.a.shape[1], case.slots, case.a.shape[0], case.a_div, case.block_m


def nan_scale(scales: torch.Tensor) -> float:
    return SCALE_NAN if scales.dtype == torch.uint8 else math.nan


def bias_of(case: Moe) -> torch.Tensor:
    return torch.randn(case.w.shape[:2], generator=torch.Generator().manual_seed(3)) * 8


@dataclass(frozen=True)
class Format:
    """Elements and scales of both operands.

    Attributes:
        name: of the format, for fp8 that of the kind of its scales.
        op: what the ops' names end in.
        number: of the kind of scales, which fp8's entries take.
        block: results that share a scale; 0 where gate and up are never one launch with SwiGLU.
    """

    name: str
    op: str
    number: tuple[int, ...] = ()
    block: int = 32

    def case(
        self, owners: tuple[int, ...], experts: int, n: int, k: int, a_div: int = 1, block_m: int = 20,
        weighted: bool = False,
    ) -> Moe:  # fmt: skip
        """Integers, or every code of e2m1, with scales that are powers of two."""
        case = exact(owners, experts, n, k, a_div, block_m, weighted, scales=(126, 128))
        if self.op == "mxfp4":
            generator = torch.Generator().manual_seed(n + k)
            case = case.but(w=torch.randint(0, 256, (experts, n, k // 2), generator=generator, dtype=torch.uint8))
        if self.op == "fp8":
            rows = -(-len(owners) // a_div)
            each = [fp8_cases.case_of(self.name, rows, n, k, ARCH, seed) for seed in range(experts)]
            w, w_scale = torch.stack([one.wq for one in each]), torch.stack([one.ws for one in each])
            case = case.but(a=each[0].xq, a_scale=each[0].xs, w=w, w_scale=w_scale)
        return case.but(a=case.a.view(FP8), w=case.w if self.op == "mxfp4" else case.w.view(FP8))

    def product(self, case: Moe, expert: int) -> torch.Tensor:
        """Every row of the activations by one expert, in float64 from the formats' definitions."""
        a, w, w_scale = case.a.view(torch.uint8), case.w[expert].view(torch.uint8), case.w_scale[expert]
        if self.op == "fp8":
            return fp8_cases.Case(ARCH, self.name, a, case.a_scale, w, w_scale).oracle()
        wide = dequantize_fp4(w, w_scale) if self.op == "mxfp4" else dequantize(w, w_scale, ARCH)
        return dequantize(a, case.a_scale, ARCH) @ wide.T

    def oracle(self, case: Moe, bias: torch.Tensor | None = None, elsewhere: float = 0.0) -> torch.Tensor:
        want = torch.full((case.slots, case.w.shape[1]), elsewhere, dtype=torch.float64)
        products = {owner: self.product(case, owner) for owner in set(case.owners) if 0 <= owner < len(case.w)}
        for slot, owner in enumerate(case.owners):
            if owner in products:
                want[slot] = products[owner][slot // case.a_div] + (0 if bias is None else bias[owner].double())
                want[slot] *= 1 if case.weights is None else case.weights[slot].double()
        return want

    def spoilt(self, case: Moe, expert: int) -> Moe:
        """The last scale of an expert is NaN; and that of the first row of the activations, if rows have their own."""
        w_scale, a_scale = case.w_scale.clone(), case.a_scale.clone()
        w_scale[expert].view(-1)[-1] = nan_scale(w_scale)
        if len(a_scale) == len(case.a):
            a_scale[0].view(-1)[-1:] = nan_scale(a_scale)
        return case.but(w_scale=w_scale, a_scale=a_scale)

    def surrounded(self, case: Moe) -> Moe:
        """The same operands among bytes that would show; experts that own no slot have NaN scales too."""
        fill = nan_byte(ARCH) | 0x80
        w_scale = case.w_scale.clone()
        w_scale[[expert for expert in range(len(w_scale)) if expert not in case.owners]] = nan_scale(w_scale)

        def inside(tensor: torch.Tensor, fill: int = 0xFF, margin: int = 64) -> torch.Tensor:
            return embedded(tensor.view(torch.uint8), fill, margin).view(tensor.dtype)

        return case.but(
            a=inside(case.a, fill), w=inside(case.w, 0xFF if self.op == "mxfp4" else fill),
            a_scale=inside(case.a_scale), w_scale=inside(w_scale, margin=64 if self.op == "fp8" else 60),
        )  # fmt: skip

    def split(
        self, case: Moe, rows: int = 16, waves: int = 2, columns: int = 16, bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The kernel whose waves share K, into an output full of a value that no test expects."""
        out = case.out() if out is None else out
        SPLIT[self.op](
            out, *operands(case), case.weights, bias, *sizes(case), *self.number, rows, waves, columns
        )  # fmt: skip
        return out

    def stream(self, case: Moe, columns: int = 128, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = case.out()
        STREAM[self.op](out, *operands(case), case.weights, bias, *sizes(case), columns)
        return out

    def workspace(self, case: Moe, groups: int) -> torch.Tensor | None:
        return split_workspace(case.slots, case.w.shape[1], groups, torch.device("cpu"), self.block)

    def gate_up(
        self, case: Moe, rows: int = 16, parts: int = 1, groups: int = 1, interleaved: bool = False, **given: Any
    ) -> Pair:
        """What the entry makes in a result that holds something else before."""
        inner = case.w.shape[1] // 2
        q = torch.full((case.slots, inner), 9, dtype=torch.uint8)
        scales = torch.full((case.slots, -(-inner // self.block)), 9.0 if self.name == "blocks" else 9)
        scales = scales if self.name == "blocks" else scales.to(torch.uint8)
        workspace = given.get("workspace", self.workspace(case, groups))
        GATE_UP[self.op](
            given.get("out", q).view(FP8), given.get("scales", scales), *operands(case), given.get("bias"),
            *sizes(case), 1.0, 0.0, math.inf, interleaved, *self.number, workspace, rows, parts, groups,
        )  # fmt: skip
        return q, scales

    def activated(self, gate_up: torch.Tensor, **activation: Any) -> Pair:
        """SwiGLU of a product in a launch of its own, in this format."""
        if self.block == 32:
            return hipforge.swiglu_mxfp8(gate_up, **activation)
        form = {"out_format": "blocks" if self.block else "rows", "e8m0": self.name.endswith("e8m0")}
        return hipforge.swiglu_fp8_dynamic(gate_up, **form, **activation)

    def linear(self, case: Moe, **given: Any) -> torch.Tensor:
        return getattr(hipforge, f"grouped_{self.op}_linear")(*operands(case), *counts(case), case.weights, **given)

    def swiglu(self, case: Moe, **given: Any) -> Pair:
        return SWIGLU[self.op](*operands(case), *counts(case), **given)

    def told(self, case: Moe, swiglu: bool = False, **given: Any) -> Any:
        """How a product, or that of gate and up with SwiGLU, is decided."""
        op = SWIGLU[self.op] if swiglu else getattr(hipforge, f"grouped_{self.op}_linear")
        return hipforge.explain(op, *operands(case), *counts(case), **given)


FORMATS = {
    "mxfp8": Format("mxfp8", "mxfp8"),
    "mxfp4": Format("mxfp4", "mxfp4"),
    **{
        kind: Format(kind, "fp8", (number,), {"rows": 0, "tensor": 0, "mx": 32}.get(kind, 128))
        for kind, number in fp8_cases.NUMBERS.items()
    },
}
FUSED = [name for name, form in FORMATS.items() if form.block]
