"""The SGLang plugin against an installed SGLang on a CPU: ``make test-integrations`` runs this file.

SGLang's classes are constructed and called with its own argument types; kernels run on the emulator. Its attention
backend needs a model runner, so ours is made without its constructor and called with a pool of SGLang's layout.
"""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

os.environ.setdefault("HIPFORGE_EMULATOR_QUIET", "1")

import pytest
import torch
from sglang.srt.layers import quantization
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.plugins import load_plugins_by_group
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

import hipforge
from hipforge.integrations import serving
from hipforge.integrations import sglang as plugin
from hipforge.integrations.sglang.attention import HipforgeAttnBackend
from hipforge.integrations.sglang.moe import HipforgeMoeQuantInfo, HipforgeRunnerCore
from hipforge.integrations.sglang.quantization import (
    HipforgeFp8Config,
    HipforgeFp8LinearMethod,
    HipforgeFp8MoEMethod,
    HipforgeMxfp8Config,
    HipforgeMxfp8LinearMethod,
    HipforgeMxfp8MoEMethod,
)
from hipforge.nn.moe import Activation
from hipforge.ops import reference

N, K = 64, 96
EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 32, 2


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert plugin.register() is False  # no ROCm here
    assert plugin.register(require_rocm=False) and plugin.register(require_rocm=False)


def test_sglang_finds_the_plugin_and_its_names():
    assert load_plugins_by_group("sglang.srt.plugins")["hipforge"][0] is plugin.register
    assert quantization.QUANTIZATION_METHODS["mxfp8"] is HipforgeMxfp8Config
    assert quantization.QUANTIZATION_METHODS["fp8"] is HipforgeFp8Config
    assert "hipforge" in ATTENTION_BACKENDS and ATTENTION_BACKEND_CHOICES.count("hipforge") == 1


def config():
    made = HipforgeMxfp8Config.from_config({"quant_method": "mxfp8", "activation_scheme": "dynamic"})
    assert made.get_name() == "mxfp8" and made.weight_block_size == [1, 32]
    return made


def quantized(*shape, seed=0):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).reshape(-1, shape[-1])
    elements, scales = hipforge.mxfp8_quantize(rows)
    return elements.view(shape), scales.view(*shape[:-1], -1)


def linear_layer():
    return ReplicatedLinear(K, N, bias=True, params_dtype=torch.bfloat16, quant_config=config(), prefix="up")


def test_a_linear_layer_of_sglang_runs_in_hipforge():
    layer = linear_layer()
    assert type(layer.quant_method) is HipforgeMxfp8LinearMethod
    weight, scale = quantized(N, K)
    layer.weight.data.copy_(weight)
    layer.weight_scale_inv.data.copy_(scale)
    layer.bias.data.copy_(torch.randn(N))
    kept = layer.weight
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight is kept
    x = torch.randn(5, K).bfloat16()
    got, _ = layer(x)
    assert torch.equal(got, serving.linear(x, weight, scale, layer.bias.data))


def test_a_linear_layer_that_is_refused_goes_to_sglangs_method(monkeypatch):
    layer = linear_layer()
    layer.bias = torch.nn.Parameter(layer.bias.data.half(), requires_grad=False)
    seen = []
    monkeypatch.setattr(Fp8LinearMethod, "process_weights_after_loading", lambda self, layer: seen.append("loaded"))
    monkeypatch.setattr(Fp8LinearMethod, "apply", lambda self, layer, x, bias=None: seen.append("applied") or x)
    layer.quant_method.process_weights_after_loading(layer)
    layer(torch.zeros(1, K).half())
    assert seen == ["loaded", "applied"] and "float16 bias" in layer.quant_method.refused


FN = torch.float8_e4m3fn


def fp8_config(block, scheme="dynamic"):
    made = HipforgeFp8Config.from_config(
        {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block}
    )
    assert made.get_name() == "fp8" and made.weight_block_size == block
    return made


