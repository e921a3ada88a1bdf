"""Generate text with a model whose decode step runs on hipforge's kernels alone: weights MX-FP8, a paged FP8 cache.

    python examples/generate.py [qwen3 | qwen3_moe | minimax_m3 | gpt_oss] [--tokens 32]
    torchrun --nproc-per-node 2 examples/generate.py [qwen3 | qwen3_moe | gpt_oss] --tp 2

The models are built by the transformers library from small configurations with random weights, converted to MX-FP8,
given a prompt in chunks and then asked for tokens one by one, greedily. On a GPU a step that chooses no keys is one
captured graph; without a GPU the kernels run on the emulator. In the end transformers computes the same sequence with
the dequantised weights in float32, and the distance of the logits is printed: what the quantised activations and cache
cost.

With ``--tp`` the processes of torchrun share a model: each has a part of every product, and two sums over all processes
make a layer whole: in the norms on GPUs, by gloo on the emulator. The first process then computes the same alone.

MiniMax-M3's sparse layers attend to blocks of keys that an indexer chooses: 16 blocks of 128 keys in the model, so
that it chooses from 2,049 tokens on, 2 blocks of 16 here. With ``--prompt`` of more than 1,024 tokens the numbers are
the model's.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed
from decoder import ALONE, FROM, SHARED, Decoder, Ranks, read_back
from rich.progress import Progress

from hipforge import argmax, devices, emulator
from hipforge.nn import CacheStep, PagedKVCache, Peers

PROMPT = 40
LONG = 1024  # tokens from which MiniMax-M3's blocks have the model's size
CHUNK, MOST_CHUNK = 10, 16  # tokens of the prompt at a time, and the most that attention takes
MOST_ERROR = 0.2  # of the logits, relative: MX-FP8 activations and weights through all layers
# Beside one process. The parts of a sum are rounded to bfloat16 once more, and every product reads e4m3, whose steps
# are 0.088 of a value in the mean: an error e becomes sqrt(0.088 e), at most 0.088 after any number of products.
MOST_TP_ERROR = 0.1


def configuration(name: str, tokens: int = 128, tp: int = 1) -> Any:
    """Return a small configuration with everything that the model has, for so many tokens and processes."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": tokens, "tie_word_embeddings": False,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if name == "qwen3":
        return transformers.Qwen3Config(intermediate_size=384, **sizes)
    if name == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, **sizes
        )
    if name == "minimax_m3":
        from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig

        return MiniMaxM3VLTextConfig(
            intermediate_size=128, dense_intermediate_size=384, shared_intermediate_size=128, num_local_experts=8,
            num_experts_per_tok=2, mlp_layer_types=["dense", "sparse"], swiglu_limit=2.0,
            layer_types=["full_attention", "minimax_m3_sparse"], index_n_heads=2, index_head_dim=64,
            index_block_size=128 if tokens > LONG else 16, index_topk_blocks=16 if tokens > LONG else 2,
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}, **sizes,
        )  # fmt: skip
    if name == "gpt_oss":  # hidden 288 is no multiple of 128, as the model's 2880 is none of 256
        return transformers.GptOssConfig(
            intermediate_size=288 * tp, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, swiglu_limit=2.0,
            layer_types=["sliding_attention", "full_attention"], **{**sizes, "hidden_size": 288},
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4,
            },
        )  # fmt: skip
    raise ValueError(name)


