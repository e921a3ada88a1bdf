"""hipforge.nn: fp8 and MXFP4 layers and experts of each kind of scales; casts, graphs and gradients of all layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.draws import normal
from helpers.errors import relative
from helpers.fp8_cases import dequantised

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.nn import (
    FP8Experts,
    FP8Linear,
    FP8MoE,
    MXFP4Experts,
    MXFP4MoE,
    MXFP8Experts,
    MXFP8Linear,
    MXFP8MoE,
    convert_to_fp8,
)
from hipforge.nn.experts import Activation, Experts
from hipforge.nn.moe import Routing
from hipforge.nn.payload import accepted_fp8, accepted_mxfp4
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_quant import QUANTISERS
from hipforge.ops.reference import (
    dequantize_fp8,
    quantize_fp8_rows,
    quantize_fp8_weights,
    quantize_mxfp4,
    quantize_mxfp8,
)
from hipforge.ops.reference.fp8 import Scales

pytestmark = pytest.mark.gfx942

OWN = fp8_dtypes("cpu")[0]
FN = torch.float8_e4m3fn
LAYOUTS = ("tensor", "rows", "blocks", "blocks_e8m0", "shared_e8m0")
KINDS = {"tensor": Scales.ONCE, "rows": Scales.ONCE, "blocks": Scales.BLOCKS, "blocks_e8m0": Scales.BLOCKS_E8M0,
         "shared_e8m0": Scales.MX_SHARED}  # fmt: skip
N, K = 144, 288  # two blocks of N and three of K, the last ones short


def checkpoint(layout: str, n: int = N, k: int = K, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3fn elements and scales as files have them, rows and blocks of very unequal size."""
    w = normal(n, k, seed=seed) * torch.logspace(-12, 4, n, base=2)[:, None] * torch.linspace(1, 8, k)
    if layout == "tensor":
        scale = w.abs().amax() / 448
        return (w / scale).to(FN), scale
    if layout == "rows":
        q, scale = quantize_fp8_rows(w)
        return q, scale[:, None]
    return quantize_fp8_weights(w, FN, layout != "blocks", 32 if layout == "shared_e8m0" else 128)


def product_bound(x: torch.Tensor, w: torch.Tensor, exact: torch.Tensor, rounding: float) -> torch.Tensor:
    """One rounding of the result; float32 sums of K + 1 terms and one product of scales per block, 2^-23 each."""
    return rounding * exact.abs() + (x.shape[1] + 3) * 2.0**-23 * (x.abs() @ w.abs().T)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@torch.no_grad()
def test_a_linear_layer_is_the_product_of_what_its_tensors_say(
    layout: str, dtype: torch.dtype, rounding: float
) -> None:
    q, scale = checkpoint(layout)
    bias = normal(N, seed=3).to(dtype)
    layer = FP8Linear.from_quantized(q, scale, bias)
    assert layer.kind is KINDS[layout] and layer.weight.dtype == OWN
    stored = dequantize_fp8(q, scale, torch.float64)
    assert torch.equal(dequantize_fp8(layer.weight, layer.weight_scale, torch.float64), stored)
    x = normal(2, 3, K, seed=2, dtype=dtype)
    with emulator.counters() as counted:
        got = layer(x)
    assert counted.launches == 2
    assert got.dtype == dtype and got.shape == (2, 3, N)
    rows = dequantised(*QUANTISERS[layer.kind](x.flatten(0, 1)), layer.kind)
    exact = rows @ stored.T + bias.double()
    bound = product_bound(rows, stored, exact, rounding) + 2.0**-23 * bias.double().abs()
    assert ((got.flatten(0, 1).double() - exact).abs() <= bound).all()
    # The scales matter: with those of another row or block the result is far away.
    if layout != "tensor":
        rolled = rows @ dequantize_fp8(q, scale.roll(1, 0), torch.float64).T + bias.double()
        assert not ((got.flatten(0, 1).double() - rolled).abs() <= bound).all()


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@torch.no_grad()
def test_a_layer_quantised_here_is_near_its_source(layout: str) -> None:
    source = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    layer = FP8Linear.from_linear(source, layout)
    x = normal(5, K, dtype=torch.bfloat16)
    # e4m3 keeps 4 bits: both operands are off by 2^-4 at most, at random by about 2^-4 / sqrt(3) in the norm, each.
    assert 2**-9 < relative(layer(x), source(x).double()) < 2 * 2**-4 / 3**0.5
    assert relative(dequantize_fp8(layer.weight, layer.weight_scale), source.weight.double()) < 2**-4 / 3**0.5


