"""The vLLM plugin against an installed vLLM on a CPU: ``make test-integrations`` runs this file in its own environment.

vLLM's classes are constructed and called with its own argument types. What is registered for ROCm on a GPU is
registered for the CPU platform here, and kernels run on the emulator.
"""

from __future__ import annotations

import inspect
import itertools
import os
from types import SimpleNamespace

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ.setdefault("HIPFORGE_EMULATOR_QUIET", "1")

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
    ocp_mx_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.oracle.fp8 import select_fp8_moe_backend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import select_mxfp4_moe_backend
from vllm.model_executor.layers.fused_moe.oracle.mxfp8 import select_mxfp8_moe_backend
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Mxfp8,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from vllm.model_executor.layers.quantization.modelopt import CkptCtx, ModelOptLinearMethod, QuantSpec
from vllm.model_executor.layers.quantization.quark.schemes import QuarkOCP_MX
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from vllm.platforms import current_platform
from vllm.plugins import load_plugins_by_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

import hipforge
from hipforge.integrations import serving
from hipforge.integrations import vllm as plugin
from hipforge.integrations.vllm.attention import HipforgeAttentionBackend, HipforgeAttentionImpl
from hipforge.integrations.vllm.linear import (
    HipforgeFp8BlockLinearKernel,
    HipforgeFp8LinearKernel,
    HipforgeMxfp8LinearKernel,
)
from hipforge.integrations.vllm.moe import HipforgeFp8Experts, HipforgeMxfp4Experts, HipforgeMxfp8Experts
from hipforge.nn.moe import Activation
from hipforge.ops import reference
from hipforge.ops.core.fp8 import fp8_dtypes

N, K = 64, 96


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """vLLM's parameters ask for their rank."""
    with set_current_vllm_config(VllmConfig()):
        file = tmp_path_factory.mktemp("rank") / "store"
        init_distributed_environment(1, 0, distributed_init_method=f"file://{file}", local_rank=0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield
        destroy_model_parallel()
        destroy_distributed_environment()


@pytest.fixture(scope="module", autouse=True)
def registered(one_rank):
    assert plugin.register(current_platform._enum) and plugin.register(current_platform._enum)
    assert kernels._POSSIBLE_MXFP8_KERNELS[current_platform._enum] == [HipforgeMxfp8LinearKernel]
    for table, kernel in (
        (kernels._POSSIBLE_FP8_KERNELS, HipforgeFp8LinearKernel),
        (kernels._POSSIBLE_FP8_BLOCK_KERNELS, HipforgeFp8BlockLinearKernel),
    ):
        known = table[current_platform._enum]
        assert known.index(kernel) == 0 and known.count(kernel) == 1
    kernels._POSSIBLE_MXFP8_KERNELS[current_platform._enum].append(kernels.EmulationMxfp8LinearKernel)


def test_vllm_finds_the_plugin_and_registers_nothing_off_rocm():
    found = load_plugins_by_group("vllm.general_plugins")
    assert found["hipforge"] is plugin.register
    assert not current_platform.is_rocm() and found["hipforge"]() is False


def quantized(*shape, seed=0):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).reshape(-1, shape[-1])
    elements, scales = hipforge.mxfp8_quantize(rows)
    return elements.view(shape), scales.view(*shape[:-1], -1)


def filled(layer, weight, scale):
    layer.weight.data.copy_(weight)
    layer.weight_scale.data.copy_(scale)
    return layer


def loader(*args, **kwargs):
    raise AssertionError("nothing is loaded from a file here")


compressed_tensors = lambda: CompressedTensorsW8A8Mxfp8()
quark = lambda: QuarkOCP_MX(kMxfp8Static, kMxfp8Dynamic)
modelopt = lambda: ModelOptLinearMethod(QuantSpec(weight=kMxfp8Static, activation=kMxfp8Dynamic), CkptCtx())


