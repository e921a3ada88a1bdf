"""Checks and times of the sums over GPUs: ``torchrun --nproc-per-node 2 op_tests/gpu/all_reduce_ranks.py``.

Every rank checks its own results; the first prints. With ``--measure`` it also prints microseconds of a call.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

from helpers.peer_parts import summed

import hipforge
from hipforge.nn import Peers
from hipforge.ops import summed_linear
from hipforge.ops.argmax import argmax_of_ranks
from hipforge.ops.fused_linear import residual_rms_mxfp8_linear, swiglu_mxfp8_linear
from hipforge.ops.mxfp8_gemm.kernels import row_stream, row_stream_made
from hipforge.tuning import timing

EPSILON, MOST_ROWS, MOST_COLUMNS = 1e-6, 64, 16384
SHAPES = ((1, 4096), (3, 2880), (8, 8192), (64, 4096), (2, 16384), (1, 32), (5, 7168))
Norm = Callable[..., Any]


def parts(seed: int, rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return every rank's part, the same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = rows, columns
    return [torch.randn(*shape, device="cuda", dtype=dtype, generator=generator) for _ in range(dist.get_world_size())]


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def require(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"rank {dist.get_rank()}: {what}")


def pause(rng: random.Random) -> None:
    """Let the GPU wait for a while that differs from rank to rank."""
    if rng.random() < 0.5:
        torch.cuda._sleep(rng.randrange(1, 100_000))


def check_calls(peers: Peers, calls: int, seed: int = 0) -> None:
    """Hold calls of changing shapes, none of which waits for the host, to the ops one by one."""
    shared, own = random.Random(seed), random.Random(100 * seed + peers.rank)
    made, wanted = [], []
    for number in range(calls):
        (rows, columns), dtype = shared.choice(SHAPES), shared.choice((torch.bfloat16, torch.float16))
        of = parts(1000 * seed + number, rows, columns, dtype)
        generator = torch.Generator("cuda").manual_seed(number)
        residual = torch.randn(rows, columns, device="cuda", dtype=dtype, generator=generator)
        weight = torch.randn(columns, device="cuda", dtype=dtype, generator=generator)
        kind, offset = shared.randrange(3), shared.choice((0.0, 1.0))
        total, kept, mine = summed(of), residual.clone(), of[peers.rank].contiguous()
        pause(own)
        with hipforge.programmatic_launch() if number % 2 else torch.no_grad():
            if kind == 0:
                got, want = [hipforge.all_reduce(mine, *peers)], [total]
            elif kind == 1:
                got = hipforge.all_reduce_residual_rms(mine, residual, weight, EPSILON, *peers, weight_offset=offset)
                want = hipforge.residual_rms(total, kept, weight, EPSILON, weight_offset=offset)
            else:
                also, copy = torch.empty_like(mine), torch.empty_like(mine)
                got = *hipforge.all_reduce_residual_rms_mxfp8(
                    mine, residual, weight, EPSILON, *peers, weight_offset=offset, also_out=also
                ), also
                want = *hipforge.residual_rms_mxfp8(
                    total, kept, weight, EPSILON, weight_offset=offset, also_out=copy
                ), copy
        made.append((f"call {number}, kind {kind}, {rows} x {columns} of {dtype}", got))
        wanted.append(want)
    torch.cuda.synchronize()
    for (what, got), want in zip(made, wanted, strict=True):
        require(all(same(one, other) for one, other in zip(got, want, strict=True)), f"{what} has other bits")


def check_graph(peers: Peers, replays: int, programmatic: bool) -> None:
    """Replay a graph of calls whose parts change from replay to replay."""
    own, rows, columns, layers = random.Random(peers.rank), 2, 4096, 5
    weight = torch.ones(columns, device="cuda").bfloat16()
    x, residual = (torch.zeros(rows, columns, device="cuda").bfloat16() for _ in range(2))
    q = [torch.zeros(rows, columns, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(layers)]
    scale = [torch.zeros(rows, columns // 32, device="cuda", dtype=torch.uint8) for _ in range(layers)]

    def calls() -> None:
        for layer in range(layers):
            hipforge.all_reduce_residual_rms_mxfp8(
                x, residual, weight, EPSILON, *peers, out=q[layer], scale_out=scale[layer]
            )

    calls()
    graph = torch.cuda.CUDAGraph()
    early = hipforge.programmatic_launch() if programmatic else torch.no_grad()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), early:
        calls()
    for replay in range(replays):
        of = parts(replay, rows, columns, torch.bfloat16)
        x.copy_(of[peers.rank])
        residual.zero_()
        pause(own)
        graph.replay()
        kept, total = torch.zeros_like(residual), summed(of)
        for layer in range(layers):
            want, want_scale, _ = hipforge.residual_rms_mxfp8(total, kept, weight, EPSILON)
            require(
                same(q[layer], want) and same(scale[layer], want_scale), f"replay {replay}, layer {layer}: other bits"
            )


def weights(n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return hipforge.mxfp8_quantize(torch.randn(n, k, device="cuda", generator=generator).bfloat16() * k**-0.5)


def check_products(rows: int, hidden: int, inner: int, layers: int, replays: int) -> None:
    """Hold products around a sum to products and sums one by one, in graphs whose inputs change."""
    peers, ranks = Peers.of_group(rows, hidden), dist.get_world_size()
    own = random.Random(peers.rank)
    up, norm_weight = weights(2 * inner, hidden, 1), torch.randn(hidden, device="cuda").bfloat16().abs()
    dist.broadcast(norm_weight, 0)
    down, flat = weights(hidden, inner, 2 + peers.rank), weights(hidden, inner, 50 + peers.rank)
    bias = torch.ones(hidden, device="cuda").bfloat16() if peers.rank == 0 else None
    gate_up = torch.zeros(rows, 2 * inner, device="cuda").bfloat16()
    codes, scales = hipforge.mxfp8_quantize(torch.ones(rows, inner, device="cuda").bfloat16())
    start = torch.randn(rows, hidden, device="cuda").bfloat16()
    dist.broadcast(start, 0)
    found = [torch.empty_like(gate_up) for _ in range(2 * layers)]
    streams = [start.clone(), *(torch.empty_like(start) for _ in range(2 * layers))]

    def calls() -> None:
        for layer in range(2 * layers):
            if layer % 2:
                summed_linear.send_mxfp8_linear(codes, scales, *flat, peers)
            else:
                summed_linear.send_swiglu_mxfp8_linear(gate_up, *down, peers, bias, alpha=1.7, beta=1.0, limit=7.0)
            summed_linear.summed_rms_mxfp8_linear(
                peers, streams[layer], norm_weight, EPSILON, *up, out=found[layer], sum_out=streams[layer + 1]
            )

    def want(layer: int, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = torch.empty_like(start)
        if layer % 2:
            given = row_stream_made.configuration(hidden, inner, 132).values()
            row_stream.mxfp8_row_stream_out(part, codes, scales, *flat, None, 8, *given, False)
        else:
            swiglu_mxfp8_linear(gate_up, *down, bias, alpha=1.7, beta=1.0, limit=7.0, out=part)
        of = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(of, part)
        return residual_rms_mxfp8_linear(summed(of), residual, norm_weight, EPSILON, *up)

    calls()
    for programmatic in (False, True):
        early = hipforge.programmatic_launch() if programmatic else torch.no_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), early:
            calls()
        for replay in range(replays):
            gate_up.copy_(torch.randn(gate_up.shape, device="cuda").bfloat16() * 3)
            codes.copy_(hipforge.mxfp8_quantize(torch.randn(codes.shape, device="cuda").bfloat16())[0])
            pause(own)
            graph.replay()
            residual = start
            for layer in range(2 * layers):
                right, residual = want(layer, residual)
                where = f"{rows} x {hidden}, replay {replay}, layer {layer}: other bits"
                require(same(found[layer], right) and same(streams[layer + 1], residual), where)


def check_choices(calls: int) -> None:
    """Hold the choice of tokens among the columns of all ranks to that of whole logits."""
    rows = 4
    peers, own = Peers.of_group(rows, 8), random.Random(dist.get_rank())
    found, wanted = [], []
    for number in range(calls):
        columns = (64128, 1000, 75968)[number % 3]
        dtype = (torch.bfloat16, torch.float16, torch.float32)[number // 3 % 3]
        of = parts(number, 1 + number % rows, columns, dtype)
        if number % 2:
            of = [part.round() for part in of]  # the largest is there more than once
        pause(own)
        with hipforge.programmatic_launch() if number % 4 < 2 else torch.no_grad():
            found.append(argmax_of_ranks(of[peers.rank], peers))
        wanted.append(torch.argmax(torch.cat(of, 1), 1))
    torch.cuda.synchronize()
    require(all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), "other tokens than of whole logits")


def check_numbers(peers: Peers) -> None:
    """Let the count of calls pass 2^32."""
    dist.barrier()
    torch.cuda.synchronize()
    peers.buffer[:, :, 0] = -5
    torch.cuda.synchronize()
    dist.barrier()
    check_calls(peers, 20, seed=7)


def measure(peers: Peers, rows: int, columns: int, calls: int = 200) -> dict[str, float]:
    """Return microseconds of a call in a graph of such calls, by way."""
    from torch.distributed import _symmetric_memory

    group: Any = dist.group.WORLD
    x, residual = (torch.zeros(rows, columns, device="cuda").bfloat16() for _ in range(2))
    weight = torch.ones(columns, device="cuda").bfloat16()
    shared = _symmetric_memory.empty(rows, columns, dtype=x.dtype, device=x.device)
    _symmetric_memory.rendezvous(shared.zero_(), group)
    q = torch.zeros(rows, columns, device="cuda", dtype=torch.float8_e4m3fn)
    given: dict[str, Any] = {"out": q, "scale_out": torch.zeros(rows, columns // 32, device="cuda", dtype=torch.uint8)}
    alone = Peers.alone(rows, columns, "cuda")

    def norm() -> None:
        hipforge.residual_rms_mxfp8(x, residual, weight, EPSILON, **given)

    def one_shot() -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group.group_name, out=x)

    fused = partial(hipforge.all_reduce_residual_rms_mxfp8, x, residual, weight, EPSILON, **given)
    ways: dict[str, list[Callable[[], object]]] = {
        "fused": [lambda: fused(*peers)],
        "fused, one rank": [lambda: fused(*alone)],
        "sum": [lambda: hipforge.all_reduce(x, *peers, out=shared)],
        "one_shot": [one_shot],
        "one_shot, norm": [one_shot, norm],
        "NCCL": [lambda: dist.all_reduce(x)],
        "NCCL, norm": [lambda: dist.all_reduce(x), norm],
        "norm": [norm],
    }  # fmt: skip
    found = {}
    for name, of in ways.items():
        for early in (False, True):
            for call in of:
                call()
            torch.cuda.synchronize()
            dist.barrier()
            with hipforge.programmatic_launch() if early else torch.no_grad():
                graph = timing.captured(of * calls)
            dist.barrier()
            found[f"{name}{', programmatic' if early else ''}"] = timing.replay_us(graph) / calls
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--measure", action="store_true")
    given = parser.parse_args()
    import os

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    peers = Peers.of_group(MOST_ROWS, MOST_COLUMNS)
    say = partial(print, flush=True) if dist.get_rank() == 0 else lambda *text: None
    check_calls(peers, given.calls)
    say(f"{given.calls} calls have the bits of the ops one by one")
    for programmatic in (False, True):
        check_graph(peers, 50, programmatic)
    say("replays have them")
    check_numbers(peers)
    say("numbers pass 2^32")
    for rows, hidden, inner in ((1, 4096, 7168), (2, 2048, 512), (1, 8192, 1024), (2, 4096, 2048)):
        check_products(rows, hidden, inner, layers=3, replays=20)
    say("products around sums have the bits of those one by one")
    check_choices(given.calls)
    say("choices are those of whole logits")
    require(hipforge.all_reduce(torch.ones(65, 32, device="cuda").half(), *peers) is None, "65 rows are not refused")
    if given.measure:
        for rows, columns in ((1, 4096), (8, 4096), (64, 4096), (1, 8192)):
            for name, us in measure(peers, rows, columns).items():
                say(f"{rows} x {columns}, {name}: {us:.2f} us")
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    say("all right")


if __name__ == "__main__":
    main()
