"""The MXFP4 GEMM that quantises X in its launch: the same bits as two launches, and which one an op takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.mxfp4_cases import among_nans, pack, random_codes

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import mxfp4_gemm as ops
from hipforge.ops.fused_linear import quantize_mxfp4_linear
from hipforge.ops.mxfp4_gemm.kernels import made
from hipforge.ops.mxfp4_gemm.raw import Problem
from hipforge.ops.mxfp4_made import FAMILY
from hipforge.ops.reference import quantize_mxfp4, shuffle_scale, shuffle_weight

pytestmark = pytest.mark.usefixtures("every_checker")

HALVES = (torch.bfloat16, torch.float16)
Weights = tuple[torch.Tensor, torch.Tensor]


def drawn(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m * k)
    x = torch.randn(m, k, generator=generator)
    return (x * torch.exp2(torch.randint(-6, 7, (m, k // 32), generator=generator)).repeat_interleave(32, 1)).to(dtype)


def weights(n: int, k: int) -> Weights:
    """Weights among NaNs: in the padding of shuffled scales, and all around the tensors."""
    case, _ = among_nans(random_codes(1, 2 * n, k, seed=n))
    wq, ws = case.args()[2:]
    return wq[::2].contiguous(), ws[::2].contiguous()


def unfilled(n: int, k: int) -> Weights:
    return torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 32, dtype=torch.uint8)


def check(x: torch.Tensor, w: Weights, shuffled: bool = False, **configuration: int) -> None:
    given = (shuffle_weight(w[0]), shuffle_scale(w[1], 255)) if shuffled else w
    got = ops.run_mxfp4_made(x, *given, shuffled=shuffled, **configuration)
    want = ops.run_mxfp4(*quantize_mxfp4(x), *w, k_splits=configuration.get("k_splits", 1))
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("k", [32, 96, 160, 672, 1056])
@pytest.mark.parametrize("m, n", [(1, 1), (9, 50), (33, 24)])
def test_tails_of_every_dimension(m: int, n: int, k: int) -> None:
    parts = min(4, 1 << (-(-k // 128)).bit_length() - 1)
    check(drawn(m, k), weights(n, k), m_sub=1 if m < 17 else 2, columns=2, k_splits=parts)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "m, n, k, m_sub, columns, k_splits",
    [
        (4, 64, 512, 1, 1, 4), (20, 80, 512, 1, 3, 2), (32, 96, 1024, 2, 1, 8), (50, 128, 384, 4, 8, 1),
        (16, 48, 1664, 1, 2, 1), (64, 64, 2560, 2, 1, 2),
    ],
)  # fmt: skip
def test_configurations_give_the_bits_of_two_launches(
    m: int, n: int, k: int, m_sub: int, columns: int, k_splits: int, dtype: torch.dtype
) -> None:
    check(drawn(m, k, dtype), weights(n, k), m_sub=m_sub, columns=columns, k_splits=k_splits)


@pytest.mark.parametrize("n, k", [(48, 64), (64, 512), (32, 1472)])
def test_shuffled_weights(n: int, k: int) -> None:
    check(drawn(20, k), weights(n, k), shuffled=True, m_sub=2, columns=2, k_splits=1 if k == 64 else 4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mixed", [False, True])
def test_every_element_becomes_its_code(dtype: torch.dtype, mixed: bool) -> None:
    """All 65,536 of X against the unit matrix: sorted blocks have every scale, mixed ones NaNs and infinities."""
    k = 512
    bits = torch.arange(1 << 16)
    if mixed:
        bits = bits[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    one_hot = pack(torch.eye(k, dtype=torch.int64) * 2), torch.full((k, k // 32), 127, dtype=torch.uint8)
    check(bits.to(torch.int16).view(dtype).view(-1, k), one_hot, m_sub=4, columns=8)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("special", ["nan", "-nan", "inf", "-inf", "0.0", "-0.0"])
def test_a_special_value_in_one_block(dtype: torch.dtype, special: str) -> None:
    x = drawn(3, 256, dtype)
    x[1, 40] = float(special)
    if special == "-nan":
        x.view(torch.int16)[1, 40] = -1
    if "0.0" in special:
        x[1, 32:64] = float(special)
    check(x, weights(40, 256), columns=2, k_splits=2)


def test_a_nan_scale_of_w_is_one_columns() -> None:
    wq, ws = weights(40, 512)
    ws[7, 9] = 255
    got = ops.run_mxfp4_made(drawn(5, 512), wq, ws, columns=2, k_splits=4)
    assert got[:, 7].isnan().all() and got.isnan().sum() == 5
    check(drawn(5, 512), (wq, ws), k_splits=4)


def test_each_group_reads_its_rows_and_columns_once() -> None:
    m, n, k = 32, 128, 1024
    x, w = drawn(m, k), weights(n, k)
    with emulator.counters() as counted:
        ops.run_mxfp4_made(x, *w, m_sub=1, columns=2, k_splits=4)
    assert counted.launches == 1
    assert counted.mfma_count == m // 16 * (n // 16) * (k // 128)
    assert counted.tensors["x"].loaded == n // 32 * x.nbytes
    assert counted.tensors["Wq"].loaded == m // 16 * w[0].nbytes
    assert counted.tensors["Ws"].unique_loaded == w[1].nbytes


def test_refused_configurations() -> None:
    x, w = drawn(4, 256), weights(32, 256)
    for given, message in (
        ({"m_sub": 3}, "m_sub"), ({"columns": 9}, "columns"), ({"k_splits": 4}, "number of K steps"),
        ({"columns": 5, "k_splits": 2}, r"columns \* k_splits must be 1 to 8; got 5 \* 2"),
    ):  # fmt: skip
        with pytest.raises(GuardError, match=message):
            ops.run_mxfp4_made(x, *w, **given)
    with pytest.raises(GuardError, match="need 66368 bytes of LDS; there are 65536"):
        ops.run_mxfp4_made(drawn(1, 7808), *unfilled(1, 7808))
    with pytest.raises(GuardError, match=r"x must be .*bfloat16"):
        ops.run_mxfp4_made(x.float(), *w)


@pytest.mark.parametrize(
    "m, n, k", [(4, 2880, 512), (16, 2112, 7168), (32, 4096, 512), (64, 7168, 2048), (256, 3072, 1536)]
)
def test_the_task_shapes_are_one_launch(m: int, n: int, k: int) -> None:
    told = hipforge.explain(quantize_mxfp4_linear, torch.empty(m, k, dtype=torch.bfloat16), *unfilled(n, k))
    assert told.kernel == "mxfp4_made" and set(told.configuration) == set(made.MADE.parameters)


@pytest.mark.parametrize(
    "m, n, k, dtype, reason",
    [
        (257, 64, 256, torch.bfloat16, "M of 1 to 256"), (1, 64, 7808, torch.bfloat16, "K of 1 to 7680"),
        (4, 64, 256, torch.float32, "x of float16 or bfloat16"),
        (256, 28672, 1024, torch.bfloat16, "two launches are faster"),
    ],
)  # fmt: skip
def test_where_two_launches_are_taken(m: int, n: int, k: int, dtype: torch.dtype, reason: str) -> None:
    told = hipforge.explain(quantize_mxfp4_linear, torch.empty(m, k, dtype=dtype), *unfilled(n, k))
    assert told.kernel == "mxfp4_quantize, mxfp4_linear" and reason in told.refused["kernel"]


@pytest.fixture
def tables(put_table: Callable[..., Path]) -> Callable[[str], Path]:
    """Puts a row into effect, given from its shape on."""
    return lambda row: put_table(FAMILY.table, f"gfx950,256,{row}")


def test_a_row_decides_the_configuration(tables: Callable[[str], Path]) -> None:
    x, w = drawn(4, 256), weights(64, 256)
    want = quantize_mxfp4_linear(x, *w)
    ruled = hipforge.explain(quantize_mxfp4_linear, x, *w)
    assert ruled.row is None and ruled.configuration["columns"] != 3
    tables("4,64,256,mxfp4_made,m_sub=1;columns=3;k_splits=1,1,,3.0,,,0.001,model:cdna4-events-3")
    told = hipforge.explain(quantize_mxfp4_linear, x, *w)
    assert dict(told.configuration) == {"m_sub": 1, "columns": 3, "k_splits": 1}
    assert told.file is not None and "tuned row" in told.reason
    torch.testing.assert_close(quantize_mxfp4_linear(x, *w), want, rtol=2.0**-7, atol=0)  # parts of K in another order
    assert hipforge.explain(quantize_mxfp4_linear, x[:3], *w).row is None


@pytest.mark.parametrize(
    "shape, use_hip, one_launch", [((4, 64, 256), 0, False), ((256, 28672, 1024), 1, True)]
)  # fmt: skip
def test_a_measured_row_decides_how_many_launches(
    shape: tuple[int, int, int], use_hip: int, one_launch: bool, tables: Callable[[str], Path]
) -> None:
    m, n, k = shape
    given = torch.empty(m, k, dtype=torch.bfloat16), *unfilled(n, k)
    assert (hipforge.explain(quantize_mxfp4_linear, *given).kernel == "mxfp4_made") is not one_launch
    config = f"{m},{n},{k},mxfp4_made,m_sub=1;columns=2;k_splits=1,{use_hip}"
    if use_hip:  # one that was modelled says nothing of two launches
        tables(f"{config},,3.0,,,0.001,model:cdna4-events-3")
        assert hipforge.explain(quantize_mxfp4_linear, *given).kernel == "mxfp4_quantize, mxfp4_linear"
    tables(f"{config},3.0,,4.0,4.0,0.001,measured:MI355X/torch-2.13")
    told = hipforge.explain(quantize_mxfp4_linear, *given)
    assert (told.kernel == "mxfp4_made") is one_launch
    assert one_launch or "use_hip=0" in told.refused["kernel"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_op_adds_a_bias_and_writes_into_out(dtype: torch.dtype, shuffled: bool) -> None:
    x, w = drawn(5, 256, dtype), weights(48, 256)
    given: Any = (shuffle_weight(w[0]), shuffle_scale(w[1])) if shuffled else w
    bias, out = drawn(1, 64)[0, :48].contiguous(), torch.empty(5, 48).bfloat16()
    want = ops.mxfp4_linear(*quantize_mxfp4(x), *w, bias)
    with emulator.counters() as counted:
        assert quantize_mxfp4_linear(x, *given, bias, shuffled=shuffled, out=out) is out
    assert counted.launches == (1 if dtype in HALVES else 2)
    torch.testing.assert_close(out, want, rtol=2.0**-7, atol=0)  # parts of K in another order, rounded twice
    turned = x.t().contiguous().t()  # other strides, and off a boundary of 16 bytes
    shifted = torch.empty(x.numel() + 1, dtype=dtype)[1:].view_as(x).copy_(x)
    for other in (turned, shifted):
        assert torch.equal(quantize_mxfp4_linear(other, *given, bias, shuffled=shuffled), out)
    with pytest.raises(GuardError, match=r"bias must be .*\[48\]"):
        quantize_mxfp4_linear(x, *given, bias[:47], shuffled=shuffled)


def test_batch_invariance_takes_two_launches() -> None:
    x, w = drawn(5, 256), weights(48, 256)
    with hipforge.batch_invariant():
        assert "two launches" in hipforge.explain(quantize_mxfp4_linear, x, *w).reason
        assert torch.equal(quantize_mxfp4_linear(x, *w)[:1], quantize_mxfp4_linear(x[:1], *w))


def test_the_op_traces_as_one_graph() -> None:
    w = weights(48, 256)
    traced = torch.compile(lambda x: quantize_mxfp4_linear(x, *w) * 2, backend="aot_eager", fullgraph=True)
    for m in (1, 20):
        assert torch.equal(traced(drawn(m, 256)), quantize_mxfp4_linear(drawn(m, 256), *w) * 2)


def test_refusals_name_argument_and_rule() -> None:
    x, (wq, ws) = drawn(4, 256), weights(32, 256)
    for call, message in (
        ((x.int(), wq, ws), r"x .*int32"), ((x[0], wq, ws), "x"), ((x[:, :40], wq, ws), "multiple of 32"),
        ((x, wq[:, :64], ws), "wq"), ((x, wq, ws[:5]), "w_scale"),
    ):  # fmt: skip
        with pytest.raises(GuardError, match=message):
            quantize_mxfp4_linear(*call)


@pytest.mark.parametrize("m, n, k", [(1, 16, 32), (17, 300, 7680), (200, 4096, 1024)])
def test_candidates_are_accepted(m: int, n: int, k: int) -> None:
    problem = Problem(m, n, k, False, torch.bfloat16, torch.device("cpu"))
    found = list(made.MADE.candidates(problem, "gfx950"))
    assert found and all(made.MADE.needs(given, problem.key, "gfx950") is None for given in found)
    assert all(us > made.START_US for us, _ in made.MADE.default(problem, "gfx950", 256))


def test_the_rule_weighs_the_starts_of_work_groups_and_the_meetings_of_waves() -> None:
    """The best of all configurations by the model of time, or within 5 % of them."""
    for shape, best in {
        (4, 2880, 512): (1, 2, 1), (32, 4096, 512): (1, 3, 1), (16, 2112, 7168): (1, 1, 8), (1, 4096, 2048): (1, 1, 8),
        (16, 3072, 1536): (1, 1, 8), (64, 7168, 2048): (1, 7, 1), (256, 3072, 1536): (2, 6, 1),
    }.items():  # fmt: skip
        problem = SimpleNamespace(key=shape)
        _, given = min(made.MADE.default(problem, "gfx950", 256), key=lambda one: one[0])
        assert tuple(given.values()) == best, shape
