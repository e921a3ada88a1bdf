"""hipforge time-model: what it reads, counts and refuses, on a model small enough to run in seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from hipforge.cli import decode_model, decode_ops, decode_step, decode_twin
from hipforge.cli.main import cli
from hipforge.errors import ConfigError
from hipforge.nn import CacheStep, SparseBlocks
from hipforge.tuning.models import weights_of

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"

DENSE = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384, "vocab_size": 256,
}  # fmt: skip
EXPERTS = {
    **DENSE, "model_type": "minimax_m3_vl_text", "rotary_dim": 32, "intermediate_size": 128,
    "dense_intermediate_size": 384, "shared_intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
    "swiglu_limit": 7.0, "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def modelled(path: Path, *options: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(cli, ["time-model", str(path), "--json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["modelled"]


def test_a_step_has_every_op_of_every_layer(tmp_path: Path) -> None:
    (dense,) = modelled(written(tmp_path, DENSE), "--context", "48")
    calls = {line["op"]: line["calls"] for line in dense["lines"]}
    assert calls == {
        "norm + quantise": 7, "qkv": 3, "norm, rope, store k v": 3, "attention, quantise": 3, "o_proj": 3,
        "gate_up": 3, "swiglu + quantise": 3, "down": 3, "lm_head": 1,
    }  # fmt: skip
    assert dense["us"] == pytest.approx(sum(line["us"] * line["calls"] for line in dense["lines"]))
    assert all(line["launches"] == 1 and line["us"] > 0 for line in dense["lines"])  # 9 launches per layer
    picture = tmp_path / "step.png"
    two = modelled(
        written(tmp_path, {"text_config": EXPERTS}), "--context", "48", "--context", "2048", "--tp", "2", "--plot",
        str(picture),
    )  # fmt: skip
    counts = {line["op"]: line["calls"] * line["launches"] for line in two[0]["lines"]}
    assert counts["norm + quantise, copy"] == counts["weighted sum"] == counts["experts' down"] == 2
    assert counts["norm + quantise"] == 5 and counts["gate_up"] == 1
    assert sum(counts.values()) == 9 + 2 * 12 + 2  # a dense layer, two of experts, the last norm and the head
    assert picture.read_bytes().startswith(b"\x89PNG")
    # A longer context takes longer, and nothing but attention does.
    short, long = ({line["op"]: line["us"] for line in step["lines"]} for step in two)
    assert long["attention, quantise"] > short["attention, quantise"]
    assert {op for op in short if short[op] != long[op]} == {"attention, quantise"}


SPARSE = {
    **EXPERTS, "head_dim": 64, "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "index_n_heads": 2,
    "index_head_dim": 64, "index_block_size": 64, "index_topk_blocks": 2,
}  # fmt: skip


def test_sparse_layers_choose_blocks_once_a_sequence_may_have_more_keys(tmp_path: Path) -> None:
    path = written(tmp_path, SPARSE)
    steps = modelled(path, *(part for keys in (128, 192, 4096) for part in ("--context", str(keys))))
    full, short, long = ({line["op"]: line for line in step["lines"]} for step in steps)
    chosen = {"scores of key blocks", "choice of key blocks", "attention over chosen blocks, quantise"}
    assert chosen & set(full) == set() and full["attention, quantise"]["calls"] == 3
    assert {name: short[name]["calls"] for name in (*chosen, "attention, quantise")} == {
        **dict.fromkeys(chosen, 2), "attention, quantise": 1
    }  # fmt: skip
    # Index rows are part of the first product, and the index alone grows with the context.
    assert short["qkv, index"]["calls"] == short["norm, rope, store k v, index"]["calls"] == 2
    assert {op for op in short if short[op]["us"] != long[op]["us"]} <= {
        "scores of key blocks", "choice of key blocks", "attention, quantise"
    }  # fmt: skip
    assert long["scores of key blocks"]["us"] > short["scores of key blocks"]["us"]


def test_the_chosen_blocks_are_those_of_the_cache(tmp_path: Path) -> None:
    shape = decode_step.read(written(tmp_path, SPARSE))
    model = decode_model.Model(replace(shape, layers=(0, 1), sparse=shape.sparse._replace(layers=1)),
                             decode_model.Random(torch.device("cpu")))  # fmt: skip
    chain = decode_ops.chain(model, 1, 192)
    decode_twin.fill(chain)
    generator = torch.Generator().manual_seed(3)
    chain.cache.index.copy_(torch.randn(chain.cache.index.shape, generator=generator))
    step = CacheStep(1, *(torch.zeros(1, dtype=torch.int64) for _ in range(2)), chain.tables, torch.tensor([192]).int())
    names = [op.name for op in chain.ops]
    for op in chain.ops[: names.index("attention over chosen blocks, quantise") + 1]:
        op.call()
    at = chain.ops[names.index("scores of key blocks")].planned.args
    over = chain.ops[names.index("attention over chosen blocks, quantise")].planned
    blocks = SparseBlocks(2, 64, 1)
    want = chain.cache.attend(0, over.args[0][:, 0], step, out_format="mxfp8", index_q=at[0][:, 0], blocks=blocks)
    assert torch.equal(over.keywords["out"].view(torch.uint8).flatten(), want[0].view(torch.uint8).flatten())
    assert torch.equal(over.keywords["scale_out"].flatten(), want[1].flatten())


LATENTS = {
    "model_type": "glm_moe_dsa", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "index_n_heads": 2, "index_head_dim": 64, "intermediate_size": 384, "first_k_dense_replace": 1,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "vocab_size": 256,
}  # fmt: skip
GROUPS = {
    **LATENTS, "model_type": "deepseek_v41_text", "head_dim": 64, "o_groups": 4, "o_lora_rank": 32, "swiglu_limit": 10.0
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "around"),
    [
        (LATENTS, {"latents": 3, "index keys": 3, "queries": 3, "index queries": 3, "o_proj": 3}),
        (GROUPS, {"latents": 3, "queries": 3, "index queries": 3, "o_proj of a group of heads": 6, "quantise": 3,
                  "o_proj": 3}),
    ],
)  # fmt: skip
def test_a_model_whose_attention_has_no_op_is_modelled_without_it_when_asked(
    tmp_path: Path, config: dict[str, Any], around: dict[str, int]
) -> None:
    path = written(tmp_path, config)
    refused = CliRunner().invoke(cli, ["time-model", str(path), "--tp", "2"])
    assert refused.exit_code == 1 and "--without-attention models the rest of a step and says so" in refused.output
    done = CliRunner().invoke(
        cli, ["time-model", str(path), "--tp", "2", "--batch", "2", "--without-attention", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["notes"] == ["without attention"]
    calls = {line["op"]: line["calls"] for line in found["modelled"][0]["lines"]}
    assert calls == {
        **around, "norm of the queries' latent + quantise": 3, "norm + quantise": 5, "gate_up": 1,
        "swiglu + quantise": 1, "down": 1, "lm_head": 1,
        **dict.fromkeys(("norm + quantise, copy", "router", "choice of experts", "sorted slots",
                         "experts' gate_up, swiglu", "experts' down", "weighted sum"), 2),
    }  # fmt: skip
    assert all(line["launches"] == 1 for line in found["modelled"][0]["lines"])


def test_projections_around_attention_have_the_sizes_that_tuners_take() -> None:
    for name in ("glm_5", "deepseek_v4_1_flash"):
        shape = decode_step.divided(decode_step.read(CONFIGS / f"{name}.json"), 8)
        model = decode_model.Model(replace(shape, layers=(0, 1)), decode_model.Untouched())
        sizes = [tuple(by.weight.shape[::-1]) for by in model.layers[0].around]
        assert sizes == [(each.k, each.n) for each in shape.projections]
        dense = weights_of(CONFIGS / f"{name}.json", 8).dense
        assert {size for size, each in zip(sizes, shape.projections, strict=True) if each.reads != "groups"} <= set(
            dense
        )
        ops = [op.name for op in decode_ops.chain(model, 1, 64).ops]
        assert not any("attention" in op for op in ops)


def test_what_has_attention_is_not_modelled_without_it(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["time-model", str(written(tmp_path, DENSE)), "--without-attention"])
    assert done.exit_code == 1 and "is for models whose attention has no op here; qwen3's has one" in done.output


def test_experts_are_divided_by_whole_blocks_as_servers_do() -> None:
    shape = decode_step.read(CONFIGS / "gpt_oss_120b.json")
    with pytest.raises(ConfigError, match="--tp 8 does not divide the experts' I, 2880"):
        decode_step.divided(shape, 8)
    part = decode_step.largest_part(shape, 8)
    assert (part.expert_inner, part.notes) == (384, ("experts of 384 columns, not 360, in whole blocks of 32",))
    assert decode_step.largest_part(shape, 2) == decode_step.divided(shape, 2)


def test_the_shipped_configurations_divide_by_eight() -> None:
    m3 = decode_step.divided(decode_step.read(CONFIGS / "minimax_m3.json"), 8)
    assert m3.sparse == (60, 16, 128, 1)
    assert (m3.heads, m3.expert_inner, m3.experts, m3.layers, m3.limit) == ((8, 1), 384, 128, (0, 60), 7.0)
    llama = decode_step.divided(decode_step.read(CONFIGS / "llama_3_1_405b.json"), 8)
    assert (llama.heads, llama.inner, llama.head_dim, llama.vocabulary) == ((16, 1), 6656, 128, 16032)
    names = {op.name for op in decode_ops.chain(decode_model.Model(llama, decode_model.Untouched()), 1, 8).ops}
    assert "gate_up" in names and "router" not in names


def test_what_cannot_be_modelled_is_refused(tmp_path: Path) -> None:
    known = "llama, qwen3, qwen3_moe, gpt_oss, minimax_m3_vl_text, glm_moe_dsa or deepseek_v41_text"
    for config, message in (
        ({**DENSE, "model_type": "mamba"}, f"model_type must be {known}; got 'mamba'"),
        ({"model": "llama"}, "must have a model_type, as the config.json of a model has; got None"),
        ({key: value for key, value in DENSE.items() if key != "vocab_size"}, "lacks the field 'vocab_size'"),
        ({**SPARSE, "layer_types": ["minimax_m3_sparse", *["full_attention"] * 2]}, "must come last in layer_types"),
        ({**SPARSE, "index_n_heads": 4}, "index queries must be as many and as wide as KV heads, 2 of 64; got 4 of 64"),
        ({**LATENTS, "q_lora_rank": "x"}, "has a value that a glm_moe_dsa model cannot have"),
        ({**EXPERTS, "shared_intermediate_size": 64}, "a shared expert must be as wide as a routed one, 128; got 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            decode_step.read(written(tmp_path, config))
    shape = decode_step.read(written(tmp_path, DENSE))
    with pytest.raises(ConfigError, match="--tp 3 does not divide query heads, 4"):
        decode_step.divided(shape, 3)
    with pytest.raises(ConfigError, match="--tp 8 does not divide query heads"):
        decode_step.divided(shape, 8)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        decode_step.read(tmp_path / "config.json")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match=rf"read as JSON: \[Errno 22\] it is not a regular file: '{tmp_path}'"):
        decode_step.read(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
