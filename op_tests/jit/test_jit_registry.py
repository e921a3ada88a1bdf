"""The registry: what a JSON entry may say, and how each mistake is named."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from hipforge.errors import ArchError, ConfigError
from hipforge.jit import fleet, hip_module, registry


def write(folder: Path, name: str = "m", file: str = "modules.json", **keys: Any) -> Path:
    path = folder / file
    path.write_text(json.dumps({name: keys}))
    return path


def test_an_entry_is_read_with_paths_relative_to_its_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        srcs=["a.cu", "${CSRC}/b.cu", "/abs/c.cu"],
        extra_include=["include"],
        archs=["gfx942"],
        flags_extra_hip=["-DX=${MODULE_DIR}"],
        variants={"M": [1, 2], "KIND": ["a", "b"]},
    )
    assert registry.register(path) == ["m"]
    entry = registry.module("m")
    assert entry.srcs == ("${MODULE_DIR}/a.cu", "${CSRC}/b.cu", "/abs/c.cu")
    assert entry.extra_include == ("${MODULE_DIR}/include",)
    assert entry.archs == ("gfx942",)
    assert entry.ffi == "abi"
    assert entry.module_dir == tmp_path
    assert list(entry.all_variants()) == [
        {"M": 1, "KIND": "a"},
        {"M": 1, "KIND": "b"},
        {"M": 2, "KIND": "a"},
        {"M": 2, "KIND": "b"},
    ]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"srcs": ["a.cu"], "is_standalone": True}, r"m: unknown key 'is_standalone'; known: srcs, flags_extra_cc"),
        ({}, "m: srcs: at least one source"),
        ({"srcs": "a.cu"}, r"m: srcs: expected a list of strings; got 'a\.cu'"),
        ({"srcs": [1]}, r"m: srcs: expected a list of strings; got \[1\]"),
        ({"srcs": ["${CSRC/a.cu"]}, r"m: srcs: '\$\{CSRC/a.cu' starts with \$\{ but with no placeholder; known: "),
        ({"srcs": ["${HOME}/a.cu"]}, r"m: srcs: unknown placeholder \$\{HOME\}; known: \$\{CSRC\}"),
        ({"srcs": ["a.cu"], "verbose": "yes"}, "m: verbose: expected true or false; got 'yes'"),
        ({"srcs": ["a.cu"], "archs": ["gfx90a"]}, r"archs: expected one or more of .*, sm_90; got \['gfx90a'\]"),
        ({"srcs": ["a.cu"], "archs": []}, "m: archs: expected one or more"),
        ({"srcs": ["a.cu"], "ffi": "ctypes"}, 'm: ffi: expected "abi" or "pybind11"; got \'ctypes\''),
        ({"srcs": ["a.cu"], "variants": [1]}, r"m: variants: expected an object of lists; got \[1\]"),
        ({"srcs": ["a.cu"], "variants": {"M": []}}, "m: variants: 'M' must be a macro name with a list"),
        ({"srcs": ["a.cu"], "variants": {"M": [1.5]}}, "m: variants: 'M' must be a macro name with a list"),
        ({"srcs": ["a.cu"], "variants": {"M": [True]}}, "m: variants: 'M' must be a macro name with a list"),
        ({"srcs": ["a.cu"], "variants": {"M N": [1]}}, "m: variants: 'M N' must be a macro name"),
        ({"srcs": ["a.cu"], "variants": {"M": [1, 1]}}, "m: variants: M lists a value twice"),
        ({"srcs": ["a.cu"], "resource_limits": {"max_regs": 1}}, "unknown limit 'max_regs'; known: max_vgprs"),
        ({"srcs": ["a.cu"], "resource_limits": {"max_vgprs": -1}}, "max_vgprs must be an integer, 0 or more; got -1"),
        ({"srcs": ["a.cu"], "resource_limits": {"kernels": {"k*": {"oops": 1}}}}, r"\['k\*'\]: unknown limit 'oops'"),
        ({"srcs": ["a.cu"], "resource_limits": {"compilers": ["clang 22"]}}, "unknown limit 'compilers'; known: max"),
        ({"srcs": ["a.cu"], "resource_limits": {"expected": {"max_vgprs": 1}}}, r"compilers must be a list .*got None"),
        ({"srcs": ["a.cu"], "resource_limits": {"expected": {"compilers": ["gcc"]}}}, r"got \['gcc'\]"),
        (
            {"srcs": ["a.cu"], "resource_limits": {"expected": {"compilers": ["clang 22"], "kernels": {}}}},
            r"resource_limits.expected: unknown limit 'kernels'; known: .*, compilers",
        ),
        (
            {"srcs": ["a.cu"], "resource_limits": {"kernels": {"k*": {"expected": {"max_vgprs": 1}}}}},
            r"\['k\*'\].expected: resource_limits.expected must name the compilers",
        ),
        (
            {"srcs": ["a.cu"], "resource_limits": {"kernels": {"k*": {"expected": {"compilers": ["clang 22"]}}}}},
            r"\['k\*'\].expected: unknown limit 'compilers'",
        ),
        ({"srcs": ["a.cu"], "resource_limits": {"kernels": [1]}}, r"kernels: expected an object of patterns; got"),
    ],
)
def test_a_mistake_is_refused_naming_file_module_and_key(tmp_path: Path, keys: dict[str, Any], complaint: str) -> None:
    path = write(tmp_path, **keys)
    with pytest.raises(ConfigError, match=complaint) as raised:
        registry.register(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object of modules; got list"),
        ('{"m": 1}', "m: expected an object; got 1"),
        ('{"a b": {}}', "'a b' is not a module name"),
        ('{"m": {"srcs": ["a"]}, "m": {"srcs": ["b"]}}', "'m' appears twice"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "modules.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        registry.register(path)


def test_expressions_are_data(tmp_path: Path) -> None:
    """What other frameworks evaluate stays a string here."""
    path = write(tmp_path, srcs=["a.cu"], flags_extra_hip=["__import__('os').abort()", "$(touch x)", "`touch x`"])
    registry.register(path)
    assert registry.module("m").flags_extra_hip == ("__import__('os').abort()", "$(touch x)", "`touch x`")


def test_a_missing_file_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: No such file or directory"):
        registry.register(tmp_path / "nowhere.json")


def test_a_name_of_another_file_is_refused_and_the_same_file_is_read_again(tmp_path: Path) -> None:
    registry.register(write(tmp_path, srcs=["a.cu"]))
    registry.register(write(tmp_path, srcs=["b.cu"]))
    assert registry.module("m").srcs == ("${MODULE_DIR}/b.cu",)
    with pytest.raises(ConfigError, match=r"m is already defined by .*modules\.json"):
        registry.register(write(tmp_path, file="other.json", srcs=["a.cu"]))


def test_an_unknown_module_lists_the_known_ones(tmp_path: Path) -> None:
    registry.register(write(tmp_path, srcs=["a.cu"]))
    with pytest.raises(ConfigError, match=r"there is no module 'nope'; known: .*\bm\b"):
        registry.module("nope")


@pytest.mark.parametrize(
    ("variant", "complaint"),
    [
        (None, r"variant names are M; got \(none\)"),
        ({"N": 1}, "variant names are M; got N"),
        ({"M": 3}, r"M=3 is not a variant; known: \[1, 2\]"),
        ({"M": 1.0}, r"M=1\.0 is not a variant; known: \[1, 2\]"),  # it would be built as another one
    ],
)
def test_a_variant_that_is_not_listed_is_refused(tmp_path: Path, variant: Any, complaint: str) -> None:
    registry.register(write(tmp_path, srcs=["a.cu"], variants={"M": [1, 2]}))
    with pytest.raises(ConfigError, match=complaint):
        hip_module.request(registry.module("m"), variant, "gfx950")


def test_an_architecture_the_module_has_no_code_for_is_an_arch_error_before_any_build(tmp_path: Path) -> None:
    registry.register(write(tmp_path, srcs=["a.cu"], archs=["gfx942"]))
    with pytest.raises(ArchError, match="m is built for gfx942; this device is gfx950"):
        hip_module.request(registry.module("m"), None, "gfx950:sramecc+:xnack-")


def test_a_missing_source_names_the_path(tmp_path: Path) -> None:
    registry.register(write(tmp_path, srcs=["a.cu"]))
    with pytest.raises(ConfigError, match=rf"m: srcs: there is no {tmp_path}/a\.cu"):
        hip_module.request(registry.module("m"), None, "gfx950")


def test_every_shipped_entry_is_sound_and_its_sources_exist() -> None:
    shipped = registry.shipped()
    assert shipped
    for entry in shipped.values():
        for arch in entry.archs:
            for variant in entry.all_variants():
                assert hip_module.request(entry, variant, arch).portable


def test_what_is_built_ahead_is_checked_and_asked_for(tmp_path: Path) -> None:
    variants = {"M": [1, 2], "KIND": ["a", "b"]}
    ahead = {"gfx950": [[2, "a"]]}
    registry.register(write(tmp_path, srcs=["a.cu"], variants=variants, build_ahead=ahead))
    entry = registry.module("m")
    assert list(entry.ahead_variants("gfx950")) == [{"M": 2, "KIND": "a"}]
    assert list(entry.ahead_variants("gfx942")) == list(entry.all_variants())
    (tmp_path / "a.cu").touch()
    assert [request.variant for request in fleet.requests(["m"], ["gfx950"])] == [{"M": 2, "KIND": "a"}]
    every = fleet.requests(["m"], ["gfx950"], every_variant=True)
    assert len(every) == 4
    for request in every:
        assert ("--every-variant" in request.how_to_get()) == (request.variant != {"M": 2, "KIND": "a"})


@pytest.mark.parametrize(
    ("ahead", "complaint"),
    [
        ([[1, "a"]], "m: build_ahead: expected an object of architectures"),
        ({"gfx90a": [[1, "a"]]}, "m: build_ahead: 'gfx90a' is not one of gfx"),
        ({"gfx950": []}, r"m: build_ahead\.gfx950: expected a list of lists of variant values; got \[\]"),
        ({"gfx950": [1]}, r"build_ahead\.gfx950: expected a list of lists"),
        ({"gfx950": [[1]]}, r"build_ahead\.gfx950: \[1\] is not a variant: give a value for each of M, KIND"),
        ({"gfx950": [[True, "a"]]}, r"build_ahead\.gfx950: \[True, 'a'\] is not a variant"),
        ({"gfx950": [[3, "a"]]}, r"build_ahead\.gfx950: \[3, 'a'\] is not a variant"),
    ],
)
def test_what_is_no_variant_cannot_be_built_ahead(tmp_path: Path, ahead: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        registry.register(write(tmp_path, srcs=["a.cu"], variants={"M": [1, 2], "KIND": ["a", "b"]}, build_ahead=ahead))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose registry has one module, and a kernel folder whose ``modules.json`` has another."""
    for place, name in ((f"jit/{registry.SHIPPED}", "one"), (f"csrc/two/{registry.BESIDE_KERNELS}", "two")):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(json.dumps({name: {"srcs": ["amd/a.cu"]}}))
    monkeypatch.setattr(registry, "package_dir", lambda name: tmp_path / name)
    monkeypatch.setattr(registry, "shipped", functools.cache(registry.shipped.__wrapped__))
    return tmp_path


def test_a_module_may_be_described_beside_its_kernel(package: Path) -> None:
    assert list(registry.shipped()) == ["one", "two"]
    entry = registry.module("two")
    assert (entry.srcs, entry.module_dir) == (("${MODULE_DIR}/amd/a.cu",), package / "csrc" / "two")


def test_a_module_is_described_in_one_place(package: Path) -> None:
    (package / "csrc/two" / registry.BESIDE_KERNELS).write_text(json.dumps({"one": {"srcs": ["a.cu"]}}))
    with pytest.raises(ConfigError, match=r"two/modules\.json: one is already defined by .*optCompilerConfig\.json"):
        registry.shipped()
