"""examples/generate.py: whole models on hipforge's kernels beside float64 and beside the transformers library."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.step_simulation import Simulation, bf16
from torch.utils._python_dispatch import TorchDispatchMode

from hipforge import devices, emulator
from hipforge.nn import PagedKVCache

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from decoder import FROM, SHARED, Decoder, Ranks, read_back
from generate import CHUNK, PROMPT, build, main, prefill

GENERATED = 32
LAUNCHES = {"dense": 9, "experts": 13, "sparse": 2}

# What a layer's halves add to the stream, beside float64 with the same roundings on the same input. The one rounding
# that the simulation leaves out is that of softmax weights to bf16: uniform within 2^-9 of each, so 1.1e-3 of what the
# heads give in the root mean square (2^-9 / sqrt(3), in random directions), 0.9e-3 in the mean. The output projection
# reads that in e4m3, whose steps are 2^-3 to 2^-4 of a value, 0.088 in the mean: a value that moved by d falls on the
# other side of a step with probability d / step and is then off by a step, so the error grows to
# sqrt(0.088 * 0.9e-3) = 0.9e-2. The MLP rounds nothing that the simulation does not.
PER_LAYER = 1e-2
# Against the library, simulation and device differ in which values fall on which side of a step, so their medians
# over 33 tokens are two draws. Errors of tokens spread by 13 to 17 % (interquartile range over 1.35), so a median's by
# at most 1.25 * 17 % / sqrt(33) = 3.7 % and the ratio of two by 5 %: this is two of those, and most of the spread is
# common to both draws, whose tokens are the same. The median, because a step may also change which expert a router
# chooses: such tokens are off by a multiple. Errors of Qwen3's tokens with experts spread by 15 to 25 %: two of 6.4 %.
BESIDE_THE_LIBRARY = {"qwen3_moe": 1.13}
BESIDE_THE_LIBRARY_ELSE = 1.1


@dataclass
class Run:
    """What a model did over one sequence; ``records`` hold, per layer, its input and what its halves added."""

    source: Any
    model: Decoder
    sequence: torch.Tensor
    logits: torch.Tensor
    records: list[dict[str, torch.Tensor]]
    launches: list[list[int]]  # of each step, by layer, on the emulator


@functools.cache
def witness(name: str) -> tuple[Any, torch.Tensor]:
    """The transformers model on dequantised weights, and what it makes of the prompt, greedily."""
    source = build(name)
    with torch.no_grad():
        read_back(FROM[name](source), source)
        sequence = torch.randint(0, source.config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(1))
        for _ in range(GENERATED):
            sequence = torch.cat((sequence, source(sequence[None], use_cache=False).logits[0, -1:].argmax(-1)))
    return source, sequence


@torch.no_grad()
def run(name: str, generated: int, change: Callable[[Decoder], None] | None = None) -> Run:
    """Run the prompt in chunks and then tokens one by one, whatever the model itself would choose."""
    source, sequence = witness(name)
    model = FROM[name](source)  # quantising quantised values changes nothing
    if change is not None:
        change(model)
    records: list[dict[str, list[torch.Tensor]]] = [{"in": [], "attention": [], "mlp": []} for _ in model.layers]
    launches: list[list[int]] = []
    for index, layer in enumerate(model.layers):
        _record(layer, index, records[index], launches)
    cache = model.make_cache(len(sequence))
    logits = [prefill(model, cache, sequence[:PROMPT])]
    for token in sequence[PROMPT : PROMPT + generated]:
        logits.append(model(token[None], cache.extend([0], 1), cache))
    joined = [{part: torch.cat(pieces).double() for part, pieces in record.items()} for record in records]
    return Run(source, model, sequence[: PROMPT + generated], torch.cat(logits).double(), joined, launches)


def _record(layer: Any, index: int, record: dict[str, list[torch.Tensor]], launches: list[list[int]]) -> None:
    contexts: list[Any] = []

    def before(module: object, arguments: tuple[Any, ...]) -> None:
        x, residual = arguments[:2]
        record["in"].append(residual.clone() if x is None else x + residual)
        if index == 0:
            launches.append([])
        if devices.current().kind == "emulator":
            contexts.append(emulator.counters())
            contexts.append(contexts[-1].__enter__())

    def after_attention(module: object, arguments: object, out: torch.Tensor) -> None:
        record["attention"].append(out.clone())

    def after(module: object, arguments: object, out: torch.Tensor) -> None:
        if contexts:
            counted, context = contexts.pop(), contexts.pop()
            context.__exit__(None, None, None)
            launches[-1].append(counted.launches)
        record["mlp"].append(out.clone())

    layer.register_forward_pre_hook(before)
    layer.attention.register_forward_hook(after_attention)
    layer.register_forward_hook(after)


@functools.cache
def whole(name: str) -> Run:
    return run(name, GENERATED)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def of_the_median_token(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()


def per_layer(done: Run) -> dict[str, float]:
    """The relative error of what each half of each layer adds, given the device's own input to it."""
    simulation = Simulation(done.source)
    found: dict[str, float] = {}
    with torch.no_grad():
        for index, record in enumerate(done.records):
            found[f"attention {index}"] = relative(record["attention"], simulation.attention(index, record["in"]))
            between = bf16(record["in"] + record["attention"])
            found[f"mlp {index}"] = relative(record["mlp"], simulation.mlp(index, between))
    return found


