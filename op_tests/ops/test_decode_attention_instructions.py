"""What decode attention executes without any option, compared with what it executed before it had options."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_cases import ARCH, ONE, case, lengths

from hipforge import emulator
from hipforge.ops.decode_attention import kernels

# (D, keys, splits, a scale per row) -> wave-instructions on gfx950 of the split kernel and the merge: before there were
# sinks, windows, soft caps, ragged queries and quantised output, and now. What the options may cost is 3 %.
COUNTS = {
    (128, 1024, 16, False): ((76_032, 39_168), (69_952, 28_288)),
    (128, 256, 1, False): ((10_752,), (10_168,)),
    (128, 8192, 128, False): ((608_256, 73_920), (559_616, 68_864)),
    (64, 1024, 16, False): ((60_800, 39_296), (56_832, 28_256)),
    (256, 256, 2, False): ((28_856, 37_120), (26_272, 26_368)),
    (128, 1024, 16, True): ((94_208, 39_168), (86_528, 28_288)),
}
MAX_COST = 1.03


def launches(d, keys, splits, by_rows):
    q, k, v = case(2, 1, 2, 8, d, keys)
    words = torch.full((2, keys, 2), 0x3C00, dtype=torch.int32)  # a scale of 1, a shift of 0
    scales = (None, None, words, words) if by_rows else (ONE, ONE)
    configuration = {"block_n": 64, "waves": 2 if d == 256 else 1, "split_k": splits}
    with emulator.counters() as counted:
        kernels.run_decode_attention(
            q, k, v, None, lengths(keys, keys), *scales, scale=0.1, configuration=configuration
        )
    return [kernel.wave_instructions for kernel in counted.kernels]


@pytest.mark.skipif(ARCH != "gfx950", reason="the figures are of gfx950")
@pytest.mark.parametrize("one", COUNTS)
def test_a_call_without_options_pays_nothing_for_them(one):
    before, now = COUNTS[one]
    found = launches(*one)
    assert all(count <= MAX_COST * limit for count, limit in zip(found, before, strict=True)), (found, before)
    assert all(count <= MAX_COST * limit for count, limit in zip(found, now, strict=True)), (found, now)
