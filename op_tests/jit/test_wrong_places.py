"""Directories, files and consoles that cannot be used: an error of the right class names them, or the build works."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.jit_stand_in import StandIn, library_value, real_clang

from hipforge import nn, settings
from hipforge.cli import decode_step
from hipforge.cli.main import cli
from hipforge.errors import ConfigError, GuardError, HipforgeError, OutOfMemoryError
from hipforge.jit import hip_module, obtain, registry, toolchain, tools
from hipforge.jit.cache import cache_dir, files, locks, trust
from hipforge.ops import fp8_linear
from hipforge.ops.core import tuned
from hipforge.weights import files as checkpoints


def built_by_clang(tmp_path: Path, name: str = "plain") -> int:
    """Build a module that reads the ROCm tree in the cache directory, with this machine's clang."""
    project = tmp_path / name
    project.mkdir(exist_ok=True)
    (project / "own.json").write_text('{"own": {"srcs": ["own.cu"], "archs": ["gfx950"], "bare": true}}')
    (project / "own.cu").write_text('#include <hip/hip_version.h>\nextern "C" int value() { return 3; }\n')
    toolchain._selected.clear()
    cache_dir._store.cache_clear()
    tools._probe_store.cache_clear()
    registry.register(project / "own.json")
    try:
        return library_value(obtain.module(hip_module.request(registry.module("own"), None, "gfx950")).entry)
    finally:
        toolchain._selected.clear()


def directory(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "named"
    if kind == "open":
        path.mkdir()
        path.chmod(0o777)
    elif kind == "a file":
        path.write_text("")
    else:
        names = {"not utf-8": os.fsdecode(b"a\xff"), "a long name": "x" * 300, "a long path": "y/" * 3000}
        path = tmp_path / names[kind]
    return path


@pytest.mark.parametrize("kind", ["open", "a file", "not utf-8", "a long name", "a long path"])
def test_a_cache_directory_that_cannot_be_used_is_not_called_a_missing_compiler(tmp_path: Path, kind: str) -> None:
    path = directory(tmp_path, kind)
    with settings.scope(CACHE_DIR=path, HIPCC=real_clang()):
        with pytest.raises(ConfigError, match=r"HIPFORGE_CACHE_DIR=.* cannot be used: "):
            built_by_clang(tmp_path)
        assert any(isinstance(verdict, toolchain.Refused) for verdict in toolchain.probe_all()), "doctor shows it"


def test_a_full_disk_while_the_rocm_tree_is_made_names_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hipforge.jit.backends.amd import rocm_tree

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rocm_tree, "_assemble", full)
    text = r"HIPFORGE_CACHE_DIR=.*cache cannot be used: No space left"
    with settings.scope(CACHE_DIR=tmp_path / "cache", HIPCC=real_clang()), pytest.raises(ConfigError, match=text):
        built_by_clang(tmp_path)


def test_a_prebuilt_directory_with_a_long_name_is_named(stand_in: StandIn, tmp_path: Path) -> None:
    wanted = hip_module.request(registry.module("sample"), None, "gfx950")
    text = r"HIPFORGE_PREBUILT_DIR=.* a name in it has 300 bytes"
    with settings.scope(PREBUILT_DIR=(tmp_path / ("x" * 300),)), pytest.raises(ConfigError, match=text):
        obtain.look(wanted)


@pytest.mark.parametrize("what", ["cache", "project", "temporary"])
def test_a_percent_sign_in_a_path_is_no_pattern_of_clang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name = "a%41b%%%s"
    if what == "temporary":
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        monkeypatch.setattr(tempfile, "tempdir", None)
    cache = tmp_path / name / "cache" if what == "cache" else tmp_path / "cache"
    with settings.scope(CACHE_DIR=cache, HIPCC=real_clang()):
        assert built_by_clang(tmp_path, name if what == "project" else "plain") == 3


def test_a_tmpdir_that_is_not_there_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with settings.scope(CACHE_DIR=tmp_path / "cache", HIPCC=real_clang()):
        assert built_by_clang(tmp_path) == 3