NAMES = tuple(sorted(FROM))


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_that_of_float64_with_the_same_roundings(name: str) -> None:
    errors = per_layer(whole(name))
    assert max(errors.values()) <= PER_LAYER, errors
    # and what the halves add is not so small that the stream would hide its errors
    for record in whole(name).records:
        for part in ("attention", "mlp"):
            assert relative(record["in"] + record[part], record["in"]) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_as_far_from_transformers_as_its_roundings_are(name: str) -> None:
    done = whole(name)
    with torch.no_grad():
        want = done.source(done.sequence[None], use_cache=False).logits[0].double()
        simulated = Simulation(done.source).logits(done.sequence)
    generated, beside = slice(PROMPT - 1, None), BESIDE_THE_LIBRARY.get(name, BESIDE_THE_LIBRARY_ELSE)
    for part in (generated, slice(None)):
        theirs = of_the_median_token(simulated[part], want[part])
        assert of_the_median_token(done.logits[part], want[part]) <= beside * theirs
        assert theirs < 0.25  # neither is noise
    assert torch.equal(want[PROMPT - 1 : -1].argmax(-1), done.sequence[PROMPT:])  # teacher-forced on its choices


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_model_cast_to_half_is_the_same_model(name: str) -> None:
    """float16 keeps three bits more than bfloat16, so casts differ from the original by its roundings alone."""
    done = whole(name)
    model = FROM[name](done.source).half()
    got = prefill(model, model.make_cache(PROMPT), done.sequence[:PROMPT])
    assert got.dtype == torch.float16
    assert of_the_median_token(got.double(), done.logits[:PROMPT]) < 0.25  # as neither is noise above


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_a_few_launches(name: str) -> None:
    """As ``emulator.counters`` has them."""
    done = whole(name)
    bounds = [LAUNCHES["experts" if layer.mlp.wants_copy else "dense"] for layer in done.model.layers]
    sparse = [LAUNCHES["sparse"] if layer.attention.blocks else 0 for layer in done.model.layers]
    bounds = [sum(parts) for parts in zip(bounds, sparse, strict=True)]
    assert len(done.launches) == PROMPT // CHUNK + GENERATED
    for step in done.launches:
        assert all(0 < count <= bound for count, bound in zip(step, bounds, strict=True)), step


# Views and allocations: nothing here reads an element of a tensor.
ALLOWED = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "select", "slice",
    "split", "split_with_sizes", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(f"{func.namespace}.{func._schema.name.split('::')[1]}")
        return func(*args, **(kwargs or {}))


