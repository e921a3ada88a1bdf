"""GPU ops: one package per tuned op family, one module per simple op; ``FAMILIES`` and ``SIMPLE_OPS`` list them.

Modules are imported on first use: ``hipforge.ops.reference`` works after ``import hipforge`` alone. Public names,
tuned tables, tuners and the subjects of ``hipforge profile`` are found through the lists.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, NamedTuple


class Room(NamedTuple):
    """Where an op family is, without importing it.

    Attributes:
        name: its package under ``hipforge.ops``.
        table: name of its tuned table; ``hipforge tune <table>`` is its tuner.
        public: names that it gives the package ``hipforge``.
        alias: a module path that names it too.

    Example:
        >>> Room("mxfp4_gemm", "mxfp4_gemm", ("mxfp4_gemm", "mxfp4_linear")).table
        'mxfp4_gemm'
    """

    name: str
    table: str
    public: tuple[str, ...]
    alias: str | None = None


FAMILIES = (
    Room("mxfp8_gemm", "mxfp8_gemm", ("mxfp8_gemm", "mxfp8_gemv", "mxfp8_linear"), alias="smallm_gemm_mxfp8"),
    Room(
        "mxfp8_grouped_gemm",
        "mxfp8_grouped_gemm",
        ("grouped_gemm_mxfp8", "grouped_mxfp8_linear"),
        alias="grouped_gemm_mxfp8",
    ),
    Room("mxfp4_gemm", "mxfp4_gemm", ("mxfp4_gemm", "mxfp4_linear")),
    Room("fp8_gemm", "fp8_gemm", ("fp8_gemm", "fp8_linear")),
    Room("fp8_skinny_gemm", "fp8_skinny_gemm", ("skinny_gemm",), alias="skinny_gemm_fp8"),
    Room(
        "decode_attention",
        "decode_attention_fp8",
        ("decode_attention_fp8", "decode_attention_splitk"),
        alias="decode_attention_fp8",
    ),
    Room("decode_attention.int4", "decode_attention_int4", ()),
)

# module -> names that it gives the package ``hipforge``
SIMPLE_OPS: dict[str, tuple[str, ...]] = {
    "fp8_linear": (
        "Float8Linear", "Float8LinearConfig", "convert_to_float8_training", "disable_fp8", "scaled_mm",
    ),
    "fp8_quant": ("fp8_quant_tensorwise",),
    "moe": ("fused_moe_mxfp8",),
    "moe_align": ("moe_align_block_size",),
    "moe_combine": ("moe_combine",),
    "mx_quantize": ("mxfp4_quantize", "mxfp8_quantize"),
    "rmsnorm_fp8": ("residual_rms", "residual_rms_mxfp8", "rms_norm", "rms_norm_fp8", "rms_norm_mxfp8"),
    "rope_and_cache": ("rope_and_cache",),
    "router_gemm": ("router_gemm",),
    "swiglu_fp8": ("swiglu_fp8", "swiglu_mxfp8"),
    "topk_gating": ("topk_gating",),
}  # fmt: skip


def public_names() -> dict[str, str]:
    """Return the public ops by name, each with the module that defines it.

    Example:
        >>> public_names()["router_gemm"]
        'hipforge.ops.router_gemm'
    """
    found = {name: room.name for room in FAMILIES for name in room.public}
    found.update({name: module for module, names in SIMPLE_OPS.items() for name in names})
    return {name: f"{__name__}.{found[name]}" for name in sorted(found)}


def table_names() -> tuple[str, ...]:
    """Return the names of the tuned tables.

    Example:
        >>> "decode_attention_int4" in table_names()
        True
    """
    return tuple(room.table for room in FAMILIES)


def schema_of(table: str) -> Any:
    """Return the schema of a tuned table; raises KeyError for a name that :func:`table_names` does not have.

    Example:
        >>> [column.name for column in schema_of("mxfp4_gemm").shape]
        ['M', 'N', 'K']
    """
    home = {room.table: room.name for room in FAMILIES}[table]
    return importlib.import_module(f"{__name__}.{home}.family").FAMILY.table


def register_operators() -> tuple[str, ...]:
    """Make every operator of hipforge known to torch, the stubs' included; return their names.

    Operators are registered when the module of their op is imported, or, for stubs, when a trace first needs them.
    A process that loads an exported program calls this first.

    Example:
        >>> "mxfp8_linear" in register_operators()
        True
    """
    from hipforge.jit.call import torch_library

    found: set[str] = set()
    for home in sorted(set(public_names().values())):
        importlib.import_module(home)
    for path, module in tuple(sys.modules.items()):
        if path.startswith(f"{__name__}."):
            stubs = (getattr(value, "stub", None) for value in vars(module).values())
            found.update(stub.operator_name() for stub in stubs if stub is not None)
    return tuple(sorted(found.union(torch_library.registered())))


def _homes() -> set[str]:
    aliases = {room.alias for room in FAMILIES if room.alias is not None}
    return {"core", "reference", *SIMPLE_OPS, *(room.name for room in FAMILIES if room.public), *aliases}


def __getattr__(name: str) -> ModuleType:
    homes = _homes()
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
