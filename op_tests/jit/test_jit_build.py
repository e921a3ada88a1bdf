"""Building: errors that help, generators, launchers, resource limits, and many modules at once."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers.jit_stand_in import StandIn, library_value, wait_until

from hipforge import settings
from hipforge.errors import ArchError, BuildError, ConfigError, ToolchainError
from hipforge.jit import build, fleet, ninja, registry
from hipforge.jit.cache import limits
from hipforge.jit.cache import store as cache
from hipforge.jit.cache.depfile import missing_headers, parse_depfile
from hipforge.jit.diagnostics import StepFailure
from hipforge.jit.roots import Roots, quote


def failure_of(box: StandIn) -> str:
    with pytest.raises(BuildError) as raised:
        box.build()
    return str(raised.value)


def test_a_build_error_ends_with_the_first_compiler_error_and_says_how_to_rerun(stand_in: StandIn) -> None:
    text = '#warning "look"\nextern "C" int value() { return first; }\nint f() { return second; }\n'
    stand_in.write("sample.cu", text)
    lines = failure_of(stand_in).splitlines()
    assert lines[0].startswith("sample for gfx950 failed to build with hipcc: HIP version: 7.0.51831, AMD clang ")
    assert lines[-1].endswith("error: 'first' was not declared in this scope")
    log = Path(lines[1].removeprefix("log: "))
    assert "second" in log.read_text(), "the full log is kept"
    rerun = lines[2].removeprefix("rerun: ")
    again = subprocess.run(["sh", "-c", rerun], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert again.returncode != 0
    assert "'first' was not declared" in again.stderr
    stand_in.write("sample.cu", 'extern "C" int value() { return 1; }\n')
    assert subprocess.run(["sh", "-c", rerun], capture_output=True, text=True).returncode == 0


def test_a_link_error_is_reported_and_remembered_too(stand_in: StandIn) -> None:
    stand_in.module(extra_ldflags=["-Wl,-z,defs"])
    stand_in.write("sample.cu", 'extern "C" int elsewhere();\nextern "C" int value() { return elsewhere(); }\n')
    assert "undefined symbol: elsewhere" in failure_of(stand_in).splitlines()[-1]
    assert "undefined symbol" in failure_of(stand_in)
    assert len(stand_in.compiles()) == 1


def test_only_the_latest_failure_of_a_module_is_kept(stand_in: StandIn) -> None:
    for name in ("one", "two"):
        stand_in.write("sample.cu", f'extern "C" int value() {{ return {name}; }}\n')
        assert name in failure_of(stand_in)
    assert len(list((stand_in.cache / "failed").iterdir())) == 1
    assert "two" in failure_of(stand_in)
    assert len(stand_in.compiles()) == 2


@pytest.mark.parametrize(
    ("output", "first", "deterministic"),
    [
        ("x.cu:1:1: warning: bad\nx.cu:2:3: error: real\nx.cu:4:1: error: later", "x.cu:2:3: error: real", True),
        (
            "In file included from x.cu:1:\n./h.h:1:2: fatal error: 'n.h' file not found\n1 error generated.",
            "./h.h:1:2: fatal error: 'n.h' file not found",
            True,
        ),
        ("ld.lld: error: undefined symbol: foo", "ld.lld: error: undefined symbol: foo", True),
        ("h.h:1: fatal error: n.h: No file\ncompilation terminated.", "h.h:1: fatal error: n.h: No file", True),
        ("Traceback (most recent call last):\n  File x\nValueError: no such shape", "ValueError: no such shape", True),
        ("x.cu:1:1: error: a\nclang: error: unable to execute command: Killed", "x.cu:1:1: error: a", False),
        ("LLVM ERROR: out of memory", "LLVM ERROR: out of memory", False),
        ("", "the command exited with status 1 and no output", False),
    ],
)
def test_the_first_real_error_is_found(output: str, first: str, deterministic: bool) -> None:
    failure = StepFailure("step", 1, "command", output)
    assert failure.first_error == first
    assert failure.deterministic is deterministic


@pytest.mark.parametrize("status", [137, 143, -9])
def test_a_signal_is_never_the_sources_fault(status: int) -> None:
    assert not StepFailure("step", status, "", "x.cu:1:1: error: real").deterministic


def test_a_launcher_stands_before_compiles_but_not_before_the_link(stand_in: StandIn) -> None:
    launcher = stand_in.folder / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$@" >> {stand_in.folder}/launched\nexec "$@"\n')
    launcher.chmod(0o755)
    with settings.scope(COMPILER_LAUNCHER=f"{launcher} "):
        assert library_value(stand_in.build().entry) == 3
    launched = (stand_in.folder / "launched").read_text().splitlines()
    assert len(launched) == 2
    assert all("-shared" not in line for line in launched)


def test_flags_reach_the_compiler_in_the_order_of_the_entry(stand_in: StandIn) -> None:
    flags = ["-DZ=1", "-UZ", "-DZ=2", "-I${MODULE_DIR}/b", "-I${MODULE_DIR}/a", '-DTEXT=$HOME`x`"it\'s"']
    stand_in.module(flags_extra_hip=flags, extra_ldflags=["-Wl,--as-needed", "-lm", "-Wl,--no-as-needed"])
    stand_in.build()
    shown = [flag.replace("${MODULE_DIR}", str(stand_in.sources)) for flag in flags]
    for call in (call for call in stand_in.calls() if ("-###" not in call and "-O3" in call) or "-O1" in call):
        at = call.index("-DZ=1")
        assert call[at : at + len(flags)] == shown
    link = stand_in.calls()[-1]
    assert link[link.index("-Wl,--as-needed") :][:3] == ["-Wl,--as-needed", "-lm", "-Wl,--no-as-needed"]


def test_sources_of_several_kinds_make_one_library(stand_in: StandIn) -> None:
    stand_in.write("other.cu", "int other() { return 20; }\n")
    stand_in.write("host.cpp", "#if !FOR_HOST || defined(__HIP__)\n#error\n#endif\nint host() { return 100; }\n")
    stand_in.write("sample.cu", 'int other();\nint host();\nextern "C" int value() { return 3 + other() + host(); }\n')
    stand_in.module(srcs=["sample.cu", "other.cu", "host.cpp"], flags_extra_cc=["-DFOR_HOST"])
    built = stand_in.build().entry
    assert library_value(built) == 123
    assert len(stand_in.compiles()) == 2, "a .cpp has no device pass"


def test_a_generator_writes_sources_and_its_output_is_recorded(stand_in: StandIn) -> None:
    script = """\
        import pathlib, sys
        out = pathlib.Path(sys.argv[1])
        (out / "made.h").write_text("#define MADE 40\\n")
        (out / "made.cu").write_text('#include "made.h"\\nint made() { return MADE; }')
        """
    stand_in.write("make.py", script)
    stand_in.write("sample.cu", 'int made();\nextern "C" int value() { return made() + 2; }\n')
    stand_in.module(blob_gen_cmd="${PYTHON} ${MODULE_DIR}/make.py ${GEN}")
    first = stand_in.build()
    assert library_value(first.entry) == 42
    assert set(first.entry.manifest.generated) == {"gen/made.cu", "gen/made.h"}
    assert not stand_in.build().built
    stand_in.write("make.py", script.replace("40", "50"))
    assert library_value(stand_in.build().entry) == 52


def test_a_failing_generator_is_a_build_error_with_its_own_message(stand_in: StandIn) -> None:
    stand_in.write("make.py", "raise SystemExit('make.py: error: no such shape')\n")
    stand_in.module(blob_gen_cmd="${PYTHON} ${MODULE_DIR}/make.py ${GEN}")
    assert failure_of(stand_in).splitlines()[-1] == "make.py: error: no such shape"
    assert not stand_in.compiles()


def test_exceeding_a_resource_limit_fails_with_the_numbers_and_is_remembered(stand_in: StandIn) -> None:
    stand_in.module(resource_limits={"max_vgprs": 4, "min_occupancy": 9})
    message = failure_of(stand_in)
    assert "empty: vgpr allocated is 8, max_vgprs is 4" in message
    assert "empty: occupancy is 8, min_occupancy is 9" in message
    assert failure_of(stand_in) == message
    stand_in.module(resource_limits={"max_vgprs": 8, "max_spills": 0, "max_scratch": 0, "min_occupancy": 8})
    assert stand_in.build().entry.manifest.kernels["empty"]["vgpr_allocated"] == 8
    stand_in.module(resource_limits={"max_lds": 0, "max_vgprs": 7})
    assert "max_vgprs is 7" in failure_of(stand_in), "a limit tightened later refuses the cached binary"
    assert len(stand_in.compiles()) == 1, "limits do not determine the binary"


OLD, NEW = "20.0.0git (roc-7.0.0)", "22.1.8"


def expecting(*compilers: str, **figures: int) -> dict[str, Any]:
    return {"max_scratch": 0, "expected": {"compilers": list(compilers), **figures}}


@pytest.mark.parametrize(("version", "compilers"), [(NEW, ["clang 22.1"]), (OLD, ["clang 22.1", "clang 20"])])
def test_expected_figures_fail_the_build_with_the_compilers_they_were_recorded_with(
    stand_in: StandIn,
    version: str,
    compilers: list[str],
) -> None:
    stand_in.install(version=version)
    stand_in.module(resource_limits=expecting(*compilers, max_vgprs=4, max_spills=0))
    message = failure_of(stand_in)
    assert message.splitlines()[-1] == "empty: vgpr allocated is 8, max_vgprs is 4"
    assert f"figures recorded with {' and '.join(compilers)}" in message


@pytest.mark.parametrize(("version", "compilers"), [(OLD, ["clang 22.1"]), (NEW, ["clang 22.2", "clang 2"])])
def test_expected_figures_are_one_warning_with_another_compiler(
    stand_in: StandIn,
    caplog: pytest.LogCaptureFixture,
    version: str,
    compilers: list[str],
) -> None:
    stand_in.install(version=version)
    stand_in.module(resource_limits=expecting(*compilers, max_vgprs=4, min_occupancy=9))
    with caplog.at_level("WARNING", "hipforge"):
        assert stand_in.build().built
    (line,) = caplog.messages
    used = "clang 20.0.0" if version == OLD else "clang 22.1.8"
    assert line == (
        f"sample for gfx950 built with {used} works, but takes more than expected (figures recorded with "
        f"{' and '.join(compilers)}): empty: vgpr allocated is 8, max_vgprs is 4; empty: occupancy is 8, "
        "min_occupancy is 9"
    )
    with caplog.at_level("WARNING", "hipforge"):
        assert not stand_in.build().built
    assert len(caplog.messages) == 1, "a later lookup has nothing new to say"


@pytest.mark.parametrize("version", [OLD, NEW])
def test_hard_limits_fail_the_build_with_every_compiler(stand_in: StandIn, version: str) -> None:
    stand_in.install(version=version)
    stand_in.module(resource_limits={"max_vgprs": 4, "expected": {"compilers": ["clang 22.1"], "max_spills": 0}})
    assert "empty: vgpr allocated is 8, max_vgprs is 4" in failure_of(stand_in)


def test_expected_figures_of_some_kernels_override_the_general_ones(stand_in: StandIn) -> None:
    stand_in.install(version=NEW)
    general = expecting("clang 22.1", max_vgprs=4)
    stand_in.module(resource_limits={**general, "kernels": {"emp*": {"expected": {"max_vgprs": 8}}}})
    assert stand_in.build().built
    stand_in.module(resource_limits={**general, "kernels": {"other*": {"expected": {"max_vgprs": 8}}}})
    assert "max_vgprs is 4" in failure_of(stand_in)


def test_a_work_group_that_cannot_be_resident_is_refused_with_every_compiler(stand_in: StandIn) -> None:
    built = stand_in.build().entry
    large = {"empty": {**built.manifest.kernels["empty"], "max_workgroup_size": 1024, "occupancy": 3}}
    manifest = dataclasses.replace(built.manifest, kernels=large)
    stand_in.module(resource_limits={"max_scratch": 0})
    error = limits.problem(dataclasses.replace(built, manifest=manifest), stand_in.spec())
    assert error is not None
    assert (
        str(error)
        .splitlines()[-1]
        .startswith("empty: a work-group of 1024 is 16 waves, its registers leave room for 12 per CU")
    )
    assert limits.problem(built, stand_in.spec()) is None


def test_a_limit_for_some_kernels_overrides_the_general_one(stand_in: StandIn) -> None:
    stand_in.module(resource_limits={"max_vgprs": 4, "kernels": {"other*": {"max_vgprs": 2}, "emp*": {"max_vgprs": 8}}})
    assert stand_in.build().built


def test_a_library_for_another_gpu_is_refused_before_it_is_published(stand_in: StandIn) -> None:
    folder = stand_in.hipcc.parent
    (folder / "gfx950.co").write_bytes((folder / "gfx942.co").read_bytes())
    assert "holds code for gfx942, not for gfx950" in failure_of(stand_in)
    assert not (stand_in.cache / "gfx950").exists()


def test_verbose_prints_commands_and_output(stand_in: StandIn, capfd: pytest.CaptureFixture[str]) -> None:
    stand_in.write("sample.cu", '#warning "look here"\nextern "C" int value() { return 1; }\n')
    with settings.scope(VERBOSE=True):
        stand_in.build()
    shown = capfd.readouterr().err
    assert "--cuda-device-only" in shown
    assert "look here" in shown


def test_compilers_are_told_how_to_take_memory_and_a_users_words_for_it_come_last(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(before='echo "$GLIBC_TUNABLES" > "$here/tunables"')
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    stand_in.build()
    told = (stand_in.hipcc.parent / "tunables").read_text().strip().split(":")
    assert told[-1] == "glibc.malloc.hugetlb=0" and "glibc.malloc.hugetlb=1" in told[:-1]


def test_jobs_are_capped_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(6)))
    assert build.capped_jobs(100) <= 6
    assert build.capped_jobs(1) == 1
    with settings.scope(MAX_JOBS=2):
        assert build.capped_jobs() <= 2
    monkeypatch.setattr(build, "_BYTES_PER_JOB", 1 << 60)
    assert build.capped_jobs(100) == 1


# --- many at once ---------------------------------------------------------------------------------------------------


def fleet_of(box: StandIn) -> list[fleet.Event]:
    events: list[fleet.Event] = []
    box.write("good.cu", 'extern "C" int value() { return N; }\n')
    box.write("bad.cu", 'extern "C" int value() { return missing; }\n')
    box.module("good", srcs=["good.cu"], variants={"N": [1, 2]})
    box.module("bad", srcs=["bad.cu"], archs=["gfx950"])
    return events


def test_one_ninja_builds_all_and_a_failure_does_not_stop_the_others(stand_in: StandIn) -> None:
    events = fleet_of(stand_in)
    # The compile of "sample" for gfx942 ends only after a module was published: one that never is fails it.
    stand_in.install(
        before=textwrap.dedent("""\
            case "$line" in
              *"|-fsyntax-only|"*) ;;
              *--offload-arch=gfx942*sample.cu*)
                tries=0
                until [ -f "$here/published" ]; do
                  tries=$((tries + 1)); [ $tries -le 300 ] || { echo "nothing was published" >&2; exit 1; }
                  sleep 0.1
                done;;
            esac""")
    )

    def seen(event: fleet.Event) -> None:
        events.append(event)
        if event.kind == "finished":
            (stand_in.hipcc.parent / "published").touch()

    wanted = fleet.requests(["good", "bad", "sample"], ["gfx942", "gfx950"])
    assert len(wanted) == 2 * 2 + 1 + 2
    outcomes = fleet.build_many(wanted, 2, seen)
    assert [outcome.status for outcome in outcomes] == ["built"] * 4 + ["failed"] + ["built"] * 2
    assert [library_value(outcome.entry) for outcome in outcomes[:4] if outcome.entry] == [1, 2, 1, 2]
    assert "'missing' was not declared" in str(outcomes[4].error)
    kinds = [event.kind for event in events]
    assert kinds.count("started") == 7
    assert kinds.count("finished") == 6
    assert kinds.count("failed") == 1
    assert not list((stand_in.cache / "staging").iterdir())
    compiles = len(stand_in.compiles())
    again = fleet.build_many(wanted, 2, events.append)
    assert [outcome.status for outcome in again] == ["hit"] * 4 + ["failed"] + ["hit"] * 2
    assert len(stand_in.compiles()) == compiles, "a remembered failure is not built again"


def host_compiles(box: StandIn) -> list[list[str]]:
    return [call for call in box.calls() if "--cuda-host-only" in call and "-fsyntax-only" not in call]


def test_the_host_code_of_a_variant_is_compiled_once_for_all_architectures(stand_in: StandIn) -> None:
    stand_in.write("good.cu", '#include "value.h"\nextern "C" int value() { return N + VALUE; }\n')
    stand_in.module("good", srcs=["good.cu"], variants={"N": [1, 2]})
    wanted = fleet.requests(["good"], ["gfx942", "gfx950"])
    outcomes = fleet.build_many(wanted, 2, lambda _: None)
    assert [library_value(outcome.entry) for outcome in outcomes if outcome.entry] == [4, 5, 4, 5]
    assert len(host_compiles(stand_in)) == 2
    assert len(stand_in.compiles()) == 4
    for outcome in outcomes:
        assert outcome.seconds > 0
        assert outcome.entry
        assert outcome.entry.manifest.dependencies == outcomes[0].entry.manifest.dependencies  # type: ignore[union-attr]
    stand_in.write("value.h", "#define VALUE 30\n")
    again = fleet.build_many(fleet.requests(["good"], ["gfx942", "gfx950"]), 2, lambda _: None)
    assert [library_value(outcome.entry) for outcome in again if outcome.entry] == [31, 32, 31, 32]
    assert len(host_compiles(stand_in)) == 4


def test_host_code_that_does_not_compile_is_the_same_error_for_each_architecture(stand_in: StandIn) -> None:
    stand_in.write("half.cu", '#if !defined(__gfx950__)\n#include "none.h"\n#endif\nint value() { return 1; }\n')
    stand_in.module("half", srcs=["half.cu"])
    wanted = fleet.requests(["half"], ["gfx942", "gfx950"])
    outcomes = fleet.build_many(wanted, 2, lambda _: None)
    assert [outcome.status for outcome in outcomes] == ["failed"] * 2
    assert len(host_compiles(stand_in)) == 1
    for outcome in outcomes:
        assert "none.h" in str(outcome.error)
        assert f"for {outcome.planned.request.arch} failed to build" in str(outcome.error)
    stand_in.write("none.h", "")
    fixed = fleet.build_many(fleet.requests(["half"], ["gfx942", "gfx950"]), 2, lambda _: None)
    assert [outcome.status for outcome in fixed] == ["built"] * 2, "the missing header was remembered for both"


def test_a_module_takes_the_shared_host_code_whatever_becomes_of_the_other(stand_in: StandIn) -> None:
    stand_in.install(before='case "$line" in *gfx942*cuda-device-only*) exit 1;; esac')
    outcomes = fleet.build_many(fleet.requests(["sample"], ["gfx942", "gfx950"]), 1, lambda _: None)
    assert [outcome.status for outcome in outcomes] == ["failed", "built"]
    assert len(host_compiles(stand_in)) == 1


def test_a_plan_says_hit_or_miss_with_commands_and_an_estimate_and_builds_nothing(stand_in: StandIn) -> None:
    fleet_of(stand_in)
    stand_in.build("good", {"N": 1})
    compiles = len(stand_in.compiles())
    hit, miss = fleet.plan(fleet.requests(["good"], ["gfx950"]))
    assert hit.entry is not None
    assert hit.commands == []
    assert miss.entry is None
    assert hit.estimate is not None
    assert miss.estimate == hit.estimate, "a variant never built is estimated from its siblings"
    assert [command.split()[0] for command in miss.commands] == [str(stand_in.hipcc)] * 3
    assert "-DN=2" in miss.commands[0]
    assert len(stand_in.compiles()) == compiles


def test_a_module_that_another_process_builds_is_waited_for(stand_in: StandIn) -> None:
    fleet_of(stand_in)
    stand_in.install(before='if [ -f "$here/slow" ]; then sleep 1; fi')
    (stand_in.hipcc.parent / "slow").touch()
    other = stand_in.start_child("ensure()")
    wait_until(stand_in.compiles)
    outcomes = fleet.build_many(fleet.requests(["sample", "good"], ["gfx950"]), 2, lambda _: None)
    assert [outcome.status for outcome in outcomes] == ["built"] * 3
    assert len([call for call in stand_in.compiles() if any("sample.cu" in word for word in call)]) == 1
    other.communicate(timeout=60)


def test_no_toolchain_is_one_failure_per_request_not_a_crash(stand_in: StandIn) -> None:
    with settings.scope(HIPCC=stand_in.folder / "nowhere"):
        (outcome,) = fleet.build_many(fleet.requests(["sample"], ["gfx950"]), 1, lambda _: None)
    assert outcome.status == "failed"
    assert isinstance(outcome.error, ToolchainError)


# --- small parts ----------------------------------------------------------------------------------------------------


def test_depfiles_are_parsed_with_escapes_and_several_rules() -> None:
    text = "a.o b.o: x.cu \\\n  dir\\ one/y.h c\\#d.h $$e.h\nx.o: x.cu z.h\n\nz.h:\n"
    assert parse_depfile(text) == ["x.cu", "dir one/y.h", "c#d.h", "$e.h", "z.h"]


def test_depfiles_are_read_as_ninja_reads_them(tmp_path: Path) -> None:
    """Names of pieces that matter, as ninja itself takes them; but for ``\\$$``, at which its names end."""
    pieces = ["a", "b/", "\\", "\\\\", "\\ ", "\\#", "$$", "x.h", "\\:c"]
    draw = random.Random(7)
    rules, texts = ["rule read\n  command = touch $out\n  depfile = $out.d\n  deps = gcc\n"], []
    for number in range(300):
        words = ["".join(draw.choices(pieces, k=draw.randint(1, 6))) for _ in range(3)]
        words = [re.sub(r"\\+[$]", "$", word) for word in words]
        texts.append(f"{number}: {draw.choice([' ', chr(92) + chr(10) + ' ']).join(words)}\n")
        (tmp_path / f"{number}.d").write_text(texts[-1])
        rules.append(f"build {number}: read\n")
    (tmp_path / "build.ninja").write_text("".join(rules))
    subprocess.run([ninja.executable(), "-j4"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    command = [ninja.executable(), "-t", "deps"]
    told = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    blocks = [block.split("\n") for block in told.strip().split("\n\n")]
    for first, *names in blocks:
        text = texts[int(first.partition(":")[0])]
        assert list(map(os.path.normpath, parse_depfile(text))) == [name[4:] for name in names], text
    assert len(blocks) == 300


def test_missing_headers_may_appear_beside_any_file_read_or_on_the_include_path() -> None:
    assert missing_headers(["n.h"], ["/a/x.cu", "/b/y.h"], ["/i"]) == ["/i/n.h", "/a/n.h", "/b/n.h"]


def test_roots_hide_the_longest_and_show_it_again() -> None:
    roots = Roots({"A": "/one", "B": "/one/two"})
    assert roots.hide("/one/two/x") == "${B}/x"
    assert roots.hide("/one/twofold/x") == "${A}/twofold/x"
    assert roots.hide("/else/x") == "/else/x"
    assert roots.show("${B}/x:${A}") == "/one/two/x:/one"
    assert roots.show("${B}/x") == "/one/two/x"


@pytest.mark.parametrize("word", ["plain", "", "a b", "it's", '"q"', "$HOME", "`x`", "${A}/with space", "-I${A}/$x"])
def test_a_quoted_word_reaches_the_command_unchanged(tmp_path: Path, word: str) -> None:
    """Through ninja and the shell, with a root that needs quoting itself."""
    root = tmp_path / "a root's $name"
    root.mkdir()
    step = ninja.Step("show", ("printf", "%s", word), ("out",))
    (tmp_path / "build").mkdir()
    text = ninja.whole_file({"A": str(root)}, ninja.body([step], "t"), out="build")
    (tmp_path / "build.ninja").write_text(text)
    # The rule ends with success when the command does; what it printed is in the log.
    subprocess.run([ninja.executable(), "-C", str(tmp_path), "--quiet"], capture_output=True)
    assert (tmp_path / "build/show.log").read_text() == word.replace("${A}", str(root))
    assert quote("plain") == "plain"


def test_an_entry_is_readable_by_others_as_the_umask_says(stand_in: StandIn) -> None:
    entry = stand_in.build().entry
    assert entry.path.stat().st_mode & 0o055 == 0o055
    assert cache.read_entry(entry.path) is not None


def test_what_cannot_be_asked_for_is_refused_with_what_can(stand_in: StandIn) -> None:
    with pytest.raises(ConfigError, match="sample"):
        fleet.requests(["nope"], ["gfx950"])
    with pytest.raises(ConfigError, match="unknown architecture 'gfx1100'; known: gfx950, gfx942"):
        fleet.requests(["sample"], ["gfx950", "gfx1100"])
    stand_in.module(archs=["gfx950"])
    with pytest.raises(ArchError, match="nothing to build for gfx942: sample is built for gfx950"):
        fleet.requests(["sample"], ["gfx942"])
    assert registry.module("sample")
