"""Ops and layers in captured graphs: nothing left to build or read, and replays equal to eager calls bit for bit."""

from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch
from helpers.op_calls import CALLS
from torch._subclasses.fake_tensor import FakeTensorMode

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError, HipforgeError, LaunchError
from hipforge.nn import MXFP8Linear, MXFP8MoE, PagedKVCache
from hipforge.nn.moe import Routing
from hipforge.ops.decode_attention import layout


def leaves(value: Any) -> list[torch.Tensor]:
    return [part for part in torch.utils._pytree.tree_leaves(value) if isinstance(part, torch.Tensor)]


def equal(left: Any, right: Any) -> bool:
    pairs = [[x.reshape(-1).view(torch.uint8) for x in pair] for pair in zip(leaves(left), leaves(right), strict=True)]
    return bool(pairs) and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("name", CALLS)
def test_every_op_replays_with_new_inputs_as_it_runs_eagerly(name: str) -> None:
    call, batch = CALLS[name], 3
    inputs = call.make(batch)
    eager = call.run(**inputs)
    if eager is None:
        pytest.fail(f"{name} took no part: choose a batch that it accepts")
    other = {each: _shifted(tensor) for each, tensor in inputs.items()}
    expected = call.run(**other)
    with emulator.capture() as graph:
        captured = call.run(**inputs)
    graph.replay()
    assert equal(captured, eager)
    for each, tensor in inputs.items():
        if tensor is not other[each]:
            tensor.copy_(other[each])
    graph.replay()
    assert equal(captured, expected)
    floating = any(tensor.is_floating_point() for tensor in inputs.values())
    assert not floating or not equal(eager, expected)  # the new inputs differ


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Other values of the same kind: rows of the batch in another order, or the tensor's values by turns."""
    if 0 in tensor.stride():  # a view in which heads share memory
        return tensor
    if tensor.dim() > 1 and tensor.shape[0] > 1:
        return tensor.roll(1, 0)
    return tensor.roll(1, tensor.dim() - 1) if tensor.is_floating_point() else tensor.clone()


IN_A_FRESH_PROCESS = """
import torch, hipforge
from hipforge import emulator
x, weight = torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16()
def refused(call):
    try:
        with emulator.capture():
            call()
    except hipforge.HipforgeError as error:
        print(error)
    else:
        print("captured")
refused(lambda: hipforge.rms_norm(x, weight, 1e-6))
hipforge.warmup(hipforge.rms_norm, torch.empty(2, 64, dtype=torch.bfloat16, device="meta"), weight, 1e-6)
refused(lambda: hipforge.rms_norm(x, weight, 1e-6))
q, s = hipforge.mxfp8_quantize(x)
w, ws = hipforge.mxfp8_quantize(torch.ones(16, 64).bfloat16())
refused(lambda: hipforge.mxfp8_linear(q, s, w, ws))
refused(lambda: hipforge.warmup("mxfp8_linear", q, s, w, ws))
hipforge.warmup("mxfp8_linear", q, s, w, ws)
refused(lambda: hipforge.mxfp8_linear(q, s, w, ws))
refused(lambda: hipforge.prepare(torch.nn.Linear(1, 1)))
"""


def test_a_first_call_in_a_capture_says_what_it_would_do_and_what_to_call_first() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    advice = "before the capture, call hipforge.warmup(op, ...)"
    assert "load module_rmsnorm" in lines[0] and "(and build it, unless it is cached)" in lines[0]
    assert advice in lines[0] and "hipforge.prepare(model)" in lines[0]
    assert "read the tuned table of mxfp8_gemm" in lines[2] and advice in lines[2]
    assert "would warm mxfp8_linear up" in lines[3]
    assert "would warm a model up" in lines[5]
    assert [lines[1], lines[4]] == ["captured"] * 2


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_up_writes_nothing_that_it_is_given(name: str) -> None:
    """Every tensor argument of the op, its results' memory too, keeps its bits."""
    op, given = getattr(hipforge, name), []

    def warm(*args: Any, **kwargs: Any) -> None:
        given.extend(leaves((args, kwargs)))
        before = [tensor.clone() for tensor in given]
        hipforge.warmup(op, *args, **kwargs)
        assert all(equal(a, b) for a, b in zip(given, before, strict=True))
        raise _Done

    call = CALLS[name]
    inputs = call.make(2)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Done):
        patch.setattr(hipforge, name, warm)
        call.run(**inputs)
    assert given


