"""What the commands of tuners take, and the cells that it names; torch is imported when nothing given is wrong.

A tuner's module names its options by a line ``OPTIONS = ("gemm", "block")``, which is read as text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hipforge.errors import ConfigError
from hipforge.tuning.cases import DECODE_M, cells, parse_cell, parse_shape, read_untuned

if TYPE_CHECKING:
    from hipforge.tuning.models import Weights
    from hipforge.tuning.tuner import Tuner

Import = Callable[[], "Tuner[Any, Any]"]
_POSITIVE = click.IntRange(min=1)
_FILE = click.Path(path_type=Path)
_CONFIG = (
    click.Option(["--config"], type=_FILE, help="A model's config.json: its weights at --tp."),
    click.Option(["--tp"], default=1, show_default=True, type=_POSITIVE, help="GPUs that share the model."),
)
OPTIONS: Mapping[str, Sequence[click.Option]] = {
    "gemm": (
        click.Option(["-i", "--untuned"], type=_FILE, help="CSV with columns M,N,K of cells."),
        click.Option(["--shapes"], multiple=True, metavar="M,N,K", help="4,768,6144, or N,K with -m; repeatable."),
        click.Option(["-m", "--batch", "batches"], multiple=True, type=_POSITIVE, help="M; repeatable."),
        *_CONFIG,
    ),
    "grouped": (
        click.Option(["--n", "columns"], multiple=True, type=_POSITIVE, help="Only this N; repeatable."),
        click.Option(["--shapes"], multiple=True, metavar="N,K", help="An expert's weight; repeatable."),
        click.Option(
            ["-m", "--batch", "batches"], multiple=True, type=_POSITIVE, help="Slots; tokens with --config; repeatable."
        ),
        click.Option(["--experts"], default=128, show_default=True, type=_POSITIVE, help="E, with --shapes."),
        click.Option(
            ["--top-k"], default=4, show_default=True, type=_POSITIVE, help="Slots of a token, with --shapes."
        ),
        click.Option(
            ["--a-div"], default=1, show_default=True, type=_POSITIVE, help="Slots per activation row, with --shapes."
        ),
        click.Option(["--weighted/--unweighted"], help="Whether slots have weights, with --shapes."),
        *_CONFIG,
    ),
    "kind": (
        click.Option(
            ["--kind"],
            type=click.Choice(["8", "4", "128", "32"]),
            default="8",
            show_default=True,
            callback=lambda context, option, value: int(value),
            help="Weights: 8 for MX-FP8, 4 for MXFP4, or of fp8 the rows that share a scale.",
        ),
    ),
    "block": (
        click.Option(
            ["--block"],
            type=click.Choice(["0", "128", "32"]),
            default="0",
            show_default=True,
            callback=lambda context, option, value: int(value),
            help="Rows of W, and elements of K, that share a scale; 0 for a scale per row.",
        ),
    ),
    "attention": (
        click.Option(["-b", "--batch", "batches"], multiple=True, type=_POSITIVE, help="B; may be repeated."),
        click.Option(["--keys"], multiple=True, type=_POSITIVE, help="Mkv; may be repeated."),
        click.Option(
            ["--heads"], multiple=True, type=(int, int), metavar="HKV G", help="KV heads, query heads of each."
        ),
        click.Option(
            ["--page-size", "page_sizes"], multiple=True, type=click.IntRange(min=0), help="0 stands for any."
        ),
        click.Option(["--d", "dims"], multiple=True, type=_POSITIVE, help="Head dimension."),
    ),
    "matrix": (click.Option(["--size"], multiple=True, nargs=2, type=_POSITIVE, help="ROWS COLUMNS; repeatable."),),
}


OPTIONS = {**OPTIONS, "gate_up": OPTIONS["grouped"]}


def _weights_of(config: Path, tp: int) -> Weights:
    from hipforge.tuning.models import weights_of

    return weights_of(config, tp)


def _gemm(
    tuner: Import, *, untuned: Path | None, shapes: Sequence[str], batches: Sequence[int], config: Path | None, tp: int,
    **own: Any,
) -> Sequence[Any]:  # fmt: skip
    if untuned is not None:
        if shapes or batches or config is not None:
            raise ConfigError("give either -i FILE or --shapes or --config and -m, not both")
        found = read_untuned(untuned)
    elif config is not None:
        if shapes:
            raise ConfigError("give either --shapes or --config, not both")
        found = cells(_weights_of(config, tp).dense, batches or DECODE_M)
    elif shapes:
        texts = [text for text in shapes if "m=" in text.lower() or text.lower().replace("x", ",").count(",") == 2]
        whole = [parse_cell(text) for text in texts]
        weights = [parse_shape(text) for text in shapes if text not in texts]
        if batches and not weights:
            raise ConfigError("-m is for --shapes of N,K; those given have an M")
        if weights and not batches:
            batches = [cell.m for cell in tuner().default_cells]
        found = sorted({*whole, *cells(weights, batches)})
    else:
        return [one for one in tuner().default_cells if not batches or one.m in batches]
    return [tuner().cell(one.n, one.k, one.m, **own) for one in found]


def _grouped(
    tuner: Import, *, columns: Sequence[int], shapes: Sequence[str], batches: Sequence[int], experts: int, top_k: int,
    a_div: int, weighted: bool, config: Path | None, tp: int, **own: Any,
) -> Sequence[Any]:  # fmt: skip
    if shapes and config is not None:
        raise ConfigError("give either --shapes or --config, not both")
    if config is not None:
        found = _weights_of(config, tp).experts
        if found is None:
            raise ConfigError(f"{config} is of a model without experts")
        own.update(experts=found.count, top_k=found.top_k)
        sizes = [
            (n, k, each, weighted, m * found.top_k)
            for n, k, each, weighted in found.products
            for m in batches or DECODE_M
        ]
    elif shapes:
        if not batches:
            raise ConfigError("--shapes of N,K need -m, the number of slots")
        own.update(experts=experts, top_k=top_k)
        sizes = [(n, k, a_div, weighted, m) for k, n in map(parse_shape, shapes) for m in batches]
    else:
        sizes = []
    made = [tuner().cell(*numbers, **own) for numbers in sizes] or [
        one for one in tuner().default_cells if not batches or one.m in batches
    ]
    return [one for one in made if not columns or one.n in columns]


def _gate_up(tuner: Import, **given: Any) -> Sequence[Any]:
    """Return the cells of first products, which have no weights of slots."""
    return [cell for cell in _grouped(tuner, **given) if not cell.has_weight]


def _attention(tuner: Import, **given: Sequence[Any]) -> Sequence[Any]:
    """Return the default cells, or every combination of what is given."""
    if not any(given.values()):
        return tuner().default_cells
    from hipforge.tuning.families.decode_attention import USUAL

    chosen = itertools.product(*(given[name] or values for name, values in USUAL.items()))
    return sorted(tuner().cell(*numbers) for numbers in chosen)


def _matrix(tuner: Import, *, size: Sequence[tuple[int, int]]) -> Sequence[Any]:
    return [tuner().cell(*numbers) for numbers in size] or tuner().default_cells


CELLS: Mapping[str, Callable[..., Sequence[Any]]] = {
    "gemm": _gemm, "grouped": _grouped, "gate_up": _gate_up, "attention": _attention, "matrix": _matrix,
}  # fmt: skip
"""(what imports the tuner, the options' values) -> cells, by the first word of ``OPTIONS``."""
