"""``hipforge trace``: a wave's instructions with register values."""

from __future__ import annotations

from click.testing import CliRunner

from hipforge.cli.main import cli


def test_trace_prints_what_a_wave_executes() -> None:
    shape = "1,256,1024"
    whole = CliRunner().invoke(cli, ["trace", "mxfp8_gemv", shape, "--lane", "3"], catch_exceptions=False)
    lines = whole.output.splitlines()
    assert "s_endpgm" in lines[-1]
    assert any("| v" in line for line in lines)
    address = "0x" + lines[20].split()[0]
    part = CliRunner().invoke(
        cli, ["trace", "mxfp8_gemv", shape, "--from", address, "--count", "4"], catch_exceptions=False
    )
    assert [line.split("|")[0] for line in part.output.splitlines()] == [line.split("|")[0] for line in lines[20:24]]
    nothing = CliRunner().invoke(cli, ["trace", "mxfp8_gemv", shape, "--wave", "99"])
    assert nothing.exit_code == 1
    assert "no instruction of work-group 0, wave 99" in nothing.output
