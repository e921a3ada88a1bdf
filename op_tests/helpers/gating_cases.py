"""Logits whose order no rounding changes, the choice of experts written out, and the error of the weights."""

from __future__ import annotations

import torch

from helpers.errors import relative


def rng(seed):
    return torch.Generator().manual_seed(seed)


def by_hand(logits, k, bias=None, groups=1, topk_groups=1, scoring="softmax"):
    """The chosen ids, written out as sorting of tuples."""
    chosen = []
    for row in logits.float():
        experts = range(len(row))
        if bias is None:
            values = row.tolist()
        else:
            scores = torch.sigmoid(row) if scoring == "sigmoid" else torch.softmax(row, 0)
            values = (scores + bias).tolist()
        size = len(row) // groups

        def order(values):
            return lambda i: (values[i] != values[i], -values[i] if values[i] == values[i] else 0, i)

        ranked = sorted(experts, key=order(values))
        if groups > 1:
            worth = []
            for g in range(groups):
                own = [values[e] for e in ranked if e // size == g]
                worth.append(
                    own[0] if bias is None or size == 1 else float(torch.tensor(own[0]) + torch.tensor(own[1]))
                )
            kept = sorted(range(groups), key=order(worth))[:topk_groups]
            ranked = [e for e in ranked if e // size in kept]
        chosen.append(ranked[:k])
    return torch.tensor(chosen, dtype=torch.int32)


def well_apart(shape, seed, dtype=torch.float32):
    """Logits whose scores differ by more than any rounding: a permutation of few steps in each row."""
    tokens, experts = shape
    rows = [torch.randperm(experts, generator=rng(seed + t)) for t in range(tokens)]
    # 512 steps of 2^-6 around 0; sigmoid and exp of neighbours differ by 2^-6 relative at e^-4 or more: 2^-12 in all.
    return ((torch.stack(rows) - experts // 2) * 2.0**-6).to(dtype)


def assert_weights(got, want):
    # exp and the division are within one unit in the last place (2^-23 relative) here and in torch; the sum has at most
    # 8 + 6 roundings of 2^-24 either way, the softmax's and the weights': 40 of them in all are generous.
    relative(got, want)  # told to who listens
    torch.testing.assert_close(got, want, rtol=40 * 2.0**-24, atol=1e-37, equal_nan=True)
