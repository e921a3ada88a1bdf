"""``hipforge demo``: the main job, end to end. Build, run on decode shapes, check every number, say what it took."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from hipforge import __version__, devices
from hipforge.cli import output
from hipforge.errors import ConfigError
from hipforge.jit import notices

if TYPE_CHECKING:
    import torch
    from rich.console import Console

SHAPES = ((6144, 1152), (6144, 768), (1024, 6144), (768, 6144))  # (K, N) of decode layers
ROWS = (1, 2, 4, 8, 16)

# fp32 accumulation and one bf16 rounding give 1.66e-3; 1.5 times as much would already mean a wrong block scale.
MAX_RELATIVE_ERROR = 3e-3
# Each weight byte once, with 5 % for partial tiles.
MAX_WEIGHT_RATIO = 1.05


@dataclass(frozen=True)
class Row:
    """One cell of the demo.

    ``weight_ratio``: weight bytes loaded / weight bytes, None where nothing counts them. ``us`` and ``bf16_us``:
    microseconds of a call and of torch's bf16 product of the same shape, measured on a GPU; None without one. ``vgpr``:
    registers of a lane.
    """

    k: int
    n: int
    m: int
    kernel: str
    relative_error: float
    exact: bool
    weight_ratio: float | None
    vgpr: int
    spills: int
    occupancy: int | None
    us: float | None = None
    bf16_us: float | None = None

    @property
    def misses(self) -> list[str]:
        """Return what this row gets wrong; empty when every bound holds."""
        found: list[str] = []
        if not self.relative_error <= MAX_RELATIVE_ERROR:
            found.append(f"relative error {self.relative_error:.2e} > {MAX_RELATIVE_ERROR:.0e}")
        if not self.exact:
            found.append("integer data is not bit-exact")
        if self.weight_ratio is not None and not self.weight_ratio <= MAX_WEIGHT_RATIO:
            found.append(f"weight bytes loaded {self.weight_ratio:.3f}x > {MAX_WEIGHT_RATIO}x")
        if self.spills:
            found.append(f"{self.spills} spilled registers")
        return found


Operands = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]


def real_operands(m: int, n: int, k: int, device: str) -> Operands:
    """Return (xq, x_scale, wq, w_scale) quantised from activations N(0, 0.5) and weights N(0, 0.1), seed 0."""
    import torch

    from hipforge.ops.reference import quantize_mxfp8

    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(m, k, generator=generator) * 0.5).to(torch.bfloat16)
    w = (torch.randn(n, k, generator=generator) * 0.1).to(torch.bfloat16)
    return tuple(part.to(device) for part in (*quantize_mxfp8(x), *quantize_mxfp8(w)))  # type: ignore[return-value]


def integer_operands(m: int, n: int, k: int, device: str) -> Operands:
    """Return operands whose every partial sum is exact: payloads -1, 0, 1 and scales 1 or 2.

    At most ``4 K`` in magnitude and whole, so fp32 sums are exact in any order; the only rounding is bf16's.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    parts = []
    for rows in (m, n):
        payload = torch.randint(-1, 2, (rows, k), generator=generator).float().to(torch.float8_e4m3fn)
        scale = torch.randint(127, 129, (rows, k // 32), generator=generator, dtype=torch.uint8)
        parts += [payload.to(device), scale.to(device)]
    return tuple(parts)  # type: ignore[return-value]


def float64_reference(operands: Operands) -> torch.Tensor:
    """Return X @ W^T of the same e4m3 and e8m0 bits, in float64 on the CPU."""
    import torch

    def dequantised(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values = payload.cpu().view(torch.float8_e4m3fn).double()
        factor = torch.exp2(scale.cpu().view(torch.uint8).double() - 127)
        return values * factor.repeat_interleave(32, dim=1)

    xq, xs, wq, ws = operands
    return dequantised(xq, xs) @ dequantised(wq, ws).t()


def resources_of(symbols: list[str]) -> list[dict[str, Any]]:
    """Return the resources of the kernels that ran, from the manifests of the modules loaded in this process.

    Without symbols (a GPU names none): of every loaded kernel.
    """
    from hipforge.jit import loader

    kernels = {
        symbol.removesuffix(".kd"): kernel
        for module in loader.loaded()
        for symbol, kernel in module.manifest.kernels.items()
    }
    return [kernels[symbol] for symbol in symbols if symbol in kernels] if symbols else list(kernels.values())


def measured_us(operands: Operands) -> tuple[float, float]:
    """Return microseconds of the product and of torch's bf16 one, in graphs over operands that rotate past L2."""
    import torch

    from hipforge.ops.smallm_gemm_mxfp8 import mxfp8_gemv
    from hipforge.tuning import timing

    def of(call: Callable[..., object], given: tuple[torch.Tensor, ...]) -> float:
        copies = timing.copies_for(sum(part.nbytes for part in given))
        rotated = [given, *(tuple(part.clone() for part in given) for _ in range(copies - 1))]
        return timing.microseconds_per_call(lambda i: call(*rotated[i]), copies)

    x, w = (part.to("cuda", torch.bfloat16) for part in operands[::2])  # of the values only the shapes matter
    return of(mxfp8_gemv, operands), of(lambda x, w: x @ w.T, (x, w))


def measure_row(m: int, n: int, k: int, device: devices.Device) -> Row:
    """Run one cell on real and on integer data and return what was found."""
    import torch

    from hipforge.ops.core.dispatch import explain
    from hipforge.ops.smallm_gemm_mxfp8 import mxfp8_gemv

    place = "cuda" if device.is_gpu else "cpu"
    operands = real_operands(m, n, k, place)
    ratio: float | None = None
    symbols: list[str] = []
    if device.kind == "emulator":
        from hipforge import emulator

        with emulator.counters() as counted:
            got = mxfp8_gemv(*operands)
        ratio = counted.tensors["Wq"].loaded / operands[2].numel()
        symbols = [kernel.name for kernel in counted.kernels]
    else:
        got = mxfp8_gemv(*operands)
    plan = explain(mxfp8_gemv, *operands)
    if got is None:
        raise ConfigError(f"mxfp8_gemv answered None for M={m}, N={n}, K={k}: {plan.reason}")
    want = float64_reference(operands)
    integers = integer_operands(m, n, k, place)
    exact_got = mxfp8_gemv(*integers)
    used = resources_of(symbols)
    us, bf16_us = measured_us(operands) if device.is_gpu else (None, None)
    return Row(
        k=k,
        n=n,
        m=m,
        kernel=" ".join([str(plan.kernel).removeprefix("smallm_mxfp8_")]
                        + [f"{name}={value}" for name, value in plan.configuration.items()]),
        relative_error=((got.cpu().double() - want).norm() / want.norm()).item(),
        exact=exact_got is not None and torch.equal(exact_got.cpu(), float64_reference(integers).bfloat16()),
        weight_ratio=ratio,
        vgpr=max(int(kernel.get("vgpr", kernel.get("registers", 0))) for kernel in used),
        spills=sum(int(count) for kernel in used for name, count in kernel.items() if "spill" in name),
        occupancy=min((int(kernel["occupancy"]) for kernel in used if "occupancy" in kernel), default=None),
        us=us,
        bf16_us=bf16_us,
    )


def second_process() -> float:
    """Return milliseconds from a call to its loaded module in a new process, everything being built already."""
    k, n = SHAPES[0]
    code = (
        "from hipforge.cli import demo\n"
        "from hipforge import devices, mxfp8_gemv\n"
        "from hipforge.jit import loader\n"
        "place = 'cuda' if devices.current().is_gpu else 'cpu'\n"
        f"mxfp8_gemv(*demo.real_operands(1, {n}, {k}, place))\n"
        "(module,) = loader.loaded()\n"
        "assert not module.built\n"
        "print(module.seconds * 1e3)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError(f"a second process could not load the module:\n{result.stderr}")
    return float(result.stdout.splitlines()[-1])


def emulator_speed() -> float:
    """Return measured wave-instructions per second of one thread on the GEMV, memory checks on."""
    import torch

    from hipforge import emulator
    from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv

    operands = real_operands(1, 768, 6144, "cpu")
    best = 0.0
    for _ in range(3):
        with emulator.options(threads=1), emulator.counters() as counted:
            smallm_mxfp8_gemv(*operands, torch.bfloat16)
        best = max(best, counted.wave_instructions / counted.seconds)
    return best


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="Print the rows and the header as JSON.")
def command(as_json: bool) -> None:
    """Build the MX-FP8 GEMV, run it on decode shapes, and check every number; exit 1 if any row misses its bound."""
    console = output.console(stderr=as_json)
    device = devices.current()
    if device.kind == "reference":
        raise ConfigError("HIPFORGE_DEVICE=reference runs no kernels, so there is nothing to demonstrate")
    header = {"hipforge": __version__, "device": _device_line(device)}
    rows: list[Row] = []
    steps = 4 if device.kind == "emulator" else 3
    notices.say(f"[1/{steps}] HIP runtime: {header['device']}")
    device.load_runtime()
    notices.say(f"[2/{steps}] {len(SHAPES) * len(ROWS)} cells, each on random and on integer data")
    for k, n in SHAPES:
        rows += [measure_row(m, n, k, device) for m in ROWS]
    header.update(_build_lines())
    notices.say(f"[3/{steps}] loading a module in a second process")
    header["warm load"] = f"{second_process():.1f} ms from call to loaded module in a second process (measured)"
    if device.kind == "emulator":
        notices.say(f"[4/{steps}] speed of the emulator on one core")
        header["emulator speed"] = f"{emulator_speed() / 1e6:.1f} million wave-instructions/s on one core (measured)"
    if as_json:
        report = {"header": header, "rows": [{**vars(row), "misses": row.misses} for row in rows]}
        click.echo(json.dumps(report, indent=1))
    else:
        _print(console, header, rows)
    missed = [row for row in rows if row.misses]
    if missed:
        for row in missed:
            click.echo(f"M,N,K = {row.m},{row.n},{row.k}: {'; '.join(row.misses)}", err=True)
        sys.exit(1)


def _device_line(device: devices.Device) -> str:
    if device.is_gpu:
        import torch

        return f"{torch.cuda.get_device_name(0)} ({device.arch_of()})"
    return f"built-in {device.arch_of()} emulator on the CPU"


def _build_lines() -> dict[str, str]:
    """Return compiler and build-time lines; a build that an earlier run did is marked (recorded)."""
    from hipforge.jit import loader

    modules = loader.loaded()
    seconds = sum(module.manifest.build_seconds for module in modules)
    each = ", ".join(f"{module.manifest.build_seconds:.1f}" for module in modules)
    mark = "" if any(module.built for module in modules) else " (recorded)"
    return {
        "compiler": ", ".join(sorted({module.manifest.toolchain for module in modules})),
        "cold build": f"{seconds:.1f} s for {len(modules)} module variants ({each}){mark}",
    }


def _print(console: Console, header: dict[str, str], rows: list[Row]) -> None:
    for name, value in header.items():
        console.print(f"{name + ':':16}{value}", markup=False, soft_wrap=True, highlight=False)
    table = Table(show_edge=False, pad_edge=False)
    measured = all(row.us for row in rows)
    more = ("µs", "torch bf16 µs", "") if measured else ("weight bytes loaded", "VGPR", "spills", "waves/SIMD", "")
    for heading in ("M,N,K", "kernel", "relF vs float64", "integers", *more):
        table.add_column(heading, justify="left" if heading in ("M,N,K", "kernel") else "right")
    for row in rows:
        table.add_row(
            f"{row.m},{row.n},{row.k}", row.kernel, f"{row.relative_error:.2e}",
            "exact" if row.exact else "WRONG",
            *_numbers(row), "[red]MISS[/]" if row.misses else "[green]ok[/]",
        )
    console.print(table)
    bound = "" if measured else f"weight bytes (counted) <= {MAX_WEIGHT_RATIO} x, "
    console.print(f"Bounds: relF <= {MAX_RELATIVE_ERROR:.0e}, integer data bit-exact, {bound}no spills.")
    if measured:
        console.print("µs: measured in this run, by graphs over operands that rotate past L2; bf16 is torch.matmul's.")


def _numbers(row: Row) -> list[str]:
    if row.us is not None and row.bf16_us is not None:
        return [f"{row.us:.2f}", f"{row.bf16_us:.2f}"]
    ratio = "not counted" if row.weight_ratio is None else f"{row.weight_ratio:.3f} x"
    return [ratio, str(row.vgpr), str(row.spills), "-" if row.occupancy is None else str(row.occupancy)]