@pytest.mark.parametrize("block", [[128, 128], [32, 32]])
def test_a_linear_layer_in_blocks_of_fp8_runs_in_hipforge(block):
    layer = ReplicatedLinear(K, N, bias=True, params_dtype=torch.bfloat16, quant_config=fp8_config(block), prefix="up")
    assert type(layer.quant_method) is HipforgeFp8LinearMethod
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    weight, scale = reference.quantize_fp8_weights(w, e8m0=block == [32, 32], block=block[0])
    layer.weight.data.copy_(weight)
    stored = reference.e8m0_to_f32(scale) if scale.dtype == torch.uint8 else scale
    layer.weight_scale_inv.data.copy_(stored)
    layer.bias.data.copy_(torch.randn(N))
    kept = layer.weight, layer.weight_scale_inv
    layer.quant_method.process_weights_after_loading(layer)
    assert (layer.weight, layer.weight_scale_inv) == kept
    x = torch.randn(5, K).bfloat16()
    got, _ = layer(x)
    # K is one block of 128. SGLang loads scales of 32 x 32, powers of two, as float32.
    q, x_scale = (hipforge.mxfp8_quantize if block == [32, 32] else hipforge.fp8_quant_rows)(x)
    assert torch.equal(got, hipforge.fp8_linear(q, x_scale, weight, scale, bias=layer.bias.data))


def test_merged_shards_of_fp8_keep_their_own_scales():
    method, layer = HipforgeFp8LinearMethod(Fp8LinearMethod(fp8_config(None))), torch.nn.Module()
    method.create_weights(layer, K, [N, 2 * N], K, 3 * N, torch.bfloat16, weight_loader=lambda *_: None)
    weight = torch.randn(3 * N, K, generator=torch.Generator().manual_seed(0)).mul(64).to(FN)
    layer.weight.data.copy_(weight)
    layer.weight_scale.data.copy_(torch.tensor([0.5, 2.0**-7]))
    method.process_weights_after_loading(layer)
    assert layer.weight_scale.shape == (2,)  # as the checkpoint has them
    x = torch.randn(5, K).bfloat16()
    got = method.apply(layer, x)
    rows = torch.tensor([0.5] * N + [2.0**-7] * (2 * N))
    assert torch.equal(got, hipforge.fp8_linear(*hipforge.fp8_quant_rows(x), weight, rows))


@pytest.mark.parametrize(("block", "scheme"), [(None, "static"), ([64, 64], "dynamic")])
def test_fp8_layers_that_are_not_taken_are_sglangs(block, scheme):
    layer = ReplicatedLinear(128, 128, quant_config=fp8_config(block, scheme), params_dtype=torch.bfloat16, prefix="up")
    assert type(layer.quant_method) is Fp8LinearMethod


def fp8_experts(kind):
    """A method, its layer and what the op takes."""
    block = {"blocks": [128, 128], "tensor": None, "mxfp4": [128, 128]}[kind]
    quant = fp8_config(block)
    quant.is_fp4_experts = kind == "mxfp4"
    method, layer = HipforgeFp8MoEMethod(quant), torch.nn.Module()
    changes = {"hidden_size": 256, "intermediate_size_per_partition": 128}
    layer.moe_tp_size, layer.moe_runner_config = 1, moe_config(**changes)
    method.create_weights(layer, EXPERTS, 256, 128, torch.bfloat16)
    method.create_moe_runner(layer, moe_config(**changes))
    generator = torch.Generator().manual_seed(0)
    w = [torch.randn(EXPERTS, rows, k, generator=generator) * 0.2 for rows, k in ((256, 256), (256, 128))]
    if kind == "tensor":
        scales = torch.rand(EXPERTS, 2, generator=generator) / 400, torch.rand(EXPERTS, generator=generator) / 400
        spread = scales[0].repeat_interleave(128, 1), scales[1][:, None].expand(-1, 256)
        stored = [((each / s[..., None]).clamp(-448, 448).to(FN), s) for each, s in zip(w, spread, strict=True)]
        pairs = [(q, s.contiguous()) for q, s in stored]
        given = [(q, s) for (q, _), s in zip(stored, scales, strict=True)]
    else:
        quantise = reference.quantize_fp8_weights if kind == "blocks" else reference.quantize_mxfp4
        pairs = [[torch.stack(part) for part in zip(*map(quantise, each), strict=True)] for each in w]
        given = pairs
        if kind == "mxfp4":
            given = [(q.view(torch.int8), reference.e8m0_to_f32(s)) for q, s in pairs]
    for name, (q, s) in zip(("w13", "w2"), given, strict=True):
        getattr(layer, f"{name}_weight").data.copy_(q)
        scale = f"{name}_weight_scale" + ("" if kind == "tensor" else "_inv")
        getattr(layer, scale).data.copy_(s)
    return method, layer, pairs


