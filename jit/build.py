"""A miss → staging directory → ninja → checked → published.

The caller holds the lock of what it builds. A killed build leaves only a staging directory, which the next build of
anything sweeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from hipforge import settings
from hipforge.errors import BuildError, HipforgeError
from hipforge.jit import children, maintenance, ninja, notices
from hipforge.jit.backends import vendors
from hipforge.jit.cache import cache_dir, failures, leftovers, limits, stability, store
from hipforge.jit.cache.stability import InputsChanged
from hipforge.jit.closure import closure
from hipforge.jit.diagnostics import StepFailure, UnreadableError
from hipforge.jit.digest import ABSENT, DigestStore, file_digest
from hipforge.jit.ninja import Step
from hipforge.jit.spec import BuildSpec, Generator

log = logging.getLogger("hipforge")

_BYTES_PER_JOB = 1_500_000_000
"""Peak memory of one compile, both passes of a large kernel file: measured 0.3 to 1.2 GB with clang 22."""

_FULL_DISK = 1 << 20
"""Bytes: where fewer are left, a compiler that fails and says nothing had no space for its output, or its words."""

_SHOW_EVERY_S = 0.5

_STEP_S, _CPP_STEP_S = 1.0, 10.0
"""Seconds of a command on one core where no build is recorded; of a C++ source, whose headers are large, more."""

_TUNABLES = "GLIBC_TUNABLES"
_ALLOCATION = (
    "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=16777216:glibc.malloc.trim_threshold=1073741824:"
    "glibc.malloc.mmap_threshold=67108864"
)
"""A compiler takes memory until it ends: in large steps and huge pages this costs 3 to 4 % less of its CPU time."""

_ATTEMPTS = 4
"""Builds of one module during which somebody edits a header, before that is an error."""


def capped_jobs(jobs: int | None = None) -> int:
    """Return how many commands to run at once: ``jobs``, else the setting, but no more than fit cores and memory."""
    wanted = jobs or settings.MAX_JOBS.get()
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        free = cores * _BYTES_PER_JOB
    return max(1, min(wanted or cores, cores, free // _BYTES_PER_JOB))


def make(spec: BuildSpec, root: Path) -> store.Entry:
    """Build ``spec`` into the cache directory ``root``; the caller holds its lock and has looked for it since.

    Raises:
        BuildError: it cannot be built.
        InputsChanged: a source was edited meanwhile, so that ``spec`` no longer describes what was built.
        OSError: the directory cannot be written.
    """
    leftovers.sweep(root, own=store.build_name(spec))
    digests = cache_dir.digests()
    before: dict[str, str] = {}
    for attempt in range(1, _ATTEMPTS + 1):
        staging = store.staging_dir(root, store.build_name(spec))
        try:
            entry = _build(spec, root, staging, digests, before)
            digests.save()
            return entry
        except InputsChanged as error:
            if error.in_key or attempt == _ATTEMPTS:
                raise
            log.info("%s; building it again", error)
            before = dict(error.dependencies)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    raise AssertionError("the last attempt returns or raises")


def keep_limit(root: Path) -> None:
    """Remove the least recently used entries under ``root`` where the cache is larger than the setting allows."""
    limit = settings.CACHE_LIMIT.get()
    if limit is not None:
        maintenance.prune(limit, root)


def prepare(spec: BuildSpec, root: Path, staging: Path, digests: DigestStore) -> BuildSpec:
    """Fill a staging directory with what the steps need; returns the spec with the sources of its generator, if any.

    Raises:
        BuildError: the generator failed.
    """
    (staging / "tmp").mkdir(mode=0o755)
    if spec.generator is not None:
        spec = generate(spec, spec.generator, root, staging, digests)
    for name, text in spec.files.items():
        (staging / name).write_text(text)
    return spec


def write_ninja(spec: BuildSpec, staging: Path, body: str, pool: str = "") -> None:
    """Write the ninja file of one build: ``body``, and what ties it to this machine."""
    launcher = settings.COMPILER_LAUNCHER.get()
    text = ninja.whole_file(spec.roots.paths, body, out=staging.name, launcher=launcher, pool=pool)
    (staging / "build.ninja").write_text(text)


def _build(spec: BuildSpec, root: Path, staging: Path, digests: DigestStore, before: Mapping[str, str]) -> store.Entry:
    with notices.slow(f"building {spec.title}", _expected_seconds(spec)) as advance:
        began_ns, started = stability.start(), time.monotonic()
        spec = prepare(spec, root, staging, digests)
        write_ninja(spec, staging, spec.ninja_body())
        with start_ninja(staging.parent, f"{staging.name}/build.ninja", staging / "tmp", capped_jobs()) as process:
            while not _ended(process):
                advance(sum(1 for _ in staging.glob("*.done")) / max(1, len(spec.steps)))
        return finish(spec, root, staging, digests, time.monotonic() - started, began_ns, before)


def _ended(process: subprocess.Popen[str]) -> bool:
    try:
        process.wait(_SHOW_EVERY_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _expected_seconds(spec: BuildSpec) -> float:
    """Return how long the last build of this module took, else a guess from the number of its commands."""
    recorded = maintenance.recorded_seconds(spec.module, spec.stem, spec.target)
    cpp = sum(any(word.endswith(".cpp") for word in step.argv) for step in spec.steps)
    return recorded or (_STEP_S * len(spec.steps) + (_CPP_STEP_S - _STEP_S) * cpp) / capped_jobs()


def generate(spec: BuildSpec, generator: Generator, root: Path, staging: Path, digests: DigestStore) -> BuildSpec:
    """Run a module's generator in ``staging`` and return the spec with the sources it wrote.

    Raises:
        BuildError: a command failed or wrote no source.
    """
    output = staging / generator.output
    output.mkdir()
    for command in generator.commands:
        argv = [spec.roots.show(word) for word in command]
        with children.waited_for():
            done = subprocess.run(
                argv, cwd=staging, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                preexec_fn=children.ending_with_parent(),
            )  # fmt: skip
        with (staging / "build.log").open("a") as log_file:
            log_file.write(f"$ {shlex.join(argv)}\n{done.stdout}\n")
        if done.returncode:
            failed = StepFailure("generator", done.returncode, shlex.join(argv), done.stdout)
            raise _failure(spec, root, staging, failed, digests, stability.start())
    written = sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file())
    sources = tuple(name for name in written if name.endswith(generator.suffixes))
    if not sources and not spec.steps:
        raise BuildError(f"{spec.title}: blob_gen_cmd wrote no source into ${{GEN}}")
    steps, files = generator.plan(sources)
    return dataclasses.replace(spec, steps=steps, files=files)


@contextlib.contextmanager
def start_ninja(
    directory: Path, file: str, temporary: Path, jobs: int, extra: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Run a ninja file in ``directory``; how each step ended is read from what it left behind.

    Raises:
        BuildError: ninja itself failed (a failing step is reported separately).
    """
    command = [ninja.executable(), "-C", str(directory), "-f", file, "-j", str(jobs), *extra]
    # Compilers put their own temporary files where they are swept with the rest when a build is killed.
    # Relative to where they run, since clang takes each % in this name for a random digit.
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": f"../{temporary.parent.name}/{temporary.name}"}
    environment[_TUNABLES] = ":".join(filter(None, (_ALLOCATION, os.environ.get(_TUNABLES))))  # the last one holds
    with (temporary / "ninja.log").open("w+") as output:
        with children.waited_for(), subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True,
            preexec_fn=children.ending_with_parent(),
        ) as process:  # fmt: skip
            yield process
        output.seek(0)
        text = output.read()
    if process.returncode and "FAILED" not in text:
        raise BuildError(f"ninja ended with status {process.returncode}: {text.strip() or 'no output'}")


