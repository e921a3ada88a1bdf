"""JSON that parses but does not hold what its reader expects is a miss or a ConfigError, never another exception.

Registries, manifests and checkpoints are among the random trials of ``stress/documents.py``.
"""

from __future__ import annotations

import doctest
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.jit_stand_in import StandIn
from helpers.json_mutants import mutant

from hipforge.errors import BuildError, ConfigError, HipforgeError
from hipforge.jit import registry, toolchain, tools
from hipforge.jit.cache import cache_dir, failures, shapes
from hipforge.jit.cache import store as cache

SEED = 20261122
CASES = 300


def mutants(document: Any) -> Iterator[Any]:
    """Copies of a document with one to three values, keys or items changed."""
    choose = random.Random(SEED)
    for _ in range(CASES):
        yield mutant(choose, document)


def each(document: Any, path: Path, read: Callable[[], object]) -> None:
    for number, changed in enumerate(mutants(document)):
        path.write_text(json.dumps(changed))
        try:
            read()
        except HipforgeError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {SEED}, case {number}: {json.dumps(changed)[:2000]}") from error


def test_the_examples_of_the_checker_hold():
    assert doctest.testmod(shapes).failed == 0


def test_failure_records(stand_in: StandIn) -> None:
    stand_in.write("sample.cu", "broken\n")
    with pytest.raises(BuildError):
        stand_in.build()
    spec = stand_in.spec()
    record = failures.directory(stand_in.cache, spec) / "failure.json"
    each(json.loads(record.read_text()), record, lambda: failures.recall([stand_in.cache], spec, cache_dir.digests()))


def test_remembered_answers_of_compilers_and_digests(stand_in: StandIn) -> None:
    stand_in.build()
    cache_dir.digests().save()
    answers = stand_in.cache / "toolchains.json"

    def ask() -> None:
        tools._probe_store.cache_clear()
        toolchain._selected.clear()
        toolchain.select("gfx950")

    each(json.loads(answers.read_text()), answers, ask)


DEEP = "[" * 100_000


def test_json_nested_deeper_than_a_parser_goes_is_like_any_other_damage(stand_in: StandIn, tmp_path: Path) -> None:
    entry = stand_in.build().entry
    (entry.path / "manifest.json").write_text(DEEP)
    assert cache.read_entry(entry.path) is None
    (stand_in.cache / "digests.json").write_text(DEEP)
    (stand_in.cache / "toolchains.json").write_text(DEEP)
    cache_dir._store.cache_clear()
    tools._probe_store.cache_clear()
    assert stand_in.build().built
    (tmp_path / "own.json").write_text(DEEP)
    with pytest.raises(ConfigError, match="not valid JSON"):
        registry.read_file(tmp_path / "own.json")
