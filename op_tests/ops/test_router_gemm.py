"""The router's product on the emulated architecture: integers bit for bit, the rest within fp32's own rounding."""

from __future__ import annotations

import pytest
import torch
from helpers.errors import assert_within, relative
from helpers.fused_fp8_cases import normal

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.router_gemm import router_gemm

pytestmark = pytest.mark.gfx942

INPUTS = [torch.float32, torch.float16, torch.bfloat16]
WEIGHTS = [torch.float32, torch.bfloat16]
# (H, E) of models: 4096 x 8 Mixtral, 3072 x 256, 6144 x 128 and 256, 4096 x 192; 2880 x 32 gpt-oss
SHAPES = [(4096, 8), (3072, 256), (6144, 128), (4096, 192), (2880, 32)]


def integers(shape, dtype, seed, most=8):
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(tokens, hidden, experts, x_dtype=torch.bfloat16, w_dtype=torch.float32, biased=True):
    """Integers whose sums stay below 2^24: any order of fp32 additions is exact."""
    x, w = integers((tokens, hidden), x_dtype, 0), integers((experts, hidden), w_dtype, 1)
    bias = integers((experts,), torch.float32, 2, 1000) if biased else None
    got = router_gemm(x, w, bias)
    want = x.double() @ w.double().T
    if bias is not None:
        want = want + bias
    assert got.dtype == torch.float32 and torch.equal(got.double(), want)


@pytest.mark.parametrize("w_dtype", WEIGHTS, ids=str)
@pytest.mark.parametrize("x_dtype", INPUTS, ids=str)
def test_integers_are_exact_in_every_dtype(x_dtype, w_dtype):
    exact(5, 640, 13, x_dtype, w_dtype)
    exact(70, 136, 6, x_dtype, w_dtype, biased=False)


@pytest.mark.parametrize("hidden", [8, 16, 120, 128, 136, 1000, 2048, 2056, 8192, 8328])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (3, 4), (8, 5), (9, 8), (33, 3)])
def test_integers_are_exact_at_every_edge(hidden, tokens, experts):
    exact(tokens, hidden, experts)


@pytest.mark.parametrize(("tokens", "experts"), [(63, 509), (64, 509), (33, 341), (49, 254), (97, 7)])
def test_many_tokens_share_a_read_of_the_weights(tokens, experts):
    # 32 tokens at a time where that makes 256 work-groups, else 16, else 8.
    exact(tokens, 264, experts)