@pytest.mark.parametrize("kind", ["blocks", "tensor", "mxfp4"])
def test_experts_of_fp8_checkpoints_through_sglangs_method_and_runner(kind):
    method, layer, ((w1, s1), (w2, s2)) = fp8_experts(kind)
    method.process_weights_after_loading(layer)
    hidden, weights = torch.randn(5, 256).bfloat16(), torch.rand(5, TOP_K)
    ids = torch.randint(0, EXPERTS, (5, TOP_K), dtype=torch.int32)
    out = method.apply(layer, dispatched(hidden, weights, ids)).hidden_states
    op = hipforge.fused_moe_mxfp4 if kind == "mxfp4" else hipforge.fused_moe_fp8
    assert torch.equal(out, op(hidden, w1, s1, w2, s2, weights, ids)) and out.any()


def test_scales_of_mxfp4_experts_must_be_powers_of_two():
    method, layer, _ = fp8_experts("mxfp4")
    layer.w2_weight_scale_inv.data[0, 0, 0] = 0.75
    with pytest.raises(hipforge.GuardError, match="w2: scales that are no powers of two"):
        method.process_weights_after_loading(layer)


def moe_config(**changes):
    given = {
        "num_experts": EXPERTS, "num_local_experts": EXPERTS, "hidden_size": HIDDEN, "top_k": TOP_K,
        "intermediate_size_per_partition": INNER, "params_dtype": torch.bfloat16,
    }  # fmt: skip
    return MoeRunnerConfig(**(given | changes))


def dispatched(hidden, weights, ids):
    return StandardDispatchOutput(hidden, None, StandardTopKOutput(weights, ids, torch.empty(0)))


