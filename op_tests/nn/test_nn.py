"""hipforge.nn: what the modules compute, keep, refuse and survive."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.draws import normal
from helpers.errors import relative

import hipforge
import hipforge.weights
from hipforge import emulator
from hipforge.errors import ConfigError, GuardError, OutOfMemoryError
from hipforge.nn import (
    FP8Linear,
    MXFP4Experts,
    MXFP8Linear,
    MXFP8MoE,
    PagedKVCache,
    SparseBlocks,
    convert_to_fp8,
    convert_to_mxfp8,
)
from hipforge.nn.moe import Activation, Routing
from hipforge.nn.payload import accepted
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference import dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8

pytestmark = pytest.mark.gfx942("not without_kernels")

# Both sides share every quantisation; left are float32 sums and one rounding to bf16, 1.66e-3.
ONE_ROUNDING = 3e-3


def linear(k: int = 96, n: int = 40, bias: bool = True) -> torch.nn.Linear:
    layer = torch.nn.Linear(k, n, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(normal(n, k) * k**-0.5)
        if bias:
            layer.bias.copy_(normal(n, seed=1))
    return layer


def quantised(x: torch.Tensor) -> torch.Tensor:
    """x after MX-FP8 in this device's format, float64."""
    q, scale = quantize_mxfp8(x.flatten(0, -2).float(), fp8_dtypes("cpu")[0])
    return dequantize_mxfp8(q, scale, torch.float64).view(x.shape)


