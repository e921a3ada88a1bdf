"""The weights of a decode step, from a model's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hipforge.errors import ConfigError
from hipforge.tuning.models import Experts, Weights, weights_of

FOLDER = Path(__file__).parents[2] / "examples" / "configs"

EXPECTED = {
    ("llama_3_1_8b", 2): Weights(((4096, 3072), (2048, 4096), (4096, 14336), (7168, 4096)), None),
    ("qwen3_235b_a22b", 1): Weights(((4096, 9216), (8192, 4096)), Experts(128, 8, 4096, 1536)),
    ("qwen3_235b_a22b", 8): Weights(((4096, 1280), (1024, 4096)), Experts(128, 8, 4096, 192)),  # one KV head each
    ("gpt_oss_120b", 1): Weights(((2880, 5120), (4096, 2880)), Experts(128, 4, 2880, 2880)),
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
    with pytest.raises(ConfigError, match=r"got 'list'"):
        weights_of(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        weights_of(path)
