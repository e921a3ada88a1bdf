"""A command of hipforge in this process: what it ends with, or its JSON."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from hipforge.cli.main import cli


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def answer(*words: str) -> object:
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
