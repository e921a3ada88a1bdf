"""What a user sees on stderr while a module builds: how it starts and ends, an estimate, and nothing when quiet."""

from __future__ import annotations

import io
import re

import pytest
from helpers.jit_stand_in import StandIn

from hipforge import settings
from hipforge.errors import BuildError
from hipforge.jit import notices


def test_a_build_is_announced_with_an_estimate_and_its_end(
    stand_in: StandIn,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in.build()
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"hipforge: building sample for gfx950 \(about \d+ s\)", lines[0]), lines
    assert re.fullmatch(r"hipforge: building sample for gfx950: done in \d+\.\d s", lines[1]), lines
    stand_in.build()
    assert capfd.readouterr().err == "", "a hit is not slow"


def test_a_build_that_fails_is_not_announced_as_done(
    stand_in: StandIn,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in.write("sample.cu", "#error no\n")
    with pytest.raises(BuildError):
        stand_in.build()
    assert "done" not in capfd.readouterr().err


def test_the_quiet_setting_silences_it(stand_in: StandIn, capfd: pytest.CaptureFixture[str]) -> None:
    with settings.scope(QUIET=True):
        stand_in.build()
    assert capfd.readouterr().err == ""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_once_it_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(notices, "_BAR_AFTER_S", 0.0)
    with notices.slow("building the emulator", 30.4) as advance:
        advance(0.5)
    text = terminal.getvalue()
    assert "building the emulator (about 30 s)" in text
    assert "━" in text, "no bar was drawn"