def of_scheme(make):
    scheme, layer = make(), torch.nn.Module()
    # The linear method of ModelOpt takes the sizes of all ranks too.
    more = {"input_size": K, "output_size": N} if make is modelopt else {}
    scheme.create_weights(
        layer, output_partition_sizes=[N // 2, N // 2], input_size_per_partition=K, params_dtype=torch.bfloat16,
        weight_loader=loader, **more,
    )  # fmt: skip
    return scheme, layer


def expected(x, weight, scale):
    xq, xs = reference.quantize_mxfp8(x)
    return reference.mxfp8_mm(xq, xs, weight, scale)


@pytest.mark.parametrize("make", [modelopt, compressed_tensors, quark])
def test_schemes_take_our_kernel(make):
    weight, scale = quantized(N, K)
    scheme, layer = of_scheme(make)
    kernel = scheme.kernel if hasattr(scheme, "kernel") else scheme.ocp_mx_linear
    assert type(kernel) is HipforgeMxfp8LinearKernel
    filled(layer, weight, scale)
    scheme.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(N).bfloat16()
    apply = scheme.apply if make is modelopt else scheme.apply_weights
    got = apply(layer, x, bias)
    assert got.shape == (2, 3, N) and got.dtype == torch.bfloat16
    plain = apply(layer, x)
    assert torch.equal(plain.reshape(-1, N), expected(x.reshape(-1, K), weight, scale))
    assert torch.equal(got, serving.linear(x, weight, scale, bias)) and not torch.equal(got, plain)


def test_a_layer_seen_too_late_goes_to_vllms_kernel():
    weight, scale = quantized(N, K)
    _, layer = of_scheme(compressed_tensors)
    kernel = kernels.init_mxfp8_linear_kernel(weight_shape=(N, K))
    assert type(kernel) is HipforgeMxfp8LinearKernel
    filled(layer, weight, scale).bias = torch.nn.Parameter(torch.randn(N).half(), requires_grad=False)
    kernel.process_weights_after_loading(layer)
    assert type(kernel.fallback) is kernels.EmulationMxfp8LinearKernel
    x = torch.randn(3, K).half()
    want = torch.nn.functional.linear(x, dequant_mxfp8_to_bf16(weight, scale).half(), layer.bias)
    assert torch.equal(kernel.apply_weights(layer, x, layer.bias), want)


def test_what_cannot_be_implemented_falls_through_in_vllms_own_choice():
    assert type(kernels.init_mxfp8_linear_kernel(weight_shape=(N, 80))) is kernels.EmulationMxfp8LinearKernel
    config = kernels.Mxfp8LinearLayerConfig((N, K), bmm_batch_size=2)
    assert "bmm_batch_size=2" in HipforgeMxfp8LinearKernel.can_implement(config)[1]


FN = torch.float8_e4m3fn
FP8_N, FP8_K = 384, 256  # three shards of 128 rows, so that one of 128 x 128 blocks holds rows of one


def fp8_scheme(kind):
    """A scheme of vLLM, its layer, and the name of its scales."""
    config = VllmConfig()
    object.__setattr__(config, "model_config", SimpleNamespace(dtype=torch.bfloat16, quantization_config=None))
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)  # as while vLLM builds a model
        if kind == "fp8-blocks":
            scheme = Fp8LinearMethod(Fp8Config(True, "dynamic", weight_block_size=[128, 128]))
        elif kind == "fp8-static":
            scheme = Fp8LinearMethod(Fp8Config(True, "static"))
        else:
            strategy, _, static = kind.partition("-")
            block = {"block_structure": [128, 128]} if strategy == "block" else {}
            args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **block)
            scheme = CompressedTensorsW8A8Fp8(args, static == "static")
        layer = torch.nn.Module()
        scheme.create_weights(
            layer, input_size_per_partition=FP8_K, output_partition_sizes=[128, 128, 128], input_size=FP8_K,
            output_size=FP8_N, params_dtype=torch.bfloat16, weight_loader=loader,
        )  # fmt: skip
    return scheme, layer, "weight_scale_inv" if kind == "fp8-blocks" else "weight_scale"


def fp8_checkpoint(kind):
    w = torch.randn(FP8_N, FP8_K, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 4, FP8_N)[:, None]
    if kind in ("fp8-blocks", "block"):
        return reference.quantize_fp8_weights(w)
    if kind.startswith("channel"):
        q, scale = reference.quantize_fp8_rows(w)
        return q, scale[:, None]
    # One scale per shard; vLLM requantises to the largest, which powers of two make exact.
    shards = w.view(3, -1) * torch.tensor([1.0, 0.5, 2.0])[:, None]
    scale = torch.tensor([1.0, 0.5, 2.0]) * 2.0**-6
    return (shards / scale[:, None]).clamp(-448, 448).to(FN).view(FP8_N, FP8_K), scale


