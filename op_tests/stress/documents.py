"""Damaged JSON: registries, manifests of the cache, and what describes a checkpoint, changed in shape and in bytes.

A registry or checkpoint is read or refused with a ConfigError; a manifest that is not what was written makes a miss,
never an error, and never gives another library than the one that was built.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from helpers.json_mutants import mutant

from hipforge import settings, weights
from hipforge.aiter_compat import checkout as aiter_checkout
from hipforge.jit import hip_module, maintenance, obtain, registry, toolchain, why
from hipforge.jit.cache import cache_dir, prebuilt, store
from hipforge.weights.files import _DTYPES
from stress.processes import stand_in
from stress.supervised import Tally


def _text(choose: random.Random, document: Any) -> bytes:
    """A damaged document as bytes: most of them still JSON."""
    raw = bytearray(json.dumps(mutant(choose, document)).encode("utf-8", "surrogatepass"))
    if choose.random() < 0.2:
        for _ in range(choose.randrange(1, 4)):
            raw[choose.randrange(len(raw))] = choose.randrange(256)
    if choose.random() < 0.05:
        del raw[choose.randrange(len(raw)) :]
    if choose.random() < 0.02:
        raw = bytearray(b"[" * 100_000)  # deeper than a parser goes
    return bytes(raw)


def registries(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Read ``count`` damaged registries and request a module of each that is accepted."""
    choose = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    shipped = json.loads((Path(registry.__file__).parent / registry.SHIPPED).read_text())
    more = {
        "blob_gen_cmd": ["${PYTHON} x.py ${GEN}"], "extra_include": ["/x"], "extra_ldflags": ["-lx"], "ffi": "abi",
        "flags_extra_cc": ["-O2"], "verbose": False,
    }  # fmt: skip
    path = folder / "own.json"
    tally = Tally(seed, "registry")
    for number in range(count):
        name = choose.choice(sorted(shipped))
        raw = _text(choose, {name: {**shipped[name], **(more if choose.random() < 0.5 else {})}})
        path.write_bytes(raw)
        with tally.case(number, raw):
            for entry in registry.read_file(path).values():
                variant = next(entry.all_variants(), None)
                if variant is not None and entry.archs:
                    hip_module.request(entry, variant, entry.archs[0])
    return tally.ended, tally.wrong