@pytest.mark.parametrize("shape", ((1,), (3,), (2, 5), (2, 20), (0,)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@torch.no_grad()
def test_a_linear_layer_is_the_product_of_quantised_operands(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source = linear()
    layer = MXFP8Linear.from_linear(source)
    x = normal(*shape, 96, seed=3, dtype=dtype)
    got = layer(x)
    want = quantised(x) @ quantised(source.weight).T + source.bias.double() if x.numel() else x.double()[..., :40]
    assert got.dtype == dtype and got.shape == (*shape, 40)
    assert relative(got, want) < ONE_ROUNDING


@torch.no_grad()
def test_a_linear_layer_takes_what_a_norm_has_quantised() -> None:
    layer = MXFP8Linear.from_linear(linear(128))
    x, weight = normal(4, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    q, scale = hipforge.rms_norm_mxfp8(x, weight, 1e-6)
    out = torch.empty(4, 40, dtype=torch.bfloat16)
    with emulator.counters() as counted:
        assert layer(q, scale, out) is out
    assert [kernel.name.split("<")[0].split("(")[0] for kernel in counted.kernels if "quantize" in kernel.name] == []
    assert torch.equal(out, layer(hipforge.rms_norm(x, weight, 1e-6)))


def stack() -> torch.nn.Sequential:
    shared = torch.nn.Linear(64, 64, bias=False)
    inner = torch.nn.Sequential(shared, torch.nn.Linear(64, 64))
    return torch.nn.Sequential(torch.nn.Linear(96, 64), inner, shared, torch.nn.Linear(64, 8)).bfloat16()


def test_conversion_replaces_what_is_not_skipped() -> None:
    model = stack()
    assert convert_to_mxfp8(model, skip=("3", "1.1")) is model
    kinds = {name: type(part) for name, part in model.named_modules(remove_duplicate=False) if name not in ("", "1")}
    assert kinds == {
        "0": MXFP8Linear, "1.0": MXFP8Linear, "1.1": torch.nn.Linear, "2": MXFP8Linear, "3": torch.nn.Linear,
    }  # fmt: skip
    assert model[1][0] is model[2]
    whole = convert_to_mxfp8(torch.nn.Linear(32, 3))
    assert isinstance(whole, MXFP8Linear)


def test_conversion_names_what_it_cannot_convert() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(48, 8))
    with pytest.raises(GuardError, match=r"1 has in_features=48.*name it in skip"):
        convert_to_mxfp8(model)
    assert type(model[0]) is torch.nn.Linear  # nothing has been replaced
    with pytest.raises(GuardError, match=r"'lm_head' matches none of the 2"):
        convert_to_mxfp8(model, skip="lm_head")
    assert type(convert_to_mxfp8(model, skip="1")[0]) is MXFP8Linear
    with pytest.raises(GuardError, match=r"in_features must be a positive multiple of 32.*got 48"):
        MXFP8Linear(48, 8)


def moe(shared: int = 0, seed: int = 0, **biases: torch.Tensor | None) -> MXFP8MoE:
    w1, w2 = normal(5, 128, 96, seed=seed) * 0.1, normal(5, 96, 64, seed=seed + 1) * 0.12
    routing = Routing(top_k=2, scoring="sigmoid", scale=2.0, shared_experts=shared)
    activation = Activation(alpha=1.702, beta=1.0, limit=1.5)
    return MXFP8MoE.from_weights(w1, w2, normal(5 - shared, 96, seed=seed + 2) * 0.1, routing, activation, **biases)


@pytest.mark.parametrize("shared", (0, 1))
@pytest.mark.parametrize("corrected", (False, True))
@torch.no_grad()
def test_a_mixture_of_experts_is_its_routing_and_its_experts(shared: int, corrected: bool) -> None:
    bias = torch.linspace(1.5, -1.5, 5 - shared) if corrected else None
    layer = moe(shared, correction_bias=bias)
    x = normal(2, 3, 96, seed=9, dtype=torch.bfloat16)
    with emulator.counters() as counted:
        got = layer(x)
    assert counted.launches == 7
    assert got.shape == x.shape and got.dtype == torch.bfloat16
    rows = x.flatten(0, 1)
    logits = hipforge.router_gemm(rows, layer.router)
    weights, ids = hipforge.topk_gating(logits, 2, scoring="sigmoid", bias=bias, scale=2.0)
    if shared:  # the last expert, of every token
        weights = torch.cat((weights, torch.ones(6, 1)), 1)
        ids = torch.cat((ids, torch.full((6, 1), 4, dtype=torch.int32)), 1)
    held = (layer.w1, layer.w1_scale, layer.w2, layer.w2_scale)
    want = hipforge.fused_moe_mxfp8(rows, *held, weights, ids, alpha=1.702, beta=1.0, limit=1.5)
    assert torch.equal(got, want.view(x.shape))
    if corrected:  # the bias decides: without it other experts are chosen
        assert relative(got, moe(shared)(x).double()) > 0.1


@pytest.mark.parametrize("make", (lambda: MXFP8Linear.from_linear(linear()), lambda: moe(1)), ids=("linear", "moe"))
def test_a_layer_refuses_an_input_before_it_copies_it(make: Callable[[], torch.nn.Module]) -> None:
    freed = torch.zeros(4, 97, dtype=torch.bfloat16)[:, :96]
    freed.untyped_storage().resize_(0)
    for x, message in ((3, "x must be a torch.Tensor; got int"), (torch.ones(4, 95), r"x must have 96 elements .*95\)"),
                       (freed, "argument 'x' reaches byte 774 of a storage of 0 bytes")):  # fmt: skip
        with pytest.raises(GuardError, match=message):
            make()(x)
    with pytest.raises(OutOfMemoryError, match="needs more memory than there is"):
        make()(torch.ones(1, 96, dtype=torch.bfloat16).expand(2**46, 96))


def test_a_mixture_refuses_weights_that_do_not_fit() -> None:
    w1, w2, router = normal(3, 64, 32), normal(3, 32, 32), normal(3, 32)
    with pytest.raises(GuardError, match=r"router must be .*\[3, 32\]"):
        MXFP8MoE.from_weights(w1, w2, router[:2], Routing(2))
    with pytest.raises(GuardError, match="at least top_k \\+ shared_experts experts, 4; got 3"):
        MXFP8MoE.from_weights(w1, w2, router[:2], Routing(3, shared_experts=1))
    with pytest.raises(GuardError, match=r"w1 must be .*\[3, 64, 32\]"):
        MXFP8MoE.from_weights(w1[:, :32], w2, router, Routing(2))
    with pytest.raises(GuardError, match=r"w2_bias must be .*\[3, 32\]"):
        MXFP8MoE.from_weights(w1, w2, router, Routing(2), w2_bias=normal(3, 64))


@pytest.mark.parametrize("make", (lambda: MXFP8Linear.from_linear(linear()), lambda: moe(1)), ids=("linear", "moe"))
@torch.no_grad()
def test_state_dict_and_pickle_bring_back_the_same_layer(make: Callable[[], torch.nn.Module]) -> None:
    layer = make()
    x = normal(3, 96, seed=5, dtype=torch.bfloat16)
    want = layer(x)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    other = make()
    for buffer in other.buffers():
        (buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer).zero_()
    assert not torch.equal(other(x), want)
    file.seek(0)
    assert other.load_state_dict(torch.load(file)) == torch.nn.modules.module._IncompatibleKeys([], [])
    assert torch.equal(other(x), want)


@torch.no_grad()
def test_a_cast_layer_gives_quantised_inputs_results_of_the_models_dtype() -> None:
    layer = MXFP8Linear.from_linear(linear())
    q, scale = quantize_mxfp8(normal(3, 96), fp8_dtypes("cpu")[0])
    want = layer(q, scale)
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        got = layer.to(dtype)(q, scale)
        assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    assert MXFP8Linear.from_linear(linear().half())(q, scale).dtype == torch.float16


@torch.no_grad()
def test_a_converted_model_runs_after_a_cast() -> None:
    """Norms, plain layers and converted ones, all of the model's dtype."""
    for dtype in (torch.float16, torch.bfloat16):
        model = torch.nn.Sequential(linear(96, 64), torch.nn.RMSNorm(64), linear(64, 32), linear(32, 8)).bfloat16()
        convert_to_mxfp8(model, skip="3")
        y = model.to(dtype)(normal(2, 96, dtype=dtype))
        assert y.dtype == dtype and y.isfinite().all()


@torch.no_grad()
def test_a_parameter_beside_the_buffers_is_cast_as_usual() -> None:
    class Adapted(MXFP8Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.low = torch.nn.Linear(sizes[0], 4)

    layer = Adapted(64, 8).half()
    assert layer.low.weight.dtype == torch.float16 and layer.weight_scale.dtype == torch.uint8


@pytest.mark.parametrize("convert", (convert_to_mxfp8, partial(convert_to_fp8, scales="blocks")), ids=("mx", "blocks"))
@pytest.mark.parametrize("assign", (False, True))
@torch.no_grad()
def test_a_layer_of_the_meta_device_takes_its_own_checkpoint(convert: Callable[..., Any], assign: bool) -> None:
    source = convert(linear())
    model = convert(torch.nn.Sequential(torch.nn.Linear(96, 40, device="meta", dtype=torch.bfloat16)))
    assert model[0].weight.is_meta and model[0].weight.dtype == source.weight.dtype
    if not assign:
        model.to_empty(device="cpu")
    state = {f"0.{name}": value for name, value in source.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    x = normal(3, 96, dtype=torch.bfloat16)
    with emulator.counters() as counted:
        assert torch.equal(model(x), source(x))
    assert counted.launches == 4  # by kernels


@pytest.mark.parametrize("assign", (False, True))
@torch.no_grad()
def test_a_checkpoint_of_another_format_is_read_in_the_layers_own(assign: bool) -> None:
    """A bias that a cast had turned into float16, scales stored as e8m0, elements as bytes of e4m3fn."""
    q, scale = quantize_mxfp8(normal(40, 96))
    bias = normal(40).half()
    stored = {"weight": q.view(torch.uint8), "weight_scale": scale.view(torch.float8_e8m0fnu), "bias": bias}
    for elements in (q, q.view(torch.uint8)):
        layer = MXFP8Linear(96, 40, bias=True)
        layer.load_state_dict({**stored, "weight": elements}, assign=assign)
        assert layer.bias.dtype == torch.bfloat16 and torch.equal(layer.bias, bias.bfloat16())
        assert layer.weight.dtype == fp8_dtypes("cpu")[0]  # e4m3fnuz on gfx942
        assert torch.equal(dequantize_mxfp8(layer.weight, layer.weight_scale), dequantize_mxfp8(q, scale))
        assert layer(normal(2, 96, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize("assign", (False, True))
@torch.no_grad()
def test_elements_and_scales_may_come_in_a_state_dict_each(assign: bool) -> None:
    """As from the files of a sharded checkpoint; copied as numbers, bytes would stand for other weights."""
    q, scale = quantize_mxfp8(normal(40, 96))
    codes, shared = quantize_mxfp4(normal(2 * 64, 32))
    packed, packed_scale = codes.view(2, 64, 16), shared.view(2, 64, 1)
    bytes_as = {torch.uint8: q.view(torch.uint8), torch.float8_e4m3fn: q}
    for elements, scales in itertools.product(bytes_as.values(), (scale, scale.view(torch.float8_e8m0fnu))):
        layer = MXFP8Linear(96, 40)
        layer.load_state_dict({"weight_scale": scales}, strict=False, assign=assign)
        if fp8_dtypes("cpu")[0] != torch.float8_e4m3fn:
            with pytest.raises(GuardError, match=r"^weight is .*e4m3fnuz.* give both to one load_state_dict"):
                layer.load_state_dict({"weight": elements}, strict=False)
            continue
        layer.load_state_dict({"weight": elements}, strict=False, assign=assign)
        assert torch.equal(dequantize_mxfp8(layer.weight, layer.weight_scale), dequantize_mxfp8(q, scale))
        with pytest.raises(GuardError, match=r"^weight must be float8_e4m3fn or uint8; got float32"):
            layer.load_state_dict({"weight": torch.zeros(40, 96)}, strict=False)
        with pytest.raises(GuardError, match=r"^weight_scale must be uint8 or float8_e8m0fnu; got float32"):
            layer.load_state_dict({"weight_scale": torch.ones(40, 3)}, strict=False)
    zeros = torch.zeros(2, 32, 16, dtype=torch.uint8)
    experts = MXFP4Experts((torch.cat((zeros, zeros), 1), packed_scale.clone()), (zeros, packed_scale[:, :32].clone()))
    state = {"w1": packed.view(torch.int8), "w1_scale": packed_scale.view(torch.float8_e8m0fnu)}
    for given in (state, *({name: value} for name, value in state.items())):
        experts.w1.zero_(), experts.w1_scale.zero_()
        experts.load_state_dict(given, strict=False, assign=assign)
        assert "w1" not in given or torch.equal(experts.w1, packed)
        assert "w1_scale" not in given or torch.equal(experts.w1_scale, packed_scale)


@torch.no_grad()
def test_a_converted_encoder_layer_of_torch_runs_its_layers() -> None:
    """torch's fused inference would read the weights of its linear layers as numbers."""
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True).eval()
    x = torch.randn(1, 8, 64)
    before, after = encoder(x), convert_to_mxfp8(encoder)(x)
    # An element is rounded by 2^-4 of itself at most; errors of a sum grow no faster than its terms.
    assert 0 < (after - before).norm() / before.norm() < 2**-4


def test_hooks_of_a_converted_layer_still_run() -> None:
    model = torch.nn.Sequential(linear())
    handle = model[0].register_forward_hook(lambda module, args, out: 2 * out)
    x, bare = normal(3, 96, dtype=torch.bfloat16), MXFP8Linear.from_linear(model[0])
    convert_to_mxfp8(model)
    assert torch.equal(model(x), 2 * bare(x))
    handle.remove()
    assert torch.equal(model(x), bare(x))


@torch.no_grad()
def test_weights_made_without_values_change_only_their_dtype() -> None:
    q, scale = torch.empty(8, 64, dtype=torch.float8_e4m3fn, device="meta"), torch.empty(8, 2, device="meta")
    made = MXFP8Linear.from_quantized(q, scale.to(torch.uint8))
    assert made.weight.dtype == fp8_dtypes("cpu")[0]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_the_default_dtype_decides_nothing(dtype: torch.dtype) -> None:
    """Loaders set it to the model's while they build one."""
    torch.set_default_dtype(dtype)
    try:
        assert PagedKVCache(1, 1, 16, 1, 64).k_scale.dtype == torch.float32
        got, want = cached_attention((10, 1))
        with torch.no_grad():
            layer = moe(1, correction_bias=torch.zeros(4))
            layer(normal(2, 96, seed=9, dtype=torch.bfloat16))
        weights, _ = hipforge.ops.reference.topk_gating(torch.ones(2, 4, dtype=torch.float32), 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert relative(got, want) < 4e-3
    assert weights.dtype == torch.float32


def test_quantised_weights_are_checked() -> None:
    q, scale = quantize_mxfp8(normal(8, 64))
    same = MXFP8Linear.from_quantized(q.view(torch.uint8), scale.view(torch.float8_e8m0fnu))
    assert torch.equal(dequantize_mxfp8(same.weight, same.weight_scale), dequantize_mxfp8(q, scale))
    with pytest.raises(GuardError, match=r"weight_scale must be .*\[8, 2\]"):
        MXFP8Linear.from_quantized(q, scale[:, :1])
    with pytest.raises(GuardError, match=r"weight must be .*; got "):
        MXFP8Linear.from_quantized(q.float(), scale)
    for bias in (torch.zeros(7), torch.zeros(8, dtype=torch.int32), [0.0] * 8):
        with pytest.raises(GuardError, match=r"^bias must be "):
            MXFP8Linear.from_quantized(q, scale, bias)  # type: ignore[arg-type]
    if fp8_dtypes("cpu")[0] == torch.float8_e4m3fnuz:
        with pytest.raises(GuardError, match=r"layer.weight cannot be converted to e4m3fnuz.*byte 254"):
            accepted(q, torch.full_like(scale, 254), "layer.weight")


@pytest.mark.parametrize("kind", (MXFP8Linear, FP8Linear))
def test_a_linear_layer_refuses_sizes_and_devices_that_do_not_exist(kind: type[torch.nn.Module]) -> None:
    for sizes, name in (((64, -1), "out_features"), ((64, 8.0), "out_features"), (("64", 8), "in_features")):
        with pytest.raises(GuardError, match=f"^{name} must be "):
            kind(*sizes)
    with pytest.raises(GuardError, match=r"^device must be one that torch knows; got "):
        kind(64, 8, device="nope")


def cached_attention(steps: tuple[int, ...], page_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences through a cache, in steps, and attention over the same rows in float64."""
    cache = PagedKVCache(layers=2, pages=192 // page_size, page_size=page_size, kv_heads=2, head_dim=64)
    cache.release(9)
    cache.extend([9], 17)  # pages in use by another sequence
    total = sum(steps)
    q, k, v = (normal(2, total, heads, 64, seed=heads + i, dtype=torch.bfloat16) for i, heads in enumerate((4, 2, 2)))
    table = torch.zeros(total, 64, dtype=torch.float32)
    table[:, :32] = 1.0  # cosines of 1: no rotation
    cache.k_scale.fill_(0.25)
    outputs = []
    first = 0
    for tokens in steps:
        step = cache.extend([3, 5], tokens)
        part = [x[:, first : first + tokens].flatten(0, 1).contiguous() for x in (q, k, v)]
        rotated = cache.rope_and_store(1, *part, table, step)
        outputs.append(cache.attend(1, rotated, step).view(2, tokens, 4, 64))
        first += tokens
    own = fp8_dtypes("cpu")[0]
    keys = (k.float() / 0.25).clamp(-torch.finfo(own).max, torch.finfo(own).max).to(own).double() * 0.25
    values = v.float().to(own).double()
    scores = torch.einsum("bthd,bshd->bhts", q.double(), keys.repeat_interleave(2, 2)) / 8
    scores = scores.masked_fill(torch.ones(total, total).triu(1).bool(), -torch.inf)
    want = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), values.repeat_interleave(2, 2))
    assert (cache.k[0].view(torch.uint8) == 0).all()  # the other layer is untouched
    return torch.cat(outputs, 1), want


@pytest.mark.parametrize("steps", ((16, 16, 7, 1), (10, 1, 1, 15, 1), (1,) * 3))
@pytest.mark.parametrize("page_size", (1, 16, 24))
def test_a_paged_cache_gives_the_attention_over_all_that_was_stored(steps: tuple[int, ...], page_size: int) -> None:
    got, want = cached_attention(steps, page_size)
    # softmax weights rounded to bf16 (2^-9 of each, at random) and one rounding of the output
    assert relative(got, want) < 4e-3


@pytest.mark.parametrize("fp8", [False, True])
def test_a_paged_cache_attends_to_the_blocks_that_its_index_chooses(fp8: bool) -> None:
    """Two of up to five blocks of 16 keys, from index keys as they are stored; four launches of a step in all."""
    own, blocks, total = fp8_dtypes("cpu")[0], SparseBlocks(topk=2, block_size=16), 71
    kind = own if fp8 else torch.bfloat16
    cache = PagedKVCache(layers=1, pages=12, page_size=16, kv_heads=2, head_dim=64, index_dtype=kind)
    cache.extend([9], 17)
    q, k, v, index_q, index_k = (
        normal(2, total, heads, 64, seed=seed, dtype=torch.bfloat16) for seed, heads in enumerate((4, 2, 2, 2, 1))
    )
    table = torch.cat((torch.ones(total, 32), torch.zeros(total, 32)), 1)
    outputs, first = [], 0
    for tokens in (16, 16, 16, 16, 6, 1):
        step = cache.extend([3, 5], tokens)
        mine = [x[:, first : first + tokens].flatten(0, 1) for x in (q, k, v, index_q, index_k)]
        with emulator.counters() as counted:
            rotated = cache.rope_and_store(0, *mine[:3], table, step, index_q=mine[3], index_k=mine[4])
            outputs.append(cache.attend(0, rotated, step, index_q=mine[3], blocks=blocks).view(2, tokens, 4, 64))
        first += tokens
    assert counted.launches == 4
    stored = index_k[:, :, 0].to(kind).double()
    scores = torch.einsum("btgd,bsd->btgs", index_q.double(), stored).masked_fill(
        torch.ones(total, total).triu(1).bool()[:, None], -torch.inf
    )
    best = torch.nn.functional.pad(scores, (0, -total % 16), value=-torch.inf).unflatten(-1, (-1, 16)).amax(-1)
    own_block = torch.arange(total) // 16
    best[:, torch.arange(total), :, own_block] = torch.inf
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(2).indices, value=True)
    seen = chosen.repeat_interleave(16, -1)[..., :total] & (scores > -torch.inf)
    keys, values = (x.float().to(own).double().repeat_interleave(2, 2) for x in (k, v))
    products = torch.einsum("bthd,bshd->bths", q.double(), keys) / 8
    weights = products.masked_fill(~seen.repeat_interleave(2, 2), -torch.inf).softmax(-1)
    want = torch.einsum("bths,bshd->bthd", weights, values)
    assert relative(torch.cat(outputs, 1), want) < 4e-3  # as above
    with pytest.raises(GuardError, match="a window has no meaning; got window=3"):
        cache.attend(0, rotated, step, index_q=mine[3], window=3)
    with pytest.raises(GuardError, match="index_q needs a cache of index keys; got one made without index_dtype"):
        PagedKVCache(1, 8, 16, 2, 64).attend(0, rotated, step, index_q=mine[3], blocks=blocks)


def test_a_paged_cache_gives_the_attention_quantised_as_a_linear_layer_reads_it() -> None:
    cache = PagedKVCache(layers=1, pages=2, page_size=16, kv_heads=1, head_dim=64)
    q, k, v = (normal(10, heads, 64, seed=heads + i, dtype=torch.bfloat16) for i, heads in enumerate((2, 1, 1)))
    step = cache.extend([0], 10)
    cache.rope_and_store(0, q, k, v, torch.cat((torch.ones(10, 32), torch.zeros(10, 32)), 1), step)
    want = cache.attend(0, q, step)
    with emulator.counters() as counted:
        heads, scales = cache.attend(0, q, step, out_format="mxfp8")
    assert counted.launches == 1 and heads.shape == q.shape and scales.shape == (10, 4)
    # e4m3 keeps 4 significant bits, so an element is off by at most 2^-4 of it; a subnormal one by 2^-10 of the scale,
    # in whose block the largest is at least 120 of it. The result without out_format is rounded to bf16.
    got = dequantize_mxfp8(heads.view(10, 128), scales, torch.float64).view(want.shape)
    largest = want.view(10, 4, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(want.shape)
    assert ((got - want.double()).abs() <= (2**-4 + 2**-8) * want.abs() + 2**-16 * largest).all()
    linear = torch.nn.Linear(128, 16, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():  # the mean error of 160 roundings is not below 2e-3 with any data
        linear.weight.copy_(normal(16, 128, seed=4) / 16)
    layer = MXFP8Linear.from_linear(linear)
    weight = dequantize_mxfp8(layer.weight, layer.weight_scale, torch.float64)
    assert relative(layer(heads.view(10, 128), scales), got.view(10, 128) @ weight.T) < 2e-3  # one rounding to bf16


def without_memory() -> torch.Tensor:
    x = torch.ones(1)
    x.untyped_storage().resize_(0)
    return x


def test_pages_are_given_out_returned_and_never_too_many() -> None:
    cache = PagedKVCache(layers=1, pages=3, page_size=16, kv_heads=1, head_dim=64)
    first = cache.extend([1], 16)
    assert first.block_tables.shape == (1, 1) and cache.free_pages == 2
    second = cache.extend([1, 2], 1)
    assert second.seqlens.tolist() == [17, 1] and second.positions.tolist() == [16, 0]
    held = second.block_tables
    assert held[0, 0] == first.block_tables[0, 0] and cache.free_pages == 0
    assert len({*held[0].tolist(), int(held[1, 0])}) == 3
    assert second.slot_mapping.tolist() == [16 * int(held[0, 1]), 16 * int(held[1, 0])]
    with pytest.raises(GuardError, match="has 0 free pages of 16 tokens; 16 more tokens of 1 sequences need 1"):
        cache.extend([2], 16)
    assert cache.length(2) == 1  # nothing has changed
    cache.release(1)
    assert cache.free_pages == 2 and cache.length(1) == 0
    assert cache.extend([2], 16).seqlens.tolist() == [17]
    with pytest.raises(GuardError, match="each once"):
        cache.extend([2, 2], 1)
    with pytest.raises(GuardError, match="page_size must be at least 1; got 0"):
        PagedKVCache(1, 1, 0, 1, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda cache: cache.extend(5, 1), "sequences must be a list of names; got int"),
        (lambda cache: cache.extend(torch.ones(2), 1), "sequences must be a list of names; got Tensor"),
        (lambda cache: cache.extend([[1]], 1), "a sequence's name must be an int; got list"),
        (lambda cache: cache.length([1]), "a sequence's name must be an int; got list"),
        (lambda cache: cache.release({}), "a sequence's name must be an int; got dict"),
        (lambda cache: cache.extend([1], torch.nn.UninitializedParameter()), "tokens must be an int"),
        (lambda _: MXFP8Linear.from_linear(3), "linear must be a torch.nn.Linear; got int"),
        (lambda cache: cache.extend([1], without_memory()), "tokens reaches byte 4 of a storage of 0 bytes"),
        (lambda _: PagedKVCache(1, 1, without_memory(), 1, 64), "page_size reaches byte 4 of a storage of 0 bytes"),
        (lambda _: PagedKVCache(1, 1, 16, 1, 64, dtype=without_memory()), "dtype must be .*; got a torch.Tensor"),
        (lambda _: convert_to_mxfp8(linear(), skip=without_memory()), "skip must be .*; got a torch.Tensor"),
        (lambda _: convert_to_mxfp8(torch.nn.ReLU(), skip=3), "skip must be a name or several names; got 3"),
        (lambda _: convert_to_mxfp8(torch.nn.ReLU(), skip=[None]), r"skip must be .*; got \[None\]"),
        (lambda _: hipforge.Float8Linear.from_float(3), "mod must be a torch.nn.Linear; got int"),
        (lambda _: hipforge.weights.load(3), "path must be a file or a folder of safetensors; got int"),
    ),
)
def test_an_argument_of_another_type_is_named(call: Callable[[PagedKVCache], object], message: str) -> None:
    with pytest.raises((GuardError, ConfigError), match=message):
        call(PagedKVCache(layers=1, pages=3, page_size=16, kv_heads=1, head_dim=64))


def test_a_cache_names_the_layer_and_the_rows_that_it_does_not_have() -> None:
    cache = PagedKVCache(layers=2, pages=3, page_size=16, kv_heads=1, head_dim=64)
    step = cache.extend([1], 3)
    for q in (torch.ones(1, 3, 1, 64), torch.ones(4, 1, 64), torch.ones(3), 1.0):
        with pytest.raises(GuardError, match=r"q must be a tensor \[B \* tokens, Hq, D\] of a step of 3 tokens; got"):
            cache.attend(0, q, step)  # type: ignore[call-overload]  # which types tell
    heads = torch.ones(3, 1, 64).bfloat16()
    with pytest.raises(GuardError, match=r"step must be what extend\(\) returned; got NoneType"):
        cache.attend(0, heads, None)  # type: ignore[call-overload]  # as below
    # Some of these layers have a type that the annotations refuse.
    for layer, message in ((2, "at most 1, of 2 layers; got 2"), (-1, "at least 0"), ("0", "must be an int")):
        with pytest.raises(GuardError, match=f"layer .*{message}"):
            cache.attend(layer, heads, step)  # type: ignore[call-overload]  # as above
        with pytest.raises(GuardError, match=f"layer .*{message}"):
            cache.rope_and_store(layer, heads, heads, heads, torch.ones(16, 64), step)  # type: ignore[arg-type]


def test_without_kernels_the_modules_compute_in_torch() -> None:
    program = """
import sys
sys.path[:0] = sys.argv[1:]
from test_nn import *
with torch.no_grad():
    test_a_linear_layer_is_the_product_of_quantised_operands((3,), torch.bfloat16)
    layer = moe(1)
    x = normal(6, 96, seed=9, dtype=torch.bfloat16)
    assert layer(x).isfinite().all() and layer(x).abs().max() > 0
    got, want = cached_attention((10, 1))
    assert relative(got, want) < 4e-3
"""
    environment = {**os.environ, "HIPFORGE_DEVICE": "reference"}
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", program, str(here), str(here.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