@pytest.mark.parametrize(
    ("changes", "swiglu"),
    [
        ({}, Activation()),
        ({"routed_scaling_factor": 2.5}, Activation()),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, Activation(1.702, 1.0, 7.0, True)),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
            Activation(1.702, 1.0, 7.0),
        ),
        ({"swiglu_limit": 10.0}, Activation(limit=10.0)),
    ],
)
def test_experts_through_sglangs_method_and_runner(changes, swiglu):
    method, layer = HipforgeMxfp8MoEMethod(config()), torch.nn.Module()
    layer.moe_tp_size, layer.moe_runner_config = 1, moe_config(**changes)
    method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.bfloat16)
    method.create_moe_runner(layer, moe_config(**changes))
    assert isinstance(method.runner, MoeRunner) and isinstance(method.runner.runner_core, HipforgeRunnerCore)
    assert method.get_moe_runner_backend(layer).value == "hipforge"
    (w1, s1), (w2, s2) = quantized(EXPERTS, 2 * INNER, HIDDEN), quantized(EXPERTS, HIDDEN, INNER, seed=1)
    for name, value in {
        "w13_weight": w1, "w13_weight_scale_inv": s1, "w2_weight": w2, "w2_weight_scale_inv": s2,
    }.items():  # fmt: skip
        getattr(layer, name).data.copy_(value)
    method.process_weights_after_loading(layer)
    hidden, weights = torch.randn(5, HIDDEN).bfloat16(), torch.rand(5, TOP_K)
    ids = torch.randint(0, EXPERTS, (5, TOP_K), dtype=torch.int32)
    ids[0, 1] = -1  # what SGLang makes of an expert of another rank
    out = method.apply(layer, dispatched(hidden, weights, ids))
    assert isinstance(out, StandardCombineInput)
    want = serving.experts(hidden, (w1, s1), (w2, s2), weights, ids, swiglu)
    factor = changes.get("routed_scaling_factor", 1.0)
    assert torch.equal(out.hidden_states, want * factor)
    weights[0, 1] = 5.0
    assert torch.equal(method.apply(layer, dispatched(hidden, weights, ids)).hidden_states, out.hidden_states)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "gelu"}, "gelu"),
        ({"is_gated": False}, "is_gated=False"),
        ({"no_combine": True}, "no_combine"),
        ({"hidden_size": 80}, "hidden size 80"),
    ],
)
def test_experts_that_are_refused_go_to_sglangs_runner(monkeypatch, changes, reason):
    method, seen = HipforgeMxfp8MoEMethod(config()), []
    monkeypatch.setattr(Fp8MoEMethod, "create_moe_runner", lambda self, layer, config: seen.append(config))
    monkeypatch.setattr(Fp8MoEMethod, "apply", lambda self, layer, dispatch: seen.append(dispatch))
    given = moe_config(**changes)
    method.create_moe_runner(torch.nn.Module(), given)
    method.apply(torch.nn.Module(), "batch")
    assert reason in method.refused and seen == [given, "batch"]


def test_lora_hooks_are_refused():
    core = HipforgeRunnerCore(moe_config())
    with pytest.raises(hipforge.GuardError, match="no LoRA hooks"):
        core.run_from_dispatch(None, HipforgeMoeQuantInfo((), ()), moe_config(), hooks=object())


HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16


