"""Many modules at once: one ninja over all of them, each published as soon as it is finished.

A module that fails does not stop the others. A module that another process is building is waited for at the end.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hipforge import archs as architectures
from hipforge.errors import ArchError, BuildError, HipforgeError
from hipforge.jit import build, hip_module, maintenance, ninja, obtain, registry
from hipforge.jit.cache import cache_dir, leftovers, stability, store
from hipforge.jit.cache.locks import try_building
from hipforge.jit.hip_module import Request
from hipforge.jit.spec import BuildSpec

_POLL_S = 0.05
_REST = 50  # at least so many times as long as the last look at the running builds: under 2 % of one core
_LINK_JOBS = 1
UNKNOWN_S = 5.0
"""Of a library without a recorded build: the mean of the shipped ones, measured with clang 22 on two busy cores."""

Status = Literal["hit", "built", "failed"]


@dataclass(frozen=True)
class Planned:
    """What would be done for one request.

    ``estimate`` is in seconds, from recorded build times, None if there are none; ``commands`` are this machine's.
    ``problem`` says why it cannot be built at all, or how an earlier attempt failed.
    """

    request: Request
    spec: BuildSpec | None
    entry: store.Entry | None
    estimate: float | None
    problem: HipforgeError | None

    @property
    def title(self) -> str:
        """Module, variant and architecture, for people."""
        return f"{self.request.stem} {self.request.arch}"

    @property
    def commands(self) -> list[str]:
        """The commands that a build would run; none for a hit."""
        if self.spec is None or self.entry is not None:
            return []
        return [build.shown_command(self.spec, step) for step in self.spec.steps]


@dataclass(frozen=True)
class BuildOutcome:
    """How one request ended; ``seconds`` is its build time (0 for a hit)."""

    planned: Planned
    status: Status
    seconds: float
    entry: store.Entry | None
    error: HipforgeError | None


@dataclass(frozen=True)
class Event:
    """Progress of one request: it was started, finished or failed."""

    kind: Literal["started", "finished", "failed"]
    planned: Planned
    outcome: BuildOutcome | None = None


OnEvent = Callable[[Event], None]
OnPlan = Callable[[Sequence[Planned], int], None]
"""Takes what is about to be done and how many commands run at once."""


def requests(modules: Iterable[str], archs: Sequence[str], *, every_variant: bool = False) -> list[Request]:
    """Return requests for ``modules``, each for those of ``archs`` that it supports.

    The variants are those to build ahead of a first call; with ``every_variant``, also those for tuners and explicit
    configurations.

    Raises:
        ArchError: no module has code for any of the architectures.
        ConfigError: a module or an architecture is not known.
    """
    entries = [registry.module(name) for name in modules]
    known = [architectures.get(arch).name for arch in archs]
    wanted = [
        hip_module.request(entry, variant, arch)
        for entry in entries
        for arch in known
        if arch in entry.archs
        for variant in (entry.all_variants() if every_variant else entry.ahead_variants(arch))
    ]
    if entries and not wanted:
        has = "; ".join(f"{entry.name} is built for {', '.join(entry.archs)}" for entry in entries)
        raise ArchError(f"there is nothing to build for {', '.join(known) or 'no architecture'}: {has}")
    return wanted


def plan(wanted: Iterable[Request]) -> list[Planned]:
    """Return what building ``wanted`` would do; nothing is built."""
    return [_plan(request, use=False) for request in wanted]


def _plan(request: Request, *, use: bool) -> Planned:
    estimate = maintenance.recorded_seconds(request.entry.name, request.stem, request.arch)
    found = obtain.look(request, use=use)
    if isinstance(found, obtain.Missing):
        return Planned(request, found.spec, None, estimate, found.error)
    if isinstance(found, obtain.Failed):
        return Planned(request, None, None, estimate, found.error)
    return Planned(request, None, found.entry, estimate, None)


def expected_seconds(planned: Iterable[Planned], jobs: int) -> float:
    """Return the estimated seconds to build the missing part of ``planned`` with ``jobs`` commands at once.

    A library without a recorded build is taken to need the mean of the others, or ``UNKNOWN_S``.
    """
    missing = [item for item in planned if item.entry is None and item.problem is None]
    known = [item.estimate for item in missing if item.estimate is not None]
    mean = sum(known) / len(known) if known else UNKNOWN_S
    each = [mean if item.estimate is None else item.estimate for item in missing]
    return max(sum(each) / max(1, jobs), max(each, default=0.0))


def build_many(
    wanted: Iterable[Request], jobs: int | None, on_event: OnEvent, on_plan: OnPlan = lambda planned, jobs: None
) -> list[BuildOutcome]:
    """Build what is missing of ``wanted`` and return how each ended, in the order given.

    Args:
        wanted: what to build, see :func:`requests`.
        jobs: commands to run at once; capped by cores and memory.
        on_event: called in this thread as requests start, finish and fail.
        on_plan: called once before anything is built.

    Raises:
        ConfigError: the cache directory that the user named cannot be written.
    """
    planned = [_plan(request, use=True) for request in wanted]
    on_plan(planned, build.capped_jobs(jobs))
    outcomes: dict[int, BuildOutcome] = {}
    todo: dict[int, tuple[Planned, BuildSpec]] = {}
    for number, item in enumerate(planned):
        if item.entry is not None:
            outcomes[number] = BuildOutcome(item, "hit", 0.0, item.entry, None)
        elif item.problem is not None or item.spec is None:
            outcomes[number] = _failed(item, item.problem, on_event)
        else:
            todo[number] = item, item.spec
    if todo:
        fleet = _Fleet(todo, build.capped_jobs(jobs), on_event)
        outcomes.update(fleet.run())
        build.keep_limit(fleet.root)
    cache_dir.digests().save()
    return [outcomes[number] for number in range(len(planned))]


def _failed(item: Planned, error: HipforgeError | None, on_event: OnEvent, seconds: float = 0.0) -> BuildOutcome:
    outcome = BuildOutcome(item, "failed", seconds, None, error)
    on_event(Event("failed", item, outcome))
    return outcome


def _as_build_error(error: HipforgeError | OSError, item: Planned) -> HipforgeError:
    return error if isinstance(error, HipforgeError) else BuildError(f"{item.title} cannot be built: {error}")


@dataclass(eq=False)
class _Running:
    """A module whose steps ninja is running.

    ``receivers`` names for each step the modules that share its output; ``received`` names the steps whose results come
    from another module.
    """

    number: int
    planned: Planned
    spec: BuildSpec
    staging: Path
    lock: contextlib.ExitStack
    began_ns: int
    announced: bool = False
    receivers: dict[str, list[_Running]] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)

    def write_ninja(self) -> None:
        own = [step for step in self.spec.steps if step.name not in self.received]
        others = {name: [other.staging.name for other in modules] for name, modules in self.receivers.items()}
        build.write_ninja(self.spec, self.staging, ninja.body(own, self.spec.stem, others), ninja.COMPILE_POOL)

    def pass_on_failures(self) -> None:
        """Give a failed step's output to the modules that wait for it; after a success, the step's command did so."""
        for step in self.spec.steps:
            if (self.staging / f"{step.name}.rc").exists():
                for other in self.receivers.get(step.name, ()):
                    for name in (*step.leaves(), f"{step.name}.rc"):
                        with contextlib.suppress(FileNotFoundError):
                            shutil.copy2(self.staging / name, other.staging / name)

    def settled(self) -> bool:
        """Whether no step of it is running or can still start."""
        blocked: set[str] = set()
        for step in self.spec.steps:
            if blocked.intersection(step.inputs) or (self.staging / f"{step.name}.rc").exists():
                blocked.update(step.outputs)
            elif not (self.staging / f"{step.name}.done").exists():
                return False
        return True

    def seconds(self) -> float:
        """How long it would have taken alone: its longest compile, and what comes after."""
        compiles, rest = [0.0], 0.0
        for step in self.spec.steps:
            start = _mtime(self.staging / f"{step.name}.started")
            end = _mtime(self.staging / f"{step.name}.done") or _mtime(self.staging / f"{step.name}.rc")
            if start and end:
                compiles += [end - start] if step.compiles else []
                rest += 0.0 if step.compiles else end - start
        return max(compiles) + rest


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


class _Fleet:
    """One run of ninja over the modules in ``todo``."""

    def __init__(self, todo: dict[int, tuple[Planned, BuildSpec]], jobs: int, on_event: OnEvent) -> None:
        self.todo = todo
        self.jobs = jobs
        self.on_event = on_event
        self.root = cache_dir.writing_root()
        self.digests = cache_dir.digests()
        self.outcomes: dict[int, BuildOutcome] = {}
        self.running: list[_Running] = []
        self.elsewhere: list[int] = []
        self.began_ns = 0

    def run(self) -> dict[int, BuildOutcome]:
        leftovers.sweep(self.root)
        self.began_ns = stability.start()  # once: it waits for the clock's next tick
        own = store.staging_dir(self.root, store.DISCARDED)
        try:
            for number, (item, spec) in self.todo.items():
                self._prepare(number, item, spec)
            if self.running:
                self._share_steps()
                self._run_ninja(own)
        finally:
            for module in self.running:
                shutil.rmtree(module.staging, ignore_errors=True)
                module.lock.close()
            shutil.rmtree(own, ignore_errors=True)
        for number in self.elsewhere:
            self._wait_for(number, self.todo[number][0])
        return self.outcomes

    def _prepare(self, number: int, item: Planned, spec: BuildSpec) -> None:
        lock = contextlib.ExitStack()
        name = store.build_name(spec)
        if not lock.enter_context(try_building(self.root, name)):
            self.elsewhere.append(number)
            return
        found = obtain.look_for(spec, [self.root])  # another process may have built it since the plan was made
        if not isinstance(found, obtain.Missing):
            lock.close()
            self.outcomes[number] = (
                BuildOutcome(item, "hit", 0.0, found.entry, None)
                if isinstance(found, obtain.Ready)
                else _failed(item, found.error, self.on_event)
            )
            return
        staging = store.staging_dir(self.root, name)
        module = _Running(number, item, spec, staging, lock, self.began_ns)
        self.running.append(module)
        try:
            module.spec = build.prepare(spec, self.root, staging, self.digests)
        except (HipforgeError, OSError) as error:
            self._close(module)
            self.outcomes[number] = _failed(item, _as_build_error(error, item), self.on_event)

    def _share_steps(self) -> None:
        """Let commands that read nothing of their build directory, and are the same in several modules, run once."""
        first: dict[tuple[str, str], _Running] = {}
        for module in self.running:
            for step in module.spec.steps:
                if step.inputs or module.spec.generator is not None:
                    continue
                runs = first.setdefault((step.name, build.shown_command(module.spec, step)), module)
                if runs is not module:
                    runs.receivers.setdefault(step.name, []).append(module)
                    module.received.add(step.name)

    def _run_ninja(self, own: Path) -> None:
        for module in self.running:
            module.write_ninja()
        (own / "tmp").mkdir()
        files = [f"{module.staging.name}/build.ninja" for module in self.running]
        (own / "build.ninja").write_text(ninja.joint_file(files, out=own.name, compiles=self.jobs))
        jobs = self.jobs + _LINK_JOBS
        with build.start_ninja(own.parent, f"{own.name}/build.ninja", own / "tmp", jobs, ("-k", "0")) as process:
            try:
                while process.poll() is None:
                    began = time.thread_time()
                    self._look()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(_POLL_S, _REST * (time.thread_time() - began)))
            except BaseException:
                process.terminate()
                raise
            self._look()
        for module in list(self.running):
            self._end(module)

    def _look(self) -> None:
        for module in list(self.running):
            if not module.announced and next(module.staging.glob("*.started"), None) is not None:
                module.announced = True
                self.on_event(Event("started", module.planned))
            if module.settled():
                self._end(module)

    def _end(self, module: _Running) -> None:
        item, seconds = module.planned, module.seconds()
        try:
            module.pass_on_failures()
            entry = build.finish(module.spec, self.root, module.staging, self.digests, seconds, module.began_ns)
        except build.InputsChanged:
            self.elsewhere.append(module.number)  # built again on its own, at the end
        except (HipforgeError, OSError) as error:
            self.outcomes[module.number] = _failed(item, _as_build_error(error, item), self.on_event, seconds)
        else:
            outcome = BuildOutcome(item, "built", seconds, entry, None)
            self.outcomes[module.number] = outcome
            self.on_event(Event("finished", item, outcome))
        finally:
            self._close(module)

    def _close(self, module: _Running) -> None:
        self.running.remove(module)
        shutil.rmtree(module.staging, ignore_errors=True)
        module.lock.close()

    def _wait_for(self, number: int, item: Planned) -> None:
        started = time.monotonic()
        try:
            entry = obtain.binary(item.request.again().specify()).entry
        except (HipforgeError, OSError) as error:
            seconds = time.monotonic() - started
            self.outcomes[number] = _failed(item, _as_build_error(error, item), self.on_event, seconds)
            return
        outcome = BuildOutcome(item, "built", time.monotonic() - started, entry, None)
        self.outcomes[number] = outcome
        self.on_event(Event("finished", item, outcome))
