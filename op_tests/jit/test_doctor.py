"""What ``hipforge doctor`` finds, and what it and ``cache list`` say of modules built ahead of time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.command_line import answer, invoke
from helpers.jit_stand_in import StandIn

from hipforge import devices, settings
from hipforge.cli import doctor
from hipforge.jit import toolchain
from hipforge.jit.cache import prebuilt
from hipforge.jit.cache import store as cache


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with what this machine's own compilers answer, and the ROCm tree: seconds for each doctor."""
    folder = tmp_path_factory.mktemp("asked")
    with settings.scope(CACHE_DIR=folder):
        invoke("doctor")
    return folder


@pytest.fixture
def knowing(stand_in: StandIn, asked: Path) -> StandIn:
    """The stand-in, and the answers of the compilers beside it."""
    shutil.copytree(asked, stand_in.cache, symlinks=True)
    return stand_in


def test_doctor_gives_each_toolchain_and_device_a_reason_and_takes_one_of_each(knowing: StandIn) -> None:
    findings = answer("doctor")
    for kind in ("toolchain", "device"):
        taken = [item for item in findings if item["kind"] == kind and item["taken"]]
        assert len(taken) == 1 and taken[0]["usable"]
    assert all(item["detail"] for item in findings)
    assert str(knowing.hipcc) in next(item["name"] for item in findings if item["taken"])


def test_doctor_names_the_modules_that_no_gpu_has_run_and_the_card_of_those_that_one_has() -> None:
    (found,) = (item for item in answer("doctor") if item["kind"] == "gpu record")
    folder = Path(__file__).parents[1] / "gpu"
    record, pending = (json.loads((folder / f"{name}.json").read_text()) for name in ("record", "pending"))
    assert found["detail"].startswith(f"{len(record)} module variants ran on a GPU (")
    assert all(name in found["detail"] for name in (*pending, *(run["card"] for run in record.values())))


def test_doctor_replaces_a_named_compiler_by_no_other(knowing: StandIn) -> None:
    knowing.hipcc.unlink()
    result = invoke("doctor", "--json")
    found = [item for item in json.loads(result.stdout) if item["kind"] == "toolchain"]
    found = [item for item in found if "nvcc" not in item["name"]]  # another vendor's
    assert result.exit_code == 1 and not any(item["usable"] for item in found)
    assert found[0]["detail"] == "there is no such file" and "HIPFORGE_HIPCC" in found[-1]["detail"]


