"""The kernels that score and choose key blocks, beside float64 and beside the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hipforge
import hipforge.ops.reference as reference
from hipforge import devices, emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention import ARCH_DTYPES, FAMILY
from hipforge.ops.decode_attention.family import problem_of
from hipforge.ops.reference.attention import paged_attention

pytestmark = pytest.mark.gfx942

ARCH = devices.current().default_arch
FP8 = ARCH_DTYPES.get(ARCH or "", torch.float8_e4m3fn)  # of the reference device: any
GROUPS = 4
# (sequences, tokens, pages, page size, block size): one column of 16 queries, two, four, and more than a z has.
SHAPES = [(2, 1, 4, 128, 128), (1, 5, 20, 16, 64), (2, 16, 6, 32, 32), (1, 20, 5, 48, 16), (3, 1, 1, 16, 128)]


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def case(
    shape: tuple[int, ...], dtype: torch.dtype, cache: torch.dtype, d: int = 128, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return index queries, a paged cache of index keys, tables and lengths; what no sequence holds is NaN."""
    batch, tokens, pages, page_size, _ = shape
    g = rng(seed)
    q = torch.randn(batch, tokens, GROUPS, d, generator=g).to(dtype)
    keys = torch.randn(pages * batch + 2, page_size, d, generator=g)
    tables = torch.randperm(pages * batch + 2, generator=g)[: pages * batch].view(batch, pages).int()
    lengths = torch.randint(1, pages * page_size + 1, (batch,), generator=g).int()
    for b in range(batch):
        for page in range(pages):
            keys[tables[b, page], max(0, int(lengths[b]) - page * page_size) :] = torch.nan
    keys[[page for page in range(len(keys)) if page not in tables]] = torch.nan
    return q, keys.to(cache), tables, lengths


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("dtype", "d"), [(torch.bfloat16, 128), (torch.float16, 64)])
def test_scores_are_those_of_float64(shape: tuple[int, ...], fp8: bool, dtype: torch.dtype, d: int) -> None:
    """Products are exact in float32; a sum of D of them is off by at most D 2^-24 times the sum of their magnitudes."""
    q, keys, tables, lengths = case(shape, dtype, FP8 if fp8 else dtype, d)
    got = hipforge.sparse_block_scores(q, keys, tables, lengths, block_size=shape[4])
    options = {"block_size": shape[4], "dtype": torch.float64}
    want = reference.sparse_block_scores(q, keys.float(), tables, lengths, **options)
    size = reference.sparse_block_scores(q.abs(), keys.float().abs(), tables, lengths, **options)
    assert torch.equal(want.isinf(), got.isinf()) and not got.isnan().any()
    seen = ~want.isinf()
    assert ((got.double() - want).abs()[seen] <= d * 2.0**-24 * size[seen]).all()


def test_scores_of_integers_are_exact() -> None:
    q, keys, tables, lengths = case(SHAPES[1], torch.bfloat16, torch.float32, seed=3)
    q = q.float().mul(4).round().clamp(-15, 15).bfloat16()
    keys = keys.mul(4).round().clamp(-15, 15)
    want = reference.sparse_block_scores(q, keys, tables, lengths, block_size=64)
    for cache in (torch.bfloat16, FP8):
        assert torch.equal(hipforge.sparse_block_scores(q, keys.to(cache), tables, lengths, block_size=64), want)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_nan_that_a_token_sees_is_the_blocks_score_and_no_other(fp8: bool) -> None:
    q, keys, tables, _ = case((1, 2, 4, 16, 32), torch.bfloat16, torch.float32)
    keys = torch.where(keys.isnan(), 0.5, keys)
    keys[tables[0, 2], 3] = torch.nan  # key 35 of the sequence, in block 1
    keys = keys.to(FP8 if fp8 else torch.bfloat16)
    scores = hipforge.sparse_block_scores(q, keys, tables, torch.tensor([36]).int(), block_size=32)
    assert scores.isnan().nonzero()[:, 1].unique().tolist() == [1]  # the token at 35 sees it
    assert scores[0, 1, :, 1].isnan().all() and not scores[..., 0].isnan().any()


CHOICES = [
    (1, 1, 5, 8, 3, 1), (2, 3, 40, 8, 16, 2), (1, 1, 300, 1, 16, 1), (1, 2, 1100, 4, 16, 0), (1, 1, 4096, 2, 16, 3),
]  # fmt: skip


def lists(batch: int, blocks: int, per_block: int, seed: int) -> tuple[Tensor, Tensor]:
    tables = torch.randint(0, 1 << 20, (batch, blocks * per_block), generator=rng(seed)).int()
    lengths = torch.randint(blocks * 64, blocks * 128 + 1, (batch,), generator=rng(seed + 1)).int()
    return tables, lengths