class Pool:
    """A pool of keys and values [slots, Hkv, D] as SGLang's MHATokenToKVPool gives it."""

    def __init__(self, dtype):
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = (torch.randn(6 * PAGE, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


def backend(dtype=torch.bfloat16, page_size=PAGE):
    made = object.__new__(HipforgeAttnBackend)
    pages = torch.tensor([[3, 1], [0, 5], [4, 2]])
    slots = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    made.use_mla, made.dcp_size, made.use_sliding_window_kv_pool, made.page_size = False, 1, False, page_size
    made.token_to_kv_pool, made.req_to_token = Pool(dtype), slots.to(torch.int32)
    made.forward_metadata = SimpleNamespace(swa_out_cache_loc=None)
    made.written = []
    made._set_kv_buffer = lambda *arguments: made.written.append(arguments)
    return made, pages


def step():
    return SimpleNamespace(
        req_pool_indices=torch.tensor([2, 0]), seq_lens=torch.tensor([20, 7]), spec_info=None,
        out_cache_loc=torch.tensor([51, 54]), out_cache_loc_physical=True,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_decode_step_over_sglangs_pool(monkeypatch, dtype):
    made, pages = backend(dtype)
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0, logit_cap=30.0)
    if dtype != torch.bfloat16:
        layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(2.0)
        layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    from hipforge.integrations.sglang import attention

    monkeypatch.setattr(attention.KVWriteLoc, "for_batch", lambda batch, swa_loc: batch.out_cache_loc)
    torch.manual_seed(0)
    q = torch.randn(2, HEADS * DIM).bfloat16()
    k, v = torch.randn(2, KV_HEADS, DIM).bfloat16(), torch.randn(2, KV_HEADS, DIM).bfloat16()
    sinks = torch.randn(HEADS)
    batch = step()
    assert made.refusal(layer, batch) is None
    got = made.forward_decode(q, k, v, layer, batch, sinks=sinks)
    pool = made.token_to_kv_pool
    scales = (0.5, 2.0) if dtype != torch.bfloat16 else (1.0, 1.0)
    want = hipforge.decode_attention_fp8(
        q.view(2, 1, HEADS, DIM), pool.k.view(6, PAGE, KV_HEADS, DIM), pool.v.view(6, PAGE, KV_HEADS, DIM),
        pages[[2, 0]].to(torch.int32), torch.tensor([20, 7], dtype=torch.int32), *scales, DIM**-0.5, sinks=sinks,
        softcap=30.0,
    )  # fmt: skip
    assert torch.equal(got.view(want.shape), want)
    assert len(made.written) == 1 and made.written[0][2] is batch.out_cache_loc
    # The table of a step is made once for its layers and again for the next pass over them.
    tables = made._tables
    later = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=1)
    later.k_scale, later.v_scale = layer.k_scale, layer.v_scale
    later.k_scale_float, later.v_scale_float = layer.k_scale_float, layer.v_scale_float
    made.forward_decode(q, k, v, later, batch, save_kv_cache=False)
    assert made._tables is tables and len(made.written) == 1
    made.forward_decode(q, k, v, layer, batch)
    assert made._tables is not tables and torch.equal(made._tables, tables)


@pytest.mark.parametrize(
    ("of_layer", "of_backend", "of_step", "reason"),
    [
        ({"sliding_window_size": 128}, {}, {}, "window"),
        ({"v_head_dim": 32}, {}, {}, "two sizes"),
        ({}, {"use_mla": True}, {}, "MLA"),
        ({}, {"page_size": 5}, {}, "not whole pages of 5"),
        ({}, {"dcp_size": 2}, {}, "shared out"),
        ({}, {}, {"spec_info": object()}, "speculative"),
        ({"xai_temperature_len": 8}, {}, {}, "scores"),
    ],
)
def test_other_steps_are_left_to_triton(monkeypatch, of_layer, of_backend, of_step, reason):
    made, _ = backend()
    layer, batch = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0), step()
    for what, changes in ((layer, of_layer), (made, of_backend), (batch, of_step)):
        for name, value in changes.items():
            setattr(what, name, value)
    assert reason in made.refusal(layer, batch)
    seen = []
    monkeypatch.setattr(TritonAttnBackend, "forward_decode", lambda self, *args, **kwargs: seen.append(args) or args[0])
    q = torch.zeros(2, HEADS * DIM)
    assert made.forward_decode(q, q, q, layer, batch) is q and len(seen) == 1


def test_pages_of_one_slot_are_taken():
    made, _ = backend(page_size=1)
    assert made.refusal(RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0), step()) is None


def test_a_pool_in_e5m2_is_refused():
    made, _ = backend(torch.float8_e5m2)
    assert "float8_e5m2" in made.refusal(RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=0), step())


def test_sglangs_constructor_takes_what_the_registered_function_gives_it():
    inspect.signature(TritonAttnBackend.__init__).bind(None, "model runner")


def test_our_methods_take_what_sglangs_call_them_with():
    pairs = [
        (HipforgeMxfp8LinearMethod, LinearMethodBase),
        (HipforgeMxfp8MoEMethod, Fp8MoEMethod),
        (HipforgeFp8LinearMethod, LinearMethodBase),
        (HipforgeFp8MoEMethod, Fp8MoEMethod),
        (HipforgeRunnerCore, DispatchMoeRunnerCore),
        (HipforgeAttnBackend, TritonAttnBackend),
        (HipforgeMxfp8Config, HipforgeMxfp8Config.__mro__[1]),
    ]
    for ours, theirs in pairs:
        assert not inspect.isabstract(ours)
        own = [name for name, value in vars(ours).items() if inspect.isfunction(value) and hasattr(theirs, name)]
        assert own
        for name in (name for name in own if name != "__init__"):
            wanted = inspect.signature(getattr(theirs, name)).parameters
            got = inspect.signature(getattr(ours, name)).parameters
            assert list(got) == list(wanted), (ours, name)
            assert [each.default for each in got.values()] == [each.default for each in wanted.values()], (ours, name)
