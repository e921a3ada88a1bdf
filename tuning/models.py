"""The weights that a decode step of a model reads on one GPU, from its ``config.json`` and the tensor-parallel degree.

Projections of one input are one weight where servers join them: query, key and value; gate and up; the two that make
MLA's latents. A weight that every GPU holds whole, as those latents' are, has the same shape at every degree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hipforge.errors import ConfigError
from hipforge.jit.cache.files import read

MLA = ("glm_moe_dsa", "deepseek_v41_text")
BLOCK = 32  # columns of an expert that GPUs divide at most, as its scales have them
KNOWN = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "minimax_m3_vl_text", *MLA)


@dataclass(frozen=True)
class Experts:
    """Routed experts on one GPU.

    Attributes:
        count: E.
        top_k: of them per token.
        hidden: K of gate and up, and N of down.
        inner: half of the N of gate and up, and K of down; a multiple of 32, of the GPU that has most.
    """

    count: int
    top_k: int
    hidden: int
    inner: int

    @property
    def products(self) -> tuple[tuple[int, int, int, bool], ...]:
        """Return (N, K, slots per activation row, whether slots are weighted) of gate and up, and of down."""
        return (2 * self.inner, self.hidden, self.top_k, False), (self.hidden, self.inner, 1, True)


@dataclass(frozen=True)
class Weights:
    """What a decode step reads on one GPU: (K, N) of dense weights, without repeats, and the routed experts."""

    dense: tuple[tuple[int, int], ...]
    experts: Experts | None


@dataclass(frozen=True)
class Projection:
    """A product of a layer's attention, [K] -> [N].

    Attributes:
        name: what it makes.
        reads: what its rows are: ``hidden``, the queries' ``latent``, or what attention leaves, ``heads`` or, of a
            product for each group of heads, ``groups``.
        k: depth.
        n: columns.
        shared: what GPUs divide among them: ``n``, ``k``, ``count``, or ``""`` for a weight that each holds whole.
        count: products of this size.
    """

    name: str
    reads: Literal["hidden", "latent", "heads", "groups"]
    k: int
    n: int
    shared: Literal["n", "k", "count", ""] = ""
    count: int = 1

    def on_one_of(self, tp: int) -> Projection:
        """Return it on one of ``tp`` GPUs; raises ValueError where it cannot be divided."""
        size = getattr(self, self.shared) if self.shared else tp
        if tp < 1 or size % tp:
            raise ValueError(f"--tp {tp} does not divide {size}")
        part: dict[str, Any] = {self.shared: size // tp} if self.shared else {}
        return replace(self, **part)


def latent_projections(config: Mapping[str, Any]) -> tuple[Projection, ...]:
    """Return the products of an attention whose queries and keys are made of latents, of one of the models of MLA.

    The first makes the latents, that of the queries first. Keys and values are made of theirs inside the attention.
    """
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    index = Projection("index queries", "latent", rank, config["index_n_heads"] * config["index_head_dim"])
    if config["model_type"] == "glm_moe_dsa":
        query = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        return (
            Projection("latents", "hidden", hidden, rank + latent),
            Projection("queries", "latent", rank, query, "n"),
            Projection("o_proj", "heads", heads * config["v_head_dim"], hidden, "k"),
            index,
            Projection("index keys", "hidden", hidden, config["index_head_dim"]),
        )
    head, groups, inner = config["head_dim"], config["o_groups"], config["o_lora_rank"]
    return (
        Projection("latents", "hidden", hidden, rank + head),
        Projection("queries", "latent", rank, heads * head, "n"),
        index,
        Projection("o_proj of a group of heads", "groups", heads // groups * head, inner, "count", groups),
        Projection("o_proj", "heads", groups * inner, hidden, "k"),
    )


def config_of(path: Path) -> dict[str, Any]:
    """Return the fields of a model's ``config.json``: those of its ``text_config`` where it has one.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object or lacks model_type.
    """
    try:
        config = json.loads(read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    config = config.get("text_config") or config if isinstance(config, dict) else config
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object; got {type(config).__name__}")
    if not isinstance(config.get("model_type"), str):
        found = config.get("model_type")
        raise ConfigError(f"{path} must have a model_type, as the config.json of a model has; got {found!r}")
    return config


def weights_of(path: Path, tp: int = 1) -> Weights:
    """Return the weights of a model on one of ``tp`` GPUs.

    Args:
        path: its ``config.json``, as the transformers library writes it.
        tp: GPUs that share it; 1, 2, 4, 8, ...

    Raises:
        ConfigError: the file is no JSON object, lacks a field, is of a model that is not known here, or ``tp`` does not
            divide a size.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "config.json"
        >>> _ = path.write_text('''{"model_type": "qwen3_moe", "hidden_size": 4096, "num_attention_heads": 64,
        ...     "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        ...     "moe_intermediate_size": 1536}''')
        >>> weights_of(path, 4)
        Weights(dense=((4096, 2304), (2048, 4096)), experts=Experts(count=128, top_k=8, hidden=4096, inner=384))
    """
    config = config_of(path)
    if config["model_type"] not in KNOWN:
        raise ConfigError(f"{path} must have a model_type of {', '.join(KNOWN)}; got {config['model_type']!r}")
    try:
        return _weights(config, tp)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the field {error} of a {config['model_type']} model") from None
    except TypeError as error:
        raise ConfigError(f"{path} has a value that is no number: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _weights(config: Mapping[str, Any], tp: int) -> Weights:
    def part(size: int) -> int:
        if tp < 1 or size % tp:
            raise ValueError(f"--tp {tp} does not divide {size}")
        return size // tp

    def mlp(inner: int) -> list[tuple[int, int]]:
        return [(hidden, 2 * part(inner)), (part(inner), hidden)]

    name, hidden = config["model_type"], config["hidden_size"]
    heads = config["num_attention_heads"]
    if name in MLA:
        own = [each.on_one_of(tp) for each in latent_projections(config)]
        dense = [
            (each.k, each.n) for each in own if each.reads != "groups"
        ]  # no GEMM here: one for each group of heads
    else:
        head = config.get("head_dim") or hidden // heads
        kv = max(1, (config.get("num_key_value_heads") or heads) // tp)
        dense = [(hidden, (part(heads) + 2 * kv) * head), (part(heads) * head, hidden)]
    experts = _experts(config)
    if experts is None:
        return Weights((*dict.fromkeys(dense + mlp(config["intermediate_size"])),), None)
    count, inner, shared = experts
    layers = config.get("mlp_layer_types") or []
    if config.get("first_k_dense_replace") or "dense" in layers:
        dense += mlp(config.get("dense_intermediate_size") or config["intermediate_size"])
    if shared:
        dense += mlp(shared)
    # In whole blocks of scales, as servers divide them: some GPUs have one block more than others, and none has less.
    blocks = -(-inner // BLOCK)
    of_one = part(inner) if part(inner) % BLOCK == 0 else BLOCK * -(-blocks // tp)
    routed = Experts(count, config["num_experts_per_tok"], hidden, of_one)
    return Weights((*dict.fromkeys(dense),), routed)


def _experts(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return how many routed experts there are, their inner size, and that of the shared one, 0 without."""
    name = config["model_type"]
    if name == "qwen3_moe":
        return config["num_experts"], config["moe_intermediate_size"], 0
    if name == "gpt_oss":
        return config["num_local_experts"], config["intermediate_size"], 0
    if name == "minimax_m3_vl_text":
        return config["num_local_experts"], config["intermediate_size"], config["shared_intermediate_size"]
    if name in MLA:
        inner = config["moe_intermediate_size"]
        return config["n_routed_experts"], inner, inner * config["n_shared_experts"]
    return None
