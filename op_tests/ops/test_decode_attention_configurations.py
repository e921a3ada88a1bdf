"""Every configuration of decode attention: blocks, waves and splits, what chooses them, and what they may cost."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.attention_cases import ARCH, ONE, case, check, lengths, packed_case, paged, rng

import hipforge
from hipforge import emulator
from hipforge.errors import BuildError, GuardError
from hipforge.jit import fleet, loader, registry
from hipforge.ops import decode_attention_fp8 as ops
from hipforge.ops.decode_attention.kernels import BLOCKS_N, FP8, HEAD_DIMS, INPUTS, MAX_SPLITS
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8, run_decode_attention, split_k_heuristic
from hipforge.ops.reference.attention import dequantize_kv_fp8

pytestmark = [
    pytest.mark.gfx942("lies or (share_the_keys and (32-128-4 or 16-256-4))"),
    pytest.mark.usefixtures("every_checker"),
]

MODULE = "module_decode_attention_fp8"


def settings(block_n, waves, split_k):
    return {"block_n": block_n, "waves": waves, "split_k": split_k}


def run(q, k, v, seqlens, configuration, **other):
    d = q.shape[-1]
    return run_decode_attention(q, k, v, None, seqlens, ONE, ONE, scale=d**-0.5, configuration=configuration, **other)


@pytest.mark.parametrize(
    ("d", "waves"), [(64, 1), (64, 2), (64, 4), (128, 1), (128, 2), (128, 4), (192, 1), (192, 4), (256, 2), (256, 4)]
)
@pytest.mark.parametrize("block_n", BLOCKS_N)
def test_blocks_and_waves_share_the_keys_in_any_order_of_waves(d, waves, block_n):
    q, k, v = case(2, 2, 1, 3, d, 150, seed=d + waves)
    seqlens = lengths(150, 70)
    split_k = 1 if block_n == 16 else 3
    results = []
    for order in ("forward", "reverse" if waves == 2 else "random"):
        with emulator.options(checks="all", wave_order=order):
            results.append(run(q, k, v, seqlens, settings(block_n, waves, split_k)))
    assert all(map(torch.equal, *results))
    check(q, k.double(), v.double(), seqlens, *results[0], d**-0.5)


@pytest.mark.parametrize(("d", "waves"), [(128, 4), (256, 4)])
def test_packed_rows_in_every_block_with_waves_that_share(d, waves):
    batch, mq, groups, heads, keys = 2, 1, 2, 2, 80
    q, (k, k_rows), (v, v_rows) = packed_case(batch, mq, groups, heads, d, keys, seed=d)
    flat, seqlens = q.view(batch, mq, groups * heads, d), lengths(keys, 33)
    k64, v64 = (dequantize_kv_fp8(x, rows, ops.ARCH_DTYPES[ARCH]) for x, rows in ((k, k_rows), (v, v_rows)))
    whole = None
    for block_n in BLOCKS_N:
        got = run_decode_attention(
            flat,
            k.view(torch.uint8),
            v.view(torch.uint8),
            None,
            seqlens,
            k_scale_shift=k_rows,
            v_scale_shift=v_rows,
            scale=d**-0.5,
            configuration=settings(block_n, waves, 2),
        )
        # Parts and magnitudes apart: |fp8 scale| is at most |x| + |shift|.
        shifts = [rows.contiguous().view(torch.float16)[..., 1::2].double().abs() for rows in (k_rows, v_rows)]
        k_parts, weighted = (x.abs() + 2 * shift.unsqueeze(-1) for x, shift in zip((k64, v64), shifts, strict=True))
        check(flat, k64, v64, seqlens, *got, d**-0.5, weighted=weighted, k_parts=k_parts)
        whole = got if whole is None else whole
        # Blocks differ in the order of sums alone.
        assert (got[0].double() - whole[0].double()).abs().max() <= 2.0**-6 * whole[0].abs().max()


@pytest.mark.parametrize("split_k", [1, 7, 65, 512])
def test_splits_up_to_512_also_where_there_are_fewer_keys(split_k):
    q, k, v = case(3, 1, 1, 2, 64, 700, seed=split_k)
    seqlens = lengths(700, 0, 1)
    out, lse = run(q, k, v, seqlens, settings(16, 1, split_k))
    check(q, k.double(), v.double(), seqlens, out, lse, 64**-0.5)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and (lse[1] == -math.inf).all()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(s, marks=pytest.mark.full) for s in range(4, 40))])
def test_random_problems_in_random_configurations(seed):
    g = rng(1000 + seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=g))]

    d, mq, page_size = pick(64, 128, 192, 256), pick(1, 2, 5, 16), pick(16, 32, 48, 128)
    kv_heads, group, batch = pick(1, 3), pick(1, 4, 9), pick(1, 2, 5)
    keys = int(torch.randint(1, 300, (1,), generator=g))
    q, k, v = case(batch, mq, kv_heads, group, d, keys, seed=seed)
    seqlens = torch.randint(0, keys + 1, (batch,), generator=g, dtype=torch.int32)
    (k_pages, tables), (v_pages, _) = paged(k, page_size, seed), paged(v, page_size, seed)
    configuration = settings(pick(*BLOCKS_N), pick(2, 4), pick(1, 2, 5, 40))
    causal = pick(True, False)
    with emulator.options(checks="all", wave_order="random", seed=seed):
        out, lse = run_decode_attention(
            q, k_pages, v_pages, tables, seqlens, ONE, ONE, scale=0.1, configuration=configuration, causal=causal
        )
    check(q, k.double(), v.double(), seqlens, out, lse, 0.1, causal)


def test_k_is_multiplied_as_it_lies_in_memory():
    """From one length to the next, V alone is converted, and K meets two terms of q per element."""
    q, k, v = case(1, 1, 1, 8, 128, 512)
    counts = []
    for keys in (256, 512):
        with emulator.counters() as counted:
            run(q, k, v, lengths(keys), settings(64, 1, 1))
        counts.append(counted.by_mnemonic)

    def more(start):
        return sum(n for name, n in counts[1].items() if name.startswith(start)) - sum(
            n for name, n in counts[0].items() if name.startswith(start)
        )

    elements = 256 * 128
    if ARCH == "gfx950":
        assert more("v_cvt_scalef32_pk_bf16_fp8") == elements // (64 * 2) and more("v_cvt_pk_f32_fp8") == 0
        # Term 0 of q needs no scale; the other one of bf16 does.
        for product in ("v_mfma_f32_16x16x128_f8f6f4", "v_mfma_scale_f32_16x16x128_f8f6f4"):
            assert more(product) == elements // (16 * 128)
        assert more("v_mfma_f32_16x16x32_bf16") == elements // (16 * 32)
    else:
        assert more("v_cvt_pk_f32_fp8") == elements // (64 * 2)
        assert more("v_mfma_f32_16x16x32_fp8_fp8") == 2 * elements // (16 * 32)
        assert more("v_mfma_f32_16x16x16_bf16") == elements // (16 * 16)


def test_the_limits_of_registers_and_spills_fail_the_build(tmp_path):
    limits = registry.module(MODULE).resource_limits
    assert (limits["max_scratch"], limits["max_lds"]) == (0, 0)
    expected = limits["expected"]
    assert (expected["max_vgprs"], expected["max_spills"], expected["min_occupancy"]) == (128, 0, 4)
    own = [one["expected"] for one in limits["kernels"].values()]
    assert all(one["max_vgprs"] <= 128 and one["min_occupancy"] >= 4 for one in own)
    shipped, name = registry.module(MODULE), "module_decode_attention_tight"
    tight = {
        "srcs": [str(source) for source in shipped.srcs],
        "archs": [ARCH],
        "variants": {"HF_HEAD_DIM": [128], "HF_INPUT": ["bf16"], "HF_BLOCK_N": [64]},
        "resource_limits": {**limits, "max_vgprs": 64},
    }
    path = tmp_path / "modules.json"
    path.write_text(json.dumps({name: tight}))
    registry.register(path)
    variant = {"HF_HEAD_DIM": 128, "HF_INPUT": "bf16", "HF_BLOCK_N": 64}
    with pytest.raises(BuildError, match=r"decode_split<__bf16, 128, 64, .*>: vgpr allocated is \d+, max_vgprs is 64"):
        loader.load(name, variant, ARCH)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_every_shipped_variant_keeps_the_limits(arch):
    wanted = fleet.requests([MODULE], [arch], every_variant=True)
    assert len(wanted) == len(HEAD_DIMS) * len(INPUTS) * len(BLOCKS_N)
    for outcome in fleet.build_many(wanted, 2, lambda event: None):
        assert outcome.error is None


def test_the_heuristic_of_splits():
    assert split_k_heuristic(1, 1, 8192) == 129  # 8192 / 128 is 64, not less
    assert split_k_heuristic(64, 1, 8192) == 16
    assert split_k_heuristic(1, 1, 1) == 2  # ceil(1/1) is not a multiple of 64
    assert split_k_heuristic(1, 8, 8192) == 64
    assert split_k_heuristic(512, 8, 8192) == 1
    assert split_k_heuristic(1, 1, 1 << 20) == 512
    assert split_k_heuristic(16, 1, 8192, page_size=64) == 128
    for batch in (1, 3, 64, 1000):
        for keys in (0, 1, 63, 64, 1000, 131072):
            assert 1 <= split_k_heuristic(batch, 2, keys) <= 512


@pytest.mark.parametrize(
    ("batch", "kv_heads", "rows", "keys", "waves", "split_k"),
    [
        (1, 8, 4, 512, 4, 8),  # 16 keys a warp
        (1, 8, 4, 2048, 4, 16),  # 32 keys a warp: more splits take longer
        (1, 8, 4, 8192, 4, 32),  # 64 keys a warp
        (4, 8, 4, 512, 4, 8),
        (8, 8, 4, 2048, 4, 4),
        (64, 8, 4, 2048, 2, 1),
        (512, 8, 4, 2048, 1, 1),
        (64, 8, 32, 2048, 1, 1),  # 32 rows are those of two pairs
        (16, 8, 8, 8192, 4, 2),
        (1, 8, 8, 131072, 4, 32),
        (1, 1, 1, 32, 4, 1),
        (1, 1, 1, 10**6, 4, 256),
    ],
)
def test_on_hopper_eight_warps_of_a_multiprocessor_share_the_keys(batch, kv_heads, rows, keys, waves, split_k):
    problem = SimpleNamespace(key=(batch, kv_heads, rows, 128, keys, 64), d=128)
    ((_, found),) = FP8.default(problem, "sm_90", 132)
    assert found == settings(16, waves, split_k)


def test_the_tuner_refuses_large_tiles_and_many_waves():
    assert ops.accepts_configuration(16, 64, 1) and ops.accepts_configuration(64, 64, 4)
    assert not ops.accepts_configuration(16, 128, 1)
    assert not ops.accepts_configuration(16, 65, 1)
    assert not ops.accepts_configuration(128, 64, 1)
    assert not ops.accepts_configuration(16, 64, 5)
    assert not ops.accepts_configuration(16, 64, 8)
    assert not ops.accepts_configuration(16, 64, 0)


def test_a_forced_configuration_overrides_and_says_so():
    q, k, v = case(1, 1, 1, 2, 64, 100)
    seqlens = lengths(100)
    told = hipforge.explain(decode_attention_fp8, q, k, v, None, seqlens)
    assert told.path == "kernel" and told.configuration["split_k"] == split_k_heuristic(1, 1, 100)
    forced = {"block_m": 16, "block_n": 32, "waves": 2, "split_k": 5}
    told = hipforge.explain(decode_attention_fp8, q, k, v, None, seqlens, split_k=2, force_kernel_config=forced)
    assert told.configuration == settings(32, 2, 5) and "force_kernel_config" in told.reason
    out = decode_attention_fp8(q, k, v, None, seqlens, split_k=2, force_kernel_config=forced)
    assert torch.equal(out, run(q, k, v, seqlens, settings(32, 2, 5))[0])


@pytest.mark.parametrize(
    ("d", "forced", "message"),
    [
        (64, {"block_n": 128}, "block_n must be 16, 32 or 64; got 128"),
        (64, {"waves": 8}, "waves must be 1, 2 or 4; got 8"),
        (256, {"waves": 1}, "decode_attention_fp8 needs waves of 2 or 4 at D=256; got .*waves=1"),
        (64, {"block_m": 32}, "block_m must be 16"),
        (64, {"split_k": 0}, "split_k must be 1 to 512; got 0"),
        (64, {"waves": np.int64(8)}, "waves must be 1, 2 or 4; got 8"),
        (64, {"split_k": torch.tensor(0)}, "split_k must be 1 to 512; got 0"),
        (64, {"waves": torch.zeros(2)}, r"force_kernel_config\['waves'\] must be an int; got a torch.Tensor"),
        (64, {"stages": 2}, "force_kernel_config has block_m, block_n, waves, split_k; got 'stages'"),
        (12, {"waves": 1}, "the kernel does not apply: D must be a multiple of 8"),
    ],
)
def test_forced_configurations_that_do_not_exist_are_refused(d, forced, message):
    q, k, v = case(1, 1, 1, 2, d, 40)
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(q, k, v, None, lengths(40), force_kernel_config=forced)


def test_a_configuration_names_everything():
    q, k, v = case(1, 1, 1, 2, 64, 40)
    with pytest.raises(GuardError, match="a configuration has block_n, waves, split_k; got block_n"):
        run(q, k, v, lengths(40), {"block_n": 64})


@pytest.mark.full
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("dtype", list(INPUTS), ids=str)
@pytest.mark.parametrize("keys", [1, 63, 300])
def test_every_split_count(d, dtype, keys):
    q, k, v = case(2, 1, 1, 4, d, keys, dtype=dtype)
    seqlens = lengths(keys, max(keys - 1, 0))
    for split_k in range(1, MAX_SPLITS + 1, 17):
        for block_n in BLOCKS_N:
            got = run(q, k, v, seqlens, settings(block_n, 2, split_k))
            check(q, k.double(), v.double(), seqlens, *got, d**-0.5)