class _Done(Exception):
    pass


def test_warm_up_refuses_what_is_no_op() -> None:
    with pytest.raises(GuardError, match=r"op must be a public op of hipforge; got print\. They are: .*mxfp8_gemv"):
        hipforge.warmup(print)


def test_a_value_on_the_host_is_refused_by_name() -> None:
    x = torch.arange(4.0)
    for block, words in (
        (lambda: x.sum().item(), "aten._local_scalar_dense.default needs a value on the host"),
        (lambda: x.nonzero(), "aten.nonzero.default needs a value on the host"),
        (lambda: torch.tensor([1.0]), "copies values from the host"),
    ):
        with pytest.raises(HipforgeError, match=words), emulator.capture():
            block()
    with emulator.capture() as graph:  # the thread's stream captures no more
        y = x + 1
    graph.replay()
    assert y.tolist() == [1, 2, 3, 4]


def test_captures_do_not_nest_and_an_error_leaves_no_graph() -> None:
    inside = pytest.raises(GuardError, match="a capture is going on in this thread")
    with inside, emulator.capture() as graph, emulator.capture():
        pass
    with pytest.raises(GuardError, match="whose capture has ended without an error"):
        graph.replay()
    with pytest.raises(GuardError, match=r"mode must be one of .*; got 'strict'"), emulator.capture("strict"):
        pass


def test_a_fake_tensor_is_refused_in_a_capture_as_outside_of_one() -> None:
    x = torch.ones(4, 64).bfloat16()
    hipforge.rms_norm(x, torch.ones(64).bfloat16(), 1e-6)  # loaded and decided
    with FakeTensorMode():
        weight = torch.ones(64).bfloat16()
    for block in (contextlib.nullcontext(), emulator.capture()):
        with pytest.raises(GuardError, match=r"weight is a FakeTensor, .* but x is a real one"), block:
            hipforge.rms_norm(x, weight, 1e-6)


def test_a_call_that_the_runtime_refuses_invalidates_the_capture() -> None:
    native = hipforge.emulator.runtime.load().library
    words = "capture was invalidated: hipDeviceSynchronize waits for all streams"
    with pytest.raises(LaunchError, match=words), emulator.capture():
        assert native.hipDeviceSynchronize() == 900


def test_torch_operations_between_kernels_are_replayed_where_they_ran() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    total = torch.zeros(3, 64)

    def block() -> tuple[torch.Tensor, torch.Tensor]:
        y = hipforge.rms_norm(x * 2, weight, 1e-6)
        total.add_(y.float())
        return hipforge.rms_norm(y[:, :].contiguous() + x, weight, 1e-6), y.amax(dim=1, keepdim=True)

    block()
    total.zero_()
    with emulator.capture() as graph:
        captured = block()
    assert not total.any()
    assert [node.split(".")[0] for node in graph.nodes].count("aten") == len(graph.nodes) - 2
    graph.replay()
    graph.replay()
    twice = total.clone()
    assert equal(captured, block())
    assert torch.equal(twice, 2 * (total - twice))


def test_a_number_for_a_scale_is_neither_copied_nor_filled_once_it_was_used() -> None:
    q, seqlens = torch.ones(1, 1, 2, 64).bfloat16(), torch.tensor([20], dtype=torch.int32)
    cache = torch.ones(1, 32, 1, 64, dtype=torch.bfloat16).to(hipforge.ops.core.fp8.fp8_dtypes("cpu")[0])
    hipforge.decode_attention_fp8(q, cache, cache, None, seqlens, 0.25, 2.0)
    kept = layout.scale_tensor("k_scale", 0.25, q.device)
    assert kept is layout.scale_tensor("k_scale", 0.25, q.device)
    assert kept.tolist() == [0.25]
    with emulator.capture() as graph:
        out = hipforge.decode_attention_fp8(q, cache, cache, None, seqlens, 0.25, 2.0)
    assert not [node for node in graph.nodes if "fill" in node or "full" in node]
    graph.replay()
    assert out[0, 0, 0, 0].item() == 2.0


HEADS, KV_HEADS, D, WIDTH, INNER, EXPERTS = 4, 2, 64, 128, 64, 4


