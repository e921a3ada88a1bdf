"""Float8Linear and its parts: layouts, formats, gradients, copies, refusals, and a small training run."""

from __future__ import annotations

import pytest
import torch
from helpers.errors import relative
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hipforge
from hipforge.errors import ConfigError, GuardError
from hipforge.nn import convert_to_fp8, convert_to_mxfp8
from hipforge.ops import fp8_linear as fp8
from hipforge.ops.core import fp8 as core_fp8

FORWARD_DTYPES = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


class Recorder(TorchDispatchMode):
    """Records every copy of an fp8 tensor and the layout of every _scaled_mm operand."""

    def __init__(self):
        super().__init__()
        self.copies = []
        self.products = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in ("clone", "copy_", "contiguous") and args[-1 if name == "copy_" else 0].dtype in fp8.FP8_DTYPES:
            self.copies.append(tuple(args[0].shape))
        if name == "_scaled_mm":
            self.products.append((args[0].dtype, args[0].stride(), args[1].dtype, args[1].stride()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("gfx942", (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)),
        ("gfx942:sramecc+:xnack-", (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)),
        ("gfx950", (torch.float8_e4m3fn, torch.float8_e5m2)),
        ("sm_90", (torch.float8_e4m3fn, torch.float8_e5m2)),
        ("meta", (torch.float8_e4m3fn, torch.float8_e5m2)),
    ],
)
def test_dtypes_follow_the_architecture(target, expected):
    assert fp8.fp8_dtypes(target) == expected


@pytest.mark.parametrize("name", ["gfx906", "sm_70"])
def test_an_unknown_architecture_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        fp8.fp8_dtypes(name)


def test_the_architecture_of_a_gpu_decides(monkeypatch):
    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"

    monkeypatch.setattr(core_fp8, "_dtypes_of", {})
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    assert fp8.fp8_dtypes(torch.device("cuda", 0))[0] is torch.float8_e4m3fnuz


@pytest.mark.parametrize("n", [32, 24])
def test_scales_of_one_element_have_any_shape(n):
    a, b = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(n, 16).to(torch.float8_e4m3fn).t()
    got = fp8.scaled_mm(a, b, torch.full((1, 1, 1), 2.0), torch.full((1, 1), 3.0))
    assert got.shape == (4, n) and bool((got == 96).all())


@pytest.mark.parametrize("dtype", fp8.FP8_DTYPES)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 3e38])
def test_quantising_uses_the_whole_range_and_never_overflows(dtype, magnitude):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x = x / x.abs().max() * magnitude
    x8, inv_scale = fp8.to_fp8(x, dtype)
    limit = torch.finfo(dtype).max
    assert inv_scale.shape == () and inv_scale.dtype == torch.float32
    assert torch.isfinite(x8.float()).all()
    if magnitude >= 1e-12:
        assert x8.float().abs().max() == limit
        # Half a step of the format at full scale (2^-4 of e4m3, 2^-3 of e5m2), plus fp32 rounding of the two factors.
        step = 2.0**-4 if dtype in FORWARD_DTYPES else 2.0**-3
        assert ((x8.double() * inv_scale.double() - x.double()).abs() <= step * magnitude).all()


def test_the_zero_tensor_and_the_empty_tensor_quantise_to_zeros():
    for x in (torch.zeros(16, 16), torch.zeros(0, 16), torch.zeros(1, 16)):
        x8, inv_scale = fp8.to_fp8(x, torch.float8_e4m3fn)
        assert x8.shape == x.shape
        assert (x8.float() == 0).all()
        assert inv_scale == 1 / torch.tensor(448 / 1e-12, dtype=torch.float64).float()


def test_non_finite_input_is_visible_as_nan():
    x = torch.ones(16, 16)
    x[3, 4] = float("inf")
    x8, inv_scale = fp8.to_fp8(x, torch.float8_e4m3fn)
    assert torch.isnan(x8.float() * inv_scale).any()