@torch.no_grad()
def test_a_linear_layer_takes_what_a_norm_or_an_activation_has_quantised() -> None:
    layer = FP8Linear.from_quantized(*checkpoint("blocks"))
    x = normal(4, 2 * K, dtype=torch.bfloat16)
    q, scale = hipforge.swiglu_fp8_dynamic(x, out_format="blocks")
    out = torch.empty(4, N, dtype=torch.float16)
    assert layer(q, scale, out) is out
    assert torch.equal(layer(q, scale), hipforge.fp8_linear(q, scale, layer.weight, layer.weight_scale))
    assert layer.half()(q, scale).dtype == torch.float16 and torch.equal(layer(q, scale), out)
    assert layer.float()(q, scale).dtype == torch.float32
    assert layer(normal(0, K, dtype=torch.bfloat16)).shape == (0, N)


def test_conversion_takes_a_layout_and_any_width() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    assert type(convert_to_fp8(model, skip="2", scales="blocks")[0]) is FP8Linear
    with pytest.raises(GuardError, match=r"in_features=50, which is not a multiple of 32"):
        convert_to_fp8(torch.nn.Linear(50, 64), scales="shared_e8m0")
    with pytest.raises(GuardError, match=r"scales must be"):
        convert_to_fp8(torch.nn.Linear(64, 64), scales="columns")


def experts_of(kind: str, seed: int = 0, **biases: torch.Tensor) -> Experts:
    """Four experts of H = 160 and I = 96."""
    act = Activation(1.702, 1.0, 7.0, interleaved=True)
    w1, w2 = normal(4, 192, 160, seed=seed) * 0.2, normal(4, 160, 96, seed=seed + 1) * 0.2
    if kind in ("rows", "mxfp8", "mxfp4"):
        made = {"rows": FP8Experts, "mxfp8": MXFP8Experts, "mxfp4": MXFP4Experts}[kind]
        return made.from_weights(w1, w2, act, **biases)
    pairs = [
        tuple(torch.stack(part) for part in zip(*(quantised_as(kind, each) for each in w), strict=True))
        for w in (w1, w2)
    ]
    return FP8Experts(*pairs, act, **biases)


def quantised_as(kind: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "tensor":
        scale = w.abs().amax() / 448
        return (w / scale).to(FN), scale
    return quantize_fp8_weights(w, FN, kind != "blocks", 32 if kind == "shared_e8m0" else 128)


EXPERTS = ("tensor", "rows", "blocks", "blocks_e8m0", "shared_e8m0", "mxfp8", "mxfp4")


@pytest.mark.parametrize("kind", EXPERTS)
@torch.no_grad()
def test_experts_are_their_op_over_what_they_hold(kind: str) -> None:
    biases = {"w1_bias": normal(4, 192, seed=5), "w2_bias": normal(4, 160, seed=6)}
    layer = experts_of(kind, **biases)
    if isinstance(layer, FP8Experts):
        assert layer.w1.dtype == OWN
    x = normal(2, 3, 160, seed=9, dtype=torch.bfloat16)
    weights, ids = torch.rand(6, 2), torch.tensor([[0, 1], [2, 0], [3, 1], [1, 3], [0, 2], [2, 3]], dtype=torch.int32)
    activation = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "interleaved": True}
    held = (layer.w1, layer.w1_scale, layer.w2, layer.w2_scale)
    for expert_map in (None, torch.tensor([1, -1, 0, 2], dtype=torch.int32)):
        got = layer(x, weights, ids, expert_map)
        assert got.shape == x.shape and got.dtype == x.dtype
        want = layer.layer(x.flatten(0, 1), *held, weights, ids, expert_map, **activation, **biases)
        assert torch.equal(got.flatten(0, 1), want)


@torch.no_grad()
def test_experts_without_a_choice_are_one_expert() -> None:
    layer = experts_of("rows")
    x = normal(3, 160, dtype=torch.bfloat16)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    assert torch.equal(layer(x), layer(x, torch.ones(3, 1), ids))
    assert hipforge.prepare(torch.nn.Sequential(layer, FP8Linear(32, 8))) == 2


@pytest.mark.parametrize("kind", (FP8MoE, MXFP4MoE, MXFP8MoE))
@torch.no_grad()
def test_a_mixture_is_its_router_and_its_experts(kind: type) -> None:
    w1, w2, router = normal(4, 64, 96) * 0.2, normal(4, 96, 32) * 0.2, normal(4, 96)
    layer = kind.from_weights(w1, w2, router, Routing(2, scale=2.0), router_bias=normal(4, seed=1))
    alone = {FP8MoE: FP8Experts, MXFP4MoE: MXFP4Experts, MXFP8MoE: MXFP8Experts}[kind].from_weights(w1, w2)
    x = normal(3, 96, dtype=torch.bfloat16)
    logits = hipforge.router_gemm(x, router, normal(4, seed=1))
    weights, ids = hipforge.topk_gating(logits, 2, scale=2.0)
    assert torch.equal(layer(x), alone(x, weights, ids))
    assert layer(x).abs().max() > 0