@pytest.mark.parametrize("kind", ["channel", "tensor", "tensor-static", "block", "fp8-blocks", "fp8-static"])
def test_fp8_schemes_take_our_kernels(kind, monkeypatch):
    scheme, layer, name = fp8_scheme(kind)
    blocks = "block" in kind
    assert type(scheme.fp8_linear) is (HipforgeFp8BlockLinearKernel if blocks else HipforgeFp8LinearKernel)
    weight, scale = fp8_checkpoint(kind)
    layer.weight.data.copy_(weight)
    getattr(layer, name).data.copy_(scale.view_as(getattr(layer, name)))
    if "static" in kind:
        layer.input_scale.data.fill_(2.0**-5)
    # As on ROCm, where rows are 256 bytes longer than they have elements.
    padded = lambda w: torch.nn.functional.pad(w.view(torch.uint8), (0, 256)).view(FN)[:, :-256]
    monkeypatch.setattr(fp8_utils, "_maybe_pad_fp8_weight", padded)
    # vLLM's wheel for CPUs has not the operator by which merged shards come to one scale.
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", lambda w, s: ((w.float() / s).clamp(-448, 448).to(FN), s))
    scheme.process_weights_after_loading(layer)
    assert layer.weight.is_contiguous() if blocks else layer.weight.t().is_contiguous()
    x, bias = torch.randn(2, 3, FP8_K).bfloat16(), torch.randn(FP8_N).bfloat16()
    apply = scheme.apply_weights if hasattr(scheme, "apply_weights") else scheme.apply
    got = apply(layer, x, bias)
    assert got.shape == (2, 3, FP8_N) and got.dtype == torch.bfloat16
    rows = x.view(6, FP8_K)
    if blocks:
        q, x_scale = reference.quantize_fp8_blocks(rows)
        want = reference.fp8_mm(q, x_scale, weight, scale, torch.float64, torch.float64)
    else:
        if scale.numel() == 3:
            weight = (weight.view(3, -1).float() * scale[:, None] / scale.max()).to(FN).view(FP8_N, FP8_K)
            scale = scale.max()
        if "static" in kind:
            x_scale = torch.tensor(2.0**-5)
            q = (rows.float() / x_scale).clamp(-448, 448).to(FN)
        else:  # vLLM asks for a scale per token, also beside one of the weight
            q, x_scale = reference.quantize_fp8_rows(rows)
        want = reference.fp8_mm(q, x_scale.view(-1)[:6], weight, scale, torch.float64, torch.float64)
    want = want + bias.double()
    # One rounding to bfloat16; float32 sums of K + 1 terms in up to two blocks.
    size = reference.fp8_mm(q.abs(), x_scale.view(6, -1) if blocks else x_scale.view(-1)[:6], weight.abs(), scale,
                            torch.float64, torch.float64) + bias.double().abs()  # fmt: skip
    bound = 2.0**-8 * want.abs() + (FP8_K + 4) * 2.0**-23 * size
    assert ((got.view(6, FP8_N).double() - want).abs() <= bound).all()


@pytest.mark.parametrize(
    ("keys", "out", "shape", "reason"),
    [
        ((kFp8StaticChannelSym, kFp8DynamicTokenSym), torch.float32, (64, 64), "results of torch.float32"),
        ((kFp8StaticChannelSym, kFp8DynamicTokenSym), torch.bfloat16, (0, 64), "an empty weight [0, 64]"),
        ((kFp8StaticChannelSym, kFp8Dynamic128Sym), torch.bfloat16, (64, 64), "scales of activations per"),
        ((kFp8Static128BlockSym, kFp8DynamicTokenSym), torch.bfloat16, (64, 64), "scales of the weight per"),
    ],
)
def test_fp8_layers_that_are_not_taken_say_why(keys, out, shape, reason):
    config = kernels.FP8ScaledMMLinearLayerConfig(*keys, shape, torch.bfloat16, out)
    assert reason in HipforgeFp8LinearKernel.can_implement(config)[1]
    if keys[1] == kFp8DynamicTokenSym:
        assert "128 x 128 weights" in HipforgeFp8BlockLinearKernel.can_implement(config)[1]


EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 32, 2