def build(name: str, seed: int = 0, tokens: int = 128, tp: int = 1) -> Any:
    """Return a transformers model with random weights: float32 numbers that bfloat16 holds."""
    import transformers

    config = configuration(name, tokens, tp)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    if name == "minimax_m3":
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

        model: Any = MiniMaxM3VLForCausalLM(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    return model.eval()


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Set every weight so that each part of a layer matters: gates as large as SwiGLU's limit, choices far apart."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, spread: float, mean: float = 0.0) -> None:
        drawn = torch.randn(tensor.shape, generator=generator) * spread + mean
        tensor.copy_(drawn.to(torch.bfloat16))

    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in everything.items():
        if "e_score_correction_bias" in name:
            normal(tensor, 0.2)
        elif name.endswith("sinks"):
            normal(tensor, 0.5, 1.5)
        elif name.endswith("bias"):
            normal(tensor, 0.3)
        elif "norm" in name:  # about the value that leaves things as they are: 1, or 0 where 1 is added
            normal(tensor, 0.1, float(tensor.detach().mean().round()))
        elif "embed_tokens" in name:
            normal(tensor, 1.0)
        elif name.endswith(("weight", "gate_up_proj", "down_proj")):
            gain = 1.5 if "gate" in name or "up_proj" in name else 1.0
            transposed = model.config.model_type == "gpt_oss" and tensor.dim() == 3
            normal(tensor, gain * tensor.shape[-2 if transposed else -1] ** -0.5)


def prefill(model: Decoder, cache: PagedKVCache, prompt: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """Put a prompt into the cache; return the logits of its tokens."""
    return torch.cat([model(part, cache.extend([0], len(part)), cache) for part in prompt.split(chunk)])


def launches_of_a_step(model: Decoder, token: torch.Tensor, cache: PagedKVCache) -> tuple[torch.Tensor, list[int]]:
    """Return a step's logits and the launches of each layer, as the emulator counts them."""
    counts: list[int] = []
    contexts: list[Any] = []

    def before(*_: object) -> None:
        contexts.append(emulator.counters())
        contexts.append(contexts[-1].__enter__())

    def after(*_: object) -> None:
        counted, context = contexts.pop(), contexts.pop()
        context.__exit__(None, None, None)
        counts.append(counted.launches)

    hooks = [layer.register_forward_pre_hook(before) for layer in model.layers]
    hooks += [layer.register_forward_hook(after) for layer in model.layers]
    logits = model(token, cache.extend([0], 1), cache)
    for hook in hooks:
        hook.remove()
    return logits, counts


class CapturedStep:
    """A decode step of one sequence on a GPU as a graph, whose inputs are written before each replay."""

    def __init__(self, model: Decoder, cache: PagedKVCache, most_tokens: int) -> None:
        width = -(-most_tokens // cache.page_size)
        place = cache.device
        self.cache, self.token = cache, torch.zeros(1, dtype=torch.int64, device=place)
        positions, slots = (torch.zeros(1, dtype=torch.int64, device=place) for _ in range(2))
        tables = torch.zeros(1, width, dtype=torch.int32, device=place)
        self.step = CacheStep(1, positions, slots, tables, torch.ones(1, dtype=torch.int32, device=place))
        slots.fill_(-1)  # what is run before the capture stores nothing
        model(self.token, self.step, cache)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # NCCL's own thread asks for its events
            self.logits = model(self.token, self.step, cache)

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        """Return the logits of a token, which joins the cache."""
        new = self.cache.extend([0], 1)
        for here, given in ((self.token, token), (self.step.positions, new.positions), (self.step.seqlens, new.seqlens),
                            (self.step.slot_mapping, new.slot_mapping)):  # fmt: skip
            here.copy_(given)
        self.step.block_tables[:, : new.block_tables.shape[1]].copy_(new.block_tables)
        self.graph.replay()
        return self.logits.clone()


def ranks_of(tp: int, model: str) -> Ranks:
    """Return this process among those of torchrun, which it joins."""
    if tp == 1:
        return ALONE
    if model not in SHARED or int(os.environ.get("WORLD_SIZE", "1")) != tp:
        raise SystemExit(f"--tp {tp} is for {', '.join(SHARED)} under torchrun --nproc-per-node {tp}")
    on_gpu = devices.current().is_gpu
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    peers = Peers.of_group(MOST_CHUNK, configuration(model).hidden_size) if on_gpu else None
    return Ranks(torch.distributed.get_rank(), tp, peers)


def compare_with_one(name: str, source: Any, logits: torch.Tensor, sequence: torch.Tensor, generated: int) -> None:
    """Print how far logits of several processes are from those of one, which computes the same tokens."""
    alone = FROM[name](source).to(logits.device)
    cache = alone.make_cache(len(sequence))
    prompt = len(sequence) - generated + 1
    steps = [prefill(alone, cache, sequence[:prompt])]
    steps += [alone(token[None], cache.extend([0], 1), cache) for token in sequence[prompt:]]
    want, got = torch.cat(steps).double(), logits.double()
    # Of the median token: a rounding may change which expert a router chooses.
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()
    agreed = int((got.argmax(-1) == want.argmax(-1))[prompt - 1 :].sum())
    print(f"logits against one process: relative error of the median token {error:.3f} (at most {MOST_TP_ERROR}), "
          f"{agreed} of {generated} greedy choices the same")  # fmt: skip
    if not error < MOST_TP_ERROR:
        raise SystemExit("the logits are too far from those of one process")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3", choices=sorted(FROM))
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt")
    parser.add_argument("--tp", type=int, default=1, help="processes that share the model, under torchrun")
    options = parser.parse_args()
    ranks = ranks_of(options.tp, options.model)
    place = "cuda" if devices.current().is_gpu else "cpu"

    length = options.prompt + options.tokens
    source = build(options.model, tokens=max(128, length), tp=options.tp).to(place)
    model = FROM[options.model](source, *([] if ranks == ALONE else [ranks])).to(place)
    seeded = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, source.config.vocab_size, (options.prompt,), generator=seeded).to(place)
    cache = model.make_cache(length)
    counts: list[int] = []
    began = time.perf_counter()
    with Progress(transient=True) as progress:
        task = progress.add_task(f"prompt of {options.prompt} tokens", total=options.tokens)
        logits = [prefill(model, cache, prompt, CHUNK if options.prompt <= LONG else MOST_CHUNK)]
        tokens = [argmax(logits[-1][-1:])[0]]
        # Blocks of keys are chosen by torch on a GPU without kernels for it, which reads them on the host.
        captured = CapturedStep(model, cache, length) if place == "cuda" and cache.index is None else None
        for _ in range(options.tokens - 1):
            progress.update(task, advance=1, description=f"token {len(tokens)}")
            if captured is not None:
                step = captured(tokens[-1][None])
            elif not counts and devices.current().kind == "emulator":
                step, counts = launches_of_a_step(model, tokens[-1][None], cache)
            else:
                step = model(tokens[-1][None], cache.extend([0], 1), cache)
            logits.append(step)
            tokens.append(argmax(step[-1:])[0])
    seconds = time.perf_counter() - began
    captured = None  # a graph holds on to the processes' group
    if ranks.count > 1:
        torch.distributed.destroy_process_group()
        if ranks.rank == 0:
            print(f"{options.model}, {ranks.count} processes: tokens {' '.join(str(int(token)) for token in tokens)}")
            sequence = torch.cat((prompt, torch.stack(tokens[:-1])))
            compare_with_one(options.model, source, torch.cat(logits), sequence, len(tokens))
        return

    read_back(model, source)
    sequence = torch.cat((prompt, torch.stack(tokens)))[:-1]
    want = source(sequence[None], use_cache=False).logits[0].double()
    got = torch.cat(logits).double()
    error = ((got - want).norm() / want.norm()).item()
    agreed = int((got.argmax(-1) == want.argmax(-1))[options.prompt - 1 :].sum())
    print(f"{options.model}: {type(source).__name__}, hidden {source.config.hidden_size}, {len(model.layers)} layers")
    print(f"tokens: {' '.join(str(int(token)) for token in tokens)}")
    print(
        f"{len(sequence)} tokens in {seconds:.1f} s (measured)"
        + (f", launches per layer of a decode step: {', '.join(map(str, counts))} (counted)" if counts else "")
    )
    print(
        f"logits against transformers in float32 with the same weights: relative error {error:.3f} "
        f"(at most {MOST_ERROR}), {agreed} of {options.tokens} greedy choices the same"
    )
    if not error < MOST_ERROR:
        raise SystemExit("the logits are too far from transformers' own")


if __name__ == "__main__":
    main()
