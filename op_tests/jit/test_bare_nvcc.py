"""What a module with "bare": true reads in place of CUDA's headers means the same, to the same code."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hipforge.errors import BuildError
from hipforge.jit import hip_module, obtain, register, registry, toolchain
from hipforge.jit.backends.nvidia import compilers, nvcc
from hipforge.jit.roots import package_roots
from hipforge.jit.units import Unit

BARE = Path(package_roots().show(nvcc.BARE))
_DECLARED = re.compile(r"(?:HF_BUILTIN_ ([\w ]+?) |, )(\w+)\(([^()]*)\)(?= noexcept;|;|, \w+\()")
_LEAST = re.compile(r"^HF_LEAST_AND_MOST_\(([\w ]+), ([\w ]+), ([\w ]+), ", re.MULTILINE)


def calls() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the result type, the name and the parameter types of each function of the headers."""
    result = ""
    for again, name, parameters in _DECLARED.findall((BARE / "builtins.h").read_text()):
        result = again or result
        yield result, name, [parameter.strip().rsplit(" ", 1)[0] for parameter in parameters.split(",") if parameter]
    for first, second, both in [*_LEAST.findall((BARE / "cuda_runtime.h").read_text()), ("float", "float", "float")]:
        yield from ((both, name, [first, second]) for name in ("min", "max"))


def kernels() -> str:
    """A kernel for each function, which calls it on values of memory, and a launch."""
    lines = ["#include <cuda_runtime.h>"]
    for number, (result, name, types) in enumerate(calls()):
        given = ", ".join(f"{kind}* p{index}" for index, kind in enumerate(types))
        call = f"{name}({', '.join(f'*p{index}' for index in range(len(types)))})"
        out, body = ("", f"{call};") if result == "void" else (f"{result}* out, ", f"*out = {call};")
        lines.append(f"__global__ void k{number}({(out + given).strip(', ')}) {{ {body} }}")
    lines.append("void launch() { k0<<<1, 1>>>(); }")
    return "\n".join(lines)


def ptx(source: Path, *flags: str) -> str:
    compiler = str(toolchain.select("sm_90").tool.path)
    argv = [compiler, "-gencode=arch=compute_90a,code=compute_90a", *flags, "-fmad=false", "-std=c++17", "-ptx"]
    done = subprocess.run([*argv, str(source), "-o", "-"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_function_compiles_to_the_code_that_cudas_headers_give(tmp_path: Path) -> None:
    source = tmp_path / "every.cu"
    source.write_text(kernels())
    text = source.read_text()
    assert all(f"{name}(" in text for name in ("__vcmpltu4", "ullmax", "ldexpf", "min", "__hiloint2double"))
    assert text.count("__global__") == (BARE / "builtins.h").read_text().count("(") + 2 * 12
    bare = ptx(source, *map(package_roots().show, nvcc.BARE_FLAGS))
    assert bare == ptx(source) and bare.count(".entry") == text.count("__global__")


def test_what_builtins_h_declares_is_what_cuda_declares(tmp_path: Path) -> None:
    source = tmp_path / "both.cu"
    source.write_text(f'#include <cuda_runtime.h>\n#include "{BARE}/builtins.h"\n')
    ptx(source)
    wrong = (BARE / "builtins.h").read_text().replace("int __clz(int x)", "unsigned int __clz(int x)")
    source.write_text("#include <cuda_runtime.h>\n" + wrong)
    with pytest.raises(AssertionError, match="__clz"):
        ptx(source)


def test_every_shipped_source_is_compiled_so() -> None:
    assert toolchain.select("sm_90").bare
    for entry in registry.shipped().values():
        if "sm_90" in entry.archs:
            variant = next(iter(entry.ahead_variants("sm_90")))
            steps = hip_module.request(entry, variant, "sm_90").specify().steps
            assert all(set(nvcc.BARE_FLAGS) <= set(step.argv) for step in steps if step.compiles), entry.name


def test_a_bare_source_that_needs_more_of_cuda_is_told_so(tmp_path: Path, isolated_cache: Path) -> None:
    (tmp_path / "more.cu").write_text("__global__ void wave(float* x) { *x = sinf(*x); }\n")
    (tmp_path / "modules.json").write_text(json.dumps({"module_test_more": {"srcs": ["more.cu"], "bare": True}}))
    register(tmp_path / "modules.json")
    with pytest.raises(BuildError, match=r'"sinf" is undefined[\s\S]*remove "bare"'):
        obtain.binary(hip_module.request(registry.module("module_test_more"), None, "sm_90").specify())


def test_an_toolthat_does_not_take_them_reads_cudas_own(tmp_path: Path, isolated_cache: Path) -> None:
    real = toolchain.select("sm_90")
    other = tmp_path / "nvcc"
    other.write_text(f'#!/bin/sh\ncase "$*" in *probe.cu*) exit 1;; esac\nexec {real.tool.path} "$@"\n')
    other.chmod(0o755)
    found = compilers.inspect(other, "sm_90")
    unit = Unit(0, "x.cu", is_hip=True, flags=(), bare=True)
    plain, bare = (set(tool.compile(unit, "m", "sm_90").steps[0].argv) for tool in (found, real))
    assert real.bare and not found.bare and bare - plain == {*nvcc.BARE_FLAGS} - {"-Xcompiler"}