def moe_config(**changes):
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=1, ep_size=1, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
        use_ep=False, all2all_backend="", enable_eplb=False,
    )  # fmt: skip
    given = {
        "num_experts": EXPERTS, "experts_per_token": TOP_K, "hidden_dim": HIDDEN, "intermediate_size": INNER,
        "num_local_experts": EXPERTS, "num_logical_experts": EXPERTS, "activation": MoEActivation.SILU, "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize, "moe_parallel_config": parallel, "in_dtype": torch.bfloat16,
    }  # fmt: skip
    return FusedMoEConfig(**(given | changes))


def test_vllms_choice_of_experts_takes_ours_for_weights_as_they_are_loaded():
    backend, experts = select_mxfp8_moe_backend(moe_config(moe_backend="triton"))
    assert backend.name == "TRITON_MXFP8" and experts is HipforgeMxfp8Experts
    assert select_mxfp8_moe_backend(moe_config())[1] is HipforgeMxfp8Experts


def supported(experts, config, *keys, form=mk.FusedMoEActivationFormat.Standard):
    return experts.is_supported_config(experts, config, *keys, form)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": MoEActivation.GELU}, "GELU"),
        ({"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE}, "without gemm1_clamp_limit"),
        ({"hidden_dim": 80}, "hidden size 80"),
        ({"intermediate_size": 48}, "intermediate size 48"),
        ({"is_lora_enabled": True}, "LoRA"),
    ],
)
def test_experts_that_are_not_taken_fall_through_with_the_reason(changes, reason):
    taken, why = supported(HipforgeMxfp8Experts, moe_config(**changes), kMxfp8Static, kMxfp8Dynamic)
    assert not taken and reason in why