@pytest.mark.parametrize("bad", [torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool)])
def test_quantising_refuses_what_is_no_float(bad):
    with pytest.raises(GuardError, match=f"must be floating point; got {str(bad.dtype)[6:]}"):
        fp8.to_fp8(bad, torch.float8_e4m3fn)


def test_quantising_refuses_other_targets():
    with pytest.raises(GuardError, match=r"torch\.bfloat16"):
        fp8.to_fp8(torch.zeros(4), torch.bfloat16)


def test_col_major_keeps_values_and_changes_strides():
    x = torch.arange(6.0).reshape(2, 3)
    y = fp8.to_col_major(x)
    assert torch.equal(x, y) and y.stride() == (1, 2)
    assert fp8.to_col_major(y).data_ptr() == y.data_ptr()
    for shape in ((0, 4), (1, 4), (4, 1)):
        assert fp8.to_col_major(torch.zeros(shape)).shape == shape
    with pytest.raises(GuardError, match=r"x must be \[R, C\]; got .*\[3\]"):
        fp8.to_col_major(torch.zeros(3))


def operands(m=32, n=48, k=64, dtype=torch.float8_e4m3fn, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, inv_a = fp8.to_fp8(torch.randn(m, k, generator=generator), dtype)
    w, inv_w = fp8.to_fp8(torch.randn(n, k, generator=generator), dtype)
    return a, w, inv_a, inv_w


def exact(a, w, inv_a, inv_w):
    return (a.double() @ w.double().t()) * inv_a.double() * inv_w.double()


@pytest.mark.parametrize("dtype", FORWARD_DTYPES)
@pytest.mark.parametrize(  # 2880: gpt-oss
    ("m", "n", "k"), [(1, 16, 16), (32, 48, 64), (17, 128, 256), (5, 24, 40), (3, 7, 9), (6, 32, 2880)]
)
def test_scaled_mm_equals_float64_up_to_output_rounding(dtype, m, n, k):
    a, w, inv_a, inv_w = operands(m, n, k, dtype)
    got = fp8.scaled_mm(a, w.t(), inv_a, inv_w, out_dtype=torch.bfloat16)
    want = exact(a, w, inv_a, inv_w)
    # One bf16 rounding of the result (half a step of 2^-7); the unaligned path rounds twice and gets twice that. fp32
    # accumulation over k <= 2880 terms adds less than k * 2^-24 of the sum of magnitudes.
    magnitude = (a.double().abs() @ w.double().abs().t()) * inv_a.double() * inv_w.double()
    rounds = 1 if k % 16 == 0 and n % 16 == 0 else 2
    bound = rounds * 2.0**-8 * want.abs() + k * 2.0**-24 * magnitude
    assert got.shape == (m, n) and got.dtype == torch.bfloat16
    assert ((got.double() - want).abs() <= bound).all()


def test_scaled_mm_names_the_operand_in_the_wrong_order():
    a, w, inv_a, inv_w = operands()
    with pytest.raises(GuardError, match=r"b must be column-major .*strides \(48, 1\).*to_col_major"):
        fp8.scaled_mm(a, w.t().contiguous(), inv_a, inv_w)
    with pytest.raises(GuardError, match=r"a must be row-major .*strides \(1, 32\).*a\.contiguous"):
        fp8.scaled_mm(fp8.to_col_major(a), w.t(), inv_a, inv_w)
    with pytest.raises(GuardError, match=r"b looks like \[N, K\]: pass b\.t\(\)"):
        fp8.scaled_mm(a, w, inv_a, inv_w)


def test_scaled_mm_refuses_what_hardware_would():
    a, w, inv_a, inv_w = operands()
    g, inv_g = fp8.to_fp8(torch.randn(32, 64), torch.float8_e5m2)
    v, inv_v = fp8.to_fp8(torch.randn(48, 64), torch.float8_e5m2)
    with pytest.raises(GuardError, match="both e5m2"):
        fp8.scaled_mm(g, v.t(), inv_g, inv_v)
    with pytest.raises(GuardError, match=r"scale_a must be one float32; got float64"):
        fp8.scaled_mm(a, w.t(), inv_a.double(), inv_w)
    with pytest.raises(GuardError, match=r"scale_b must be one float32; .*\[2\]"):
        fp8.scaled_mm(a, w.t(), inv_a, inv_w.repeat(2))
    with pytest.raises(GuardError, match=r"a must be float8; got torch\.float32"):
        fp8.scaled_mm(a.float(), w.t(), inv_a, inv_w)
    with pytest.raises(GuardError, match=r"a must be \[rows, columns\]; got float8_e4m3fn(uz)? \[64\]"):
        fp8.scaled_mm(a[0], w.t(), inv_a, inv_w)


def test_scaled_mm_of_no_rows_is_empty():
    _, w, inv_a, inv_w = operands()
    empty = torch.zeros(0, 64).to(torch.float8_e4m3fn)
    assert fp8.scaled_mm(empty, w.t(), inv_a, inv_w).shape == (0, 48)


def layer(in_features=128, out_features=256, bias=True, seed=0):
    torch.manual_seed(seed)
    plain = nn.Linear(in_features, out_features, bias=bias)
    return plain, fp8.Float8Linear.from_float(plain)


@pytest.mark.parametrize("shape", [(32, 128), (2, 16, 128), (4, 2, 8, 128), (32, 2880)])  # 2880: gpt-oss
def test_gradients_are_those_of_a_linear_layer(shape):
    plain, converted = layer(shape[-1], 256)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(*shape[:-1], 256, generator=torch.Generator().manual_seed(2))
    results = []
    for module in (plain, converted):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        (y.float() * weights).sum().backward()
        results.append((y.detach(), leaf.grad, module.weight.grad.clone(), module.bias.grad.clone()))
    for got, want in zip(results[1][:2], results[0][:2], strict=True):
        # Normal data in e4m3: 2^-4 half step times the rms of a uniform error (1/sqrt 3) over two factors, about 2.6 %
        # each; e5m2 gradients have twice the step. 5 % is the sum in quadrature with room for bf16.
        assert relative(got, want) < 6e-2
    assert relative(results[1][2], results[0][2]) < 6e-2
    assert relative(results[1][3], results[0][3]) < 2.0**-7  # only bf16: the bias sees no fp8


def test_the_layer_makes_the_three_copies_it_must_and_no_other():
    _, converted = layer(bias=False)
    x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
    with Recorder() as forward:
        y = converted(x)
    assert forward.copies == []
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert forward.products == [(e4m3, (128, 1), e4m3, (1, 128))]
    with Recorder() as backward:
        y.backward(torch.randn_like(y))
    assert sorted(backward.copies) == sorted([(128, 256), (256, 32), (128, 32)])  # w8.t(), go8.t(), x8.t()
    assert backward.products == [(e5m2, (256, 1), e4m3, (1, 256)), (e5m2, (32, 1), e4m3, (1, 32))]


def test_frozen_weights_cost_no_weight_gradient():
    _, converted = layer(bias=False)
    converted.weight.requires_grad_(False)
    x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
    y = converted(x)
    with Recorder() as backward:
        y.backward(torch.randn_like(y))
    assert len(backward.products) == 1 and converted.weight.grad is None and x.grad is not None


def test_non_contiguous_inputs_and_expanded_gradients_work():
    plain, converted = layer(bias=False)
    x = torch.randn(128, 64).t()
    got = converted(x)
    assert relative(got, plain(x)) < 6e-2
    got.sum().backward()
    assert converted.weight.grad.shape == (256, 128)


@pytest.mark.parametrize(
    ("batch", "in_features", "out_features"), [(7, 128, 256), (1, 128, 256), (16, 120, 128), (16, 128, 100)]
)
def test_dimensions_off_sixteen_fall_back_to_bf16(batch, in_features, out_features):
    plain, converted = layer(in_features, out_features)
    x = torch.randn(batch, in_features)
    with Recorder() as recorder:
        got = converted(x)
    assert recorder.products == []
    want = torch.nn.functional.linear(x.bfloat16(), plain.weight.bfloat16(), plain.bias.bfloat16())
    assert torch.equal(got, want)


def test_an_empty_batch_gives_an_empty_result():
    _, converted = layer()
    assert converted(torch.zeros(0, 128)).shape == (0, 256)


def test_a_wrong_last_dimension_is_named():
    _, converted = layer()
    with pytest.raises(GuardError, match=r"in_features=128; got shape \(4, 64\)"):
        converted(torch.zeros(4, 64))


def test_a_cast_model_decides_the_compute_dtype():
    for cast, dtype in ((nn.Module.half, torch.float16), (nn.Module.bfloat16, torch.bfloat16)):
        model = cast(nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128), nn.Linear(128, 8)))
        model = fp8.convert_to_float8_training(model)
        x = torch.randn(16, 128, dtype=dtype, requires_grad=True)
        y = model(x)
        y.float().sum().backward()
        assert y.dtype == x.grad.dtype == model[0].weight.grad.dtype == dtype
    _, converted = layer()
    assert converted(torch.randn(16, 128, dtype=torch.float16)).dtype == torch.bfloat16  # float32 parameters