def ignore_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every op believe that no dispatch mode is active: ``modes`` is a free variable of the function it is."""
    cells: dict[int, Any] = {}
    for name, module in tuple(sys.modules.items()):
        for value in vars(module).values() if name.startswith("hipforge.ops") else ():
            free = getattr(getattr(value, "__code__", None), "co_freevars", ())
            if "modes" in free:
                cell = value.__closure__[free.index("modes")]
                cells[id(cell)] = cell
    assert len(cells) > 10
    for cell in cells.values():
        monkeypatch.setattr(cell, "cell_contents", lambda: 0)


@torch.no_grad()
def seen_in_layers(name: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every torch operator inside the layers. The ops run as without a mode, so that what they do themselves shows."""
    ignore_modes(monkeypatch)
    source, sequence = witness(name)
    model = FROM[name](source)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: watch.__enter__() and None)
        layer.register_forward_hook(lambda *_: watch.__exit__(None, None, None))
    cache = model.make_cache(PROMPT + 1)
    prefill(model, cache, sequence[:CHUNK])
    model(sequence[CHUNK][None], cache.extend([0], 1), cache)
    return watch.seen


@pytest.mark.parametrize("name", NAMES)
def test_inside_layers_torch_only_views_and_allocates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_in_layers(name, Watch(), monkeypatch)
    computed = {one for one in seen if one.split(".")[0] == "aten" and one.split(".")[1] not in ALLOWED}
    assert computed == set()
    assert any(one.startswith("hipforge.") for one in seen)  # the launches themselves are seen as operators


def test_the_watch_sees_what_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    from hipforge.nn import MXFP8Linear

    plain = MXFP8Linear.forward

    def with_a_sum(self: Any, *args: Any) -> torch.Tensor:
        return plain(self, *args) + 0

    monkeypatch.setattr(MXFP8Linear, "forward", with_a_sum)
    assert "aten.add" in seen_in_layers("qwen3", Watch(), monkeypatch)


EXAMPLES = Path(__file__).parents[2] / "examples"


AGAIN = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import decoder, generate
from torch import distributed
leave, distributed.destroy_process_group = distributed.destroy_process_group, lambda: None
init, distributed.init_process_group = distributed.init_process_group, lambda *_: None
init("gloo")
for name in decoder.SHARED:
    sys.argv[1] = name
    generate.main()
