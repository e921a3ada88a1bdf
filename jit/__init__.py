"""Build, cache, load and bind HIP modules.

The files in dependency order; none imports a later one::

    children, cache.files     processes; small files
    digest, roots, ninja      contents of files; placeholders for paths; commands → ninja text
    spec                      what is wanted, and everything that determines a binary, each as one value
    backends.vendors          what is asked of a vendor, and whose architecture this is
    cache.trust, cache.shapes     who can write there; what JSON must hold
    cache.store, cache.cache_dir     may this binary be used? where is the cache?
    demangle, backends.amd.code_object     which GPUs and kernels a library is for
    backends.amd.scaled_mfma     does its code compute what its source says?
    cache.limits, cache.locks, cache.leftovers, diagnostics, cache.failures, cache.depfile, cache.stability
    closure                   the files that determined a build
    backends.amd.resources    what the kernels of a finished library need
    tools, backends.amd.rocm_tree, units, backends.amd.hip_clang     the commands of one compiler
    backends.amd.compilers, backends.amd.backend     which compilers there are; the vendor as one value
    backends.nvidia.backend, backends.nvidia.resources, backends.nvidia.nvcc, backends.nvidia.compilers     the same
    host_cpu, cache.prebuilt      modules built ahead of time
    maintenance, notices      listing and pruning the cache; what a user is told while a build runs
    build                     a miss → staging directory → ninja → checked → published
    obtain                    prebuilt, else cached, else the error of an earlier build, else built
    toolchain                 which compiler, and why not the others
    registry, hip_module      module entry + variant + architecture + toolchain → spec
    loader                    loaded once per process
    host_library              the same for host-only libraries
    why, fleet                why a module is a hit or a miss; building many modules at once
    backends.runtime_library, backends.amd.runtime, backends.nvidia.runtime     the runtime that modules bind to
    call.python_module, call.signature, call.tensors, call.binder, call.torch_functions     for binding
    call.abi, call.torch_library, compile_ops, call.bench_hook     the call itself

A module's first use costs one compile. Every later use, in any process, costs a stat of each file that the compiler
read: no lock, no process, no compiler.
"""

from __future__ import annotations

from hipforge.jit.compile_ops import compile_ops
from hipforge.jit.loader import load
from hipforge.jit.registry import register

__all__ = ["compile_ops", "load", "register"]
