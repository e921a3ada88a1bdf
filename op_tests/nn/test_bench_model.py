"""hipforge bench-model: the step that it measures is the model's, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from nn.test_time_model import CONFIGS, DENSE, EXPERTS, LATENTS, written

import hipforge
from hipforge.cli import bench_model, decode_model, decode_ops, decode_ranks, decode_step, decode_twin
from hipforge.cli.bench_model import MOST_ERROR
from hipforge.cli.main import cli
from hipforge.errors import ConfigError, HipforgeError

CPU = torch.device("cpu")
QWEN3_MOE = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
}  # fmt: skip
GPT_OSS = {
    **DENSE, "model_type": "gpt_oss", "hidden_size": 288, "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 288, "sliding_window": 16, "swiglu_limit": 2.0,
}  # fmt: skip
MODELS = {"llama": {**DENSE, "model_type": "llama"}, "qwen3": DENSE, "experts": EXPERTS, "qwen3_moe": QWEN3_MOE,
          "gpt_oss": GPT_OSS}  # fmt: skip


def shape_of(folder: Path, name: str) -> decode_step.Shape:
    return decode_twin.small(decode_step.read(written(folder, MODELS[name])))


@pytest.mark.parametrize("name", MODELS)
def test_the_steps_logits_are_those_of_float64(tmp_path: Path, name: str) -> None:
    assert decode_twin.check(shape_of(tmp_path, name), CPU, context=70, steps=2) <= MOST_ERROR


@pytest.mark.parametrize(
    "name, ends",
    [
        ("qwen3", {"norm, qkv", "norm, gate_up", "swiglu, down"}), ("qwen3_moe", {"norm, qkv", "norm, router"}),
        ("gpt_oss", {"norm, router"}),
    ],
)
def test_a_step_whose_products_make_their_activations_is_the_same(tmp_path: Path, name: str, ends: set[str]) -> None:
    model = decode_model.Model(shape_of(tmp_path, name), decode_model.Random(CPU))
    logits, names = [], []
    for fused in (False, True):
        chain = decode_ops.chain(model, 2, 70, ahead=2, fused=fused)
        for _ in range(2):
            for op in chain.ops:
                op.call()
        logits.append(chain.logits)
        names.append({op.name for op in chain.ops})
    assert torch.equal(*logits) and names[1] - names[0] == ends


FAULTS: dict[str, tuple[str, Callable[[decode_step.Shape], decode_step.Shape]]] = {
    "a window one shorter": ("gpt_oss", lambda shape: replace(shape, window=shape.window - 8)),
    "another limit": ("gpt_oss", lambda shape: replace(shape, limit=shape.limit / 2)),
    "another offset of norms": ("experts", lambda shape: replace(shape, offset=0.0)),
    "another base of the rotation": ("qwen3", lambda shape: replace(shape, theta=shape.theta * 2)),
    "a shorter rotation": ("llama", lambda shape: replace(shape, rotary_dim=shape.rotary_dim // 2)),
    "another scoring": ("experts", lambda shape: replace(shape, scoring="softmax")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_with_a_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, change = FAULTS[fault]
    exact = decode_twin.exact_logits

    def of_another(model: decode_model.Model, *rest: Any) -> torch.Tensor:
        model.shape = change(model.shape)
        try:
            return exact(model, *rest)
        finally:
            model.shape = shape

    shape = shape_of(tmp_path, name)
    monkeypatch.setattr(decode_twin, "exact_logits", of_another)
    assert decode_twin.check(shape, CPU, context=70, steps=1) > 1.5 * MOST_ERROR


def test_steps_follow_each_other_without_the_host(tmp_path: Path) -> None:
    """Positions, slots and lengths of the next step are what the cache itself would give, and reset goes back."""
    model = decode_model.Model(shape_of(tmp_path, "qwen3"), decode_model.Random(CPU))
    chain = decode_ops.chain(model, 3, decode_ops.PAGE_SIZE - 1, ahead=2)
    calls: list[tuple[list[int], ...]] = []
    real = hipforge.nn.PagedKVCache.rope_and_store

    def seen(self: Any, layer: int, q: Any, k: Any, v: Any, table: Any, step: Any, **named: Any) -> Any:
        if layer == 0:
            calls.append((step.positions.tolist(), step.slot_mapping.tolist(), step.seqlens.tolist()))
        return real(self, layer, q, k, v, table, step, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hipforge.nn.PagedKVCache, "rope_and_store", seen)
        for _ in range(3):
            for op in chain.ops:
                op.call()
        chain.reset()
        chain.ops[3].call()
    tables = chain.tables.tolist()
    for number, (positions, slots, lengths) in enumerate([*calls[:3], calls[0]]):
        at = decode_ops.PAGE_SIZE - 2 + number % 3
        assert positions == [at] * 3 and lengths == [at + 1] * 3
        page, slot = divmod(at, decode_ops.PAGE_SIZE)
        assert slots == [row[page] * decode_ops.PAGE_SIZE + slot for row in tables]
    assert calls[3] == calls[0]


def test_what_is_read_is_the_weights_the_touched_experts_and_the_cache(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, "qwen3_moe")
    model = decode_model.Model(shape, decode_model.Random(CPU))
    chain = decode_ops.chain(model, 1, 70)
    for op in chain.ops:
        op.call()
    reads: dict[str, int] = {}
    for op in chain.ops:
        reads[op.name] = reads.get(op.name, 0) + op.reads()
    layers, (heads, kv_heads), dim = 2, shape.heads, shape.head_dim
    assert reads["qkv"] == layers * (heads + 2 * kv_heads) * dim * shape.hidden * 33 // 32
    assert reads["experts' gate_up, swiglu"] == layers * 2 * 2 * shape.expert_inner * shape.hidden * 33 // 32
    assert reads["attention, quantise"] == layers * 70 * 2 * kv_heads * dim
    assert reads["argmax"] == reads["norm + quantise"] == 0


class Replayed(list[Callable[[], object]]):
    """Calls in place of a graph of them."""

    def replay(self) -> None:
        for call in self:
            call()


def test_a_step_is_measured_op_by_op_and_goes_back_to_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []
    monkeypatch.setattr(bench_model.timing, "REPLAYS", 2)
    monkeypatch.setattr(bench_model, "captured", lambda calls, way: ways.append(way) or Replayed(calls))

    def timed(graph: Replayed) -> float:
        for _ in range(bench_model.timing.WARMUP + bench_model.timing.REPLAYS):
            graph.replay()
        return float(len(graph))

    monkeypatch.setattr(bench_model.timing, "replay_us", timed)
    model = decode_model.Model(shape_of(tmp_path, "qwen3"), decode_model.Random(CPU))
    with torch.no_grad():
        step = bench_model.measure(model, 2, 70, 1e12, programmatic=True)
    lines = {line.op: line for line in step.lines}
    assert lines["qkv"].calls == 2 and lines["norm + quantise"].calls == 5 and lines[decode_ops.MOVES_ON].calls == 1
    # A call takes one unit, alone and in the step, both ways.
    assert all(line.step_us == line.programmatic_us == line.calls for line in step.lines)
    assert step.us == step.programmatic_us == sum(line.calls for line in step.lines) and step.gap_us == 0
    assert step.floor_us == sum(line.read_bytes for line in step.lines) / 1e6 > 0
    assert ways == [False, True] * (1 + len(lines)) and {line.path for line in step.lines} == {"kernel", "torch"}


def test_a_replay_that_gives_other_logits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Replayed):
        def replay(self) -> None:
            for call in self[:-4]:  # without the head
                call()

    monkeypatch.setattr(bench_model, "captured", lambda calls, way: Broken(calls))
    model = decode_model.Model(shape_of(tmp_path, "qwen3"), decode_model.Random(CPU))
    reset = decode_ops.Chain.reset

    def forget(chain: decode_ops.Chain) -> None:
        reset(chain)
        chain.logits.zero_()

    monkeypatch.setattr(decode_ops.Chain, "reset", forget)
    with torch.no_grad(), pytest.raises(HipforgeError, match="a replay gives other logits than op by op"):
        bench_model.measure(model, 2, 70, 1e12, programmatic=False)


def test_the_shipped_models_have_the_sizes_of_their_names() -> None:
    sizes = {"llama_3_1_8b": 8.03e9, "qwen3_8b": 8.19e9, "qwen3_30b_a3b": 30.5e9, "gpt_oss_20b": 20.9e9}
    for name, parameters in sizes.items():
        shape = decode_step.read(CONFIGS / f"{name}.json")
        (heads, kv_heads), (dense, sparse) = shape.heads, shape.layers
        attention = shape.hidden * shape.head_dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * shape.hidden * (dense * shape.inner + sparse * shape.experts * shape.expert_inner)
        count = (dense + sparse) * attention + mlp + 2 * shape.vocabulary * shape.hidden
        assert count == pytest.approx(parameters, rel=0.01), name


def test_logits_are_compared_over_two_layers_of_a_kind(tmp_path: Path) -> None:
    shape = replace(shape_of(tmp_path, "experts"), layers=(3, 4))
    model = decode_model.Model(shape, decode_model.Random(CPU))
    found = bench_model.logits_of(model, 2, 70)
    assert len(model.layers) == 7 and model.shape.layers == (3, 4)  # as it was
    for not_looked_at, other in ((2, 0), (5, 3), (6, 4)):
        model.layers[not_looked_at] = model.layers[other]
    assert torch.equal(bench_model.logits_of(model, 2, 70), found)
    model.layers[4] = replace(model.layers[4], out=model.layers[3].out)
    assert not torch.equal(bench_model.logits_of(model, 2, 70), found)


TWO = """
import sys, tempfile
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
from hipforge.cli import bench_model, decode_model, decode_ops, decode_ranks
from nn.test_bench_model import CPU, MODELS, shape_of