def test_without_a_home_the_private_directory_is_used_and_the_reason_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id without an entry
    monkeypatch.setattr(cache_dir, "_refused", {})
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with settings.scope(CACHE_DIR=None):
        assert cache_dir.writing_root() == tmp_path / f"hipforge-{os.geteuid()}"
        assert cache_dir.reading_roots() == [tmp_path / f"hipforge-{os.geteuid()}"]
    assert "HOME is not set" in caplog.text


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["digests.json", "toolchains.json", "manifest.json", "failure.json"])
def test_a_fifo_where_a_file_is_kept_is_not_waited_for(stand_in: StandIn, name: str) -> None:
    if name == "failure.json":
        stand_in.write("sample.cu", "broken\n")
    try:
        entry = stand_in.build().entry.path
    except HipforgeError:
        entry = next(stand_in.cache.glob("failed/*"))
    path = stand_in.cache / name if name in ("digests.json", "toolchains.json") else entry / name
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o644)
    tools._probe_store.cache_clear()
    with pytest.raises(HipforgeError) if name == "failure.json" else pytest.MonkeyPatch.context():
        assert library_value(stand_in.build().entry) == 3


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "long"])
def test_a_tuned_table_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    paths = {"device": Path("/dev/zero"), "directory": tmp_path, "long": tmp_path / ("x" * 300)}
    path = paths.get(kind, tmp_path / "f")
    if kind == "fifo":
        os.mkfifo(path)
    from hipforge import ops

    with pytest.raises(ConfigError, match="cannot read the tuned table"):
        tuned.read_rows(ops.schema_of("mxfp8_gemm"), path)


def test_a_home_that_does_not_exist_in_a_list_of_tables_is_a_setting_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HIPFORGE_CONFIG_MXFP8_GEMM", "~nosuchuser/x.csv")
    with pytest.raises(ConfigError, match=r"HIPFORGE_CONFIG_MXFP8_GEMM='~nosuchuser/x\.csv' is not valid"):
        settings.config_override("mxfp8_gemm")


@pytest.mark.parametrize("kind", ["fifo", "NUL", "long"])
def test_a_registry_file_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / {"fifo": "f", "NUL": "a\0b", "long": "x" * 300}[kind]
    if kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(ConfigError):
        registry.register(path)


def test_a_lock_that_is_a_directory_is_named(stand_in: StandIn) -> None:
    (stand_in.cache / "locks/x.lock").mkdir(parents=True)
    text = r"locks/x\.lock is a directory, where hipforge keeps a lock file"
    with pytest.raises(ConfigError, match=text), locks.building(stand_in.cache, "x", "x"):
        pass


def test_a_lock_server_that_does_not_answer_is_no_lock(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fails)
    monkeypatch.setattr(locks, "_flock_works", {})
    assert library_value(stand_in.build().entry) == 3


def test_a_process_that_ignores_sigchld_builds_and_sees_what_failed(stand_in: StandIn) -> None:
    body = """
import signal, subprocess
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(ensure().built, tools.ask("false", ["false"], __import__("pathlib").Path("/bin/false"))[0])
print(signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN)
"""
    done = stand_in.start_child("from hipforge.jit import tools\n" + body)
    out, err = done.communicate(timeout=60)
    assert out.split() == ["True", "1", "True"], err


@pytest.mark.parametrize("key", ["blob_gen_cmd", "HIPFORGE_COMPILER_LAUNCHER"])
def test_an_open_quote_is_named(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        if key == "blob_gen_cmd":
            stand_in.module(blob_gen_cmd=["sh -c 'a"])
        monkeypatch.setenv(key, "ccache 'a")
        settings.COMPILER_LAUNCHER.get()


def test_a_module_name_that_is_too_long_for_a_folder_is_refused(stand_in: StandIn) -> None:
    stand_in.module("m" * 230)
    with pytest.raises(ConfigError, match="230 characters together; 200 is the most"):
        stand_in.build("m" * 230)


def test_a_file_is_never_writable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write(tmp_path / "x", "text")
    finally:
        os.umask(before)
    assert trust.problem(tmp_path / "x") is None


# ---- checkpoints and models ------------------------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text", ['{"quantization_config": 5}', '{"text_config": 5}', '{"quantization_config": [1]}', DEEP]
)
def test_a_wrong_config_of_a_checkpoint_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        checkpoints.configuration(tmp_path)


