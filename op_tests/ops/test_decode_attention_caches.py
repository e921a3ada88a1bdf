"""Caches of decode attention that no kernel reads: rows that overlap, pages that are not there; and all other strides.

A kernel cuts a tile's buffer to its keys times the bytes between two of them, so rows in less memory than they have
bytes would read as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.draws import normal

import hipforge
from hipforge import GuardError
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference import quantize_kv_int4

D, HEADS, GROUP, KEYS = 64, 2, 4, 20


class Cache(NamedTuple):
    """``rows`` makes a cache [pages, keys, HEADS, ...]; ``attend(q, k, v, lengths)`` is the op on such caches."""

    rows: Callable[[torch.Tensor], torch.Tensor]
    attend: Callable[..., torch.Tensor]


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return hipforge.decode_attention_fp8(q, k, v, None, lengths)


def _int4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    # One sequence: the op's rows [1, keys, ...] are its page.
    k, v = (part.unsqueeze(3).expand(-1, -1, -1, GROUP, -1) for part in (k, v))
    heads = q.view(1, q.shape[1], HEADS, GROUP, D)
    return hipforge.decode_attention_splitk(heads, k, v, None, None, lengths, num_groups=1)[0].view(q.shape)


CACHES = {
    "fp8": Cache(lambda x: x.to(fp8_dtypes("cpu")[0]), _plain),
    "half": Cache(lambda x: x.half(), _plain),
    "int4": Cache(lambda x: quantize_kv_int4(x, 1), _int4),
}


def _case(kind: str, keys: int = KEYS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = [CACHES[kind].rows(normal(1, keys, HEADS, D, seed=seed)) for seed in (1, 2)]
    return normal(1, 1, HEADS * GROUP, D, seed=0).half(), *rows, torch.tensor([keys], dtype=torch.int32)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("kind", CACHES)
def test_rows_that_overlap_are_refused(kind: str, which: str) -> None:
    q, k, v, lengths = _case(kind)
    for stride in (0, k.stride(1) // 2 // HEADS):
        narrow = (k if which == "k" else v).as_strided(k.shape, (k.stride(0), stride, k.stride(2), 1))
        given = (narrow, v) if which == "k" else (k, narrow)
        with pytest.raises(GuardError, match=rf"{which} has keys of \d+ bytes that overlap, \d+ bytes apart"):
            CACHES[kind].attend(q, *given, lengths)


@pytest.mark.parametrize("kind", CACHES)
def test_other_strides_say_nothing(kind: str) -> None:
    q, k, v, lengths = _case(kind)
    whole = CACHES[kind].attend(q, k, v, lengths)
    keys_last = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (k, v)]
    assert keys_last[0].stride(1) < k.stride(1)  # a row's own bytes: the smallest distance of rows
    assert torch.equal(CACHES[kind].attend(q, *keys_last, lengths), whole)
    one_head = [part[:, :, :1].expand(-1, -1, HEADS, -1) for part in (k, v)]
    copies = [part.contiguous() for part in one_head]
    assert torch.equal(CACHES[kind].attend(q, *one_head, lengths), CACHES[kind].attend(q, *copies, lengths))


@pytest.mark.parametrize("kind", CACHES)
def test_the_stride_of_a_single_key_says_nothing(kind: str) -> None:
    q, k, v, lengths = _case(kind, keys=1)
    whole = CACHES[kind].attend(q, k, v, lengths)
    for stride in (0, 1, 3 * k.stride(1)):
        odd = [part.as_strided(part.shape, (part.stride(0), stride, part.stride(2), 1)) for part in (k, v)]
        assert torch.equal(CACHES[kind].attend(q, *odd, lengths), whole)


def _paged(tables: list[list[int]], lengths: list[int], pages: int = 4, **options: Any) -> torch.Tensor:
    """Attention of a token per sequence over pages of 16 keys."""
    k, v = (normal(pages, 16, HEADS, D, seed=seed).half() for seed in (1, 2))
    q = normal(len(lengths), 1, HEADS * GROUP, D, seed=0).half()
    given = [torch.tensor(part, dtype=torch.int32) for part in (tables, lengths)]
    return hipforge.decode_attention_fp8(q, k, v, *given, **options)


@pytest.mark.parametrize("page", [4, -1, 2**31 - 1])
def test_a_page_that_is_not_there_is_named(page: int, path: str) -> None:
    said = rf"block_tables\[1, 1\] is page {page}, but the cache has pages 0 to 3; sequence 1 reads it, having 17 keys"
    with pytest.raises(GuardError, match=said):
        _paged([[0, 1, 2], [3, page, 0]], [40, 17])


@pytest.mark.parametrize("page", [0, -1])
def test_a_cache_without_pages_holds_no_key(page: int, path: str) -> None:
    assert not _paged([[page], [page]], [0, 0], pages=0).any()
    with pytest.raises(GuardError, match=rf"block_tables\[1, 0\] is page {page}, but the cache has no pages"):
        _paged([[page], [page]], [0, 1], pages=0)


@pytest.mark.parametrize("page", [4, -1, 2**31 - 1])
def test_what_no_sequence_reads_may_name_any_page(page: int, path: str) -> None:
    past_the_end = [[0, page, page], [3, 1, page], [page, page, page]]
    assert torch.equal(_paged(past_the_end, [16, 17, 0]), _paged([[0, 0, 0], [3, 1, 0], [0, 0, 0]], [16, 17, 0]))
    # The last 8 of 40 keys are all in the third page, the last 9 are not.
    windowed = _paged([[page, page, 2]], [40], window=8)
    assert torch.equal(windowed, _paged([[0, 1, 2]], [40], window=8))
    with pytest.raises(GuardError, match=r"block_tables\[0, 1\] is page"):
        _paged([[page, page, 2]], [40], window=9)
