"""``hipforge profile``: counts of one op at one shape on the emulator, with the bounds they imply."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from hipforge import devices
from hipforge.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Subject:
    """An op that can be profiled: the names of its shape's numbers, and what makes the call from them."""

    shape: tuple[str, ...]
    call: Callable[..., Callable[[], object]]


def _normal(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * scale).bfloat16()


def _mxfp8_gemv(m: int, n: int, k: int) -> Callable[[], object]:
    from hipforge.ops.reference import quantize_mxfp8
    from hipforge.ops.smallm_gemm_mxfp8 import mxfp8_gemv

    operands = (*quantize_mxfp8(_normal(m, k, 0, 0.5)), *quantize_mxfp8(_normal(n, k, 1, 0.1)))
    return lambda: mxfp8_gemv(*operands)


def _mxfp4_gemm(m: int, n: int, k: int) -> Callable[[], object]:
    from hipforge.ops.mxfp4_gemm import mxfp4_gemm
    from hipforge.ops.reference import quantize_mxfp4

    operands = (*quantize_mxfp4(_normal(m, k, 0)), *quantize_mxfp4(_normal(n, k, 1)))
    return lambda: mxfp4_gemm(*operands)


def _fp8_quant(rows: int, columns: int) -> Callable[[], object]:
    from hipforge.ops.fp8_quant import fp8_quant_tensorwise

    x = _normal(rows, columns, 0)
    return lambda: fp8_quant_tensorwise(x, transpose=True)


def _residual_rms(rows: int, columns: int) -> Callable[[], object]:
    import torch

    from hipforge.ops.rmsnorm_fp8 import residual_rms

    x, residual, weight = _normal(rows, columns, 0), _normal(rows, columns, 1), _normal(1, columns, 2)[0]
    return lambda: residual_rms(x, residual, weight, 1e-5, torch.tensor([0.02]))


def _swiglu_fp8(rows: int, columns: int) -> Callable[[], object]:
    import torch

    from hipforge.ops.swiglu_fp8 import swiglu_fp8

    gate_up = _normal(rows, 2 * columns, 0)
    return lambda: swiglu_fp8(gate_up, torch.tensor([0.02]))


SUBJECTS: dict[str, Subject] = {
    "mxfp8_gemv": Subject(("M", "N", "K"), _mxfp8_gemv),
    "mxfp4_gemm": Subject(("M", "N", "K"), _mxfp4_gemm),
    "fp8_quant_tensorwise": Subject(("R", "C"), _fp8_quant),
    "residual_rms": Subject(("R", "C"), _residual_rms),
    "swiglu_fp8": Subject(("R", "D"), _swiglu_fp8),
}


def parse_shape(text: str, names: Sequence[str]) -> list[int]:
    """Return the positive integers of ``"4,768,6144"``.

    Raises:
        ConfigError: another count of numbers, or one that is not a positive integer.
    """
    parts = text.replace("x", ",").split(",")
    if len(parts) != len(names) or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"shape {text!r}: expected {','.join(names)} as positive integers, as in 4,768,6144")
    return [int(part) for part in parts]


@click.command("profile")
@click.argument("op", type=click.Choice(sorted(SUBJECTS)))
@click.argument("shape")
@click.option("--listing", is_flag=True, help="Also print every instruction with its counts.")
@click.option("--json", "as_json", is_flag=True, help="Print the counters as JSON.")
def command(op: str, shape: str, listing: bool, as_json: bool) -> None:
    """Count what OP does at SHAPE (such as 4,768,6144 for M,N,K) on the emulator, and print the bounds that implies."""
    from hipforge import emulator
    from hipforge.emulator import report

    device = devices.current()
    if device.kind != "emulator":
        raise ConfigError(f"profile counts on the emulator, not on {device.kind}; set HIPFORGE_DEVICE=emulator")
    subject = SUBJECTS[op]
    call = subject.call(*parse_shape(shape, subject.shape))
    with emulator.counters(per_pc=listing) as counted:
        result = call()
    if result is None:
        raise ConfigError(f"{op} answered None for {shape}: the shape is outside its envelope")
    counts = counted.result
    if as_json:
        click.echo(json.dumps(counts.as_dict(), indent=1))
        return
    click.echo(report.text(report.profile(counts, device.arch_of())))
    if listing:
        click.echo("\n" + report.listing(counts))
