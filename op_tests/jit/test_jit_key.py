"""The cache key: everything that determines a binary is in it, and nothing else is."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pybind11
import pytest
from helpers.jit_stand_in import StandIn, library_value

import hipforge
from hipforge import settings
from hipforge.jit import digest, hip_module, host_library, registry, spec, tools
from hipforge.jit.backends.amd import hip_clang
from hipforge.jit.cache import cache_dir
from hipforge.jit.obtain import Ready, binary
from hipforge.jit.spec import INGREDIENTS, KEY_ENVIRONMENT, BuildSpec, category

Patch = pytest.MonkeyPatch


class Case:
    """A build that can be repeated, and its spec."""

    def __init__(self, box: StandIn, patch: Patch) -> None:
        self.box = box
        self.patch = patch
        self.arguments: dict[str, object] = {}

    def spec(self) -> BuildSpec:
        return self.box.spec(**self.arguments)  # type: ignore[arg-type]

    def build(self) -> Ready:
        cache_dir._store.cache_clear()
        return binary(self.spec())


class HostCase(Case):
    """The same for a host library built with -march=native."""

    def spec(self) -> BuildSpec:
        source = self.box.sources / "host.c"
        wanted = host_library.request("host_sample", sources=[source], cflags=["-march=native"], ldflags=[])
        return host_library.specification(wanted)


def change_module(case: Case) -> None:
    case.box.module("renamed", **MODULE)
    case.arguments["name"] = "renamed"


def change_steps(case: Case) -> None:
    original = hip_clang.HipClang.link

    def link(self: hip_clang.HipClang, objects: list[str], ldflags: list[str], library: str) -> object:
        return original(self, objects, [*ldflags, "-Wl,-O1"], library)

    case.patch.setattr(hip_clang.HipClang, "link", link)


def change_answer(case: Case, owner: Any, function: str, asked: str, answer: str) -> None:
    """A function of one name answers otherwise."""
    original = getattr(owner, function)
    case.patch.setattr(owner, function, lambda name: answer if name == asked else original(name))


GENERATOR = """\
import sys, pathlib
pathlib.Path(sys.argv[1], "made.cu").write_text('extern "C" int made() { return 1; }')
"""

MODULE = {
    "srcs": ["sample.cu"],
    "variants": {"ROWS": [1, 2]},
    "flags_extra_hip": ["-DA", "-DB"],
    "blob_gen_cmd": "${PYTHON} ${MODULE_DIR}/make.py ${GEN}",
    "ffi": "pybind11",
}

# ingredient: (how to change it, other ingredients that necessarily change with it)
CHANGES: dict[str, tuple[Callable[[Case], object], set[str]]] = {
    "format": (lambda case: case.patch.setattr(spec, "FORMAT", spec.FORMAT + 1), set()),
    "hipforge": (lambda case: case.patch.setattr(hipforge, "__version__", "99.0"), set()),
    "abi": (lambda case: case.patch.setattr(spec, "ABI_VERSION", spec.ABI_VERSION + 1), set()),
    "module": (change_module, {"steps", "files"}),
    "target": (lambda case: case.arguments.update(arch="gfx942"), {"steps", "files"}),
    "variant": (lambda case: case.arguments.update(variant={"ROWS": 2}), {"steps"}),
    # The same flags in another order.
    "flags": (lambda case: case.box.module(**{**MODULE, "flags_extra_hip": ["-DB", "-DA"]}), {"steps"}),
    "source": (lambda case: case.box.write("sample.cu", 'extern "C" int value() { return 4; }\n'), set()),
    "generator": (lambda case: case.box.write("make.py", GENERATOR + "# another\n"), set()),
    "steps": (change_steps, set()),
    "files": (lambda case: case.patch.setattr(hip_clang, "_PIECE", hip_clang._PIECE + "# another\n"), set()),
    "compiler": (lambda case: case.box.install(version="20.0.1git (roc-7.0.1)"), set()),
    "device library": (lambda case: (case.box.folder / "amdgcn/bitcode/ocml.bc").write_bytes(b"another"), set()),
    "host headers": (lambda case: (case.box.folder / "gcc/13").mkdir(), set()),
    # The compiler is told -march=native whatever this says, so the library still runs here.
    "host cpu": (lambda case: case.patch.setattr(host_library, "native", lambda: "another cpu"), set()),
    "environment": (lambda case: case.patch.setenv("CPATH", str(case.box.sources)), set()),
    "python": (lambda case: change_answer(case, sysconfig, "get_config_var", "SOABI", "another"), set()),
    "pybind11": (lambda case: case.patch.setattr(pybind11, "__version__", "99.0"), set()),
    "torch": (lambda case: change_answer(case, importlib.metadata, "version", "torch", "99.0"), set()),
}


@pytest.fixture
def case(stand_in: StandIn, monkeypatch: Patch, request: pytest.FixtureRequest) -> Case:
    for name in KEY_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    stand_in.write("make.py", GENERATOR)
    stand_in.write("host.c", "int value(void) { return 3; }\n")
    stand_in.module(**MODULE)
    (stand_in.folder / "amdgcn/bitcode").mkdir(parents=True)
    (stand_in.folder / "amdgcn/bitcode/ocml.bc").write_bytes(b"one")
    (stand_in.folder / "gcc").mkdir()
    monkeypatch.setattr(hip_clang, "_GCC_INSTALLATIONS", str(stand_in.folder / "gcc"))
    on_host = getattr(request, "param", "") == "host cpu"
    made = HostCase(stand_in, monkeypatch) if on_host else Case(stand_in, monkeypatch)
    if not on_host:
        made.arguments["variant"] = {"ROWS": 1}
    return made


def test_every_ingredient_is_perturbed_below() -> None:
    assert set(CHANGES) == set(INGREDIENTS)


@pytest.mark.parametrize(("case", "ingredient"), [(name, name) for name in CHANGES], indirect=["case"])
def test_a_changed_ingredient_is_a_miss_and_changes_nothing_else(case: Case, ingredient: str) -> None:
    change, consequences = CHANGES[ingredient]
    before = case.spec().ingredients
    assert case.build().built
    assert not case.build().built, "an unchanged module was built twice"
    change(case)
    tools._probe_store.cache_clear()
    after = case.spec().ingredients
    changed = {category(name) for name in {*before, *after} if before.get(name) != after.get(name)}
    assert changed == {ingredient, *consequences}
    assert case.build().built
    assert not case.build().built


def test_every_ingredient_of_a_real_spec_is_a_known_one(case: Case) -> None:
    assert {category(name) for name in case.spec().ingredients} <= set(INGREDIENTS)


@pytest.mark.parametrize("variable", KEY_ENVIRONMENT)
def test_each_compiler_variable_is_in_the_key(case: Case, variable: str) -> None:
    before = case.spec().key
    case.patch.setenv(variable, "/tmp")
    assert case.spec().key != before


def test_an_edited_header_is_a_miss_and_restoring_it_a_hit(stand_in: StandIn) -> None:
    assert library_value(stand_in.build().entry) == 3
    stand_in.write("value.h", "#define VALUE 5\n")
    changed = stand_in.build()
    assert changed.built
    assert library_value(changed.entry) == 5
    stand_in.write("value.h", "#define VALUE 3\n")
    restored = stand_in.build()
    assert not restored.built
    assert library_value(restored.entry) == 3


def test_a_header_behind_isystem_is_in_the_key(stand_in: StandIn) -> None:
    stand_in.write("system/limit.h", "#define LIMIT 1\n")
    stand_in.write("sample.cu", '#include <limit.h>\nextern "C" int value() { return LIMIT; }\n')
    stand_in.module(flags_extra_hip=["-isystem", "${MODULE_DIR}/system"])
    assert library_value(stand_in.build().entry) == 1
    stand_in.write("system/limit.h", "#define LIMIT 2\n")
    assert library_value(stand_in.build().entry) == 2


def test_a_header_that_only_the_device_pass_includes_is_in_the_key(stand_in: StandIn) -> None:
    stand_in.write("device.h", "#define WAVE 64\n")
    text = '#ifdef __gfx950__\n#include "device.h"\n#endif\nextern "C" int value() { return 1; }\n'
    stand_in.write("sample.cu", text)
    assert stand_in.build().built
    stand_in.write("device.h", "#define WAVE 32\n")
    assert stand_in.build().built


def test_new_content_with_an_older_mtime_is_a_miss(stand_in: StandIn, monkeypatch: Patch) -> None:
    monkeypatch.setattr(digest, "_RACE_NS", 0)  # remember digests of files made a moment ago
    stand_in.build()
    header = stand_in.sources / "value.h"
    header.write_text("#define VALUE 7\n")
    os.utime(header, (1_000_000_000, 1_000_000_000))
    built = stand_in.build()
    assert built.built
    assert library_value(built.entry) == 7


def test_new_content_with_the_same_size_and_mtime_is_a_miss(
    stand_in: StandIn,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(digest, "_RACE_NS", 0)  # remember digests of files made a moment ago
    header = stand_in.sources / "value.h"
    stand_in.build()
    before = header.stat()
    with header.open("r+") as file:
        file.write("#define VALUE 8\n")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = header.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert library_value(stand_in.build().entry) == 8


def test_a_compiler_replaced_in_place_by_one_of_the_same_version_is_a_miss(stand_in: StandIn) -> None:
    stand_in.build()
    stand_in.install(before="# the same version, other bytes")
    assert stand_in.build().built


def touch_everything(box: StandIn) -> None:
    for path in box.sources.rglob("*"):
        path.touch()


def check_out_again_with_older_mtimes(box: StandIn) -> None:
    for path in [*box.sources.rglob("*"), box.hipcc]:
        data, mode = path.read_bytes(), path.stat().st_mode
        path.unlink()
        path.write_bytes(data)
        path.chmod(mode)
        os.utime(path, (1_000_000_000, 1_000_000_000))


def set_the_clock_ahead(box: StandIn) -> None:
    tomorrow = time.time() + 86_400
    for path in [*box.sources.rglob("*"), box.hipcc]:
        os.utime(path, (tomorrow, tomorrow))


def move_the_clone(box: StandIn) -> None:
    moved = box.folder / "elsewhere"
    shutil.move(box.sources, moved)
    registry._registered.clear()
    registry.register(moved / "sample.json")


def move_the_compiler(box: StandIn) -> None:
    moved = box.folder / "opt/rocm-7/bin"
    moved.parent.mkdir(parents=True)
    shutil.move(box.hipcc.parent, moved)
    settings._overrides["HIPFORGE_HIPCC"] = moved / "hipcc"


def ask_for_other_jobs_and_more_words(box: StandIn) -> None:
    settings._overrides["HIPFORGE_MAX_JOBS"] = 7
    settings._overrides["HIPFORGE_VERBOSE"] = True
    box.module(verbose=True)


def put_a_launcher_in_front(box: StandIn) -> None:
    settings._overrides["HIPFORGE_COMPILER_LAUNCHER"] = "env"


def set_unrelated_variables(box: StandIn) -> None:
    os.environ["HIPFORGE_TEST_UNRELATED"] = "1"


@pytest.mark.parametrize(
    "change",
    [touch_everything, check_out_again_with_older_mtimes, set_the_clock_ahead, move_the_clone, move_the_compiler,
     ask_for_other_jobs_and_more_words, put_a_launcher_in_front, set_unrelated_variables],
)  # fmt: skip
def test_what_does_not_determine_the_binary_is_still_a_hit(
    stand_in: StandIn,
    change: Callable[[StandIn], None],
    monkeypatch: Patch,
) -> None:
    monkeypatch.delenv("HIPFORGE_TEST_UNRELATED", raising=False)
    monkeypatch.setattr(settings, "_overrides", dict(settings._overrides))
    assert stand_in.build().built
    change(stand_in)
    tools._probe_store.cache_clear()
    assert not stand_in.build().built


def test_no_unordered_container_reaches_the_key(stand_in: StandIn) -> None:
    """Two processes with different hash seeds agree on the key."""
    program = (
        "spec = hip_module.specification(hip_module.request(registry.module('sample'), None, 'gfx950'),"
        " toolchain.select('gfx950'))\nprint(spec.key, spec.ninja_body())\n"
    )
    outputs = set()
    for seed in ("1", "2", "3"):
        child = stand_in.start_child(program, PYTHONHASHSEED=seed)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        outputs.add(out)
    assert len(outputs) == 1


def test_the_abi_version_is_the_headers() -> None:
    header = Path(hip_module.package_roots().paths["CSRC"]) / "include/hipforge/host/abi.h"
    assert f"#define HF_ABI_VERSION {spec.ABI_VERSION}\n" in header.read_text()
