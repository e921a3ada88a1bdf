"""hipforge.integrations.transformers: a checkpoint in MX-FP8, loaded by the library itself, compiled with its cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as shape_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

import hipforge
from hipforge import weights
from hipforge.errors import ConfigError
from hipforge.integrations.transformers import MXFP8Config
from hipforge.nn import MXFP8Linear, convert_to_mxfp8
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference import dequantize_mxfp8, quantize_mxfp8

pytestmark = pytest.mark.gfx942("loads_with_the_numbers")

VOCABULARY, PROMPT = 64, 5
LINEARS = 2 * 7  # of both layers


def small() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.Linear) and part.bias is not None:
            torch.nn.init.normal_(part.bias)
    return model


def write(model: Any, folder: Path, as_bytes: bool = False, declared: dict[str, Any] | None = None) -> Path:
    """A checkpoint of the model, projections in MX-FP8 as others publish them: e4m3fn whatever the device computes."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            elements, scale = quantize_mxfp8(tensor.float())
            state[name], state[f"{name}_scale"] = elements.view(torch.uint8) if as_bytes else elements, scale
        else:
            state[name] = tensor.contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    (folder / "config.json").write_text(
        json.dumps(config if not declared else config | {"quantization_config": declared})
    )
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(PROMPT)[None]).logits


DECLARED = {"quant_method": "hipforge_mxfp8", "modules_to_not_convert": ["lm_head"]}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("as_bytes", "declared", "options"),
    [
        (False, None, {"quantization_config": MXFP8Config()}),
        (True, None, {"quantization_config": MXFP8Config(modules_to_not_convert=["lm_head"])}),
        (True, DECLARED, {}),
        (False, DECLARED, {"quantization_config": MXFP8Config()}),
    ],
    ids=["given", "given-bytes", "declared-bytes", "both"],
)
def test_a_checkpoint_loads_with_the_numbers_that_were_written(
    tmp_path: Path, as_bytes: bool, declared: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    source = small()
    model = loaded(write(source, tmp_path, as_bytes, declared), **options)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, MXFP8Linear)}
    assert len(layers) == LINEARS
    assert type(model.lm_head) is torch.nn.Linear
    stored = load_file(tmp_path / "model.safetensors")
    for name, layer in layers.items():
        assert layer.weight.dtype == fp8_dtypes("cpu")[0]
        elements = stored[f"{name}.weight"].view(torch.float8_e4m3fn)
        want = dequantize_mxfp8(elements, stored[f"{name}.weight_scale"], torch.float64)
        assert torch.equal(dequantize_mxfp8(layer.weight, layer.weight_scale, torch.float64), want)
        assert (layer.bias is None) == (".mlp." in name)
        assert layer.bias is None or torch.equal(layer.bias, stored[f"{name}.bias"])
    if fp8_dtypes("cpu")[0] == torch.float8_e4m3fn:  # there the model's own quantiser gives the same bits
        assert torch.equal(logits(model), logits(convert_to_mxfp8(source, skip="lm_head")))
    assert not model.is_quantized or model.hf_quantizer.is_compileable


def test_a_plain_checkpoint_is_quantised_while_it_is_loaded(tmp_path: Path) -> None:
    source = small()
    source.save_pretrained(tmp_path)
    model = loaded(tmp_path, quantization_config=MXFP8Config(quantize=True))
    assert torch.equal(logits(model), logits(convert_to_mxfp8(source, skip="lm_head")))


def test_what_is_saved_loads_again_and_hipforge_weights_reads_it(tmp_path: Path) -> None:
    source = small()
    source.save_pretrained(tmp_path / "plain")
    model = loaded(tmp_path / "plain", quantization_config=MXFP8Config(quantize=True))
    model.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    read = {name: tensor for name, tensor, meta in weights.load(tmp_path / "saved") if meta.format == "mxfp8"}
    assert len(read) == 2 * LINEARS
    assert all(torch.equal(model.get_buffer(name), tensor) for name, tensor in read.items())


def test_what_is_saved_is_refused_where_the_quantiser_is_not_registered(tmp_path: Path) -> None:
    source = small()
    source.save_pretrained(tmp_path / "plain")
    loaded(tmp_path / "plain", quantization_config=MXFP8Config(quantize=True)).save_pretrained(tmp_path / "saved")
    load = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", load, tmp_path / "saved"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "size mismatch" in done.stderr.replace("mismatched sizes", "size mismatch")


def test_a_layer_without_scales_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(small(), tmp_path)
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    del state[f"{name}.weight_scale"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name}\.weight_scale is not in the checkpoint"):
        loaded(folder, quantization_config=MXFP8Config())


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got quant_method 'fp8' and weight_block_size"):
        MXFP8Config(quant_method="fp8", weight_block_size=[128, 128])


def generated(model: Any, run: Callable[..., Any], batch: int) -> torch.Tensor:
    """Logits of three decode steps after a prompt, by ``run``, with the library's own cache."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    prompt = torch.randint(0, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
    steps = []
    with torch.no_grad():
        model(prompt, past_key_values=cache, use_cache=True)
        for index in range(3):
            given = {"position_ids": torch.full((batch, 1), PROMPT + index), "past_key_values": cache}
            steps.append(run(torch.full((batch, 1), index + 3), use_cache=True, **given).logits)
    return torch.cat(steps, 1)


@pytest.mark.parametrize(
    ("one_for_all", "graphs"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.full)], ids=["oblivious", "default"]
)
def test_one_decode_graph_of_the_whole_model_serves_batches_of_1_to_8(
    tmp_path: Path, one_for_all: bool, graphs: int
) -> None:
    """By default torch makes its own graph for a batch of 1."""
    model = loaded(write(small(), tmp_path), quantization_config=MXFP8Config())
    made = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        made.append(graph)
        return graph

    torch._dynamo.reset()
    run = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=True)
    with shape_config.patch(backed_size_oblivious=one_for_all):
        for batch in (3, 8, 1):
            assert torch.equal(generated(model, run, batch), generated(model, model, batch)), batch
    assert len(made) == graphs
    targets = [str(node.target) for node in made[0].graph.nodes if node.op == "call_function"]
    assert sum("hipforge.mxfp8_linear" in target for target in targets) == LINEARS


def test_prepare_warms_the_loaded_model_up(tmp_path: Path) -> None:
    model = loaded(write(small(), tmp_path), quantization_config=MXFP8Config())
    # q and o; k and v; gate and up; down
    assert hipforge.prepare(model, tokens=(1, 4)) == 2 * 4
