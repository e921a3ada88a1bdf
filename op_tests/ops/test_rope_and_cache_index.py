"""The index queries and keys of sparse attention in the launch of RoPE and the cache write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.fused_fp8_cases import normal
from helpers.rope_cases import FP8, Case, case

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError

pytestmark = pytest.mark.gfx942

GROUPS = 4
INDEX = ("index_q", "index_k", "index_cache")


def with_index(given: Case, fp8: bool, dim: int = 128, seed: int = 20) -> dict[str, torch.Tensor]:
    """Return the index operands of a case: slices of one tensor, and a cache that holds a pattern."""
    tokens, dtype = given.q.shape[0], given.q.dtype
    index_q, index_k = normal((tokens, GROUPS + 1, dim), dtype, seed).split((GROUPS, 1), dim=1)
    cache = torch.full((*given.k_cache.shape[:2], dim), 0.5).to(FP8 if fp8 else dtype)
    return {"index_q": index_q.clone(), "index_k": index_k, "index_cache": cache}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("storage", ["half", "fp8", "rows", "int4"])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (torch.float16, 64)])
def test_the_index_is_what_a_call_of_its_own_makes_and_the_rest_is_as_without(
    storage: str, dtype: torch.dtype, dim: int, fp8: bool
) -> None:
    """Bit for bit: the same operations on the same values, K's fp8 with a scale of 1."""
    given = case(storage, dtype, dim=dim, rotary_dim=dim // 2, tokens=5, weight_offset=1.0, epsilon=1e-6)
    given.slots[1] = -1
    weights = {f"{name}_weight": normal((dim,), dtype, 30 + i) for i, name in enumerate("qk")}
    of_index = {f"index_{name}_weight": normal((dim,), dtype, 40 + i) for i, name in enumerate("qk")}
    plain, both, index = given.copy(), given.copy(), with_index(given, fp8, dim)
    q = hipforge.rope_and_cache(*plain.tensors(), **plain.options, **weights)
    q_too = hipforge.rope_and_cache(
        *both.tensors(), **both.options, **weights, **index, **of_index,
        index_q_out=(turned := torch.empty_like(index["index_q"])),
    )  # fmt: skip
    assert torch.equal(q, q_too)
    for one, other in zip(plain.written(), both.written(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    fresh = with_index(given, fp8, dim)
    k_cache = fresh["index_cache"].unsqueeze(2)
    alone = replace(
        given.copy(), q=fresh["index_q"], k=fresh["index_k"], v=fresh["index_k"], k_cache=k_cache,
        v_cache=k_cache.clone(),
        options={"weight_offset": 1.0, "epsilon": 1e-6, **({"k_scale": 1.0, "v_scale": 1.0} if fp8 else {})},
    )  # fmt: skip
    own = {f"{name}_weight": of_index[f"index_{name}_weight"] for name in "qk"}
    assert torch.equal(turned, hipforge.rope_and_cache(*alone.tensors(), **alone.options, **own))
    assert torch.equal(index["index_cache"].view(torch.uint8), k_cache[:, :, 0].view(torch.uint8))
    assert not torch.equal(index["index_cache"].float(), torch.full(index["index_cache"].shape, 0.5))


def test_the_torch_path_gives_the_same_and_none_writes_the_queries_in_place() -> None:
    given = case("fp8", exact=True, dim=128)
    one, other = with_index(given, True), with_index(given, True)
    for index in (one, other):
        index["index_q"], index["index_k"] = (index[name].mul(4).round() for name in ("index_q", "index_k"))
    hipforge.rope_and_cache(*given.copy().tensors(), **given.options, **one)
    want = hipforge.ops.reference.rope_and_index(
        other["index_q"], other["index_k"], given.cos_sin, given.positions, other["index_cache"], given.slots,
        fp8_dtype=FP8,
    )  # fmt: skip
    assert torch.equal(one["index_q"], want)
    assert torch.equal(one["index_cache"].view(torch.uint8), other["index_cache"].view(torch.uint8))


def test_it_is_one_launch() -> None:
    given = case("fp8")
    with emulator.counters() as counted:
        hipforge.rope_and_cache(*given.tensors(), **given.options, **with_index(given, True))
    assert counted.launches == 1


def test_refusals_name_what_is_missing() -> None:
    given = case("fp8")
    index = with_index(given, True)
    for left_out in INDEX:
        some = {name: part for name, part in index.items() if name != left_out}
        with pytest.raises(GuardError, match="index_q, index_k and index_cache must all be given, or none"):
            hipforge.rope_and_cache(*given.tensors(), **given.options, **some)
    with pytest.raises(GuardError, match=r"index_cache.*pages and page_size of k_cache"):
        hipforge.rope_and_cache(*given.tensors(), **given.options, **{**index, "index_cache": index["index_cache"][:2]})
    with pytest.raises(GuardError, match=r"index_k.*one index key per token"):
        hipforge.rope_and_cache(*given.tensors(), **given.options, **{**index, "index_k": index["index_q"].clone()})