def finish(
    spec: BuildSpec,
    root: Path,
    staging: Path,
    digests: DigestStore,
    seconds: float,
    began_ns: int,
    before: Mapping[str, str] = MappingProxyType({}),
) -> store.Entry:
    """Turn what ninja left in ``staging`` into a published entry.

    ``began_ns`` and ``before`` are as :func:`hipforge.jit.cache.stability.check` takes them.

    Raises:
        InputsChanged: a file changed while it was being compiled; nothing is published or remembered.
        BuildError: a step failed, the device code was refused, or the kernels exceed the module's
            ``resource_limits``.
        OSError: the cache directory cannot be written.
    """
    failed = next(iter(step_failures(spec, staging)), None)
    write_log(spec, staging)
    if failed is not None:
        raise _failure(spec, root, staging, failed, digests, began_ns, before)
    dependencies = closure(spec, staging, digests)
    stability.check(spec, dependencies, began_ns, before)
    library = staging / spec.library
    try:
        code = vendors.read_resources(spec, library)
    except BuildError as error:
        place = failures.keep(staging, root, spec)
        message = f"{spec.title} was refused\nlog: {place / 'build.log'}\n{error}"
        if not isinstance(error, UnreadableError):
            failures.remember(place, spec, message, dependencies)
        raise BuildError(message) from None
    manifest = store.Manifest(
        module=spec.module,
        variant=dict(spec.variant),
        target=spec.target,
        key=spec.key,
        ingredients=dict(spec.ingredients),
        dependencies=dependencies,
        library_sha256=file_digest(library),
        library_bytes=library.stat().st_size,
        build_seconds=round(seconds, 3),
        built_at=time.time(),
        toolchain=spec.toolchain,
        commands=[step.command() for step in spec.steps],
        gfx_targets=code.gfx_targets,
        kernels=code.kernels,
        checks=code.checks,
        generated=_generated(spec, staging),
    )
    for pattern in ("*.o", "*.co", ".ninja_*", "*.started", "*.done", "*.log"):
        for item in staging.glob(pattern):
            if item.name != "build.log":
                item.unlink()
    shutil.rmtree(staging / "tmp", ignore_errors=True)
    entry = store.Entry(store.publish(staging, root, spec, manifest), manifest)
    store.hold(entry)
    failures.forget(root, spec)
    log.debug("built %s in %.1f s", spec.title, seconds)
    return limits.checked(entry, spec)