def test_autocast_decides_the_compute_dtype():
    _, converted = layer()
    with torch.autocast("cpu", dtype=torch.float16):
        assert converted(torch.randn(16, 128)).dtype == torch.float16
    assert converted(torch.randn(16, 128)).dtype == torch.bfloat16


def test_compiled_and_checkpointed_layers_agree_with_eager():
    _, converted = layer()
    x = torch.randn(32, 128, dtype=torch.bfloat16)

    def run(function):
        converted.zero_grad()
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.float().square().sum().backward()
        return y.detach(), leaf.grad, converted.weight.grad.clone()

    eager = run(converted)
    for function in (
        torch.compile(converted, backend="aot_eager", fullgraph=True),
        lambda leaf: checkpoint(converted, leaf, use_reentrant=False),
    ):
        for got, want in zip(run(function), eager, strict=True):
            assert torch.equal(got, want)


def test_conversion_shares_parameters_and_respects_the_filter():
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Sequential(nn.Linear(256, 128)), nn.Linear(128, 10))
    weight = model[0].weight
    assert fp8.convert_to_float8_training(model) is model
    kinds = [type(model[0]), type(model[2][0]), type(model[3])]
    assert kinds == [fp8.Float8Linear, fp8.Float8Linear, nn.Linear]
    assert model[0].weight is weight
    first = model[0]
    fp8.convert_to_float8_training(model)
    assert model[0] is first

    names = []
    other = nn.Sequential(nn.Linear(128, 256), nn.Sequential(nn.Linear(256, 128)))
    fp8.convert_to_float8_training(other, module_filter_fn=lambda module, name: names.append(name) or name == "1.0")
    assert names == ["0", "1.0"]
    assert type(other[0]) is nn.Linear and type(other[1][0]) is fp8.Float8Linear
    assert isinstance(fp8.convert_to_float8_training(nn.Linear(128, 128)), fp8.Float8Linear)