def fp8_moe_case(kind):
    """Weights, their scales and vLLM's configuration of them; activations get scales per token or per 128."""
    block = [128, 128] if kind == "blocks" else None
    parts = []
    for rows, columns, seed in ((256, 256, 0), (256, 128, 1)):
        w = torch.randn(EXPERTS, rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.2
        if kind == "blocks":
            pairs = [reference.quantize_fp8_weights(each) for each in w]
        elif kind == "channel":
            pairs = [(q, s[:, None]) for q, s in map(reference.quantize_fp8_rows, w)]
        else:
            pairs = [((each / 2**-9).to(FN), torch.tensor(2.0**-9)) for each in w]
        parts.append([torch.stack(part) for part in zip(*pairs, strict=True)])
    quant = fp8_w8a8_moe_quant_config(
        w1_scale=parts[0][1], w2_scale=parts[1][1], block_shape=block, per_act_token_quant=kind == "channel",
    )  # fmt: skip
    return parts, quant


def routed_tokens(width):
    """Five tokens with weights and ids of their experts."""
    hidden = torch.randn(5, width).bfloat16()
    return hidden, torch.rand(5, TOP_K), torch.randint(0, EXPERTS, (5, TOP_K), dtype=torch.int32)


def applied(experts, activation, w1, w2, hidden, weights, ids, expert_map=None):
    """The output of the experts as vLLM calls them, in a tensor that held other values."""
    out = torch.full_like(hidden, 7.0)
    experts.apply(
        output=out, hidden_states=hidden, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids, activation=activation,
        global_num_experts=EXPERTS, expert_map=expert_map, a1q_scale=None, a2_scale=None,
        workspace13=torch.empty(0), workspace2=torch.empty(0), expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", ["blocks", "channel", "tensor"])
def test_fp8_experts_compute_what_the_op_computes(kind):
    ((w1, s1), (w2, s2)), quant = fp8_moe_case(kind)
    config = moe_config(hidden_dim=256, intermediate_size=128)
    experts = HipforgeFp8Experts(config, quant)
    hidden, weights, ids = routed_tokens(256)
    out = applied(experts, config.activation, w1, w2, hidden, weights, ids)
    assert torch.equal(out, hipforge.fused_moe_fp8(hidden, w1, s1, w2, s2, weights, ids)) and out.any()


@pytest.mark.parametrize(
    ("keys", "changes", "reason"),
    [
        ((kFp8Static128BlockSym, kFp8Dynamic128Sym), {}, None),
        ((kFp8StaticChannelSym, kFp8DynamicTokenSym), {}, None),
        ((kFp8StaticTensorSym, kFp8DynamicTensorSym), {}, None),
        ((kFp8StaticTensorSym, kFp8StaticTensorSym), {}, "quantization scheme"),
        ((kFp8Static128BlockSym, kFp8Dynamic128Sym), {"intermediate_size": 192}, "must not share a block of 128"),
        ((kFp8StaticChannelSym, kFp8DynamicTokenSym), {"intermediate_size": 72}, "not a multiple of 16"),
        ((kFp8StaticChannelSym, kFp8DynamicTokenSym), {"activation": MoEActivation.GELU}, "GELU"),
    ],
)
def test_vllms_choice_of_fp8_experts(keys, changes, reason):
    config = moe_config(**({"hidden_dim": 256, "intermediate_size": 128, "moe_backend": "triton"} | changes))
    taken, why = supported(HipforgeFp8Experts, config, *keys)
    assert taken == (reason is None) and (reason is None or reason in why)
    if taken:
        backend, experts = select_fp8_moe_backend(config, *keys)
        assert backend.name == "TRITON" and experts is HipforgeFp8Experts


def test_mxfp4_experts_of_gpt_oss_take_the_place_of_vllms_emulation():
    w1, w2 = (reference.quantize_mxfp4(torch.randn(EXPERTS * rows, columns)) for rows, columns in ((64, 64), (64, 32)))
    (w1, s1), (w2, s2) = ([part.view(EXPERTS, -1, part.shape[1]) for part in pair] for pair in (w1, w2))
    config = moe_config(moe_backend="emulation", activation=MoEActivation.SWIGLUOAI)
    vllm = VllmConfig()
    object.__setattr__(vllm, "model_config", SimpleNamespace(dtype=torch.bfloat16, quantization_config=None))
    with set_current_vllm_config(vllm):
        backend, experts = select_mxfp4_moe_backend(config)
    assert backend.name == "EMULATION" and experts is HipforgeMxfp4Experts
    biases = torch.randn(EXPERTS, 64), torch.randn(EXPERTS, 64)
    quant = ocp_mx_moe_quant_config(
        quant_dtype="mxfp4", w1_scale=s1, w2_scale=s2, w1_bias=biases[0].bfloat16(), w2_bias=biases[1].bfloat16(),
    )  # fmt: skip
    layer = HipforgeMxfp4Experts(config, quant)
    assert layer.swiglu == Activation(1.702, 1.0, 7.0, True)
    hidden, weights, ids = routed_tokens(HIDDEN)
    out = applied(layer, config.activation, w1, w2, hidden, weights, ids)
    want = hipforge.fused_moe_mxfp4(
        hidden, w1, s1, w2, s2, weights, ids, alpha=1.702, beta=1.0, limit=7.0, interleaved=True,
        w1_bias=biases[0].bfloat16().float(), w2_bias=biases[1].bfloat16().float(),
    )  # fmt: skip
    assert torch.equal(out, want) and out.any()


def test_tokens_batched_by_expert_are_refused():
    batched = mk.FusedMoEActivationFormat.BatchedExperts
    taken, why = supported(HipforgeMxfp8Experts, moe_config(), kMxfp8Static, kMxfp8Dynamic, form=batched)
    assert not taken and str(batched.value) in why


@pytest.mark.parametrize("with_map", [False, True])
def test_experts_compute_what_the_op_computes(with_map):
    (w1, s1), (w2, s2) = quantized(EXPERTS, 2 * INNER, HIDDEN), quantized(EXPERTS, HIDDEN, INNER, seed=1)
    quant = fp8_w8a8_moe_quant_config(
        w1_scale=s1, w2_scale=s2, block_shape=[1, 32], gemm1_alpha=1.702, gemm1_clamp_limit=7.0
    )
    config = moe_config(activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE)
    experts = HipforgeMxfp8Experts(config, quant)
    assert experts.swiglu == Activation(1.702, 1.0, 7.0)
    hidden, weights, ids = routed_tokens(HIDDEN)
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32) if with_map else None
    shapes = experts.workspace_shapes(5, 2 * INNER, HIDDEN, TOP_K, EXPERTS, EXPERTS, None, config.activation)
    assert shapes == ((0,), (0,), (5, HIDDEN))
    out = applied(experts, config.activation, w1, w2, hidden, weights, ids, expert_map)
    want = hipforge.fused_moe_mxfp8(hidden, w1, s1, w2, s2, weights, ids, expert_map, alpha=1.702, beta=1.0, limit=7.0)
    assert torch.equal(out, want)


def test_our_methods_take_what_vllms_call_them_with():
    """Every abstract method is there, and every parameter of vLLM's has the same name, place and default in ours."""
    pairs = [
        (HipforgeMxfp8LinearKernel, kernels.Mxfp8LinearKernel),
        (HipforgeFp8LinearKernel, kernels.FP8ScaledMMLinearKernel),
        (HipforgeFp8BlockLinearKernel, kernels.Fp8BlockScaledMMLinearKernel),
        *((own, mk.FusedMoEExpertsModular) for own in (HipforgeFp8Experts, HipforgeMxfp4Experts, HipforgeMxfp8Experts)),
        (HipforgeAttentionImpl, TritonAttentionImpl),
        (HipforgeAttentionBackend, HipforgeAttentionBackend.__mro__[1]),
    ]
    for ours, theirs in pairs:
        assert not inspect.isabstract(ours), ours.__abstractmethods__
        mine = {name for each in ours.__mro__ if each.__module__.startswith("hipforge") for name in vars(each)}
        own = [name for name in sorted(mine) if callable(getattr(ours, name)) and name in dir(theirs)]
        assert len(own) > 3
        for name in own:
            wanted = inspect.signature(getattr(theirs, name)).parameters
            got = inspect.signature(getattr(ours, name)).parameters
            if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in got.values()):
                continue
            assert list(got) == list(wanted), (ours, name)
            for parameter, value in wanted.items():
                assert got[parameter].default == value.default, (ours, name, parameter)