@pytest.mark.parametrize(("batch", "tokens", "blocks", "per_block", "topk", "local"), CHOICES)
def test_the_choice_is_the_references(
    batch: int, tokens: int, blocks: int, per_block: int, topk: int, local: int
) -> None:
    """Scores have few values, so that most choices are ties; some are NaN, infinite or -0."""
    tables, lengths = lists(batch, blocks, per_block, 1)
    specials = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1.5, -2.0, 3.0, 3.0])
    scores = specials[torch.randint(0, 9, (batch, tokens, GROUPS, blocks), generator=rng(2))]
    scores = torch.where(torch.rand(scores.shape, generator=rng(3)) < 0.9, scores.nan_to_num(0, 0, 0), scores)
    options = {"page_size": 128 // per_block, "topk": topk, "local_blocks": local}
    found = hipforge.sparse_topk_blocks(scores, tables, lengths, **options)
    for got, want in zip(found, reference.sparse_topk_blocks(scores, tables, lengths, **options), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("lengths", [(0, 1), (128, 129), (2048, 2049), (5000, 2)])
def test_the_choice_at_the_borders_of_blocks(lengths: tuple[int, int]) -> None:
    tables = torch.arange(2 * 40).int().view(2, 40)
    scores = torch.randn(2, 4, GROUPS, 40, generator=rng(5))
    seqlens = torch.tensor(lengths).int()
    found = hipforge.sparse_topk_blocks(scores, tables, seqlens, page_size=128)
    for got, want in zip(found, reference.sparse_topk_blocks(scores, tables, seqlens, page_size=128), strict=True):
        assert torch.equal(got, want)


def test_tables_without_a_page_have_no_block_to_choose(path: str) -> None:
    index = torch.ones(2, 1, 4, 128).bfloat16(), torch.empty(0, 128, 128).bfloat16()
    for pages in (0, 1):  # a cache without pages, and what its tables may hold then
        scores = hipforge.sparse_block_scores(*index, torch.zeros(2, pages).int(), torch.zeros(2).int())
        assert scores.shape == (2, 1, 4, pages) and scores.eq(-torch.inf).all()
    empty = torch.empty(2, 0, dtype=torch.int32)
    for length in (0, 7):
        given = torch.empty(2, 3, 4, 0), empty, torch.full((2,), length, dtype=torch.int32)
        ids, pages, keys = hipforge.sparse_topk_blocks(*given, page_size=16, topk=2, block_size=32)
        assert ids.eq(-1).all() and not pages.any() and not keys.any()
        assert (ids.shape, pages.shape, keys.shape) == ((2, 3, 4, 2), (6, 4, 4), (6, 4))


@pytest.mark.parametrize("cache", ["fp8", "half"])
def test_attention_over_the_chosen_blocks_is_that_of_float64(cache: str) -> None:
    """Weights are rounded to 2^-8 of them, the output to 2^-8 of it: 2^-7 of the largest value together."""
    page, topk, tokens = 32, 3, 3
    dtype = FP8 if cache == "fp8" else torch.bfloat16
    q, keys, tables, lengths = case((2, tokens, 16, page, 64), torch.bfloat16, torch.bfloat16, 64)
    lengths[0] = 16 * page - 5
    k, v = (torch.randn(len(keys), page, GROUPS, 64, generator=rng(seed)).to(dtype) for seed in (7, 8))
    scores = hipforge.sparse_block_scores(q, keys, tables, lengths, block_size=64)
    ids, pages, seen = hipforge.sparse_topk_blocks(scores, tables, lengths, page_size=page, topk=topk, block_size=64)
    heads = torch.randn(2 * tokens, 1, 2 * GROUPS, 64, generator=rng(9)).bfloat16()
    scales = torch.tensor([0.5, 1.0, 2.0, 0.25]) if cache == "fp8" else torch.ones(GROUPS)
    for split_k in (1, 4):
        out, lse = hipforge.decode_attention_fp8(
            heads, k, v, pages, seen, scales, scales, split_k=split_k, return_lse=True
        )
        wide = [each.double() * scales.double().view(-1, 1) for each in (k, v)]
        want, want_lse = paged_attention(heads, *wide, pages, seen, None, True, dtype=torch.float64)
        assert ((out.double() - want).abs() <= 2.0**-7 * wide[1].abs().amax() + 1e-7).all()
        torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    assert (ids >= 0).sum(-1).max() == topk


def test_each_kv_heads_own_keys_give_what_a_call_for_the_head_gives() -> None:
    """Bit for bit, sinks and scales of each head among what differs."""
    g = rng(4)
    k, v = (torch.randn(12, 16, 2, 64, generator=g).to(FP8) for _ in range(2))
    q = torch.randn(3, 2, 8, 64, generator=g).bfloat16()
    tables = torch.randint(0, 12, (3, 2, 5), generator=g).int()
    lengths = torch.tensor([[80, 3], [0, 41], [64, 17]]).int()
    scales, sinks = torch.tensor([0.5, 2.0]), torch.randn(8, generator=g)
    options: dict[str, Any] = {"split_k": 2, "return_lse": True}
    out, lse = hipforge.decode_attention_fp8(q, k, v, tables, lengths, scales, scales, sinks=sinks, **options)
    for h in range(2):
        mine = slice(4 * h, 4 * h + 4)
        one, one_lse = hipforge.decode_attention_fp8(
            q[:, :, mine].contiguous(), k[:, :, h : h + 1], v[:, :, h : h + 1], tables[:, h].contiguous(),
            lengths[:, h].contiguous(), scales[h : h + 1], scales[h : h + 1], sinks=sinks[mine].contiguous(), **options,
        )  # fmt: skip
        assert torch.equal(out[:, :, mine], one) and torch.equal(lse[:, mine], one_lse)


def test_a_kernel_without_lists_of_keys_leaves_them_to_torch() -> None:
    q, cache = torch.zeros(1, 1, 8, 64).half(), torch.zeros(4, 16, 2, 64, dtype=torch.uint8)
    for tables, refused in ((torch.zeros(1, 2, 3).int(), True), (torch.zeros(1, 3).int(), False)):
        reason = FAMILY.envelope(problem_of(q, cache, tables), "sm_90")
        assert (reason is not None) == refused
    assert problem_of(q, cache, torch.zeros(1, 2, 3).int()).max_keys == 48


def test_each_op_is_one_launch_and_reads_the_index_keys_once() -> None:
    q, keys, tables, lengths = case((1, 1, 16, 128, 128), torch.bfloat16, FP8)
    lengths[:] = 16 * 128
    with emulator.counters() as counted:
        scores = hipforge.sparse_block_scores(q, keys, tables, lengths)
        hipforge.sparse_topk_blocks(scores, tables, lengths, page_size=128)
    assert counted.launches == 2
    assert counted.tensors["index_cache"].loaded == counted.tensors["index_cache"].unique_loaded == 16 * 128 * 128


def test_true_is_one_local_block(path: str) -> None:
    scores, tables = torch.tensor([3.0, 1.0, 2.0, 0.0]).view(1, 1, 1, 4), torch.tensor([[7, 6, 5, 4]]).int()
    options: dict[str, Any] = {"page_size": 16, "block_size": 16, "topk": 3, "local_blocks": True}
    found, _, _ = hipforge.sparse_topk_blocks(scores, tables, torch.tensor([50]).int(), **options)
    assert found.flatten().tolist() == [0, 2, 3]


def test_refusals_say_what_is_accepted() -> None:
    q, keys, tables, lengths = case(SHAPES[0], torch.bfloat16, torch.bfloat16)
    with pytest.raises(GuardError, match=r"block_size must be one of 16, 32, 64, 128; got 100"):
        hipforge.sparse_block_scores(q, keys, tables, lengths, block_size=100)
    with pytest.raises(GuardError, match=r"index_cache.*D of q"):
        hipforge.sparse_block_scores(q, keys[..., :64], tables, lengths)
    scores = hipforge.sparse_block_scores(q, keys, tables, lengths)
    with pytest.raises(GuardError, match=r"scores must have the 2 blocks of block_tables; got shape"):
        hipforge.sparse_topk_blocks(scores, tables, lengths, page_size=64)
    with pytest.raises(GuardError, match="topk must be 1 to 16; got 17"):
        hipforge.sparse_topk_blocks(scores, tables, lengths, page_size=128, topk=17)
    with pytest.raises(GuardError, match="local_blocks must be 0 to topk = 2: they are always chosen; got 3"):
        hipforge.sparse_topk_blocks(scores, tables, lengths, page_size=128, topk=2, local_blocks=3)
    with pytest.raises(GuardError, match="page_size must be a multiple of 16 that divides block_size = 128; got 48"):
        hipforge.sparse_topk_blocks(scores, tables, lengths, page_size=48)


def test_a_dim_without_a_kernel_is_torchs_and_explain_says_why() -> None:
    q, keys, tables, lengths = case(SHAPES[0], torch.bfloat16, torch.bfloat16, d=96)
    found = hipforge.explain("sparse_block_scores", q, keys, tables, lengths)
    assert found.path == "torch" and found.refused["kernel"] == "D must be one of (64, 128); got 96"
    got = hipforge.sparse_block_scores(q, keys, tables, lengths)
    assert torch.equal(got, reference.sparse_block_scores(q, keys, tables, lengths))