def _generated(spec: BuildSpec, staging: Path) -> dict[str, str]:
    if spec.generator is None:
        return {}
    files = sorted(path for path in (staging / spec.generator.output).rglob("*") if path.is_file())
    return {path.relative_to(staging).as_posix(): file_digest(path) for path in files}


def step_failures(spec: BuildSpec, staging: Path) -> Iterable[StepFailure]:
    """Yield the failed steps in the spec's order; steps that never ran are left out."""
    for step in spec.steps:
        status_file = staging / f"{step.name}.rc"
        if status_file.exists():
            text = status_file.read_text().strip()
            yield StepFailure(step.name, int(text) if text else -1, shown_command(spec, step), _output(staging, step))
    if not (staging / spec.library).exists():
        yield StepFailure("ninja", -1, "", f"no {spec.library} was made: the build was stopped")


def shown_command(spec: BuildSpec, step: Step) -> str:
    """Return a step's command with this machine's paths."""
    quoted = {name: shlex.quote(path) for name, path in spec.roots.paths.items()}
    return re.sub(r"\$\{([A-Z][A-Z0-9_]*)\}", lambda match: quoted[match.group(1)], step.command())


def _output(staging: Path, step: Step) -> str:
    try:
        return (staging / f"{step.name}.log").read_text(errors="replace")
    except OSError:
        return ""


def write_log(spec: BuildSpec, staging: Path) -> None:
    """Join the steps' commands and outputs into ``build.log``; print it when asked to be verbose."""
    parts = [f"$ {shown_command(spec, step)}\n{_output(staging, step)}" for step in spec.steps]
    text = "\n".join(parts)
    with (staging / "build.log").open("a") as log_file:
        log_file.write(text)
    if spec.verbose or settings.VERBOSE.get():
        print(text, file=sys.stderr)


def _failure(
    spec: BuildSpec,
    root: Path,
    staging: Path,
    failed: StepFailure,
    digests: DigestStore,
    began_ns: int,
    before: Mapping[str, str] = MappingProxyType({}),
) -> HipforgeError:
    silent_on_full_disk = not failed.output.strip() and shutil.disk_usage(staging).free < _FULL_DISK
    if failed.out_of_space or silent_on_full_disk:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staging))
    dependencies = closure(spec, staging, digests, failed=True) if failed.deterministic else []
    stability.check(spec, [pair for pair in dependencies if pair[1] != ABSENT], began_ns, before)
    place = failures.keep(staging, root, spec)
    message = (
        f"{spec.title} failed to build with {spec.toolchain}\n"
        f"log: {place / 'build.log'}\n"
        f"rerun: cd {shlex.quote(str(place))} && {failed.command}\n"
        f"{failed.first_error}{failed.hint}"
    )
    if dependencies:  # otherwise nothing could tell that the cause has gone
        failures.remember(place, spec, message, dependencies)
    return BuildError(message)
