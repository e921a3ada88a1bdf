"""What other ranks leave in a rank's buffer, written by the test: a rank's call alone then has all it waits for."""

from __future__ import annotations

import torch

from hipforge.nn import Peers
from hipforge.ops.peers import HEADER, SLOTS


def deliver(to: Peers, sender: int, part: torch.Tensor, number: int) -> None:
    """Write ``part``, float16 or bfloat16 [rows, cols], as what ``sender`` writes in call ``number``.

    Each 8 elements are four words; units of a word and the number follow each other, first those of all chunks' first
    two words, then of the others.
    """
    rows, cols = part.shape
    words = part.contiguous().view(torch.int32).view(rows, cols // 8, 2, 2).transpose(1, 2)
    signed = (number + 2**31) % 2**32 - 2**31
    units = torch.stack((words, torch.full_like(words, signed)), -1)
    at = HEADER + (number % SLOTS * len(to.addresses) + sender) * to.columns
    to.buffer[to.rank if len(to.buffer) > 1 else 0, :rows, at : at + cols] = units.reshape(rows, cols)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in fp32, in the order of ranks, rounded."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