CASTS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "half": lambda layer: layer.half(),
    "to": lambda layer: layer.to(torch.float16),
    "type": lambda layer: layer.type(torch.float16),
    "there and back": lambda layer: layer.bfloat16().float().type(torch.float32).to("cpu"),
}
MADE: dict[str, Callable[[], torch.nn.Module]] = {
    **{
        layout: lambda layout=layout: FP8Linear.from_quantized(*checkpoint(layout, 64, 160), normal(64).bfloat16())
        for layout in LAYOUTS
    },
    **{
        f"experts {kind}": lambda kind=kind: experts_of(kind, w1_bias=normal(4, 192), w2_bias=normal(4, 160))
        for kind in ("rows", "blocks", "shared_e8m0", "mxfp4")
    },
    "mxfp8": lambda: MXFP8Linear.from_quantized(*quantize_mxfp8(normal(64, 160)), normal(64).bfloat16()),
    "mixture": lambda: mixture(),
}


def mixture() -> MXFP8MoE:
    """Five experts, one of them shared, with every bias that there is."""
    sizes = {"router_bias": (4,), "correction_bias": (4,), "w1_bias": (5, 128), "w2_bias": (5, 160)}
    biases = {name: normal(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items(), 7)}
    routing = Routing(top_k=2, scoring="sigmoid", scale=2.0, shared_experts=1)
    weights = (normal(5, 128, 160) * 0.1, normal(5, 160, 64) * 0.1, normal(4, 160) * 0.1)
    return MXFP8MoE.from_weights(*weights, routing, Activation(1.702, 1.0, 1.5), **biases)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("make", MADE)
@torch.no_grad()
def test_a_cast_leaves_a_layer_as_it_was(make: str, cast: str) -> None:
    layer, before = MADE[make](), MADE[make]()
    CASTS[cast](layer)
    for name, buffer in layer.named_buffers():
        was = before.get_buffer(name)
        assert buffer.dtype == was.dtype and torch.equal(buffer.view(torch.uint8), was.view(torch.uint8)), name
    x = normal(3, 160, seed=5)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(layer(x.to(dtype)), before(x.to(dtype)))


@torch.no_grad()
def test_the_default_dtype_decides_nothing() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layers = [FP8Linear(64, 8, bias=True, scales=layout) for layout in LAYOUTS]
        results = [layer(normal(2, 64, dtype=torch.float16)) for layer in layers]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {layer.weight_scale.dtype for layer in layers} == {torch.float32, torch.uint8}
    assert {result.dtype for result in results} == {torch.float16}


@pytest.mark.parametrize("assign", (False, True))
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_checkpoint_is_read_in_the_layers_own_format(layout: str, assign: bool) -> None:
    """e4m3fn as bytes, scales in bfloat16 or as e8m0, a bias that a cast had turned into float16."""
    q, scale = checkpoint(layout)
    want = FP8Linear.from_quantized(q, scale)
    e8m0 = scale.dtype == torch.uint8
    stored = want.weight_scale if OWN == FN else accepted_back(want)
    stored = stored.view(torch.float8_e8m0fnu) if e8m0 else stored.bfloat16()
    layer = FP8Linear(K, N, bias=True, scales=layout)
    state = {"weight": q.view(torch.uint8), "weight_scale": stored, "bias": normal(N).half()}
    layer.load_state_dict(state, assign=assign)
    assert layer.bias is not None and torch.equal(layer.bias, normal(N).half().bfloat16())
    numbers = dequantize_fp8(layer.weight, layer.weight_scale, torch.float64)
    assert torch.equal(numbers, dequantize_fp8(q, stored if e8m0 else stored.float(), torch.float64))
    assert layer(normal(2, K, dtype=torch.bfloat16)).isfinite().all()


@torch.no_grad()
def test_scales_of_a_state_dict_are_shaped_like_the_layers_and_never_read_as_other_numbers() -> None:
    q, scale = checkpoint("rows")
    layer = FP8Linear(K, N)
    layer.load_state_dict({"weight": q, "weight_scale": scale.view(N, 1)})
    assert torch.equal(layer.weight_scale, FP8Linear.from_quantized(q, scale).weight_scale)
    for held, given in (("blocks", "blocks_e8m0"), ("blocks_e8m0", "blocks")):
        layer, (q, scale) = FP8Linear(K, N, scales=held), checkpoint(given)
        state = {"weight": q, "weight_scale": scale}
        with pytest.raises(GuardError, match=r"^weight_scale is \w+ \[.*, but the layer holds .* assign=True"):
            layer.load_state_dict(state)
        with pytest.raises(GuardError, match=r"^weight_scale must be "):
            layer.load_state_dict({"weight_scale": scale}, strict=False)
        layer.load_state_dict(state, assign=True)
        x = normal(3, K, dtype=torch.bfloat16)
        assert torch.equal(layer(x), FP8Linear.from_quantized(q, scale)(x))


