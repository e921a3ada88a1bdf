"""The weights of a decode step, from a model's configuration, and the rows that ship for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hipforge.errors import ConfigError
from hipforge.ops.core.tuned import shipped_path
from hipforge.tuning import driver
from hipforge.tuning.families import fp8_gemm, fp8_grouped_gemm, gate_up_split, mxfp4_grouped_gemm
from hipforge.tuning.families.fp8_gemm import ScaledCell
from hipforge.tuning.families.fp8_grouped_gemm import ScaledMoeCell
from hipforge.tuning.families.gate_up_split import SplitCell
from hipforge.tuning.grouped import MoeCell
from hipforge.tuning.models import Experts, Weights, weights_of
from hipforge.tuning.table_writer import read_existing
from hipforge.tuning.tuner import Tuner

FOLDER = Path(__file__).parents[2] / "examples" / "configs"
DEGREES = 1, 4, 8
FORMATS = {"qwen3_235b_a22b": 128, "glm_5": 128, "deepseek_v4_1_flash": 32}  # rows that share scales of dense weights
TOKENS = 1, 2, 4, 8, 16, 32, 64
# Of experts: MX-FP8, MXFP4, blocks of 128.
KINDS = {"minimax_m3": 8, "deepseek_v4_1_flash": 4, "gpt_oss_120b": 4, "qwen3_235b_a22b": 128, "glm_5": 128}

EXPECTED = {
    ("llama_3_1_8b", 2): Weights(((4096, 3072), (2048, 4096), (4096, 14336), (7168, 4096)), None),
    ("qwen3_235b_a22b", 1): Weights(((4096, 9216), (8192, 4096)), Experts(128, 8, 4096, 1536)),
    ("qwen3_235b_a22b", 8): Weights(((4096, 1280), (1024, 4096)), Experts(128, 8, 4096, 192)),  # one KV head each
    ("gpt_oss_120b", 1): Weights(((2880, 5120), (4096, 2880)), Experts(128, 4, 2880, 2880)),
    # 23 and 12 of an expert's 90 blocks of 32 columns, not 22.5 and 11.25.
    ("gpt_oss_120b", 4): Weights(((2880, 1280), (1024, 2880)), Experts(128, 4, 2880, 736)),
    ("gpt_oss_120b", 8): Weights(((2880, 640), (512, 2880)), Experts(128, 4, 2880, 384)),
    # Latents of query and keys, queries, the heads' output, queries and keys of the index, dense layers, shared expert.
    ("glm_5", 8): Weights(
        (
            (6144, 2624),
            (2048, 2048),
            (2048, 6144),
            (2048, 4096),
            (6144, 128),
            (6144, 3072),
            (1536, 6144),
            (6144, 512),
            (256, 6144),
        ),
        Experts(256, 8, 6144, 256),
    ),
    # Latents, queries, the index's queries, the second of the output's two projections, the shared expert.
    ("deepseek_v4_1_flash", 1): Weights(
        ((5120, 1792), (1280, 32768), (1280, 4096), (8192, 5120), (5120, 4608), (2304, 5120)),
        Experts(384, 6, 5120, 2304),
    ),
    # With one of eight heads' queries as many as the index's.
    ("deepseek_v4_1_flash", 8): Weights(
        ((5120, 1792), (1280, 4096), (1024, 5120), (5120, 576), (288, 5120)), Experts(384, 6, 5120, 288)
    ),
    ("minimax_m3", 8): Weights(((6144, 1280), (1024, 6144), (6144, 768), (384, 6144)), Experts(128, 4, 6144, 384)),
}


@pytest.mark.parametrize(("name", "tp"), EXPECTED)
def test_weights_are_those_of_one_gpu(name: str, tp: int) -> None:
    assert weights_of(FOLDER / f"{name}.json", tp) == EXPECTED[name, tp]


def _written(path: Path, **config: Any) -> Path:
    path.write_text(json.dumps(config))
    return path


def test_configurations_that_say_too_little_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for config, said in (
        ({"model_type": "mamba"}, r"must have a model_type of llama, qwen3, .*; got 'mamba'"),
        ({"model_type": "llama", "hidden_size": 64}, r"lacks the field 'num_attention_heads' of a llama model"),
        ({"model_type": "llama", "hidden_size": "64", "num_attention_heads": 4}, "has a value that is no number"),
    ):
        with pytest.raises(ConfigError, match=said):
            weights_of(_written(path, **config))
    with pytest.raises(ConfigError, match=r"gpt_oss_120b\.json: --tp 7 does not divide 64"):
        weights_of(FOLDER / "gpt_oss_120b.json", 7)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object; got list"):
        weights_of(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        weights_of(path)


def _dense() -> list[Any]:
    return [
        ScaledCell(n, k, m, block)
        for name, block in FORMATS.items()
        for tp in DEGREES
        for k, n in weights_of(FOLDER / f"{name}.json", tp).dense
        for m in TOKENS
    ]


def _experts(names: tuple[str, ...], block: int | None) -> list[Any]:
    found = []
    for name in names:
        for tp in DEGREES:
            of = weights_of(FOLDER / f"{name}.json", tp).experts
            assert of is not None
            for n, k, a_div, weighted in of.products:
                sizes = [(n, k, a_div, weighted, m * of.top_k) for m in TOKENS]
                more = {"experts": of.count, "top_k": of.top_k}
                found += [MoeCell(*size, **more) for size in sizes] if block is None else [
                    ScaledMoeCell(*size, **more, block=block) for size in sizes
                ]  # fmt: skip
    return found


def _splits() -> list[Any]:
    found = []
    for name, kind in KINDS.items():
        for tp in DEGREES:
            experts = weights_of(FOLDER / f"{name}.json", tp).experts
            assert experts is not None
            (n, k, a_div, weighted), _ = experts.products
            more = {"experts": experts.count, "top_k": experts.top_k, "kind": kind}
            found += [SplitCell(n, k, a_div, weighted, m * experts.top_k, **more) for m in TOKENS]
    return found


@pytest.mark.parametrize(
    ("tuner", "cells"),
    [
        (gate_up_split.TUNER, _splits()),
        (fp8_gemm.TUNER, _dense()),
        (fp8_grouped_gemm.TUNER, _experts(("qwen3_235b_a22b", "glm_5"), 128)),
        (mxfp4_grouped_gemm.TUNER, _experts(("gpt_oss_120b", "deepseek_v4_1_flash"), None)),
    ],
    ids=lambda given: given.family.table.family if isinstance(given, Tuner) else "",
)
def test_rows_that_ship_for_models_are_of_their_weights_and_none_is_needless(
    tuner: Tuner[Any, Any], cells: list[Any]
) -> None:
    rows = read_existing(tuner.family.table, shipped_path(tuner.family.table))
    # Rows of one scale per row are of MiniMax-M3's shapes.
    own = {key for key in rows if tuner.family.table.family != "fp8_gemm" or key[-1] != 0}
    known = set()
    for card in (("gfx950", 256), ("gfx942", 304)):
        of_models = {tuner.key(cell, *card): cell for cell in cells}
        assert driver._needless(tuner, [of_models[key] for key in own & set(of_models)], rows, card) == []
        known |= set(of_models)
    assert own and own <= known
    # Codes of gate and up are mostly the same in every order of sums.
    least = -1.0 if tuner is gate_up_split.TUNER else 0.0
    assert all(least < float(rows[key]["err"]) < tuner.max_error for key in own)
