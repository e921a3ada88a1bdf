"""Products that make their activations: where they are two launches, and what the one launch of sm_90 takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hipforge
from hipforge.errors import GuardError
from hipforge.ops import norm_router
from hipforge.ops.core.row_stream import SHARED_BYTES
from hipforge.ops.fused_linear import residual_rms_mxfp8_linear, swiglu_mxfp8_linear
from hipforge.ops.mxfp8_gemm.kernels import row_stream, row_stream_made
from hipforge.ops.mxfp8_grouped_gemm import token
from hipforge.ops.norm_router import residual_rms_mxfp8_router

M, N, K = 3, 48, 256
H100_UNITS = 132


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


def test_a_norm_and_its_product_are_two_launches_here() -> None:
    x, residual, weight, by = drawn(M, K), drawn(M, K) * 2, drawn(K), hipforge.mxfp8_quantize(drawn(N, K))
    kept, bias = residual.clone(), drawn(N)
    call: Any = x, residual, weight, 1e-5, *by, bias
    out, total = torch.empty(M, N).bfloat16(), torch.empty(M, K).bfloat16()
    found = residual_rms_mxfp8_linear(*call, weight_offset=1.0, out=out, sum_out=total)
    assert found[0] is out and found[1] is total and torch.equal(residual, kept)
    q, scale, _ = hipforge.residual_rms_mxfp8(x, kept, weight, 1e-5, weight_offset=1.0)
    assert torch.equal(total, kept) and torch.equal(out, hipforge.mxfp8_linear(q, scale, *by, bias))
    told = hipforge.explain(residual_rms_mxfp8_linear, *call)
    assert told.kernel == "residual_rms_mxfp8, mxfp8_linear" and told.reason == "two launches"
    assert "sm_90" in told.refused["kernel"]


def test_a_norm_and_its_router_are_two_launches_here() -> None:
    x, residual, weight, router = drawn(M, K), drawn(M, K) * 2, drawn(K), drawn(9, K).float()
    kept, bias, y = residual.clone(), torch.randn(9), torch.empty(M, K).bfloat16()
    call: Any = x, residual, weight, 1e-5, router, bias
    out, total = torch.empty(M, 9), torch.empty(M, K).bfloat16()
    found = residual_rms_mxfp8_router(*call, weight_offset=1.0, out=out, sum_out=total)
    assert found[0] is out and found[1] is total and torch.equal(residual, kept)
    q, scale, _ = hipforge.residual_rms_mxfp8(x, kept, weight, 1e-5, weight_offset=1.0, also_out=y)
    assert torch.equal(total, kept) and torch.equal(out, hipforge.router_gemm(y, router, bias))
    for one, other in zip(found[2:], (q, scale), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    again = residual_rms_mxfp8_router(*call, q_out=found[2], scale_out=found[3])
    assert again[2] is found[2] and again[3] is found[3]
    told = hipforge.explain(residual_rms_mxfp8_router, *call)
    assert told.kernel == "residual_rms_mxfp8, router_gemm" and "sm_90" in told.refused["kernel"]


def test_a_norm_and_its_router_name_the_argument_that_they_refuse() -> None:
    x, residual, weight, router = drawn(M, K), drawn(M, K), drawn(K), drawn(9, K)
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("x must be float16 or bfloat16; got float32", (x.float(), residual, weight, 1e-5, router)),
        ("residual must be bfloat16", (x, residual[:, :32], weight, 1e-5, router)),
        ("norm_weight must be bfloat16", (x, residual, weight[:5], 1e-5, router)),
        ("w must be .*its K is that of x", (x, residual, weight, 1e-5, router[:, :32])),
        ("w must be a torch.Tensor; got float", (x, residual, weight, router, 1e-5)),
    ]
    for message, call in wrong:
        with pytest.raises(GuardError, match=message):
            residual_rms_mxfp8_router(*call)
    w, w_scale = hipforge.mxfp8_quantize(drawn(9, K))
    with pytest.raises(GuardError, match="residual must be"):  # torch would repeat its one row
        residual_rms_mxfp8_linear(x, residual[:1], weight, 1e-5, w, w_scale)
    with pytest.raises(GuardError, match="norm_weight must be"):
        residual_rms_mxfp8_linear(x, residual, weight[:5], 1e-5, w, w_scale)


@pytest.mark.parametrize(
    "tokens, hidden, fault",
    [(1, 2048, None), (16, 8192, None), (17, 2048, "got 17 and"), (0, 64, "got 0 and"), (1, 8224, "and H=8224"),
     (1, 48, "multiple of 32")],
)  # fmt: skip
def test_what_one_launch_of_a_norm_and_its_router_takes(tokens: int, hidden: int, fault: str | None) -> None:
    refusal = norm_router.refusal(tokens, hidden)
    assert refusal is None if fault is None else fault in str(refusal)


@pytest.mark.parametrize("interleaved", [False, True])
def test_swiglu_and_its_product_are_two_launches_here(interleaved: bool) -> None:
    gate_up, by, bias = drawn(M, 2 * K), hipforge.mxfp8_quantize(drawn(N, K)), drawn(N)
    given: dict[str, Any] = {"alpha": 1.5, "beta": 0.5, "limit": 2.0, "interleaved": interleaved}
    got = swiglu_mxfp8_linear(gate_up, *by, bias, **given)
    assert torch.equal(got, hipforge.mxfp8_linear(*hipforge.swiglu_mxfp8(gate_up, **given), *by, bias))
    with pytest.raises(GuardError, match="limit must be positive"):
        swiglu_mxfp8_linear(gate_up, *by, limit=-1.0)


def test_swiglu_and_its_product_name_the_argument_that_they_refuse() -> None:
    gate_up, (wq, w_scale) = drawn(M, 2 * K), hipforge.mxfp8_quantize(drawn(N, K))
    for x, w, message in (
        (gate_up, wq[None], r"wq must be \[N, K\]"),
        (gate_up, wq[0], r"wq must be \[N, K\]"),
        (gate_up[0], wq, r"gate_up must be \[M, 2 K\]"),
        (gate_up[:, :K].contiguous(), wq, rf"gate_up must be \[{M}, {2 * K}\] \(\[M, 2 K\] with wq's K\)"),
    ):
        with pytest.raises(GuardError, match=message):
            swiglu_mxfp8_linear(x, w, w_scale)


@pytest.mark.parametrize(
    "m, n, k, fault",
    [
        (9, 64, 256, "M of 1 to 8"), (1, 0, 256, "N of at least 1"), (1, 64, 288, "K of a positive multiple of 128"),
        (2, 64, 8192, "M times the pieces of 4096 columns of a row at most 2; got M=2, K=8192"),
        (3, 64, 4096, "M times"), (1, 64, 12288, "M times"), (2, 64, 4096, None), (1, 64, 8192, None),
    ],
)  # fmt: skip
def test_which_norms_are_one_launch_on_sm_90(m: int, n: int, k: int, fault: str | None) -> None:
    refusal = row_stream_made.norm_refusal(m, n, k)
    assert refusal is None if fault is None else fault in str(refusal)


def test_which_swiglus_are_one_launch_on_sm_90() -> None:
    assert row_stream_made.swiglu_refusal(1, 4096, 14336) is None
    assert "M of at most 2; got 3" in str(row_stream_made.swiglu_refusal(3, 4096, 14336))
    assert "shared memory" in str(row_stream_made.swiglu_refusal(2, 4096, 128 * 1024))


@pytest.mark.parametrize("m, n, k", [(1, 6144, 4096), (2, 28672, 4096), (1, 4096, 14336), (1, 5120, 128), (1, 64, 384)])
def test_a_configuration_fits_and_is_one_that_the_stream_takes(m: int, n: int, k: int) -> None:
    found = row_stream_made.configuration(n, k, H100_UNITS)
    block_rows = -(-n // found["blocks"])
    assert row_stream_made.shared_bytes(m, found["tiles"], block_rows, k) <= SHARED_BYTES
    row_stream.ROW_STREAM.require(rows=row_stream_made.ROWS, **found)
    assert found["sharers"] <= -(-k // 128)


@pytest.mark.parametrize("n, k, sharers", [(6144, 4096, 8), (28672, 4096, 16), (4096, 14336, 16), (2048, 4096, 16)])
def test_all_warps_share_k_where_a_block_has_one_pass_or_much_to_do(n: int, k: int, sharers: int) -> None:
    assert row_stream_made.configuration(n, k, H100_UNITS)["sharers"] == sharers


@pytest.mark.parametrize(
    "slots, hidden, inner, fault",
    [
        (8, 2048, 768, None), (8, 2048, 640, None), (8, 7168, 2048, None), (2, 4096, 14336, None),
        (8, 8704, 768, None), (33, 2048, 768, "got 33"), (8, 2912, 768, "H=2912"), (8, 4352, 768, "H=4352"),
        (8, 2048, 672, "I=672"), (8, 2048, 4224, "I=4224"), (8, 0, 768, "H=0"),
    ],
)  # fmt: skip
def test_which_layers_are_two_launches_for_one_token(slots: int, hidden: int, inner: int, fault: str | None) -> None:
    refusal = token.refusal(slots, hidden, inner)
    assert refusal is None if fault is None else fault in str(refusal)