class Layer:
    """A decode layer as a server runs it: norms, projections, rotation, paged attention, experts."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random) * 0.1

        def linear(inner: int, outer: int) -> MXFP8Linear:
            part = torch.nn.Linear(inner, outer, bias=False)
            part.weight.data.copy_(normal(outer, inner))
            return MXFP8Linear.from_linear(part)

        self.qkv, self.out = linear(WIDTH, (HEADS + 2 * KV_HEADS) * D), linear(HEADS * D, WIDTH)
        self.moe = MXFP8MoE.from_weights(
            normal(EXPERTS, 2 * INNER, WIDTH), normal(EXPERTS, WIDTH, INNER), normal(EXPERTS, WIDTH), Routing(top_k=2)
        )
        self.norms = [(1 + normal(WIDTH)).bfloat16() for _ in range(2)]
        self.cos_sin = normal(64, D)
        self.modules = torch.nn.ModuleList([self.qkv, self.out, self.moe])

    def __call__(self, residual: torch.Tensor, step: Any, cache: PagedKVCache) -> torch.Tensor:
        tokens = residual.shape[0]
        heads = self.qkv(*hipforge.rms_norm_mxfp8(residual, self.norms[0], 1e-6)).view(tokens, -1, D)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        rotated = torch.empty(tokens, HEADS, D, dtype=heads.dtype)
        cache.rope_and_store(0, q, k, v, self.cos_sin, step, q_out=rotated)
        attended = self.out(cache.attend(0, rotated, step).view(tokens, -1))
        copy = torch.empty_like(residual)
        quantized = hipforge.residual_rms_mxfp8(attended, residual, self.norms[1], 1e-6, also_out=copy)[:2]
        return residual + self.moe(copy, quantized)


def test_a_whole_decode_layer_replays_its_next_steps_in_the_same_buffers() -> None:
    layer, batch, steps = Layer(), 3, 4
    random = torch.Generator().manual_seed(1)
    inputs = [torch.randn(batch, WIDTH, generator=random).bfloat16() for _ in range(steps + 1)]
    prompt = torch.randn(batch * 5, WIDTH, generator=random).bfloat16()

    def run(with_graph: bool) -> tuple[list[torch.Tensor], PagedKVCache]:
        cache, outs = PagedKVCache(1, 16, 16, KV_HEADS, D), []
        layer(prompt.clone(), cache.extend(range(batch), 5), cache)
        hidden, step = inputs[0].clone(), cache.extend(range(batch), 1)
        outs.append(layer(hidden, step, cache).clone())
        if with_graph:
            with emulator.capture() as graph:
                result = layer(hidden, step, cache)
        for each in inputs[1:]:
            following = cache.extend(range(batch), 1)
            if not with_graph:
                outs.append(layer(each.clone(), following, cache))
                continue
            hidden.copy_(each)
            for field in fields(following):
                if isinstance(getattr(following, field.name), torch.Tensor):
                    getattr(step, field.name).copy_(getattr(following, field.name))
            graph.replay()
            outs.append(result.clone())
        return outs, cache

    (eager, eager_cache), (replayed, replayed_cache) = run(False), run(True)
    assert equal(eager, replayed)
    assert equal([eager_cache.k, eager_cache.v], [replayed_cache.k, replayed_cache.v])
    assert not equal(eager[1], eager[2])


def test_prepare_runs_each_kind_of_layer_for_each_batch() -> None:
    layer = Layer()
    assert hipforge.prepare(layer.modules, tokens=(1, 2, 2)) == 6
    twins = torch.nn.ModuleList([layer.out, layer.out, MXFP8Linear.from_linear(torch.nn.Linear(256, 128, bias=False))])
    assert hipforge.prepare(twins) == 1
    assert hipforge.prepare(torch.nn.Linear(1, 1)) == 0
    with pytest.raises(GuardError, match="tokens must be at least 1; got 0"):
        hipforge.prepare(layer.modules, tokens=0)


def test_a_graph_keeps_the_memory_that_it_reads_and_refuses_one_that_was_freed() -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.ones(64).bfloat16()
    want = hipforge.rms_norm(x, weight, 1e-6)
    with emulator.capture() as graph:
        y = hipforge.rms_norm(x, weight, 1e-6)
    x.data = torch.full_like(x, torch.nan)  # what it was is nobody's now but the graph's
    taken = [torch.full((4, 64), 7.0).bfloat16() for _ in range(100)]
    graph.replay()
    assert torch.equal(y, want) and taken
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(graph)
    weight.untyped_storage().resize_(0)
    y.zero_()
    with pytest.raises(GuardError, match="a storage of 128 bytes that the graph uses has 0 now or has moved"):
        graph.replay()
    assert not y.any()