@pytest.mark.parametrize(("hidden", "experts"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 8])
def test_the_shapes_of_models_keep_to_the_error_of_fp32(hidden, experts, tokens):
    x, w = normal((tokens, hidden), torch.bfloat16, 1), normal((experts, hidden), torch.float32, 2, hidden**-0.5)
    bias = normal((experts,), torch.float32, 3)
    got = router_gemm(x, w, bias).double()
    want = x.double() @ w.double().T + bias.double()
    # A product and its addition: at most one rounding each, along at most H / 256 + 6 + 16 additions in a row, and the
    # bias; relative to the sum of magnitudes.
    steps = 2 * (hidden // 256 + 8) + 6 + 16 + 1
    bound = steps * 2.0**-24 * (x.double().abs() @ w.double().abs().T + bias.double().abs())
    assert_within(got, want, bound)
    # What rounding the product to bf16, or w to bf16, would give: 2^-9 of it. Far above what is seen.
    assert relative(got, want) < 1e-6


def test_float32_inputs_are_not_shortened():
    x = torch.full((1, 128), 1 + 2.0**-23)
    got = router_gemm(x, torch.eye(128)[:4].contiguous())
    assert torch.equal(got, x[:, :4])


def test_small_and_large_values():
    x = torch.tensor([[2.0**-126, 2.0**126, float("inf"), float("nan"), 2.0**-149, 0, 0, 0]]).expand(5, 8).contiguous()
    w = torch.zeros(8, 8)
    w[0, 0], w[1, 1], w[2, 4] = 0.5, 2.0, 1.0
    finite = x[:, [0, 1, 4, 5, 5, 5, 5, 5]].contiguous()
    w_finite = torch.zeros(3, 8)
    w_finite[0, 0], w_finite[1, 1], w_finite[2, 2] = 0.5, 2.0, 1.0
    assert router_gemm(finite, w_finite)[0].tolist() == [2.0**-127, 2.0**127, 2.0**-149]
    assert bool(router_gemm(x, w).isnan().all())  # NaN, and 0 times infinity


def test_rows_with_a_stride_and_results_where_asked():
    wide = integers((4, 400), torch.bfloat16, 0)
    x, w = wide[:, 8:264], integers((5, 256), torch.float32, 1)
    out = torch.empty(4, 5)
    assert router_gemm(x, w, out=out) is out
    assert torch.equal(out.double(), x.double() @ w.double().T)
    odd = wide[:, 3:259]  # off 16 bytes: copied
    assert torch.equal(router_gemm(odd, w).double(), odd.double() @ w.double().T)


def test_what_the_kernel_does_not_take_goes_to_torch():
    x, w = integers((3, 100), torch.bfloat16, 0), integers((5, 100), torch.float32, 1)
    shown = hipforge.explain("router_gemm", x, w)
    assert shown.path == "torch" and "H a multiple of 8" in shown.refused["kernel"]
    assert torch.equal(router_gemm(x, w).double(), x.double() @ w.double().T)
    assert router_gemm(x, w[:0]).shape == (3, 0)
    assert router_gemm(x[:0, :96], w[:, :96]).shape == (0, 5)


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 32])
def test_the_weights_are_loaded_once_per_eight_tokens(tokens):
    x, w = integers((tokens, 1024), torch.bfloat16, 0), integers((32, 1024), torch.float32, 1)
    with emulator.counters() as counted:
        router_gemm(x, w)
    assert counted.launches == 1 and counted.scratch_bytes == 0
    assert counted.tensors["w"].loaded == w.nbytes * -(-tokens // 8)
    # 8 groups of 4 experts, one tile of 4 tokens or two in each 8, and 8 instructions for a step of 128.
    tiles = 1 if tokens <= 4 else -(-tokens // 8) * 2
    assert counted.mfma_count == 32 // 4 * tiles * (1024 // 128) * 8
    assert counted.tensors["out"].stored == tokens * 32 * 4


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_wave_order_changes_nothing(order):
    x, w = normal((9, 2048), torch.bfloat16), normal((5, 2048), torch.float32)
    want = router_gemm(x, w)
    with emulator.options(checks="all", wave_order=order, check_global_races=True):
        assert torch.equal(router_gemm(x, w), want)


def test_refusals_name_argument_value_and_rule():
    x, w = torch.zeros(2, 16).bfloat16(), torch.zeros(3, 16)
    for arguments, options, message in (
        ((x[0], w), {}, r"x must be \[T, H\]"),
        ((x.double(), w), {}, r"x must be .*got float64"),
        ((x, w[0]), {}, r"w must be \[E, H\]"),
        ((x, w.half()), {}, r"w must be float32 or bfloat16.*; got float16"),
        ((x, w[:, :8]), {}, r"w must be .*\[3, 16\] \(H of x\)"),
        ((x, w, torch.zeros(2)), {}, r"bias must be .*\[3\]"),
        ((x, w, torch.zeros(3).half()), {}, "bias must be .*; got float16"),
        ((x, w), {"out": torch.zeros(2, 4)}, r"out must be .*\[2, 3\]"),
        ((x, w), {"out": torch.zeros(2, 3).half()}, "out must be .*; got float16"),
        ((x, w), {"out": torch.zeros(2, 6)[:, ::2]}, "out must be contiguous"),
        ((x.float(), w, w.flatten()[:3]), {"out": torch.zeros(3, 2).t()}, "out must be contiguous"),
    ):
        with pytest.raises(GuardError, match=message):
            router_gemm(*arguments, **options)


def test_explain_names_the_kernel_and_the_other_paths():
    x, w = integers((2, 64), torch.bfloat16, 0), integers((4, 64), torch.float32, 1)
    shown = hipforge.explain("router_gemm", x, w)
    assert (shown.path, shown.kernel, set(shown.refused)) == ("kernel", "router_gemm", {"triton", "torch"})