@pytest.mark.parametrize("change", ["deep", "1e99", "Infinity", "text", "list", "zero heads"])
def test_a_wrong_config_of_a_model_is_named(tmp_path: Path, change: str) -> None:
    config = json.loads((Path(__file__).parents[2] / "examples/configs/llama_3_1_405b.json").read_text())
    text = {
        "deep": DEEP,
        "1e99": json.dumps({**config, "hidden_size": 1e99}),
        "Infinity": json.dumps({**config, "hidden_size": float("inf")}),
        "text": json.dumps({**config, "vocab_size": "many"}),
        "list": "[1]",
        "zero heads": json.dumps({**config, "num_attention_heads": 0, "head_dim": None}),
    }[change]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        decode_step.read(tmp_path / "config.json")


@pytest.mark.parametrize("convert", [fp8_linear.convert_to_float8_training, nn.convert_to_mxfp8])
def test_only_a_module_is_converted(convert: object) -> None:
    with pytest.raises(GuardError, match=r"must be a torch\.nn\.Module; got int"):
        convert(5)  # type: ignore[operator]


@pytest.mark.parametrize("sizes", [(2**40, 2**20), (2**62, 4), (1, 2**31)])
def test_a_cache_of_absurd_size_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises((OutOfMemoryError, GuardError)):
        nn.PagedKVCache(*sizes, 16, 8, 128)


# ---- the command line ------------------------------------------------------------------------------------------------


def test_a_mistyped_variable_is_warned_of_once() -> None:
    environment = {**os.environ, "HIPFORGE_EMULAT": "gfx942", "HIPFORGE_TEST_UNRELATED": "1"}
    code = "from hipforge import devices, settings\ndevices.current()\nsettings.warn_of_mistyped()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("there is no setting HIPFORGE_EMULAT (did you mean HIPFORGE_EMULATE?)") == 1
    assert "UNRELATED" not in done.stderr


def test_a_mistyped_family_of_tables_is_warned_of() -> None:
    names = {"MXFP8_GEM": "tables.csv", "MY_OWN_OP": "mine.csv", "SMALLM_MXFP8": "former.csv", "MXFP4_GEM": ""}
    environment = {**os.environ, **{f"HIPFORGE_CONFIG_{name}": text for name, text in names.items()}}
    code = "from hipforge import devices\ndevices.current()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "no tuned table is read from HIPFORGE_CONFIG_MXFP8_GEM (did you mean MXFP8_GEMM?)" in done.stderr
    assert done.stderr.count("no tuned table") == 1


# doctor, which starts every compiler, with the least that an encoding can have; the others in the full run.
@pytest.mark.parametrize(
    ("words", "encoding"),
    [
        pytest.param(words, encoding, marks=[pytest.mark.full] if words == ["doctor"] and encoding != "ascii" else [])
        for words in (["doctor"], ["cache", "list"], ["--help"])
        for encoding in ("ascii", "latin-1", "cp1252", "shift_jis")
    ],
)
def test_an_output_that_is_not_utf8_gets_what_it_can_show(stand_in: StandIn, encoding: str, words: list[str]) -> None:
    stand_in.build()
    code = f"from hipforge.cli import main; import sys; sys.argv[1:] = {words!r}; main()"
    environment = {**stand_in.environment(), "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode in (0, 1) and b"Traceback" not in done.stderr, done.stderr[-500:]
    done.stdout.decode(encoding)


def test_letters_that_an_encoding_lacks_are_replaced() -> None:
    code = (
        "import click\nfrom hipforge.cli.main import cli\n"
        "cli.add_command(click.Command('x', callback=lambda: print('\\u00b5s \\u2026')))\n"
        "cli.get_command = lambda ctx, name: cli.commands[name]\n"
        "cli.resolve_command = lambda ctx, args: (args[0], cli.commands[args[0]], args[1:])\ncli(['x'])"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "?s ?\n"


def test_a_dry_run_ends_with_what_a_build_would_do_and_shows_commands_only_when_asked(stand_in: StandIn) -> None:
    plain = CliRunner().invoke(cli, ["build", "sample", "--dry-run"]).output
    assert plain.splitlines()[-1].startswith("0 hits, 1 misses, 0 problems; a build would take about ")
    assert "hipcc" not in plain
    assert "hipcc" in CliRunner().invoke(cli, ["build", "sample", "--dry-run", "-v"]).output
