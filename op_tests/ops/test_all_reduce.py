"""Sums over ranks on the emulated architecture: the bits of the ops one by one, with threads or processes as ranks."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.peer_parts import deliver, summed
from stress.case import Arguments, Op, Rng

import hipforge
from hipforge import emulator
from hipforge.errors import ConfigError, EmulatorFault, GuardError
from hipforge.nn import Peers
from hipforge.ops import summed_linear
from hipforge.ops.all_reduce import all_reduce, all_reduce_residual_rms, all_reduce_residual_rms_mxfp8
from hipforge.ops.peers import POLLS

pytestmark = pytest.mark.gfx942

DTYPES = [torch.bfloat16, torch.float16]
EPSILON = 1e-5


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_by_one(op: str, total: torch.Tensor, given: Arguments) -> tuple[torch.Tensor, ...]:
    """The results of a call, and the residual behind it, from the ops that are there without ranks."""
    if op == "all_reduce":
        return (total,)
    residual = given["residual"].clone()
    rest = given["weight"], given["epsilon"]
    offset = given.get("weight_offset", 0.0)
    if op == "all_reduce_residual_rms":
        return hipforge.residual_rms(total, residual, *rest, weight_offset=offset)
    also = torch.empty_like(total)
    return *hipforge.residual_rms_mxfp8(total, residual, *rest, weight_offset=offset, also_out=also), also


def same(got: Any, want: tuple[torch.Tensor, ...]) -> bool:
    results = got if isinstance(got, tuple) else (got,)
    return len(results) == len(want) and all(
        torch.equal(*(part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in (one, other)))
        for one, other in zip(results, want, strict=True)
    )


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that run at the same time; the first error is raised."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def make(op: str) -> Callable[[Rng], Arguments]:
    """Of one rank: trials work on copies of tensors, and addresses would lead to the first ones."""

    def of(rng: Rng) -> Arguments:
        rows, columns, dtype = rng.integer(0, 3), 32 * rng.integer(1, 40), rng.pick(DTYPES)
        x, residual = (rng.finite(rows, columns, dtype=dtype) for _ in range(2))
        peers = Peers.alone(3, columns + 32 * rng.integer(0, 2))
        given: Arguments = {"x": x, **peers._asdict(), "polls": rng.pick((1, POLLS))}
        if op != "all_reduce":
            given |= {"residual": residual, "weight": rng.finite(columns, dtype=dtype)}
            given |= {"epsilon": rng.pick((0.0, EPSILON)), "weight_offset": rng.pick((0.0, 1.0))}
        if op == "all_reduce_residual_rms_mxfp8":
            given["also_out"] = torch.zeros_like(x)
        if rng.chance(0.5):
            given["out"] = torch.zeros_like(x)
            if op == "all_reduce_residual_rms_mxfp8":
                given["out"], given["scale_out"] = hipforge.mxfp8_quantize(x)
        return given

    return of


def judge(op: str) -> Callable[[Arguments, Any, Arguments], str | None]:
    def of(before: Arguments, result: Any, after: Arguments) -> str | None:
        results = result if isinstance(result, tuple) else (result,)
        if op == "all_reduce_residual_rms_mxfp8":
            results = (*results, after["also_out"])
        return None if same(results, one_by_one(op, before["x"], before)) else "other bits than the ops one by one"

    return of


FIXED = ("buffer", "addresses", "rank", "polls")  # places in memory
STRESS = (
    Op("all_reduce", make("all_reduce"), judge("all_reduce"), writes=("out", "buffer"), fixed=FIXED),
    Op(
        "all_reduce_residual_rms", make("all_reduce_residual_rms"), judge("all_reduce_residual_rms"),
        writes=("out", "residual", "buffer"), fixed=FIXED,
    ),
    Op(
        "all_reduce_residual_rms_mxfp8", make("all_reduce_residual_rms_mxfp8"), judge("all_reduce_residual_rms_mxfp8"),
        writes=("out", "scale_out", "also_out", "residual", "buffer"), fixed=FIXED,
    ),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("columns", [32, 288, 4096, 10240])
def test_every_rank_gets_the_bits_of_the_ops_one_by_one(columns: int, ranks: int, dtype: torch.dtype) -> None:
    rows = 2
    parts = [normal(rows, columns, seed=seed, dtype=dtype) for seed in range(ranks)]
    given: Arguments = {"weight": normal(columns, seed=50, dtype=dtype), "epsilon": EPSILON}
    base = normal(rows, columns, seed=51, dtype=dtype)
    for offset in (0.0, 1.0):
        for number, own in enumerate(Peers.on_one_device(ranks, rows + 1, columns, polls=1)):
            for count, op in enumerate((all_reduce, all_reduce_residual_rms, all_reduce_residual_rms_mxfp8), 1):
                for sender, part in enumerate(parts):
                    if sender != number:
                        deliver(own, sender, part, count)
                given |= {"residual": base.clone(), "weight_offset": offset}
                want = one_by_one(op.__name__, summed(parts), given)
                mine, also = parts[number].clone(), torch.empty_like(base)
                if op is all_reduce:
                    got: Any = all_reduce(mine, *own, out=also)
                    assert got is also
                elif op is all_reduce_residual_rms:
                    got = all_reduce_residual_rms(
                        mine, given["residual"], given["weight"], EPSILON, *own, weight_offset=offset
                    )
                else:
                    got = *all_reduce_residual_rms_mxfp8(
                        mine, given["residual"], given["weight"], EPSILON, *own, weight_offset=offset, also_out=also
                    ), also
                assert same(got, want)
                assert own.buffer[number, :, 0].tolist() == [count, count, 0]


def test_what_a_rank_sends_is_what_others_wait_for() -> None:
    part, ranks = normal(2, 64), 3
    sender, *others = Peers.on_one_device(ranks, 2, 96)
    for number in (1, 2, 3):
        for other in others:
            deliver(sender, other.rank, part, number)
        before = sender.buffer.clone()
        hipforge.all_reduce(part, *sender)
        for other in others:
            want = Peers(before.clone(), other.addresses, other.rank)
            deliver(want, 0, part, number)
            assert torch.equal(want.buffer[other.rank], sender.buffer[other.rank])


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_run_at_the_same_time_wait_for_each_other(ranks: int) -> None:
    peers, weight = Peers.on_one_device(ranks, 5, 512, polls=200_000), normal(512, seed=9)
    for number, rows in enumerate((5, 1, 3, 5, 2, 5)):
        parts = [normal(rows, 512, seed=10 * number + rank) for rank in range(ranks)]
        residuals = [normal(rows, 512, seed=99) for _ in range(ranks)]
        want = hipforge.residual_rms_mxfp8(summed(parts), residuals[0].clone(), weight, EPSILON)
        calls = [
            lambda own=own, part=part, residual=residual: all_reduce_residual_rms_mxfp8(
                part, residual, weight, EPSILON, *own
            )
            for own, part, residual in zip(peers, parts, residuals, strict=True)
        ]
        assert all(same(got, want) for got in in_threads(calls))


def _rank(buffers: torch.Tensor, rank: int, calls: int, done: Any) -> None:
    peers = Peers.in_memory(buffers)[rank]
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(calls):
        if torch.rand((), generator=generator) < 0.3:
            threading.Event().wait(0.02)
        found.append(hipforge.all_reduce(normal(2, 64, seed=100 * number + rank), *peers))
    done.put((rank, torch.stack(found).view(torch.int16).tolist()))  # a tensor would need this process to stay


def test_processes_that_share_memory_add_up() -> None:
    ranks, calls = 2, 20
    hipforge.all_reduce(normal(2, 64), *Peers.alone(2, 64))  # is built here, once
    buffers = Peers.on_one_device(ranks, 2, 64)[0].buffer.share_memory_()
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    processes = [context.Process(target=_rank, args=(buffers, rank, calls, done)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = dict(done.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    want = [summed([normal(2, 64, seed=100 * number + rank) for rank in range(ranks)]) for number in range(calls)]
    assert all(found[rank] == torch.stack(want).view(torch.int16).tolist() for rank in range(ranks))


def test_a_rank_that_does_not_come_ends_the_launch() -> None:
    own, x, weight = Peers.on_one_device(2, 1, 32, polls=50)[1], normal(1, 32), normal(32)
    for add in (
        lambda: hipforge.all_reduce(x, *own),
        lambda: all_reduce_residual_rms(x, x.clone(), weight, EPSILON, *own),
        lambda: all_reduce_residual_rms_mxfp8(x, x.clone(), weight, EPSILON, *own),
    ):
        with pytest.raises(EmulatorFault, match=r"rank 1 of 2 gave up: .* 50 reads(.|\n)*trap"):
            add()


def test_an_older_part_is_not_taken_for_this_calls() -> None:
    own = Peers.on_one_device(2, 1, 32, polls=50)[0]
    deliver(own, 1, normal(1, 32), 1)
    hipforge.all_reduce(normal(1, 32), *own)
    own.buffer[0, 0, 0] = 2  # call 3 finds what call 1 left in its slot
    with pytest.raises(EmulatorFault, match="trap"):
        hipforge.all_reduce(normal(1, 32), *own)


def test_special_values_are_added_as_floats() -> None:
    values = torch.tensor([[0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 65504.0]])
    for dtype in DTYPES:
        parts = [values.to(dtype), values.flip(1).to(dtype), torch.zeros(1, 8, dtype=dtype)]
        own = Peers.on_one_device(3, 1, 8)[2]
        deliver(own, 0, parts[0], 1)
        deliver(own, 1, parts[1], 1)
        torch.testing.assert_close(hipforge.all_reduce(parts[2], *own), summed(parts), rtol=0, atol=0, equal_nan=True)


def test_more_than_the_buffer_holds_is_left_to_torch() -> None:
    own = Peers.alone(2, 64)
    assert hipforge.all_reduce(normal(3, 64), *own) is None and hipforge.all_reduce(normal(2, 96), *own) is None
    told = hipforge.explain(hipforge.all_reduce, normal(3, 64), *own)
    assert told.path == "none" and told.reason == "the buffer is for 2 rows of 64 columns; got 3 of 64"
    assert hipforge.all_reduce(normal(0, 64), *own).shape == (0, 64)
    assert own.buffer.count_nonzero() == 0


def test_wrong_arguments_are_refused() -> None:
    x, own = normal(1, 64), Peers.alone(1, 64)
    two = Peers.on_one_device(2, 1, 64)[0]
    with pytest.raises(GuardError, match="multiple of 8 columns; got 63"):
        hipforge.all_reduce(x[:, :63].contiguous(), *own)
    with pytest.raises(GuardError, match="multiple of 32 columns; got 40"):
        all_reduce_residual_rms_mxfp8(x[:, :40].contiguous(), x[:, :40].clone(), x[0, :40].clone(), EPSILON, *own)
    with pytest.raises(GuardError, match=r"addresses must be those of 1 to 8 ranks; got 9"):
        hipforge.all_reduce(x, own.buffer, own.addresses.repeat(9), 0)
    with pytest.raises(GuardError, match="rank must be 0 to 0; got 1"):
        hipforge.all_reduce(x, own.buffer, own.addresses, 1)
    with pytest.raises(GuardError, match="polls must be 1 to"):
        hipforge.all_reduce(x, *own._replace(polls=0))
    with pytest.raises(GuardError, match="made by hipforge"):
        hipforge.all_reduce(x, torch.zeros(1, 1, 200, dtype=torch.int32), own.addresses, 0)
    with pytest.raises(GuardError, match="this rank's or all 2 ranks'"):
        hipforge.all_reduce(x, torch.cat((two.buffer, two.buffer)), two.addresses, 0)
    with pytest.raises(GuardError, match="buffer must be contiguous int32"):
        hipforge.all_reduce(x, own.buffer.float(), own.addresses, 0)
    with pytest.raises(GuardError, match="residual"):
        all_reduce_residual_rms(x, normal(2, 64), normal(64), EPSILON, *own)
    with pytest.raises(GuardError, match="epsilon must be finite"):
        all_reduce_residual_rms(x, x.clone(), normal(64), -1.0, *own)
    wrong: Any
    for wrong in ((0, 1, 8), (9, 1, 8), (1, 0, 8), (1, 1, 0), (2.0, 1, 8), (1, "1", 8), (1, 1, None)):
        with pytest.raises(GuardError, match="must"):
            Peers.on_one_device(*wrong)
    assert own.buffer.count_nonzero() == 0


def test_a_group_without_processes_or_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="init_process_group first"):
        Peers.of_group(1, 64)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees none"):
        Peers.of_group(1, 64)


def test_no_lane_waits_or_reads_outside_of_its_memory() -> None:
    own = Peers.on_one_device(3, 2, 288)[1]
    for sender in (0, 2):
        deliver(own, sender, normal(2, 288, seed=sender), 1)
    with emulator.options(checks="all"):
        all_reduce_residual_rms_mxfp8(normal(2, 288), normal(2, 288), normal(288), EPSILON, *own)


def test_products_around_sums_say_where_they_are_for_and_what_they_refuse() -> None:
    sizes: dict[str, Any] = {"sending": (2048,), "receiving": (3072,)}
    assert summed_linear.refusal(1, 4096, **sizes) == "the kernels are for sm_90"
