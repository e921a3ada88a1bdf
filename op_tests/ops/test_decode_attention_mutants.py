"""The tests of decode attention on kernels with one deliberate mistake each: all of them must be noticed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.attention_cases import FP8, NAN_CODE, ONE, case, check, lengths, paged, rng
from helpers.planted_faults import planted

from hipforge import emulator
from hipforge.errors import EmulatorFault
from hipforge.ops.decode_attention import kernels
from hipforge.ops.reference.attention import dequantize_kv_fp8, quantize_kv_fp8

VARIANTS = {"HF_HEAD_DIM": [64, 256], "HF_INPUT": ["bf16"], "HF_BLOCK_N": [32]}


@dataclass(frozen=True)
class Mutant:
    """A line of one source, what takes its place, and the head dimension and waves where it matters."""

    name: str
    file: str
    line: str
    becomes: str
    d: int = 64
    waves: int = 1


WHOLE = Mutant("whole", "problem.h", "", "")
KERNEL, PROBLEM, QUERY, ROWS = "amd/decode_kernel.h", "problem.h", "amd/query.h", "amd/tile_rows.h"
RANGES, MERGE, END = "amd/merge_ranges.h", "amd/merge_kernel.h", "amd/row_end.h"
TWO_HALVES = {"d": 256, "waves": 2}
MUTANTS = [
    Mutant("one_key_too_many", ROWS, "if (own_left <= kTileN * t + r)", "if (own_left < kTileN * t + r)"),
    Mutant("sums_not_rescaled", KERNEL, "j < kPerLane; ++j) acc[j] *= keep;", "j < kPerLane; ++j) acc[j] *= 1.f;"),
    Mutant("finer_term_lost", QUERY, "values[3] = (values[3] - high[1]) * (1 << kTermBits);", "values[3] = 0.f;"),
    Mutant("shift_of_k_forgotten", KERNEL, "own.scale * scores[t] + own.shift * shift", "own.scale * scores[t]"),
    Mutant("shift_of_v_forgotten", KERNEL, "shifted += weight.hi * own.shift.hi;", ""),
    Mutant("page_never_turned", PROBLEM, "index += turned ? 1 : 0;", ""),
    Mutant("keys_past_the_end", PROBLEM, "end = min(begin + each * kBlockN, length);", "end = begin + each * kBlockN;"),
    Mutant("splits_weighed_alike", MERGE, "= dev::of_lane(held, (first + i) % dev::kWaveSize);", "= 1.f;"),
    Mutant("ranges_not_rescaled", RANGES, "wave.acc[j] *= keep;", "wave.acc[j] *= 1.f;", waves=2),
    Mutant("half_of_d_forgotten", KERNEL, "scores[t] += other[t * dev::kWaveSize];", ";", **TWO_HALVES),
    Mutant("half_not_waited_for", KERNEL, "__syncthreads();  // before the other slot is read", "", **TWO_HALVES),
    Mutant("waves_not_rescaled", MERGE, "exp2f(largest[w] - base);", "exp2f(0.f);"),
    Mutant("sink_forgotten", END, "total * keep + __builtin_amdgcn_exp2f(weight - base)", "total * keep"),
    Mutant("sink_in_every_split", KERNEL, "p.splits == 1 ? p.sinks", "p.splits > 0 ? p.sinks"),
    Mutant("sink_of_another_head", MERGE, "problem.sinks, head);", "problem.sinks, 0);"),
    Mutant(
        "window_off_by_one",
        ROWS,
        "static_cast<int32_t>(p.window) - first,",
        "static_cast<int32_t>(p.window) + 1 - first,",
    ),
    Mutant(
        "window_of_the_first_token",
        PROBLEM,
        "length > p.window ? length - p.window : 0",
        "length > p.window + 2 ? length - p.window - 2 : 0",
    ),
    Mutant("cap_forgotten", KERNEL, "if (p.cap != 0.f) cap_scores(problem_here(), scores);", ""),
    Mutant("nan_left_in_a_hidden_key", KERNEL, "bytes[r][word] &= ~((nans >> 7) * 0xFF);", ""),
    Mutant("nan_taken_from_all", KERNEL, "marks[r] = nans >> 1;", "marks[r] = 0;"),
    Mutant("words_of_a_hidden_key", KERNEL, "return has_special_half(word) ? 0 : word;", "return word;"),
    Mutant("slot_taken_while_read", KERNEL, "__syncthreads();  // before a slot is written again", "", **TWO_HALVES),
]


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """The raw op of every mutant, and of the kernel itself."""
    root = tmp_path_factory.mktemp("mutants")
    return {
        mutant.name: planted(
            root / mutant.name, kernels.decode_attention_fp8_out, f"decode_attention/{mutant.file}", mutant.line,
            mutant.becomes, unit="decode_attention/amd/decode_attention_fp8.cu", variants=VARIANTS,
        )
        for mutant in (WHOLE, *MUTANTS)
    }  # fmt: skip


def plain_is_right(d, waves):
    q, k, v = case(2, 2, 1, 3, d, 144, seed=1)
    seqlens = lengths(144, 37)
    (k_pages, tables), (v_pages, _) = paged(k, 48), paged(v, 48)
    configuration = {"block_n": 32, "waves": waves, "split_k": 5}  # a wave of the merge has two
    got = kernels.run_decode_attention(
        q, k_pages, v_pages, tables, seqlens, ONE, ONE, scale=1.0, configuration=configuration
    )
    check(q, k.double(), v.double(), seqlens, *got, 1.0)


def packed_is_right():
    """Rows of equal elements are their shift alone, so that only the shift's own terms count."""
    q, _, _ = case(1, 1, 1, 3, 64, 1, seed=2)
    rows = torch.randn(1, 80, 1, 1, generator=rng(3)).half().float().expand(-1, -1, -1, 64)
    words, shifts = quantize_kv_fp8(rows, FP8)
    x = dequantize_kv_fp8(words, shifts, FP8)
    data = words.view(torch.uint8)
    got = kernels.run_decode_attention(
        q,
        data,
        data,
        None,
        lengths(80),
        k_scale_shift=shifts,
        v_scale_shift=shifts,
        scale=0.1,
        configuration={"block_n": 32, "waves": 1, "split_k": 2},
    )
    check(q, x, x, lengths(80), *got, 0.1)


