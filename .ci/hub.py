"""Lay a module out as a project of the Hugging Face kernels hub, from the same sources: ``python .ci/hub.py --help``.

``kernel-builder`` makes one library per toolkit of it. They are loaded by apache-tvm-ffi: a module exports its entries
for it. A module with variants is refused, because the builder compiles a source once, with one set of macros.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import hipforge
from hipforge import archs
from hipforge.errors import ConfigError
from hipforge.jit import registry
from hipforge.jit.backends.nvidia.nvcc import DEVICE_FLAGS

CSRC = Path(hipforge.__file__).parent / "csrc"
BINDING = "// The entries are in the module itself, which exports each as __tvm_ffi_<name>.\n"
FLAKE = """{
  description = "%s of hipforge";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""


def lay_out(module: str, entries: list[str], target: Path) -> Path:
    """Write the project of a module below a folder; returns the project's folder.

    Raises:
        ConfigError: there is no such module, or the builder cannot take it.
    """
    entry = registry.module(module)
    if entry.variants or entry.ffi != "abi" or entry.blob_gen_cmd:
        raise ConfigError(f"{module} has variants, a generator or another ffi; the builder compiles a source once")
    name = module.removeprefix("module_")
    project = target / name
    python = project / "tvm-ffi-ext" / name
    python.mkdir(parents=True)
    shutil.copytree(CSRC / "include", project / "csrc" / "include", dirs_exist_ok=True)
    sections: list[str] = []
    for vendor, backend in (("amd", "rocm"), ("nvidia", "cuda")):
        supported = [arch for arch in entry.archs or archs.ARCHS if archs.get(arch).vendor == vendor]
        own = entry.for_vendor(vendor)
        sources = [source.replace("${CSRC}/", "csrc/") for source in own.srcs]
        for source in sources:  # with the headers beside it
            (project / source).parent.mkdir(parents=True, exist_ok=True)
            for path in (CSRC.parent / source, *(CSRC.parent / source).parent.glob("*.h")):
                shutil.copy(path, (project / source).parent)
        flags = ["-std=c++17", *own.flags_extra_hip]
        include = ["csrc/include"]
        if vendor == "nvidia":
            flags += [flag for flag in DEVICE_FLAGS if flag.startswith(("-f", "--", "-D"))]
            include.append("csrc/include/hipforge/nvidia/include")
        on = [f"{arch[3:-1]}.{arch[-1]}" for arch in supported] if vendor == "nvidia" else supported
        lists = {
            "depends": [], "src": sources, "include": include,
            "cuda-capabilities" if vendor == "nvidia" else "rocm-archs": on,
            "cuda-flags" if vendor == "nvidia" else "hip-flags": flags,
        }  # fmt: skip
        sections += [f'\n[kernel.{name}_{backend}]\nbackend = "{backend}"']
        sections += [f"{key} = {json.dumps(values)}" for key, values in lists.items()]
    general = f'[general]\nname = "{name.replace("_", "-")}"\nversion = 1\nedition = 5\nlicense = "MIT"'
    text = [general, 'backends = ["cuda", "rocm"]', '\n[tvm-ffi]\nsrc = ["tvm-ffi-ext/binding.cpp"]', *sections]
    (project / "build.toml").write_text("\n".join(text) + "\n")
    (project / "flake.nix").write_text(FLAKE % name)
    (project / "tvm-ffi-ext" / "binding.cpp").write_text(BINDING)
    first = f'"""{name} of hipforge: entries that write into the tensors they are given."""\n\nfrom ._ops import ops\n'
    (python / "__init__.py").write_text("\n".join([first, *(f"{each} = ops.{each}" for each in entries), ""]))
    return project


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="for example module_moe_align")
    parser.add_argument("entries", nargs="+", help="its entries, for example moe_align_block_size_out")
    parser.add_argument("--outdir", type=Path, default=Path("dist/hub"))
    given = parser.parse_args()
    print(lay_out(given.module, given.entries, given.outdir))


if __name__ == "__main__":
    main()
