"""The MoE grouped GEMM's first raw op: its guards, which are those of every kernel, and full sizes."""

from __future__ import annotations

import pytest
import torch
from helpers.mxfp8_cases import (
    assert_bits,
    assert_close,
    dequantize,
    embedded,
    normal,
)
from helpers.mxfp8_grouped_cases import UNTOUCHED, Moe, exact, oracle, random_owners, run, sort_slots, sparse_bytes

from hipforge import devices, emulator
from hipforge.errors import ArchError, GuardError
from hipforge.ops.grouped_gemm_mxfp8 import smallm_mxfp8_moe_grouped_gemm


@pytest.mark.parametrize("block_n", (8, 16))
def test_both_values_of_block_n_do_the_same(block_n: int) -> None:
    case = exact([1] * 20, experts=3, n=37, k=1056, weighted=True)
    with emulator.options(checks="all"):
        assert_bits(run(case, block_n), oracle(case))


def test_empty_tiles_start_no_work_groups() -> None:
    case = exact((3, 5), experts=128, n=32, k=32)
    ids, experts, padded = sort_slots(case.owners, 64, 128)
    longer = torch.cat((ids, torch.full((126 * 64,), 2, dtype=torch.int32)))
    index = (longer, torch.cat((experts, torch.full((126,), -1, dtype=torch.int32))), padded)
    with emulator.counters() as counted:
        assert_bits(run(case.but(index=index), 16), oracle(case))
    assert counted.kernels[0].grid[:2] == (2, 2)


GOOD = exact((0, 1, 1, 0), experts=2, n=8, k=64, block_m=8)


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def index_with(position: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    index = list(GOOD.sorted())
    index[position] = tensor
    return tuple(index)


def refused(case: Moe, message: str, out: torch.Tensor | None = None, block_n: int = 8) -> None:
    with pytest.raises(GuardError, match=message):
        smallm_mxfp8_moe_grouped_gemm(*case.arguments(GOOD.out() if out is None else out), case.weights, block_n)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"a": zeros(4, 64, dtype=torch.int8)}, r"a_q must be contiguous float8_e4m3fn or uint8 \[rows, K\].*got int8"),
        ({"w": zeros(2, 8, 64, dtype=torch.float8_e5m2)}, r"w must be .*float8_e4m3fn or uint8 \[E, N, K\].*e5m2"),
        ({"a_scale": zeros(4, 2, dtype=torch.float32)}, r"a_scale must be .*float8_e8m0fnu .*e8m0 scale.*got float32"),
        ({"w_scale": zeros(2, 8, 2, dtype=torch.int32)}, r"w_scale must be .*float8_e8m0fnu .*e8m0 scale.*got int32"),
        ({"a": zeros(4, 32), "a_scale": zeros(4, 1)}, r"must have the same K; got a_q uint8 \[4, 32\]"),
        ({"a_scale": zeros(4, 3)}, r"a_scale must be .*float8_e8m0fnu \[4, 2\].*got uint8 \[4, 3\]"),
        ({"w_scale": zeros(2, 8, 3)}, r"w_scale must be .*float8_e8m0fnu \[2, 8, 2\].*got uint8 \[2, 8, 3\]"),
        # a_scale whose rows are further apart than K/32 would be misread by an index of K/32 per row.
        ({"a_scale": zeros(4, 4)[:, :2]}, r"a_scale must be contiguous"),
        ({"a": zeros(4, 128)[:, ::2]}, r"a_q must be contiguous"),
        ({"w": zeros(2, 64, 8).transpose(1, 2)}, r"w must be contiguous"),
        ({"w_scale": zeros(2, 2, 8).transpose(1, 2)}, r"w_scale must be contiguous"),
        ({"a": zeros(264)[8:].view(4, 64)}, r"a_q must start at a multiple of 16 bytes"),
        ({"w": zeros(1032)[8:].view(2, 8, 64)}, r"w must start at a multiple of 16 bytes"),
        ({"index": index_with(0, zeros(16, dtype=torch.int64))},
         r"sorted_token_ids must be contiguous int32 \[16\]; got int64"),
        ({"index": index_with(1, zeros(2, dtype=torch.int64))},
         r"expert_ids must be contiguous int32 \[2\]; got int64"),
        ({"index": index_with(2, zeros(1, dtype=torch.int64))},
         r"num_tokens_post_padded must be contiguous int32 \[1\]; got int64"),
        ({"index": index_with(0, zeros(32, dtype=torch.int32)[::2])}, r"sorted_token_ids must be contiguous"),
        ({"index": index_with(1, zeros(4, dtype=torch.int32)[::2])}, r"expert_ids must be contiguous"),
        ({"index": index_with(0, zeros(2, 8, dtype=torch.int32))}, r"sorted_token_ids.* \[16\]; got int32 \[2, 8\]"),
        ({"index": index_with(2, zeros(1, 1, dtype=torch.int32))},
         r"num_tokens_post_padded must be contiguous int32 \[1\]; got int32 \[1, 1\]"),
        ({"index": index_with(0, zeros(12, dtype=torch.int32))}, r"multiple of block_m = 8 entries; got 12"),
        ({"index": index_with(1, zeros(1, dtype=torch.int32))}, r"expert_ids must have one entry per tile, 2; got 1"),
        ({"index": index_with(2, zeros(0, dtype=torch.int32))}, r"num_tokens_post_padded must have 1 entry"),
        ({"block_m": 6}, r"block_m must be a positive multiple of 4; got 6"),
        ({"block_m": -4}, r"block_m must be a positive multiple of 4; got -4"),
        ({"a_div": 0}, r"a_div must be a positive 32-bit integer; got 0"),
        ({"a_div": -1}, r"a_div must be a positive 32-bit integer; got -1"),
        ({"a": zeros(3, 64), "a_scale": zeros(3, 2)}, r"a_q has M_act = 3 rows, but 4 slots .* read rows 0 to 3"),
        ({"weights": zeros(4, dtype=torch.bfloat16)}, r"mul_weight_by must be contiguous float32; got bfloat16"),
        ({"weights": zeros(3, dtype=torch.float32)}, r"mul_weight_by must have one weight per slot, 4; got 3"),
        ({"weights": zeros(8, dtype=torch.float32)[::2]}, r"mul_weight_by must be contiguous"),
    ),
)  # fmt: skip
def test_arguments_are_guarded(changes: dict[str, object], message: str) -> None:
    # The index of the good case, so that changing block_m does not make another one that fits.
    refused(GOOD.but(**{"index": GOOD.sorted(), **changes}), message)