def test_doctor_ends_with_1_where_nothing_can_build(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = toolchain.Refused("hipcc", None, "there is none")
    monkeypatch.setattr(toolchain, "probe_all", lambda arch: [refused])
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "there is none" in result.output and "Nothing here can build" in result.output


def test_doctor_judges_every_setting_and_names_the_one_that_was_meant(
    knowing: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(item["usable"] for item in answer("doctor") if item["kind"] == "setting")
    monkeypatch.setenv("HIPFORGE_MAX_JOBS", "many")
    monkeypatch.setenv("HIPFORGE_DEVCE", "hip")
    monkeypatch.setenv("HIPFORGE_PREBUILT_DIR", "/tmp:/no/such")
    monkeypatch.setenv("HIPFORGE_CONFIG_MXFP8_GEMM", "/no/such.csv")
    monkeypatch.setenv("HIPFORGE_CONFIG_SMALM", "/no/such.csv")
    result = invoke("doctor", "--json")
    refused = {
        item["name"].partition("=")[0]: item["detail"]
        for item in json.loads(result.stdout)
        if item["kind"] == "setting" and not item["usable"]
    }
    assert result.exit_code == 1
    assert refused["HIPFORGE_MAX_JOBS"] == "HIPFORGE_MAX_JOBS='many' is not valid: expected a positive integer"
    assert "did you mean HIPFORGE_DEVICE?" in refused["HIPFORGE_DEVCE"]
    assert refused["HIPFORGE_PREBUILT_DIR"] == "there is no directory /no/such"
    assert "HIPFORGE_CONFIG_MXFP8_GEMM names this file" in refused["HIPFORGE_CONFIG_MXFP8_GEMM"]
    assert "no tuned table 'smalm'; known: decode_attention_fp8, " in refused["HIPFORGE_CONFIG_SMALM"]
    assert len(refused) == 5


def test_doctor_survives_a_refused_device(knowing: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.current.cache_clear()
    monkeypatch.setenv("HIPFORGE_DEVICE", "tpu")
    result = invoke("doctor", "--json")
    devices.current.cache_clear()
    gpu = next(item for item in json.loads(result.stdout) if item["name"] == "AMD GPU")
    assert result.exit_code == 1 and "HIPFORGE_DEVICE='tpu' is not valid" in gpu["detail"]


def test_doctor_reports_what_is_broken_and_prints_no_traceback(
    knowing: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> list[object]:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "device_findings", broken)
    result = invoke("doctor", "--json")
    (device,) = [item for item in json.loads(result.stdout) if item["kind"] == "device"]
    assert result.exit_code == 1 and not device["usable"] and device["detail"].startswith("OSError: libtorch_cpu.so")
    assert isinstance(result.exception, SystemExit)


@pytest.fixture
def ahead(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the stand-in's module and an emulator built ahead of time, and no compiler to build another."""
    entry = stand_in.build().entry
    host = replace(entry, manifest=replace(entry.manifest, target="host", module="emulator"))
    folder = tmp_path / "ahead"
    prebuilt.export([entry], folder)
    shutil.copytree(next(folder.glob("gfx950/*")), folder / "host" / entry.path.name)
    manifest = folder / "host" / entry.path.name / cache.MANIFEST
    manifest.chmod(0o644)
    stated = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**stated, "target": host.manifest.target, "module": host.manifest.module}))
    monkeypatch.setenv("HIPFORGE_PREBUILT_DIR", str(folder))
    monkeypatch.setattr(toolchain, "probe_all", lambda arch: [toolchain.Refused("hipcc", None, "there is none")])
    return folder


def test_doctor_ends_with_0_where_modules_built_ahead_run_without_a_compiler(
    ahead: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "emulator_findings", list)
    result = invoke("doctor", "--json")
    (found,) = [item for item in json.loads(result.stdout) if item["kind"] == "prebuilt"]
    assert found["usable"] and found["detail"].startswith("1 of 1 libraries of kernels fit this installation (gfx950)")
    assert result.exit_code == 0 and "Modules built ahead of time run without" in result.stderr
    for path in ahead.glob("gfx950/*/*"):
        path.chmod(0o600)
    shutil.rmtree(ahead / "gfx950")
    assert invoke("doctor").exit_code == 1, "no kernel is left"


def test_doctor_looks_for_what_the_emulator_needs(knowing: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def emulator() -> dict[str, object]:
        return next(item for item in json.loads(invoke("doctor", "--json").stdout) if item["kind"] == "emulator")

    monkeypatch.setenv("CXX", "g++")
    assert emulator()["usable"] and "will be built by" in emulator()["detail"] and invoke("doctor").exit_code == 0
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "looked for CXX=no-such-compiler" in emulator()["detail"] and invoke("doctor").exit_code == 1
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setenv("HIPFORGE_DISABLE_JIT", "1")
    assert "forbids building it" in emulator()["detail"]
    result = invoke("doctor")
    assert result.exit_code == 1 and "HIPFORGE_DISABLE_JIT=1: nothing is built" in result.stderr
    knowing.build()
    monkeypatch.setattr(doctor, "emulator_findings", list)
    assert invoke("doctor").exit_code == 0, "what is built already runs"


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("HIPFORGE_CACHE_DIR", "/proc/nope", "cannot be used"),
        ("HIPFORGE_COMPILER_LAUNCHER", "no-such-launcher --fast", "there is no executable no-such-launcher"),
        ("HIPFORGE_COMPILER_LAUNCHER", "'", "cannot be split into words"),
    ],
)
def test_doctor_tries_settings_that_name_something(
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str,
    reason: str,
) -> None:
    monkeypatch.setenv(setting, value)
    result = invoke("doctor", "--json")
    (found,) = [item for item in json.loads(result.stdout) if item["name"] == f"{setting}={value}"]
    assert result.exit_code == 1 and not found["usable"] and reason in found["detail"]


def test_cache_list_shows_modules_built_ahead(ahead: Path) -> None:
    rows = answer("cache", "list")
    assert [row["prebuilt"] for row in rows if row["module"] == "sample"] == [True, False]
    assert "prebuilt" in invoke("cache", "list").stdout