def options_are_right():
    q, k, v = case(2, 3, 2, 2, 64, 100, seed=4)
    for splits in (1, 3):
        # 100 - 35: the first key that the last token sees is the second one of a tile.
        for options in ({"sinks": torch.tensor([0.0, 3.0, -2.0, 1.0])}, {"window": 35}, {"softcap": 2.0}):
            got = kernels.run_decode_attention(
                q,
                k,
                v,
                None,
                lengths(100, 23),
                ONE,
                ONE,
                scale=0.2,
                configuration={"block_n": 32, "waves": 1, "split_k": splits},
                **options,
            )
            check(q, k.double(), v.double(), lengths(100, 23), *got, 0.2, **options)


def hidden_is_right():
    """The last key's V is NaN, or its scale; of two tokens only the second one sees it."""
    q, k, v = case(1, 2, 1, 3, 64, 37, seed=3)
    words = torch.ones(1, 37, 1, 2, dtype=torch.float16).view(torch.int32).squeeze(-1)
    spoiled, spoiled_words = v.clone(), words.clone()
    spoiled.view(torch.uint8)[0, 36, 0, 5], spoiled_words[0, 36] = NAN_CODE, 0x7E007E00

    def run(v, **scales):
        return kernels.run_decode_attention(
            q, k, v, None, lengths(37), **scales, scale=0.1, configuration={"block_n": 32, "waves": 1, "split_k": 1}
        )[0][0]

    clean, got = run(v, k_scale=ONE, v_scale=ONE), run(spoiled, k_scale=ONE, v_scale=ONE)
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1].isnan(), (torch.arange(64) == 5).expand(3, 64))
    by_rows = {"k_scale_shift": words}
    clean, got = (run(v, **by_rows, v_scale_shift=rows) for rows in (words, spoiled_words))
    assert torch.equal(got[0], clean[0]) and got[1].isnan().all()


def noticed(monkeypatch, entry, d, waves):
    monkeypatch.setattr(kernels, "decode_attention_fp8_out", entry)
    try:
        for order in ("forward", "reverse"):
            with emulator.options(checks="all", wave_order=order):
                plain_is_right(d, waves)
        if d == 64:
            with emulator.options(checks="all"):
                packed_is_right()
                hidden_is_right()
                options_are_right()
    except (AssertionError, EmulatorFault):
        return True
    return False


@pytest.mark.parametrize(("d", "waves"), sorted({(m.d, m.waves) for m in MUTANTS}))
def test_the_kernel_itself_passes(entries, monkeypatch, d, waves):
    assert not noticed(monkeypatch, entries["whole"], d, waves)


# One of each kind; the others run with --full.
QUICK = {
    "one_key_too_many",
    "finer_term_lost",
    "splits_weighed_alike",
    "half_not_waited_for",
    "nan_left_in_a_hidden_key",
    "window_off_by_one",
    "sink_in_every_split",
}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.full) for m in MUTANTS],
)
def test_a_mistake_is_noticed(entries, monkeypatch, mutant):
    assert noticed(monkeypatch, entries[mutant.name], mutant.d, mutant.waves)
