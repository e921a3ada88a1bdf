"""The weights that a decode step of a model reads on one GPU, from its ``config.json`` and the tensor-parallel degree.

Projections of one input are one weight where servers join them: query, key and value; gate and up; the two that make
MLA's latents. A weight that every GPU holds whole, as those latents' are, has the same shape at every degree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipforge.errors import ConfigError
from hipforge.jit.cache.files import read

MLA = ("glm_moe_dsa", "deepseek_v41_text")
KNOWN = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "minimax_m3_vl_text", *MLA)


@dataclass(frozen=True)
class Experts:
    """Routed experts on one GPU.

    Attributes:
        count: E.
        top_k: of them per token.
        hidden: K of gate and up, and N of down.
        inner: half of the N of gate and up, and K of down.
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
    try:
        config = json.loads(read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    config = config.get("text_config") or config if isinstance(config, dict) else config
    if not isinstance(config, dict) or config.get("model_type") not in KNOWN:
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise ConfigError(f"{path} must have a model_type of {', '.join(KNOWN)}; got {found!r}")
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
        index = config["index_n_heads"] * config["index_head_dim"]
    if name == "glm_moe_dsa":
        rank, latent = config["q_lora_rank"], config["kv_lora_rank"] + config["qk_rope_head_dim"]
        query = part(heads) * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        dense = [(hidden, rank + latent), (rank, query), (part(heads) * config["v_head_dim"], hidden)]
        dense += [(rank, index), (hidden, config["index_head_dim"])]
    elif (
        name == "deepseek_v41_text"
    ):  # the first of its two output projections is one for each group of heads: no GEMM here
        rank, head = config["q_lora_rank"], config["head_dim"]
        dense = [(hidden, rank + head), (rank, part(heads) * head), (rank, index)]
        dense += [(part(config["o_groups"]) * config["o_lora_rank"], hidden)]
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
    routed = Experts(count, config["num_experts_per_tok"], hidden, part(inner))
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