@pytest.mark.parametrize(
    ("position", "said", "message"),
    (
        (8, 3, r"E = 3 disagrees with the shape of w, which says 2"),
        (9, 16, r"N = 16 disagrees"),
        (10, 32, r"K = 32 disagrees"),
        (10, 48, r"K must be a positive multiple of 32.*got 48"),
        (11, -1, r"num_valid_tokens must be between 0 and 2\^31 - 1; got -1"),
        (12, 5, r"M_act = 5 disagrees with the shape of a_q, which says 4"),
    ),
)
def test_numbers_that_repeat_a_shape_must_agree_with_it(position: int, said: int, message: str) -> None:
    arguments = GOOD.arguments(GOOD.out())
    arguments[position] = said
    with pytest.raises(GuardError, match=message):
        smallm_mxfp8_moe_grouped_gemm(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_n", (0, 4, 12, 32, -8))
def test_other_block_n_are_refused(block_n: int) -> None:
    refused(GOOD, rf"block_n must be 8 or 16.*got {block_n}", block_n=block_n)


@pytest.mark.parametrize(
    ("out", "message"),
    (
        (zeros(4, 8, dtype=torch.float32), r"out must be contiguous bfloat16; got float32"),
        (zeros(3, 8, dtype=torch.bfloat16), r"out has 24 elements; 4 slots of N = 8 columns need 32"),
        (zeros(8, 4, dtype=torch.bfloat16).t(), r"out must be contiguous"),
    ),
)
def test_the_output_is_guarded(out: torch.Tensor, message: str) -> None:
    refused(GOOD, message, out)


def test_a_longer_output_is_taken_and_its_surplus_left_alone() -> None:
    out = torch.full((6, 8), UNTOUCHED, dtype=torch.bfloat16)
    smallm_mxfp8_moe_grouped_gemm(*GOOD.arguments(out))  # type: ignore[arg-type]
    assert_bits(out[:4], oracle(GOOD))
    assert (out[4:] == UNTOUCHED).all()


def test_an_expert_or_activations_past_2_gib_are_refused() -> None:
    k = 2**20
    row, scale = sparse_bytes(2048, k), sparse_bytes(2048, k // 32)
    index = sort_slots((0,), 8, 1)
    case = Moe(row[:1], scale[:1], row[None], scale[None], (0,), 1, 8, index=index)
    refused(case, r"one expert of w has N\*K = 2048\*1048576 = 2147483648 bytes", zeros(1, 2048, dtype=torch.bfloat16))
    case = Moe(row, scale, row[None, :8], scale[None, :8], (0,), 1, 8, index=index)
    refused(case, r"a_q has M_act\*K = 2048\*1048576 = 2147483648 bytes", zeros(1, 8, dtype=torch.bfloat16))


def test_both_spellings_of_the_dtypes_and_unaligned_scales_work() -> None:
    case = exact(random_owners(7, 2), experts=2, n=9, k=128)
    spelled = case.but(
        a=case.a.view(torch.float8_e4m3fn),
        w=case.w.view(torch.float8_e4m3fn),
        a_scale=embedded(case.a_scale, 0xFF, margin=61).view(torch.float8_e8m0fnu),
        w_scale=embedded(case.w_scale, 0xFF, margin=63).view(torch.float8_e8m0fnu),
    )
    assert_bits(run(spelled), oracle(case))


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: devices.Device("emulator", "gfx942"))
    with pytest.raises(ArchError, match="is for gfx950; w is on gfx942"):
        smallm_mxfp8_moe_grouped_gemm(*GOOD.arguments(GOOD.out()))  # type: ignore[arg-type]


# (E, N, K, a_div, weighted, T, top_k)
SEVEN = (
    (128, 1536, 6144, 4, False, 4, 4),
    (128, 6144, 768, 1, True, 8, 1),
    (128, 6144, 768, 1, False, 8, 1),
    (32, 1536, 6144, 4, False, 4, 4),
    (64, 6144, 768, 1, True, 8, 1),
    (128, 1536, 6144, 4, False, 16, 4),
    (32, 768, 6144, 4, False, 4, 4),
)
BEYOND = (
    (256, 1536, 6144, 4, False, 4, 4),
    (128, 6144, 384, 1, True, 8, 1),
)  # refused by an envelope of 2 GB and K % 1024


def full_size(
    experts: int, n: int, k: int, a_div: int, weighted: bool, tokens: int, top_k: int, busy: int
) -> tuple[Moe, torch.Tensor]:
    """A case whose experts are one random weight with its rows rotated by the expert's number, and its oracle.

    Only ``busy`` experts, the first and the last among them, receive slots and take memory.
    """
    slots = tokens * top_k
    data = normal(-(-slots // a_div), n, k)
    generator = torch.Generator().manual_seed(1)
    chosen = [experts - 1, 0, *torch.randperm(experts - 2, generator=generator).add(1).tolist()][:busy]
    owners = tuple(chosen[slot % busy] for slot in range(slots))
    w, w_scale = sparse_bytes(experts, n, k), sparse_bytes(experts, n, k // 32)
    for expert in chosen:
        w[expert], w_scale[expert] = data.wq.roll(expert, 0), data.ws.roll(expert, 0)
    weights = torch.rand(slots, generator=generator) if weighted else None
    rows = dequantize(data.xq, data.xs) @ dequantize(data.wq, data.ws).T
    want = torch.stack([rows[slot // a_div].roll(owner) for slot, owner in enumerate(owners)])
    if weights is not None:
        want *= weights.double()[:, None]
    return Moe(data.xq, data.xs, w, w_scale, owners, a_div, 64, weights), want


@pytest.mark.parametrize("shape", (*SEVEN, *BEYOND), ids=lambda shape: "-".join(map(str, map(int, shape))))
def test_full_sizes_with_few_busy_experts(shape: tuple[int, int, int, int, bool, int, int]) -> None:
    case, want = full_size(*shape, busy=2)
    assert_close(run(case), want)


@pytest.mark.full
@pytest.mark.parametrize("shape", (*SEVEN, *BEYOND), ids=lambda shape: "-".join(map(str, map(int, shape))))
def test_full_sizes_with_every_slot_its_own_expert(shape: tuple[int, int, int, int, bool, int, int]) -> None:
    case, want = full_size(*shape, busy=min(shape[0], shape[5] * shape[6]))
    assert_close(run(case), want)
