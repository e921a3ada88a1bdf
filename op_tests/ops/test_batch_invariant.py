"""Under ``batch_invariant`` a row has the same bits in every batch; its sums cancel, so that another order shows.

Operands are halves of K that cancel: X has the same elements in both, W the opposite ones, each block of 32 with a
scale of its own. What is left of a sum is the rounding of its parts, which depends on their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import hipforge
from hipforge.errors import GuardError
from hipforge.integrations import serving
from hipforge.ops.core import dispatch, family, invariance
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.decode_attention import family as decode_attention
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8
from hipforge.ops.mxfp8_gemm.family import GEMM

BLOCK = 32
EXPERTS = 64
FEW, MANY = (1, 2, 15, 16, 17, 33), (64, 65, 130)


def cancelling(rows: int, k: int, sign: int) -> torch.Tensor:
    half = torch.randn(rows, k // 2, generator=torch.Generator().manual_seed(rows + k + sign))
    return torch.cat([half, sign * half], 1)


def scales(rows: int, k: int) -> torch.Tensor:
    half = torch.randint(117, 138, (rows, k // (2 * BLOCK)), dtype=torch.uint8)
    return torch.cat([half, half], 1)


def mxfp8_operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    e4m3 = fp8_dtypes(torch.device("cpu"))[0]
    x_scale = torch.full((m, k // BLOCK), 127, dtype=torch.uint8)
    return cancelling(m, k, 1).to(e4m3), x_scale, cancelling(n, k, -1).to(e4m3), scales(n, k)


def wide_operands(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """X and W whose products have many exponents, for sums without a scale per block."""
    e4m3 = fp8_dtypes(torch.device("cpu"))[0]
    spread = torch.exp2(torch.randint(-7, 6, (1, k // 2)).float()).repeat(1, 2)
    return (cancelling(m, k, 1) * spread).to(e4m3), cancelling(40, k, -1).to(e4m3)


def dense(m: int, k: int) -> Callable[[int], torch.Tensor]:
    x, x_scale, w, w_scale = mxfp8_operands(m, 40, k)
    return lambda rows: hipforge.mxfp8_linear(x[:rows], x_scale[:rows], w, w_scale)


def mxfp4(m: int, k: int) -> Callable[[int], torch.Tensor]:
    x, _ = hipforge.mxfp4_quantize(cancelling(m, k, 1))
    w, _ = hipforge.mxfp4_quantize(cancelling(48, k, -1))
    x_scale, w_scale = torch.full((m, k // BLOCK), 127, dtype=torch.uint8), scales(48, k)
    return lambda rows: hipforge.mxfp4_linear(x[:rows], x_scale[:rows], w, w_scale)


def per_row(m: int, k: int) -> Callable[[int], torch.Tensor]:
    x, w = wide_operands(m, k)
    x_scale, w_scale = torch.ones(m, 1), torch.ones(40, 1)
    return lambda rows: hipforge.fp8_linear(x[:rows], x_scale[:rows], w, w_scale)


def blocks(m: int, k: int) -> Callable[[int], torch.Tensor]:
    x, w = wide_operands(m, k)
    x_scale, half = torch.ones(m, k // 128), torch.exp2(torch.randint(-9, 10, (1, k // 256)).float())
    return lambda rows: hipforge.fp8_linear(x[:rows], x_scale[:rows], w, torch.cat([half, half], 1))


def grouped(m: int, k: int) -> Callable[[int], torch.Tensor]:
    x, x_scale, w, w_scale = mxfp8_operands(m, 64, k)
    w, w_scale = w.view(1, 64, k).repeat(EXPERTS, 1, 1), w_scale.view(1, 64, -1).repeat(EXPERTS, 1, 1)
    experts = torch.arange(m, dtype=torch.int32).view(m, 1) % EXPERTS

    def call(rows: int) -> torch.Tensor:
        sorting = hipforge.moe_align_block_size(experts[:rows].contiguous(), 16, EXPERTS)
        a = x[:rows], x_scale[:rows], w, w_scale, *sorting, rows, 16, 1
        payload, scale = grouped_swiglu_mxfp8(*a)
        return torch.cat([hipforge.grouped_mxfp8_linear(*a).float(), payload.float(), scale.float()], 1)

    return call


def grouped_fp8(m: int, k: int) -> Callable[[int], torch.Tensor]:
    x, w = wide_operands(m, k)
    w = w.repeat(2, 1)[:64].repeat(EXPERTS, 1, 1)
    half = torch.exp2(torch.randint(-9, 10, (1, 1, k // 256)).float())
    scale = torch.cat([half, half], 2).expand(EXPERTS, -1, -1).contiguous()
    experts = torch.arange(m, dtype=torch.int32).view(m, 1) % EXPERTS

    def call(rows: int) -> torch.Tensor:
        sorting = hipforge.moe_align_block_size(experts[:rows].contiguous(), 16, EXPERTS)
        a = x[:rows], torch.ones(rows, k // 128), w, scale, *sorting, rows, 16, 1
        payload, scales = hipforge.grouped_swiglu_fp8(*a)
        return torch.cat([hipforge.grouped_fp8_linear(*a).float(), payload.float(), scales], 1)

    return call


def skinny(m: int, k: int) -> Callable[[int], torch.Tensor]:
    a, w = wide_operands(m, k)
    one = torch.ones(1)
    return lambda rows: hipforge.skinny_gemm(a[:rows], w.t(), one)


def attention(m: int, k: int) -> Callable[[int], torch.Tensor]:
    e4m3, keys = fp8_dtypes(torch.device("cpu"))[0], 1024
    q = torch.randn(m, 1, 4, 64).half()
    k_cache, v_cache = (torch.randn(m, keys, 2, 64).to(e4m3) for _ in range(2))
    lengths = torch.randint(1, keys + 1, (m,), dtype=torch.int32)
    lengths[0] = keys

    def call(rows: int) -> torch.Tensor:
        given = q[:rows], k_cache[:rows], v_cache[:rows], None, lengths[:rows]
        return torch.cat([part.flatten(1) for part in hipforge.decode_attention_fp8(*given, return_lse=True)], 1)

    return call


# On gfx942 MXFP4 runs in torch, and K = 2048 is cut alike for every batch.
HERE = (mxfp4, 4096), (dense, 2048)
CASES = [
    pytest.param(make, k, rows, id=f"{make.__name__}-{k}", marks=() if (make, k) in HERE else pytest.mark.gfx942)
    for make, k, rows in [
        (dense, 2048, FEW + MANY),
        (dense, 7168, FEW + MANY),
        (per_row, 4096, FEW + MANY),
        (blocks, 4096, FEW + MANY),
        (mxfp4, 4096, (*FEW, *MANY, 260)),
        (grouped, 4096, FEW + MANY),
        (grouped_fp8, 4096, FEW + MANY),
        (skinny, 4096, (1, 2, 8, 9, 16, 17, 32)),
        (attention, 0, (*FEW, 70)),
    ]
]


@pytest.mark.parametrize(("make", "k", "batches"), CASES)
def test_a_row_has_the_same_bits_in_every_batch(
    make: Callable[[int, int], Callable[[int], torch.Tensor]], k: int, batches: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    call = make(max(batches), k)
    with hipforge.batch_invariant():
        whole = call(max(batches))
        different = [rows for rows in batches if not torch.equal(call(rows), whole[:rows])]
    assert different == []
    assert whole.float().isfinite().all()
    plain = [torch.equal(call(rows), whole[:rows]) for rows in batches]
    assert not all(plain), "without the mode nothing differs, so this case shows nothing"


def spread(rows: int, columns: int) -> torch.Tensor:
    """bf16 of many exponents, so that a sum in another order rounds to another value."""
    exponents = torch.randint(-8, 9, (rows, columns), generator=torch.Generator().manual_seed(rows)).float()
    return (cancelling(rows, columns, -1) * torch.exp2(exponents)).bfloat16()


X, WEIGHT = spread(300, 2048), spread(1, 2048)[0]
TABLES, LENGTHS = torch.arange(6).repeat(300, 1).int(), torch.arange(300).int() % 96 + 1
ALWAYS: dict[str, Callable[[int], object]] = {
    "rms_norm": lambda rows: hipforge.rms_norm(X[:rows], WEIGHT, 1e-6),
    "rms_norm_mxfp8": lambda rows: hipforge.rms_norm_mxfp8(X[:rows], WEIGHT, 1e-6),
    "residual_rms": lambda rows: hipforge.residual_rms(X[:rows].clone(), X[300 - rows :].flip(0).clone(), WEIGHT, 1e-6),
    "swiglu_mxfp8": lambda rows: hipforge.swiglu_mxfp8(X[:rows]),
    "mxfp8_quantize": lambda rows: hipforge.mxfp8_quantize(X[:rows]),
    "mxfp4_quantize": lambda rows: hipforge.mxfp4_quantize(X[:rows]),
    "fp8_quant_rows": lambda rows: hipforge.fp8_quant_rows(X[:rows]),
    "fp8_quant_blocks": lambda rows: hipforge.fp8_quant_blocks(X[:rows]),
    "router_gemm": lambda rows: hipforge.router_gemm(X[:rows], spread(32, 2048)),
    "topk_gating": lambda rows: hipforge.topk_gating(X[:rows, :64].float(), 4),
    "argmax": lambda rows: hipforge.argmax(X[:rows]),
    "moe_combine": lambda rows: hipforge.moe_combine(X[: 4 * rows], top_k=4),
    "sparse_block_scores": lambda rows: hipforge.sparse_block_scores(
        X[:rows, :512].unflatten(1, (1, 4, 128)).contiguous(), X[:, :256].unflatten(1, (2, 128)).repeat(1, 8, 1),
        TABLES[:rows], LENGTHS[:rows], block_size=32,
    ),
    "sparse_topk_blocks": lambda rows: hipforge.sparse_topk_blocks(
        X[:rows, :24].float().unflatten(1, (1, 1, 24)), TABLES[:rows].repeat(1, 8), 7 * LENGTHS[:rows], page_size=16,
        block_size=32,
    ),
}  # fmt: skip


@pytest.mark.gfx942
@pytest.mark.parametrize("op", ALWAYS)
def test_these_have_the_same_bits_in_every_batch_without_the_mode(op: str) -> None:
    def results(rows: int) -> tuple[torch.Tensor, ...]:
        found = ALWAYS[op](rows)
        return found if isinstance(found, tuple) else (found,)  # type: ignore[return-value]  # ops give Any

    largest = 75 if op == "moe_combine" else 300
    whole = results(largest)
    for rows in (1, 2, 15, 16, 17, 33, 64, 65, largest - 1):
        for part, of_all in zip(results(rows), whole, strict=True):
            assert torch.equal(part.view(torch.uint8), of_all[:rows].view(torch.uint8)), rows


def test_on_hopper_every_batch_takes_one_tile() -> None:
    problem = GEMM.problem(*(part for part in mxfp8_operands(1, 40, 256)))
    assert GEMM.invariant is not None
    found = [GEMM.invariant(replace(problem, m=m), "sm_90", 132) for m in (1, 8, 64, 65, 4096)]
    assert set(map(str, found)) == {"mxfp8_ring_tiles(tile=64128, k_splits=2, shared=0)"}


@pytest.mark.parametrize(
    ("of", "arch", "page_size", "chosen"),
    [
        (decode_attention.FAMILY, "sm_90", 64, "decode_attention_fp8(block_n=16, waves=4, split_k=16)"),
        (decode_attention.GATHERED_FAMILY, "gfx950", 1, "decode_attention_gathered(waves=1, split_k=16)"),
    ],
)
def test_every_batch_of_attention_has_the_waves_of_one_sequence(of, arch, page_size, chosen) -> None:
    given = torch.bfloat16, torch.float8_e4m3fn, torch.device("cpu")
    problem = decode_attention.Problem(1, 1, 32, 8, 128, 1024, page_size, *given)
    found = [of.invariant(replace(problem, batch=batch), arch, 132) for batch in (1, 8, 64, 512)]
    assert set(map(str, found)) == {chosen}


def test_explain_and_the_state_of_the_process() -> None:
    operands = mxfp8_operands(1, 40, 256)
    before = hipforge.explain(hipforge.mxfp8_linear, *operands).reason
    with hipforge.batch_invariant():
        assert hipforge.explain(hipforge.mxfp8_linear, *operands).reason == invariance.REASON
        with hipforge.batch_invariant(False):
            assert hipforge.explain(hipforge.mxfp8_linear, *operands).reason == before
        assert hipforge.explain(hipforge.mxfp8_linear, *operands).reason == invariance.REASON
    assert hipforge.explain(hipforge.mxfp8_linear, *operands).reason == before


def test_of_blocks_that_overlap_the_last_entered_decides_until_it_is_over() -> None:
    """As those of two threads do: each was restored to what it had found, and the mode stayed on for ever."""
    before = invariance.STATE.on
    first, second = hipforge.batch_invariant(), hipforge.batch_invariant()
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert invariance.STATE.on
    second.__exit__(None, None, None)
    assert invariance.STATE.on is before
    with pytest.raises(GuardError, match="enabled must be True or False; got 'yes'"), hipforge.batch_invariant("yes"):  # type: ignore[arg-type]
        pass


def test_a_decision_begun_before_the_mode_was_turned_on_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    call, mode, find_row = dense(130, 2048), hipforge.batch_invariant(), family.find_row

    def entering(*args: object) -> object:  # another thread, meanwhile
        monkeypatch.setattr(family, "find_row", find_row)
        mode.__enter__()
        return find_row(*args)  # type: ignore[arg-type]

    usual = call(130)
    dispatch.clear_decisions()
    monkeypatch.setattr(family, "find_row", entering)
    assert torch.equal(call(130), usual)
    try:
        whole = call(130)
        assert all(torch.equal(call(rows), whole[:rows]) for rows in FEW)
    finally:
        mode.__exit__(None, None, None)
    assert not torch.equal(usual, whole), "without the mode nothing differs, so this shows nothing"


def test_a_servers_own_switch_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with hipforge.batch_invariant(False):  # which restores the state of the process
        for value, on in (("0", False), ("1", True)):
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
            serving.follow_batch_invariance("VLLM_BATCH_INVARIANT")
            assert invariance.STATE.on is on


def test_a_compiled_graph_is_guarded_by_the_mode() -> None:
    x, x_scale, w, w_scale = mxfp8_operands(20, 40, 256)  # 20 rows have no row in the table: None without the mode
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(1)
        return graph.forward

    compiled = torch.compile(lambda *a: hipforge.mxfp8_gemv(*a), backend=backend)
    assert compiled(x, x_scale, w, w_scale) is None
    with hipforge.batch_invariant():
        inside = compiled(x, x_scale, w, w_scale)
        assert inside is not None and torch.equal(inside, hipforge.mxfp8_gemv(x, x_scale, w, w_scale))
    assert compiled(x, x_scale, w, w_scale) is None
