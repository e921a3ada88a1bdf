"""Where tasks run: in this process, in several, or on a Ray cluster. Results come as they are ready, in any order.

A worker that dies loses nothing: its task, and those that waited for it, are run again. When workers have died more
than ``MOST_DEATHS`` times in a row, with no task finishing meanwhile, each task that is left runs alone, and fails
with an error if its worker dies then too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from hipforge.errors import ConfigError
from hipforge.tuning.work import Done, Task, tune_cell_elsewhere

MOST_DEATHS = 3
Results = Iterator[tuple[int, Done]]
Work = Callable[[Task], Done]


def here(tasks: Sequence[Task], work: Work) -> Results:
    """Yield each task's number and result, done one after another in this process."""
    for number, task in enumerate(tasks):
        yield number, work(task)


def processes(tasks: Sequence[Task], workers: int, work: Work = tune_cell_elsewhere) -> Results:
    """Yield each task's number and result, done by ``workers`` processes.

    Args:
        tasks: what to do.
        workers: how many processes.
        work: importable, because it travels by name.
    """
    left = dict(enumerate(tasks))
    deaths = 0
    while left:
        # Fresh interpreters: torch's threads and a loaded emulator do not survive a fork.
        with ProcessPoolExecutor(min(workers, len(left)), mp_context=get_context("spawn")) as pool:
            numbers = {pool.submit(work, task): number for number, task in left.items()}
            try:
                for future in as_completed(numbers):
                    done = future.result()
                    deaths = 0
                    number = numbers[future]
                    del left[number]
                    yield number, done
                continue
            except BrokenProcessPool:
                deaths += 1
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        if deaths > MOST_DEATHS:
            yield from _one_by_one(left, work)
            return


def ray_cluster(tasks: Sequence[Task], address: str, work: Work = tune_cell_elsewhere) -> Results:
    """Yield each task's number and result, done by a Ray cluster whose nodes have hipforge installed.

    Args:
        tasks: what to do; each asks for one CPU.
        address: as ``ray.init`` takes it: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``.
        work: importable on every node.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install ray") from None
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--ray {address}: there is no Ray cluster at this address: {error}") from error
    try:
        remote = ray.remote(num_cpus=1, max_retries=MOST_DEATHS)(work)
        numbers = {remote.remote(task): number for number, task in enumerate(tasks)}
        while numbers:
            ready, _ = ray.wait(list(numbers), num_returns=1)
            number = numbers.pop(ready[0])
            try:
                done: Done = ray.get(ready[0])
            except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
                done = Done(None, [], f"{tasks[number].cell}: its worker died {MOST_DEATHS + 1} times: {error}")
            yield number, done
    finally:
        if started:
            ray.shutdown()


def _one_by_one(left: dict[int, Task], work: Work) -> Results:
    """Run each task in a process of its own, which shows the one that kills its worker; the others get their result."""
    for number, task in left.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                done = pool.submit(work, task).result()
            except BrokenProcessPool:
                why = f"workers died {MOST_DEATHS + 1} times in a row, and this task's once more when it ran alone"
                done = Done(None, [], f"{task.cell}: not tuned, {why}; run with --resume")
        yield number, done
