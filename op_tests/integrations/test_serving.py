"""What the adapters of inference servers share: refusals by name, parameters of SwiGLU, layouts of caches, numerics."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hipforge
from hipforge.errors import GuardError
from hipforge.integrations import serving
from hipforge.nn.moe import Activation
from hipforge.ops import reference
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference.swiglu import swiglu as swiglu_of

pytestmark = pytest.mark.gfx942("numbers or lie or quantise_and or map")

OWN = fp8_dtypes("cpu")[0]
FN = torch.float8_e4m3fn


def test_no_server_is_imported_with_the_package():
    code = (
        "import sys, hipforge.integrations.vllm, hipforge.integrations.sglang\n"
        "print([name for name in ('vllm', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def checkpoint(*shape, seed=0):
    """MX-FP8 tensors as checkpoints have them: e4m3fn on every GPU."""
    generator = torch.Generator().manual_seed(seed)
    return reference.quantize_mxfp8(torch.randn(shape, generator=generator), FN)


def numbers(weight, scale):
    return reference.dequantize_mxfp8(weight, scale)


def test_the_emulated_gpus_are_taken_and_no_device_is_refused(monkeypatch):
    assert serving.device_refusal() is None
    monkeypatch.setattr(serving.devices, "current", lambda: serving.devices.Device("reference", None))
    assert "HIPFORGE_DEVICE=reference" in serving.device_refusal()
    monkeypatch.setattr(serving.devices, "current", lambda: serving.devices.Device("emulator", "gfx90a"))
    assert serving.device_refusal() == "hipforge has kernels for gfx950, gfx942, sm_90; this GPU is gfx90a"


@pytest.mark.parametrize(
    ("bias", "reason"),
    [(None, None), (torch.bfloat16, None), (torch.float16, "float16 bias"), (torch.float32, "float32 bias")],
)
def test_a_bias_is_taken_in_bfloat16_alone(bias, reason):
    found = serving.bias_refusal(None if bias is None else torch.zeros(4, dtype=bias))
    assert found is None if reason is None else reason in found


def test_widths_off_the_block_are_refused():
    assert serving.linear_refusal(7, 64) is None
    assert "multiple of 32; got 48" in serving.linear_refusal(64, 48)
    assert serving.linear_refusal(64, 0) is not None
    assert serving.moe_refusal(64, 32, torch.bfloat16) is None
    assert "hidden size 48" in serving.moe_refusal(48, 32, torch.bfloat16)
    assert "intermediate size 80" in serving.moe_refusal(64, 80, torch.bfloat16)
    assert "float64" in serving.moe_refusal(64, 32, torch.float64)


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (torch.zeros(64, 3, dtype=torch.uint8), None),
        (torch.zeros(128, 4, dtype=torch.uint8), None),
        (torch.zeros(64, 3, dtype=torch.uint8).view(torch.float8_e8m0fnu), None),
        (torch.zeros(2, 3, dtype=torch.uint8), "compact scales: 2 rows of scales for 64"),
        (torch.zeros(512, dtype=torch.uint8), "swizzled"),
        (torch.zeros(64, 3), "torch.float32"),
        (torch.zeros(64, 2, dtype=torch.uint8), "2 scales in a row of 96"),
        (torch.zeros(1, 64, 3, dtype=torch.uint8), r"(1, 64, 3)"),
    ],
)
def test_scales_in_other_layouts_are_refused_by_name(scale, reason):
    weight = torch.zeros(64, 96, dtype=torch.uint8).view(FN)
    found = serving.scale_refusal(weight, scale)
    if reason is None:
        assert found is None
    else:
        assert reason in found
        with pytest.raises(GuardError, match="gate_up"):
            serving.device_weights(weight, scale, "gate_up")


def test_a_weight_that_is_not_quantised_is_refused():
    assert "torch.bfloat16" in serving.scale_refusal(torch.zeros(4, 32).bfloat16(), torch.zeros(4, 1).byte())


@pytest.mark.parametrize("stored", [FN, torch.uint8])
def test_weights_keep_their_numbers_in_the_devices_format(stored):
    weight, scale = checkpoint(8, 96)
    padded = torch.full((16, 4), 255, dtype=torch.uint8)
    padded[:8, :3] = scale
    got = serving.device_weights(weight.view(stored), padded)
    assert got[0].dtype == OWN and got[1].shape == (8, 3) and got[1].is_contiguous()
    assert torch.equal(numbers(*got), numbers(weight, scale))


def test_stacked_weights_are_converted_where_they_lie_and_once():
    weight, scale = (each.view(2, 4, -1).clone() for each in checkpoint(8, 64))
    before = numbers(weight.view(8, -1), scale.view(8, -1))
    for converted in (False, True, True):
        got = serving.in_device_format(weight, scale, converted)
        assert [each.data_ptr() for each in got] == [weight.data_ptr(), scale.data_ptr()]
        assert got[0].dtype == OWN and torch.equal(numbers(got[0].view(8, -1), got[1].view(8, -1)), before)
    with pytest.raises(GuardError, match="compact scales"):
        serving.in_device_format(weight, scale[:, :1], False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_linear_layer_is_quantise_and_multiply(dtype):
    torch.manual_seed(0)
    weight, scale = serving.device_weights(*checkpoint(48, 96))
    x, bias = torch.randn(2, 3, 96).to(dtype), torch.randn(48).bfloat16()
    got = serving.linear(x, weight, scale, bias)
    assert got.shape == (2, 3, 48) and got.dtype == dtype
    xq, xs = reference.quantize_mxfp8(x.view(6, 96), OWN)
    exact = numbers(xq, xs).double() @ numbers(weight, scale).double().t() + bias.double()
    # One rounding to bfloat16, which float16 and float32 hold, and float32 sums of 97 terms.
    magnitude = numbers(xq, xs).double().abs() @ numbers(weight, scale).double().abs().t() + bias.double().abs()
    bound = 2.0**-8 * exact.abs() + 97 * 2.0**-24 * magnitude
    assert ((got.double().view(6, 48) - exact).abs() <= bound).all()
    with pytest.raises(GuardError, match="float16 bias"):
        serving.linear(x, weight, scale, bias.half())


@pytest.mark.parametrize(
    ("activation", "alpha", "beta", "limit", "expected"),
    [
        ("silu", None, None, None, Activation()),
        ("silu", None, None, 7.0, Activation(limit=7.0)),
        ("silu", 1.702, None, 7.0, Activation(1.702, 1.0, 7.0)),
        ("silu", 1.702, 0.0, None, Activation(1.702, 0.0)),
        ("silu", None, 0.5, None, Activation(1.0, 0.5)),
        ("swigluoai", None, None, None, Activation(1.702, 1.0, 7.0, True)),
        ("swigluoai", 1.5, None, 6.0, Activation(1.5, 1.0, 6.0, True)),
        ("swigluoai_uninterleave", 1.702, None, 7.0, Activation(1.702, 1.0, 7.0)),
        ("swigluoai_uninterleave", 1.702, 0.25, 7.0, Activation(1.702, 0.25, 7.0)),
        ("swigluoai_uninterleave", 1.702, 1.0, None, "without gemm1_clamp_limit"),
        ("gelu", None, None, None, "activation 'gelu'"),
        ("silu", None, None, 0.0, "must be positive"),
    ],
)
def test_a_missing_beta_beside_an_alpha_is_one(activation, alpha, beta, limit, expected):
    found = serving.swiglu_parameters(activation, alpha, beta, limit)
    assert expected in found if isinstance(expected, str) else found == expected


def moe_case():
    torch.manual_seed(0)
    w1, w2 = (
        tuple(each.view(4, -1, each.shape[-1]) for each in serving.device_weights(*checkpoint(4 * rows, width)))
        for rows, width in ((64, 64), (64, 32))
    )
    hidden, weights = torch.randn(5, 64).bfloat16(), torch.rand(5, 2)
    return hidden, w1, w2, weights, torch.randint(0, 4, (5, 2))


def reference_moe(hidden, w1, w2, weights, ids, swiglu, place=(0, 1, 2, 3), biases=(None, None)):
    """Every expert in float64, with the roundings of the layer: bfloat16 after both products, MX-FP8 between them."""
    x = numbers(*reference.quantize_mxfp8(hidden, OWN)).double()
    first, second = (numbers(each[0].flatten(0, 1), each[1].flatten(0, 1)).double().view(4, -1, each[0].shape[2])
                     for each in (w1, w2))  # fmt: skip
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(len(x)):
        for choice, expert in enumerate(ids[token].tolist()):
            here = place[expert]
            if here < 0:
                continue
            gate_up = first[here] @ x[token] + (0 if biases[0] is None else biases[0][here].double())
            act = swiglu_of(gate_up.bfloat16()[None], swiglu.alpha, swiglu.beta, swiglu.limit, swiglu.interleaved)
            inner = numbers(*reference.quantize_mxfp8(act, OWN)).double()[0]
            down = second[here] @ inner + (0 if biases[1] is None else biases[1][here].double())
            out[token] += down * weights[token, choice]
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("place", [(0, 1, 2, 3), (2, -1, 0, 1)])
def test_experts_with_a_map_and_every_parameter(interleaved, place):
    hidden, w1, w2, weights, ids = moe_case()
    swiglu = Activation(1.702, 1.0, 7.0, interleaved)
    biases = torch.randn(4, 64).half(), torch.randn(4, 64).half()
    expert_map = None if place == (0, 1, 2, 3) else torch.tensor(place, dtype=torch.int32)
    out = torch.full((5, 64), 7.0).bfloat16()
    got = serving.experts(
        hidden, w1, w2, weights, ids, swiglu, expert_map=expert_map, w1_bias=biases[0], w2_bias=biases[1], out=out
    )
    want = reference_moe(hidden, w1, w2, weights, ids, swiglu, place, biases)
    assert got is out
    # The product of the first GEMM may round to the other bfloat16 beside a tie, which moves an element of the inner
    # activation by a step of e4m3 (2^-3 of it at most) in the worst case; then bfloat16 of the products and the sum.
    assert (got.double() - want).norm() <= 2.0**-6 * want.norm()
    assert (want[:, 0] != 0).all() or place != (0, 1, 2, 3)


def test_weights_that_were_applied_to_the_input_are_not_applied_again():
    hidden, w1, w2, weights, ids = moe_case()
    got = serving.experts(hidden, w1, w2, weights, ids.to(torch.uint8), Activation(), weighted_input=True)
    want = serving.experts(hidden, w1, w2, torch.ones_like(weights), ids, Activation())
    assert torch.equal(got, want)
    assert not torch.equal(got, serving.experts(hidden, w1, w2, weights, ids, Activation()))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((128, 16, "auto"), None),
        ((64, 64, "fp8_e4m3"), None),
        ((192, 64, "fp8"), None),
        ((256, None, None), None),
        ((96, 16, "auto"), None),
        ((128, 1, "auto"), None),
        ((100, 16, "auto"), "head size 100: decode attention has kernels for a multiple of 8 from 16 to 512"),
        ((128, 16, "fp8_e5m2"), "cache of fp8_e5m2"),
        ((128, 16, "fp8_per_token_head"), "cache of fp8_per_token_head"),
        ((128, 16, "int8"), "cache of int8"),
    ],
)
def test_caches_that_are_not_taken_are_refused_by_name(arguments, reason):
    found = serving.cache_refusal(*arguments)
    assert found is None if reason is None else reason in found


def test_hopper_takes_whole_tiles_and_four_head_sizes(monkeypatch):
    monkeypatch.setattr(serving.devices, "current", lambda: SimpleNamespace(default_arch="sm_90"))
    assert serving.cache_refusal(128, 16, "auto") is None
    assert "head size 96" in serving.cache_refusal(96, 16, "auto")
    assert "blocks of 24" in serving.cache_refusal(128, 24, "auto")


def test_caches_are_taken_as_views_and_packed_ones_refused():
    rows = torch.zeros(4, 2, 16, 128, dtype=torch.uint8)
    k, v = rows.transpose(1, 2).split(64, dim=-1)
    assert serving.caches_refusal(k, v) is None
    packed = torch.zeros(4, 2, 8, 16, 8, dtype=torch.uint8)
    assert "5 dimensions" in serving.caches_refusal(packed, v)
    assert "neighbours" in serving.caches_refusal(k, torch.zeros(4, 16, 64, 2).transpose(2, 3))
    assert "strides of" in serving.caches_refusal(torch.zeros(4, 16, 2, 72, dtype=torch.uint8)[..., :64], v)
    assert "V cache" in serving.caches_refusal(k, rows.flatten()[8:-8].as_strided((3, 16, 2, 64), (4096, 128, 2048, 1)))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [((6, 6, 1), 1), ((12, 6, 2), 2), ((11, 6, 2), None), ((17, 1, 17), None), ((16, 1, 16), 16), ((0, 0, 0), None)],
)
def test_a_decode_step_is_a_batch_of_one_query_length(batch, expected):
    assert serving.tokens_per_sequence(*batch) == expected


@pytest.mark.parametrize("fp8", [True, False])
def test_a_step_over_one_buffer_of_keys_and_values(fp8):
    """Rotation, write and attention over [blocks, Hkv, block_size, 2 D] equal those over their own caches."""
    torch.manual_seed(0)
    dtype, bytes_of = (OWN, torch.uint8) if fp8 else (torch.bfloat16, torch.int16)
    both = torch.randn(4, 2, 16, 128).bfloat16().to(dtype)
    k_cache, v_cache = both.transpose(1, 2).split(64, dim=-1)
    k_own, v_own = k_cache.clone(memory_format=torch.contiguous_format), v_cache.contiguous()
    q, k, v = (torch.randn(4, heads, 64).half() if fp8 else torch.randn(4, heads, 64).bfloat16() for heads in (4, 2, 2))
    slots = torch.tensor([18, 19, -1])  # the last token pads the batch
    positions, cos_sin = torch.tensor([18, 19, 3, 0]), torch.randn(32, 64)
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([2.0])}
    own = {name: each.view(1) if fp8 else None for name, each in scales.items()}
    wanted_q = hipforge.rope_and_cache(q[:3].clone(), k[:3], v[:3], cos_sin, positions[:3], k_own, v_own, slots, **own)
    last = q[3].clone()
    serving.rotate_and_store(q, k, v, cos_sin, positions, k_cache, v_cache, slots, neox=True, **scales)
    assert torch.equal(q[:3], wanted_q) and torch.equal(q[3], last)
    assert torch.equal(k_cache.contiguous().view(bytes_of), k_own.view(bytes_of))
    assert torch.equal(v_cache.contiguous().view(bytes_of), v_own.view(bytes_of))

    tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    lengths = torch.tensor([20, 0], dtype=torch.int32)
    options = {"window": 9, "softcap": 30.0}
    sinks = torch.randn(4).bfloat16()
    out = torch.full((4, 256), 7.0, dtype=q.dtype)
    got = serving.attend(
        q, k_cache, v_cache, tables, lengths, 2, scale=0.125, sinks=sinks, out=out, **scales, **options
    )
    plain = {name: (each.view(1) if fp8 else 1.0) for name, each in scales.items()}
    want = hipforge.decode_attention_fp8(
        q.view(2, 2, 4, 64), k_own, v_own, tables, lengths, scale=0.125, sinks=sinks.float(), **plain, **options
    )
    assert torch.equal(got.view(want.shape), want) and torch.equal(out, want.view(4, 256))
    assert not want[1].any() and want[0].any()


def test_sequences_with_unequally_many_tokens_and_an_output_in_fp8():
    """Each sequence has the bits of its own call."""
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(4, 16, 2, 128).bfloat16().split(64, dim=-1)
    tables, lengths = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
    q, scale = torch.randn(4, 4, 64).bfloat16(), torch.tensor(0.25)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    out = torch.zeros(4, 256, dtype=OWN)
    got = serving.attend(
        q, k_cache, v_cache, tables, lengths, 3, scale=0.125, cu_seqlens_q=starts, out_scale=scale, out=out
    )
    assert got.data_ptr() == out.data_ptr() and got.shape == q.shape
    for row, tokens in enumerate((slice(0, 3), slice(3, 4))):
        alone = serving.attend(
            q[tokens], k_cache, v_cache, tables[row : row + 1], lengths[row : row + 1], tokens.stop - tokens.start,
            scale=0.125, out_scale=scale,
        )  # fmt: skip
        assert torch.equal(got[tokens].view(torch.uint8), alone.view(torch.uint8)) and alone.float().any()