def test_disabling_swaps_back_even_after_an_error():
    model = fp8.convert_to_float8_training(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)))
    kept = list(model)
    with pytest.raises(KeyError), fp8.disable_fp8(model):
        assert [type(child) for child in model] == [nn.Linear, nn.Linear]
        assert model[0].weight is kept[0].weight
        raise KeyError
    assert list(model) == kept
    with pytest.raises(GuardError, match="to_float"), fp8.disable_fp8(kept[0]):
        pass


def test_only_the_tensorwise_recipe_exists():
    assert fp8.Float8LinearConfig.from_recipe_name("tensorwise") == fp8.Float8LinearConfig()
    with pytest.raises(ConfigError, match="rowwise"):
        fp8.Float8LinearConfig.from_recipe_name("rowwise")


def test_what_is_no_configuration_is_refused():
    with pytest.raises(GuardError, match="config must be a Float8LinearConfig or None; got int"):
        fp8.convert_to_float8_training(nn.Linear(8, 8), config=3)


def test_an_mlp_learns_as_well_as_in_bf16():
    """20 steps on a fixed regression: the FP8 loss ends within 2 % of the bf16 one."""

    def train(convert):
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
        x = torch.randn(256, 128)
        target = teacher(x).detach() + 0.3 * torch.randn(256, 128)
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
        if convert:
            fp8.convert_to_float8_training(model)
        optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(20):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float() - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return loss.item()

    bf16, float8 = train(False), train(True)
    assert bf16 < 0.1  # it learns: the untrained loss is above 0.2
    assert abs(float8 - bf16) <= 0.02 * bf16, (float8, bf16)