decoder.Ranks.summed = lambda self, x: x
distributed.destroy_process_group = leave
generate.main()
"""


def test_two_processes_generate_what_one_does_and_are_found_out_where_they_do_not_add_their_parts_up(
    tmp_path: Path,
) -> None:
    """The last time, in the same processes and their group, the sums are left out."""
    (tmp_path / "again.py").write_text(AGAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "again.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HIPFORGE_EMULATOR_CHECKS": "memory"}  # as a user runs it
    command += ["MODEL", "--tp", "2", "--prompt", "20", "--tokens", "3"]  # two chunks and two steps
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for name in SHARED:
        assert f"{name}, 2 processes: tokens" in done.stdout, done.stderr[-3000:]
    assert done.stdout.count("of 3 greedy choices the same") == len(SHARED) + 1, done.stderr[-3000:]
    assert done.returncode != 0
    assert "too far from those of one process" in done.stderr, done.stderr[-3000:]


def test_a_share_of_a_model_that_it_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        (("minimax_m3", "--tp", "2"), "--tp 2 is for qwen3, qwen3_moe, gpt_oss under torchrun --nproc-per-node 2"),
        (("qwen3", "--tp", "2"), "--tp 2 is for qwen3, qwen3_moe, gpt_oss under torchrun"),
    ):
        monkeypatch.setattr(sys, "argv", ["generate.py", *options])
        with pytest.raises(SystemExit, match=message):
            main()
    with pytest.raises(SystemExit, match=r"--tp 3 does not divide \(4, 2\) along dimension 0"):
        Ranks(0, 3).part(torch.zeros(4, 2), 0)


def changed(path: str, only: int | None = None, **values: Any) -> Callable[[Decoder], None]:
    """Other values of what a path leads to, in every layer that has it or in ``only`` one."""
    *owners, name = path.split(".")

    def change(model: Decoder) -> None:
        for layer in model.layers if only is None else [model.layers[only]]:
            owner = functools.reduce(lambda part, each: getattr(part, each, None), owners, layer)
            of = getattr(owner, name, None)
            if is_dataclass(of):
                setattr(owner, name, replace(of, **values))
            elif of is not None:
                for each, value in values.items():
                    setattr(of, each, value)

    return change


def without_beta(model: Decoder) -> None:
    changed("mlp.moe.activation", beta=0.0)(model)
    for layer in model.layers:
        if not layer.mlp.wants_copy:
            layer.mlp.activation = replace(layer.mlp.activation, beta=0.0)


def with_a_window_one_longer(model: Decoder) -> None:
    model.layers[0].attention.window += 1


def with_a_cache(model: Decoder, **changed: Any) -> None:
    cache = type("Changed", (PagedKVCache,), changed)
    own = model.make_cache(1)
    model.make_cache = lambda tokens: cache(  # type: ignore[method-assign]
        len(model.layers), -(-tokens // 16), 16, own.k.shape[3], own.k.shape[4], index_dtype=torch.bfloat16
    )


def with_stale_index_keys(model: Decoder) -> None:
    def rope_and_store(self: PagedKVCache, layer: int, *args: Any, **options: Any) -> torch.Tensor:
        if options["index_k"] is not None:  # that of the token before
            options["index_k"] = options["index_k"].roll(1, 0)
        return PagedKVCache.rope_and_store(self, layer, *args, **options)

    with_a_cache(model, rope_and_store=rope_and_store)


def with_a_causal_cut_one_early(model: Decoder) -> None:
    def attend(self: PagedKVCache, layer: int, q: torch.Tensor, step: Any, **options: Any) -> Any:
        if "index_q" in options:
            step = replace(step, seqlens=step.seqlens - 1)
        return PagedKVCache.attend(self, layer, q, step, **options)

    with_a_cache(model, attend=attend)


SABOTAGE: dict[str, tuple[str, Callable[[Decoder], None], str]] = {
    "sinks": ("gpt_oss", changed("attention", sinks=None), "attention"),
    "window": ("gpt_oss", changed("attention", 0, window=None), "attention 0"),
    "a window one longer": ("gpt_oss", with_a_window_one_longer, "attention 0"),
    "beta": ("gpt_oss", without_beta, "mlp"),
    "biases of experts": ("gpt_oss", changed("mlp.moe", w2_bias=None), "mlp"),
    "gates before ups": ("gpt_oss", changed("mlp.moe.activation", interleaved=False), "mlp"),
    "biases of attention": ("gpt_oss", changed("attention.qkv", bias=None), "attention"),
    "beta of both": ("minimax_m3", without_beta, "mlp"),
    "gating bias": ("minimax_m3", changed("mlp.moe", correction_bias=None), "mlp 1"),
    "scale of routed experts": ("minimax_m3", changed("mlp.moe.routing", scale=1.0), "mlp 1"),
    "one in the norms": ("minimax_m3", changed("norm", offset=0.0), "attention"),
    "own block": ("minimax_m3", changed("attention.blocks", 1, local_blocks=0), "attention 1"),
    "block before forced too": ("minimax_m3", changed("attention.blocks", 1, local_blocks=2), "attention 1"),
    "stale index keys": ("minimax_m3", with_stale_index_keys, "attention 1"),
    "a causal cut one early": ("minimax_m3", with_a_causal_cut_one_early, "attention 1"),
    "norms of heads": ("qwen3", changed("attention", q_norm=None), "attention"),
    "renormalised weights": ("qwen3_moe", changed("mlp.moe.routing", renormalize=False), "mlp"),
}


@pytest.mark.parametrize("part", SABOTAGE)
def test_a_model_with_a_part_left_out_or_wrong_fails(part: str) -> None:
    name, change, where = SABOTAGE[part]
    with emulator.options(checks="memory"):  # that no kernel breaks a rule is seen above, on the same model
        errors = per_layer(run(name, 0, change))
    assert all(error > 3 * PER_LAYER for half, error in errors.items() if half.startswith(where)), errors