CHECKOUT = Path(__file__).resolve().parents[1] / "helpers" / "aiter_checkout"
_Tensors = dict[str, tuple[str, tuple[int, ...]]]
LAYOUTS: tuple[tuple[_Tensors, dict[str, Any]], ...] = (  # as published: key -> (dtype, shape), and the configuration
    ({"a.weight": ("F8_E4M3", (32, 64)), "a.weight_scale": ("U8", (32, 2)), "a.bias": ("F32", (32,))},
     {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"group_size": 32}}}}),
    ({"a.weight": ("F8_E4M3", (130, 140)), "a.weight_scale_inv": ("F32", (2, 2)), "norm.weight": ("BF16", (64,))},
     {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ({"a.weight": ("F8_E4M3", (3, 8, 32)), "a.weight_scale": ("BF16", (3, 8)), "a.input_scale": ("F32", (3,))},
     {"quant_method": "modelopt", "group_size": None}),
    ({"a.weight": ("U8", (16, 32)), "a.weight_scale": ("F8_E8M0", (16, 2))},
     {"quant_method": "quark", "global_quant_config": {"weight": {"group_size": 32}}}),
    ({"a.weight_packed": ("U8", (16, 32)), "a.weight_scale": ("U8", (16, 2)), "steps": ("I64", (1,))}, {}),
    ({"a_blocks": ("U8", (2, 8, 2, 16)), "a_scales": ("U8", (2, 8, 2)), "a_bias": ("F16", (2, 8))},
     {"quant_method": "mxfp4"}),
    ({"a.weight": ("I8", (8, 32)), "a.scale": ("F8_E8M0", (8, 2))}, {"quant_method": "fp8"}),
)  # fmt: skip


def _header(tensors: _Tensors) -> dict[str, Any]:
    header, end = {}, 0
    for key, (kind, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * _DTYPES[kind].itemsize
        header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    return header


def _other(choose: random.Random, tensors: _Tensors) -> _Tensors:
    """Tensors with other names, dtypes and sizes, whose bytes are still where they should be."""
    changed = dict(tensors)
    if choose.random() < 0.2:
        changed = {key: (kind, (0, *shape[1:])) for key, (kind, shape) in changed.items()}
    for _ in range(choose.choice((0, 1, 1, 2))):
        key = choose.choice(list(changed))
        kind, shape = changed.pop(key)
        way = choose.choice(("name", "kind", "size", "rank", "rank", "both", "gone"))
        if way == "name":
            key = choose.choice(("a", "a.weight", "a.weight_packed", "a.scale", "a.weight_scale_2", "weight", ""))
        if way in ("kind", "both"):
            kind = choose.choice(list(_DTYPES))
        if way in ("size", "both") and shape:
            at = choose.randrange(len(shape))
            shape = (*shape[:at], choose.choice((0, 1, 2, shape[at] * 2, 2**62, 2**70, -4)), *shape[at + 1 :])
        if way == "rank":
            shape = choose.choice(((), (), shape[:1], shape[1:], (1, *shape), (*shape, 1), (1,) * 70))
        if way != "gone" or not changed:
            changed[key] = kind, shape
    return changed


def checkpoints(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Load ``count`` checkpoints whose header, configuration or index is damaged."""
    choose = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally(seed, "checkpoint")
    for number in range(count):
        tensors, config = choose.choice(LAYOUTS)
        documents: dict[str, Any] = {
            "header": _header(tensors), "config.json": {"quantization_config": config},
            "a.safetensors.index.json": {"weight_map": dict.fromkeys(tensors, "a.safetensors")},
        }  # fmt: skip
        damaged = choose.choice((*["tensors"] * 6, *documents))
        if damaged == "tensors":
            documents["header"] = _header(_other(choose, tensors))
        texts = {
            name: _text(choose, document) if name == damaged else json.dumps(document).encode()
            for name, document in documents.items()
        }
        header = texts.pop("header")
        (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(1 << 15))
        for name, text in texts.items():
            (folder / name).write_bytes(text)
        with tally.case(number, texts.get(damaged, header)):
            for _ in weights.load(folder, shuffled=choose.random() < 0.3):
                pass
    return tally.ended, tally.wrong


def checkouts(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Judge the modules of ``count`` checkouts of aiter whose module JSON is damaged."""
    choose = random.Random(seed)
    copy = shutil.copytree(CHECKOUT, folder / "checkout")
    file = copy / "aiter/jit/optCompilerConfig.json"
    whole = json.loads(file.read_text())
    tally = Tally(seed, "checkout")
    known = set(registry._registered)
    for number in range(count):
        file.write_bytes(raw := _text(choose, whole))
        with tally.case(number, raw):
            tally.ended.update(f"module {found.state}" for found in aiter_checkout.modules(copy))
        for name in set(registry._registered) - known:
            registry._registered.pop(name)
    return tally.ended, tally.wrong


def manifests(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Damage the manifest of one entry ``count`` times and look for the entry in every way there is."""
    choose = random.Random(seed)
    box = stand_in(folder / "manifests")
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    name = "sample0"
    registry.register(box.sources / f"{name}.json")
    try:
        with settings.scope(CACHE_DIR=box.cache, HIPCC=box.hipcc):
            cache_dir._store.cache_clear()
            toolchain._selected.clear()
            entry, spec = box.build(name).entry, box.spec(name)
            wanted = hip_module.request(registry.module(name), None, "gfx950")
            whole = (entry.path / store.MANIFEST).read_bytes()
            library = entry.manifest.library_sha256
            for number in range(count):
                raw = _text(choose, json.loads(whole))
                (entry.path / store.MANIFEST).write_bytes(raw)
                try:
                    found = obtain.look(wanted, use=False)
                    maintenance.entries()
                    maintenance.recorded_seconds(name, name, "gfx950")
                    why.explain(name, None, "gfx950")
                    read = store.read_entry(entry.path)
                    if read is not None:
                        list(why.changed(read, spec))
                        prebuilt.misfit(read, wanted)
                except Exception as error:
                    ended["raw exception"] += 1
                    wrong.append(f"seed {seed}, manifest {number}: {type(error).__name__}: {error}: {raw[:1500]!r}")
                    continue
                ended[type(found).__name__] += 1
                another = isinstance(found, obtain.Ready) and found.entry.manifest.library_sha256 != library
                if another or isinstance(found, obtain.Failed):
                    wrong.append(f"seed {seed}, manifest {number}: {'another library' if another else found}")
    finally:
        registry._registered.pop(name, None)
        toolchain._selected.clear()
    return ended, wrong