def test_a_layer_in_several_places_stays_one_layer():
    shared = nn.Linear(128, 128)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared), "c": nn.Sequential()})
    model["c"].first = model["c"].second = shared
    fp8.convert_to_float8_training(model)
    places = [model["a"][0], model["b"][0], model["c"].first, model["c"].second]
    assert all(place is places[0] for place in places) and isinstance(places[0], fp8.Float8Linear)
    with fp8.disable_fp8(model):
        inside = [model["a"][0], model["b"][0], model["c"].first, model["c"].second]
        assert all(place is inside[0] for place in inside) and type(inside[0]) is nn.Linear
    assert model["c"].second is places[0]


def test_hooks_move_along():
    seen = []
    model = nn.Sequential(nn.Linear(128, 128))
    handle = model[0].register_forward_hook(lambda module, args, out: seen.append(type(module)))
    model[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append(sorted(kwargs)), with_kwargs=True)
    fp8.convert_to_float8_training(model)
    model(torch.zeros(16, 128))
    assert seen == [[], fp8.Float8Linear]
    with fp8.disable_fp8(model):
        model(torch.zeros(16, 128))
    assert seen[2:] == [[], nn.Linear]
    handle.remove()
    model(torch.zeros(16, 128))
    assert seen[4:] == [[]], "a handle from before the conversion still removes its hook"


def test_a_parametrized_layer_is_refused_with_the_way_out():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)))
    with pytest.raises(GuardError, match=r"computes its weight by a parametrization; .*module_filter_fn"):
        fp8.convert_to_float8_training(model)
    assert fp8.convert_to_float8_training(model, module_filter_fn=lambda layer, name: False) is model


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("convert", [fp8.convert_to_float8_training, convert_to_mxfp8, convert_to_fp8])
def test_a_weight_that_a_hook_computes_is_refused_until_it_is_a_parameter(convert):
    """Between two calls such a layer holds the weight of the first one, whatever was loaded since."""
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(128, 128)))
    with pytest.raises(GuardError, match=r"computes its weight in a forward pre-hook.*remove_weight_norm"):
        convert(model)
    torch.nn.utils.remove_weight_norm(model[0])
    assert type(convert(model)[0]) is not nn.Linear


@pytest.mark.parametrize("of", ["x", "weight"])
def test_a_second_derivative_is_refused_by_name(of):
    layer, x = hipforge.Float8Linear(32, 32), torch.randn(16, 32, requires_grad=True)
    at = x if of == "x" else layer.weight
    (gradient,) = torch.autograd.grad(layer(x).pow(2).sum(), at, create_graph=True)
    (plain,) = torch.autograd.grad(layer(x).pow(2).sum(), at)
    assert torch.equal(gradient, plain)
    with pytest.raises(GuardError, match=r"Float8Linear has no second derivative: .*use nn\.Linear"):
        gradient.sum().backward()


def test_transforms_of_torch_func_are_refused_by_name():
    layer, x = hipforge.Float8Linear(32, 32), torch.randn(16, 32)
    for transformed in (
        lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda: torch.func.vmap(layer)(x.expand(2, -1, -1)),
        lambda: torch.func.jvp(layer, (x,), (x,)),
    ):
        with pytest.raises(GuardError, match=r"argument 'input' is inside a transform of torch\.func"):
            transformed()
    with pytest.raises(GuardError, match=r"argument 'weight' is inside a transform of torch\.func"):
        torch.func.grad(lambda w: torch.func.functional_call(layer, {"weight": w}, x).sum())(layer.weight)