def accepted_back(layer: FP8Linear) -> torch.Tensor:
    """The scales of a layer of gfx942 as a file has them."""
    scale = layer.weight_scale
    return scale - 1 if scale.dtype == torch.uint8 else scale / 2


def test_the_same_numbers_reach_gfx942s_format() -> None:
    """Moving e4m3fn buffers to a device of e4m3fnuz doubles their scales."""
    for layout in LAYOUTS:
        q, scale = checkpoint(layout)
        layer = FP8Linear(K, N, scales=layout)
        layer.weight = q
        layer.weight_scale = scale.reshape(layer.weight_scale.shape).clone()
        layer._apply(lambda x: x.clone())
        assert layer.weight.dtype == OWN
        got = dequantize_fp8(layer.weight, layer.weight_scale, torch.float64)
        assert torch.equal(got, dequantize_fp8(q, scale, torch.float64))


@torch.no_grad()
def test_layers_trace_as_one_graph() -> None:
    x = normal(4, 160, seed=5, dtype=torch.bfloat16)
    for make in ("rows", "experts mxfp4", "experts blocks", "mxfp8", "mixture"):
        layer = MADE[make]()
        torch._dynamo.reset()
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(traced(x), layer(x))


def test_a_layer_refuses_to_pretend_a_gradient() -> None:
    x = normal(2, 160, dtype=torch.bfloat16).requires_grad_()
    for layer in (MADE[make]() for make in ("rows", "experts mxfp4", "mxfp8", "mixture")):
        with pytest.raises(GuardError, match=f"{type(layer).__name__} computes no gradients.*torch.no_grad"):
            layer(x)
        with torch.no_grad():
            assert not layer(x).requires_grad


ROWS, FOUR = quantize_fp8_rows(normal(8, 64)), quantize_mxfp4(normal(8, 64))


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: FP8Linear.from_quantized(ROWS[0], ROWS[1][:7]), r"weight_scale must have one float32 or 8; or"),
        (lambda: FP8Linear.from_quantized(ROWS[0].float(), ROWS[1]), "weight must be .*; got float32"),
        (lambda: FP8Linear.from_quantized(ROWS[0], ROWS[1].double()), "weight_scale must be .*; got float64"),
        (lambda: FP8Linear.from_quantized(ROWS[0][None], ROWS[1][None]), r"weight must be \[N, K\]"),
        (lambda: FP8Linear.from_linear(3), "linear must be a torch.nn.Linear; got int"),
        (lambda: FP8Linear.from_linear(torch.nn.Linear(8, 8), "tensor"), "scales must be"),
        (lambda: FP8Linear(0, 8), "in_features must be at least 1; got 0"),
        (lambda: FP8Linear(48, 8, scales="shared_e8m0"), "K must be a multiple of 32 for scales of 32 x 32"),
        (lambda: FP8Linear(48, 8)(normal(2, 40)), r"x must have 48 elements in its last dimension; got \(2, 40\)"),
        (lambda: accepted_fp8(ROWS[0][0], ROWS[1]), r"weight must be \[N, K\], or \[E, N, K\] for experts"),
        (lambda: MXFP4Experts(FOUR, FOUR), r"w1 must be \[E, 2\*I, H\]"),
        (lambda: accepted_mxfp4(FOUR[0], FOUR[1][:, :1]), r"weight_scale must be .*\[8, 2\]"),
        (lambda: accepted_mxfp4(FOUR[0].float(), FOUR[1]), "weight must be .*; got float32"),
        (lambda: FP8Experts((ROWS[0][None], ROWS[1][None]), (ROWS[0][None], ROWS[1][None])), "w1 must.*; got float8"),
    ),
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        call()


def test_a_scale_without_a_double_is_refused_where_it_must_be_doubled() -> None:
    q, scale = quantize_fp8_rows(normal(8, 64))
    scale[3] = 2.0**127
    if OWN == FN:
        assert accepted_fp8(q, scale)[1][3] == 2.0**127
    else:
        with pytest.raises(GuardError, match=r"w cannot be converted to e4m3fnuz: twice a scale of 1.7e\+38"):
            accepted_fp8(q, scale, "w")
    scale[3] = float("nan")
    assert accepted_fp8(q, scale)[1][3].isnan()