dist.init_process_group("gloo")
for name in sys.argv[1].split(","):
    shape = shape_of(Path(tempfile.mkdtemp()), name)
    if name == "gpt_oss":
        shape = replace(shape, expert_inner=320)  # two parts of whole blocks
    with torch.no_grad():
        # With seed 0 two scores of gpt_oss are 0.03 apart, and a token chooses another expert in two parts.
        model = decode_model.Model(shape, decode_model.Random(CPU, seed=int(name == "gpt_oss")))
        want = bench_model.logits_of(model, 3, 70)
        own = decode_model.part(model, decode_ranks.Ranks(dist.get_rank(), 2))
        print(f"{name}: {bench_model.error_beside(own, 3, 70, want)}")
dist.all_reduce = lambda x: x  # the parts are not added up
with torch.no_grad():
    bench_model.error_beside(own, 3, 70, want)
"""


def test_two_processes_with_a_part_each_have_the_logits_of_one_if_they_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    # The same kernels run in one process above, with every check of the emulator.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HIPFORGE_EMULATOR_CHECKS": "memory"}
    command += [str(tmp_path / "two.py"), ",".join(MODELS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    errors = re.findall(r"([a-z]\w*): (0\.\d+)", done.stdout)  # two processes may write into one line
    assert sorted(name for name, _ in errors) == sorted(2 * [*MODELS]), done.stderr[-3000:]
    assert all(0 < float(error) <= MOST_ERROR for _, error in errors)
    assert done.returncode != 0
    assert "the logits of 2 GPUs are" in done.stderr and "from those of one" in done.stderr, done.stderr[-3000:]


def test_gpus_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--tp 2 needs 2 GPUs; torch sees 1"):
        decode_ranks.start(2, [])
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="--tp 2 needs 2 processes; torchrun has started 4"):
        decode_ranks.join(2, "all_reduce")


def test_each_process_has_its_kv_heads_or_shares_one() -> None:
    found = [decode_ranks.Ranks(rank, 4).kv_heads(8) for rank in range(4)]
    assert found == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    found = [decode_ranks.Ranks(rank, 4).kv_heads(2) for rank in range(4)]
    assert found == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]


def test_without_a_gpu_the_command_says_what_to_use(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench-model", str(written(tmp_path, DENSE))])
    assert done.exit_code == 1
    assert "measures on a GPU, and the device is emulator" in done.output and "hipforge time-model" in done.output
    done = CliRunner().invoke(cli, ["bench-model", str(written(tmp_path, LATENTS))])
    assert done.exit_code == 1 and "the attention of glm_moe_dsa models has no op here" in done.output
    done = CliRunner().invoke(cli, ["bench-model", "config.json", "--batch", "1,x"])
    assert done.exit_code == 2 and "expected positive numbers separated by commas" in done.output


def test_a_table_says_what_a_step_took(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hipforge.cli import output

    line = bench_model.Line("qkv", "kernel", 32, 400.0, 320.0, 800_000_000)
    step = bench_model.Step(8, 2048, 1000.0, 800.0, 400.0, (line,), {"bf16": 1600.0, "fp8": "does not fit"},
                            peer_ways={"bf16": {"cuBLAS": 1600.0, "tuned": "no such product"}, "fp8": {}})  # fmt: skip
    assert step.gap_us == 600.0 and json.dumps(bench_model.asdict(step))
    bench_model._print(output.console(), "llama", step, 2.5e12)
    for kind in step.peers:
        bench_model._print_peer(step, kind)
    said = capsys.readouterr().out
    shares = "80%", "60.0%", "share 40.0%", "share 50.0%"
    ways = "(cuBLAS 1600; tuned no such product)"
    for part in (ways, "12.50", "10.00", "2.00", "8000 tokens/s", "2.00×", "1.00 GB", "does not fit", *shares):
        assert part in said, part


def test_the_timeline_shows_the_middle_of_a_step_from_zero() -> None:
    launches = tuple((f"kernel {number}", 10.0 * number, 4.0) for number in range(100))
    step = bench_model.Step(1, 64, 1000.0, None, 500.0, (), {}, kernels=launches)
    chosen = bench_model.shown(step, 10)
    assert [name for name, *_ in chosen] == [f"kernel {number}" for number in range(40, 60)]
    assert chosen[0][1:] == (0.0, 4.0) and chosen[-1][1:] == (190.0, 4.0)
    assert len(bench_model.shown(step, 1)) == 100
