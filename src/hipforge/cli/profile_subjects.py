"""What ``hipforge profile`` can call: per op, what makes operands of a shape and returns the call on them."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

import hipforge
from hipforge import archs, ops, shapes
from hipforge.cli.operands import SUBJECTS as SUBJECTS
from hipforge.cli.operands import Subject, e4m3, mxfp8, normal, of_experts, routed
from hipforge.cli.options import REGISTER_OPTION
from hipforge.cli.subjects_more import MORE
from hipforge.errors import ConfigError, HipforgeError, did_you_mean


def refusal(op: str, call: partial[Any]) -> str:
    """Return why ``op``, of which ``call`` is one, runs no kernel."""
    if SUBJECTS[op].own:
        return "its call launched nothing"
    from hipforge.ops.core.dispatch import explain

    return explain(call.func, *call.args, **call.keywords).reason


def _mxfp8(op: str) -> Callable[[int, int, int], partial[Any]]:
    def call(m: int, n: int, k: int) -> partial[Any]:
        return partial(getattr(hipforge, op), *mxfp8(m, k, seed=0, scale=0.5), *mxfp8(n, k, seed=1, scale=0.1))

    return call


def _grouped(op: str) -> Callable[[int, int, int, int, int], partial[Any]]:
    def call(tokens: int, n: int, k: int, experts: int, top_k: int) -> partial[Any]:
        import torch

        from hipforge.ops.moe import DEFAULT_BLOCK_M
        from hipforge.ops.reference.moe import moe_align_block_size

        slots = moe_align_block_size(routed(tokens, experts, top_k), DEFAULT_BLOCK_M, experts)
        weights = of_experts(experts, *mxfp8(n, k, seed=1, scale=0.1))
        named: dict[str, Any] = {"num_valid_tokens": tokens * top_k, "block_m": DEFAULT_BLOCK_M, "a_div": top_k}
        if op == "grouped_gemm_mxfp8":
            named |= {"top_k": top_k, "out_dtype": torch.bfloat16}
        return partial(getattr(hipforge, op), *mxfp8(tokens, k, seed=0, scale=0.5), *weights, *slots, **named)

    return call


def _grouped_swiglu(op: str) -> Callable[[int, int, int, int, int], partial[Any]]:
    def call(tokens: int, n: int, k: int, experts: int, top_k: int) -> partial[Any]:
        from hipforge.ops import moe, reference

        function = {"mxfp8": moe.grouped_swiglu_mxfp8, "mxfp4": moe.grouped_swiglu_mxfp4}[op]
        linear = _grouped("grouped_mxfp8_linear")(tokens, n, k, experts, top_k)
        given = linear.args
        if op == "mxfp4":
            weights = of_experts(experts, *reference.quantize_mxfp4(normal(n, k, seed=1, scale=0.1)))
            given = (*given[:2], *weights, *given[4:])
        return partial(function, *given, **linear.keywords)

    return call


def _grouped_fp8_blocks(tokens: int, n: int, k: int, experts: int, top_k: int) -> partial[Any]:
    import torch

    linear = _grouped("grouped_mxfp8_linear")(tokens, n, k, experts, top_k)
    a_q, _, w, _, *slots = linear.args
    a_scale, w_scale = torch.ones(tokens, -(-k // 128)), torch.ones(experts, -(-n // 128), -(-k // 128))
    return partial(hipforge.grouped_fp8_linear, a_q, a_scale, w, w_scale, *slots, **linear.keywords)


def _fp8_gemm(op: str) -> Callable[[int, int, int], partial[Any]]:
    def call(m: int, n: int, k: int) -> partial[Any]:
        import torch

        x, w = e4m3(m, k, seed=0), e4m3(n, k, seed=1, scale=0.1)
        return partial(getattr(hipforge, op), x, torch.full((m,), 0.5), w, torch.full((n,), 0.25))

    return call


def _fp8_quant(rows: int, columns: int) -> partial[Any]:
    from hipforge.ops.fp8_quant import fp8_quant_tensorwise

    x = normal(rows, columns, seed=0)
    return partial(fp8_quant_tensorwise, x, transpose=True)


def _skinny_gemm(m: int, n: int, k: int) -> partial[Any]:
    import torch

    from hipforge.ops.fp8_skinny_gemm import skinny_gemm

    a, b = e4m3(m, k, seed=0), e4m3(n, k, seed=1, scale=0.1)
    return partial(skinny_gemm, a, b.t(), torch.tensor([0.5]))


def _decode_attention_fp8(batch: int, keys: int, kv_heads: int, group: int, d: int) -> partial[Any]:
    import torch

    from hipforge.ops.decode_attention_fp8 import decode_attention_fp8

    page_size = 64
    pages = -(-keys // page_size)
    q = normal(batch, 1, kv_heads * group, d, seed=0)
    k_cache, v_cache = (e4m3(batch * pages, page_size, kv_heads, d, seed=seed) for seed in (1, 2))
    block_tables = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    seqlens, scale = torch.full((batch,), keys, dtype=torch.int32), torch.tensor([0.5])
    return partial(decode_attention_fp8, q, k_cache, v_cache, block_tables, seqlens, scale, scale)


def _declared(op: str, shape: str) -> Subject:
    """Return the subject of an op whose own module has its example."""
    names, numbers = zip(*(part.split("=") for part in shape.split(",")), strict=True)

    def call(*given: int) -> partial[Any]:
        made: partial[Any] = importlib.import_module(ops.public_names()[op]).example(op, *given)
        return made

    return Subject(tuple(names), tuple(map(int, numbers)), call)


_MOE = ("M", "N", "K", "E", "TOPK")

SUBJECTS |= {
    "fp8_gemm": Subject(("M", "N", "K"), (16, 768, 2048), _fp8_gemm("fp8_gemm")),
    "fp8_linear": Subject(("M", "N", "K"), (16, 768, 2048), _fp8_gemm("fp8_linear")),
    "mxfp8_gemm": Subject(("M", "N", "K"), (128, 512, 1024), _mxfp8("mxfp8_gemm")),
    "mxfp8_gemv": Subject(("M", "N", "K"), (4, 768, 6144), _mxfp8("mxfp8_gemv")),
    "grouped_gemm_mxfp8": Subject(_MOE, (4, 1536, 6144, 8, 2), _grouped("grouped_gemm_mxfp8")),
    "grouped_mxfp8_linear": Subject(_MOE, (4, 1536, 6144, 8, 2), _grouped("grouped_mxfp8_linear")),
    "grouped_swiglu_mxfp8": Subject(_MOE, (4, 1536, 6144, 8, 2), _grouped_swiglu("mxfp8")),
    "grouped_swiglu_mxfp4": Subject(_MOE, (4, 1536, 2880, 8, 2), _grouped_swiglu("mxfp4")),
    "grouped_fp8_blocks": Subject(_MOE, (4, 1536, 4096, 8, 2), _grouped_fp8_blocks),
    "mxfp8_linear": Subject(("M", "N", "K"), (4, 768, 6144), _mxfp8("mxfp8_linear")),
    "fp8_quant_tensorwise": Subject(("R", "C"), (256, 512), _fp8_quant),
    "skinny_gemm": Subject(("M", "N", "K"), (8, 2304, 16384), _skinny_gemm),
    "decode_attention_fp8": Subject(("B", "MKV", "HKV", "G", "D"), (4, 2048, 1, 8, 128), _decode_attention_fp8),
    **MORE,
    **{op: _declared(op, shape) for op, shape in ops.examples().items()},
}

_WIDTH = max(map(len, SUBJECTS)) + 2
SHAPES_HELP = "\b\nSHAPE by OP, as numbers or by name (m=4,n=768,k=6144):\n" + "\n".join(
    f"  {op:<{_WIDTH}}{','.join(subject.shape):<15} as in {','.join(map(str, subject.example))}"
    for op, subject in SUBJECTS.items()
)


class _ShapeCommand(click.Command):
    """A command whose SHAPE may begin with a negative number, which is then a wrong shape and not an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, such shapes last and behind ``--``."""
        shapes_given = [] if "--" in args else [each for each in args if _NEGATIVE.match(each)]
        if shapes_given:
            args = [*(each for each in args if each not in shapes_given), "--", *shapes_given]
        return super().parse_args(ctx, args)


_NEGATIVE = re.compile(r"-\d+[,x]")


def _no_op(name: str) -> str:
    return (
        f"there is no op {name!r}{did_you_mean(name, SUBJECTS)}; there are {', '.join(sorted(SUBJECTS))}, "
        "and those in CALLS of a Python file given to --register"
    )


class _Op(click.Choice[str]):
    """The name of an op, one that is registered included; the error for another says which is near."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in SUBJECTS:
            self.fail(_no_op(value))
        return value


