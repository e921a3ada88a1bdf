"""The peers of hipforge bench-model: each way to write a step in torch computes the model, and a failure is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nn.test_bench_model import CPU, shape_of

from hipforge.cli import bench_model, decode_peers
from hipforge.cli.decode_peers import KINDS, MOST_ERROR, Peer, ways


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What inductor makes of it is the subject of op_tests/gpu: bench-model holds that to float64 as well."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(decode_peers, "_flash", flash)


def flash(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's own is for GPUs."""
    keys, values = (part.repeat_interleave(q.shape[1] // part.shape[1], 1).double() for part in (keys, values))
    scores = q.double() @ keys.transpose(2, 3) * q.shape[3] ** -0.5
    return (scores.softmax(-1) @ values).to(q.dtype), scores.logsumexp(-1).float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "experts", "gpt_oss"])
@torch.no_grad()
def test_every_way_computes_the_layers_of_float64(tmp_path: Path, name: str, kind: str) -> None:
    shape = shape_of(tmp_path, name)
    peer, seen = Peer(shape, kind, CPU), 0
    for way in ways(shape, kind):
        if "_scaled_grouped_mm" in way.name:  # not on a CPU
            continue
        for batch in [batch for batch in (1, 3) if batch in way.sequences]:
            step = peer.step(way, batch, 70)
            step.run()
            assert 0 < step.error() <= MOST_ERROR[kind], (way.name, batch)
            seen += 1
    assert seen >= 2


@torch.no_grad()
def test_a_way_that_computes_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(tmp_path, "qwen3_moe")
    peer = Peer(shape, "bf16", CPU)
    chosen = decode_peers._chosen

    def another(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = chosen(*args)
        return weights, ids.roll(1, 1)

    monkeypatch.setattr(decode_peers, "_chosen", another)
    for way in ways(shape, "bf16"):
        assert peer.step(way, 3, 70).error() > 5 * MOST_ERROR["bf16"]


def test_the_sequences_of_a_peer_differ(tmp_path: Path) -> None:
    """Equal ones would choose the same experts, and read less than they should."""
    shape = replace(shape_of(tmp_path, "qwen3_moe"), experts=64, top_k=2)
    seen = []

    def experts(x: torch.Tensor, layer: Any, of: Any) -> torch.Tensor:
        seen.append(decode_peers._chosen(x, layer, of)[1])
        return torch.zeros_like(x)

    way = ways(shape, "bf16")[0]
    with torch.no_grad():
        Peer(shape, "bf16", CPU).step(replace(way, math=replace(way.math, experts=experts)), 8, 70).run()
    assert all(len(ids.unique()) > 8 for ids in seen)


def test_what_cannot_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(tmp_path, "qwen3_moe")

    def step(self: Peer, way: decode_peers.Way, batch: int, context: int) -> decode_peers.Running:
        if way.name == "torch._grouped_mm":
            raise RuntimeError("no such product\non this card")
        return decode_peers.Running(lambda: None, lambda: 0.5 if batch == 3 else 0.001)

    monkeypatch.setattr(Peer, "step", step)
    monkeypatch.setattr(Peer, "__init__", lambda *_: None)
    monkeypatch.setattr(bench_model, "captured", lambda calls, way: None)
    monkeypatch.setattr(bench_model.timing, "replay_us", lambda graph: 100.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    one, two, three, many = bench_model.measure_peers(shape, "bf16", [(1, 70), (2, 70), (3, 70), (64, 70)])
    gathered, grouped = (way.name for way in ways(shape, "bf16"))
    assert one == {gathered: 100.0}
    assert two == {gathered: 100.0, grouped: "RuntimeError: no such product"}
    assert three[gathered].endswith("a layer adds what is 0.500 from float64, relatively; at most 0.02 is right")
    assert list(many) == [grouped]  # each token would gather weights of its own
    assert bench_model.best_peer(two) == 100.0
    assert bench_model.best_peer(many) == "torch._grouped_mm: RuntimeError: no such product"
