"""``hipforge tune``: the tuners of :mod:`hipforge.tuning`, one subcommand per op family."""

from __future__ import annotations

import importlib

import click

# family -> module whose ``command`` is its tuner
TUNERS: dict[str, str] = {
    "smallm_mxfp8": "hipforge.ops.mxfp8_dense.tuner",
    "smallm_mxfp8_moe": "hipforge.ops.mxfp8_grouped.tuner",
    "mxfp4_gemm": "hipforge.ops.mxfp4_gemm.tuner",
    "decode_attention_fp8": "hipforge.tuning.decode_attention",
    "skinny_gemm_fp8": "hipforge.ops.fp8_skinny_gemm.tuner",
}


class TunerGroup(click.Group):
    """Imports a tuner when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the op families that have a tuner."""
        return list(TUNERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one tuner, or None if there is none of that name."""
        if cmd_name not in TUNERS:
            return None
        tuner: click.Command = importlib.import_module(TUNERS[cmd_name]).command
        return tuner


command = TunerGroup("tune", help="Search configurations of an op and write its tuned table.")