def _checked_shape(ctx: click.Context, _param: click.Parameter, shape: str) -> str:
    """Refuse a wrong shape before anything of torch is imported, which takes seconds."""
    if "op" in ctx.params and not ctx.resilient_parsing:
        parsed(ctx.params["op"], shape)
    return shape


def parsed(op: str, shape: str) -> list[int]:
    """Return the numbers of a shape of ``op``.

    Raises:
        ConfigError: there is no such op, or the shape is not one of its.
    """
    if op not in SUBJECTS:
        raise ConfigError(_no_op(op))
    subject = SUBJECTS[op]
    numbers = shapes.parse(shape, subject.shape, subject.example)
    named = dict(zip(subject.shape, numbers, strict=True))
    if not subject.own and "TOPK" in named and named["TOPK"] > named.get("E", named["TOPK"]):
        raise ConfigError(f"shape {shape!r}: TOPK must be at most E ({named['E']}); got {named['TOPK']}")
    return numbers


def subject_command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function that takes ``op``, ``shape`` and ``arch``, and what its own options add."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        takes_op = click.argument("op", type=_Op(sorted(SUBJECTS)), metavar="OP")
        takes_arch = click.option(
            "--arch", type=click.Choice(archs.EMULATED), help="Emulate it; default as HIPFORGE_EMULATE says."
        )
        called = REGISTER_OPTION(takes_op(click.argument("shape", callback=_checked_shape)(takes_arch(function))))
        return click.command(name, cls=_ShapeCommand, epilog=SHAPES_HELP)(called)

    return decorate


def call_of(op: str, shape: str) -> partial[Any]:
    """Return the call of an op at a shape as :func:`hipforge.shapes.parse` takes it.

    Raises:
        ConfigError: the shape is not one of the op's, or its operands do not fit in memory.
    """
    numbers = parsed(op, shape)
    with making_operands(f"{op} at {shape}"):
        return SUBJECTS[op].call(*numbers)


@contextlib.contextmanager
def making_operands(title: str) -> Iterator[None]:
    """Turn what torch raises in the block, where operands of a call do not fit in memory, into a ConfigError."""
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError, TypeError) as error:
        if isinstance(error, HipforgeError):
            raise
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise ConfigError(f"the operands of {title} cannot be made ({reason}); take a smaller shape") from error