HEADS, KV_HEADS, DIM, BLOCKS, BLOCK_SIZE = 4, 2, 64, 6, 16


class Layer(torch.nn.Module):
    def __init__(self, k_scale, v_scale):
        super().__init__()
        self._q_scale = torch.tensor(1.0)
        self._k_scale, self._v_scale = torch.tensor(k_scale), torch.tensor(v_scale)


def metadata(tokens, lengths, **changes):
    batch = len(lengths)
    tables = torch.arange(batch * 2, dtype=torch.int32).view(batch, 2)
    given = {
        "num_actual_tokens": batch * tokens, "max_query_len": tokens,
        "query_start_loc": torch.arange(batch + 1, dtype=torch.int32) * tokens, "max_seq_len": max(lengths),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32), "block_table": tables,
        "slot_mapping": torch.tensor(
            [int(tables[row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
             for row, length in enumerate(lengths) for p in range(length - tokens, length)]
        ),
        "seq_threshold_3D": 0, "num_par_softmax_segments": 0, "softmax_segm_output": None, "softmax_segm_max": None,
        "softmax_segm_expsum": None, "causal": True,
    }  # fmt: skip
    return TritonAttentionMetadata(**(given | changes))


def impl(cache_dtype, **changes):
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": cache_dtype, "logits_soft_cap": None}
    return HipforgeAttentionImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, *(given | changes).values())


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("heads_first", [True, False])
def test_rotation_write_and_attention_over_vllms_cache(cache_dtype, heads_first):
    torch.manual_seed(0)
    cache = torch.randn(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * DIM).mul(8).bfloat16()
    cache = cache.to(torch.float8_e4m3fn).view(torch.uint8) if cache_dtype == "fp8" else cache
    if not heads_first:  # the same logical order over [blocks, block_size, Hkv, 2 D] in memory
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    layer, attention = Layer(0.25, 0.5), impl(cache_dtype)
    step = metadata(2, [20, 3, 32])
    tokens = step.num_actual_tokens
    q, k, v = (torch.randn(tokens, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    cos_sin = torch.randn(64, DIM)
    positions = torch.tensor([18, 19, 1, 2, 30, 31])
    kv = cache.view(torch.float8_e4m3fn) if cache_dtype == "fp8" else cache
    plain = kv.transpose(1, 2).clone(memory_format=torch.contiguous_format).split(DIM, dim=-1)
    scales = (layer._k_scale.view(1), layer._v_scale.view(1)) if cache_dtype == "fp8" else (None, None)
    k_plain, v_plain = (each.contiguous() for each in plain)
    q_plain = hipforge.rope_and_cache(
        q.clone(), k, v, cos_sin, positions, k_plain, v_plain, step.slot_mapping, k_scale=scales[0], v_scale=scales[1]
    )
    want = hipforge.decode_attention_fp8(
        q_plain.view(3, 2, HEADS, DIM), k_plain, v_plain, step.block_table, step.seq_lens,
        *(1.0 if each is None else each for each in scales), DIM**-0.5,
    )  # fmt: skip

    assert attention.fused_rope_kvcache_supported()
    flat = q.view(tokens, -1)
    attention.do_rope_and_kv_cache_update(layer, flat, k, v, positions, cos_sin, True, cache, step.slot_mapping)
    assert torch.equal(q, q_plain)
    written = torch.cat((k_plain, v_plain), dim=-1).transpose(1, 2)
    assert torch.equal(cache.contiguous().view(torch.uint8), written.contiguous().view(torch.uint8))
    out = torch.full((tokens, HEADS * DIM), 7.0).bfloat16()
    assert attention.refusal(step, cache) is None
    assert attention.forward(layer, q, k, v, cache, step, out) is out
    assert torch.equal(out.view(3, 2, HEADS, DIM), want)


def test_unequal_sequences_and_an_output_in_fp8():
    torch.manual_seed(0)
    cache = torch.randn(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * DIM).bfloat16()
    layer, attention = Layer(1.0, 1.0), impl("auto")
    counts = torch.tensor([3, 1, 2])
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    step = metadata(1, [20, 3, 32], num_actual_tokens=6, max_query_len=3, query_start_loc=starts)
    q = torch.randn(6, HEADS, DIM).bfloat16()
    scale = torch.tensor(0.125)
    assert attention.refusal(step, cache) is None
    assert attention.fused_output_quant_supported(kFp8StaticTensorSym)
    out = torch.zeros(6, HEADS * DIM, dtype=fp8_dtypes("cpu")[0])
    attention.forward(layer, q, q, q, cache, step, out, scale)
    k_cache, v_cache = cache.transpose(1, 2).split(DIM, dim=-1)
    for row, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        alone = hipforge.decode_attention_fp8(
            q[None, begin:end], k_cache, v_cache, step.block_table[row : row + 1], step.seq_lens[row : row + 1],
            scale=DIM**-0.5, out_scale=scale.view(1),
        )  # fmt: skip
        assert torch.equal(out[begin:end].view(torch.uint8), alone.view(end - begin, -1).view(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "step", "width", "reason"),
    [
        ({}, {"max_query_len": 17}, 2 * DIM, "more than 16 new tokens"),
        ({}, {"causal": False}, 2 * DIM, "causal"),
        ({}, {"rswa_prefix_lens": torch.zeros(1)}, 2 * DIM, "mask"),
        ({"alibi_slopes": [0.5] * HEADS}, {}, 2 * DIM, "ALiBi"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, {}, 2 * DIM + 8, "scales within the rows"),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, 2 * DIM, "cache of fp8_e5m2"),
    ],
)
def test_other_batches_and_caches_are_left_to_triton(monkeypatch, changes, step, width, reason):
    attention = impl("auto", **changes)
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, width, dtype=torch.bfloat16)
    batch = metadata(1, [4], **step)
    assert reason in attention.refusal(batch, cache)
    seen = []
    monkeypatch.setattr(TritonAttentionImpl, "forward", lambda self, *args: seen.append(args) or args[6])
    q, out = torch.zeros(1, HEADS, DIM).bfloat16(), torch.zeros(1, HEADS * DIM).bfloat16()
    assert attention.forward(Layer(1.0, 1.0), q, q, q, cache, batch, out) is out
    assert len(seen) == 1


def test_vllm_selects_the_attention_backend_by_name_and_gets_reasons():
    assert AttentionBackendEnum["HIPFORGE"].get_class() is HipforgeAttentionBackend
    assert HipforgeAttentionBackend.get_impl_cls() is HipforgeAttentionImpl
    support = HipforgeAttentionBackend.get_builder_cls().get_cudagraph_support(None, None)
    assert support.name == "UNIFORM_BATCH"
    given = {
        "head_size": DIM, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": None, "attn_type": "decoder", "has_sliding_window": True,
    }  # fmt: skip
    assert HipforgeAttentionBackend.validate_configuration(**given) == []
    for name, value, reason in (
        ("head_size", 100, "head size 100"),
        ("kv_cache_dtype", "fp8_e5m2", "cache of fp8_e5m2"),
        ("kv_cache_dtype", "int4_per_token_head", "cache of int4_per_token_head"),
        ("attn_type", "encoder", "encoder"),
    ):
        assert any(reason in why for why in HipforgeAttentionBackend.validate_configuration(**(given | {name: value})))
