"""The small version of every random trial, a minute on one core; ``make stress`` runs the long one."""

from __future__ import annotations

import inspect

import pytest

from hipforge.ops import public_names
from stress import calls, run
from stress.case import Arguments, Op, Rng

SEED = 20261122  # the same in every run of the suite; `make stress` draws one


NO_CALLS = {"Float8LinearConfig", "convert_to_float8_training", "disable_fp8"}  # they set a model up
LAYERS = {"MXFP8Linear", "MXFP8MoE"}  # of hipforge.nn, under casts


def test_every_public_op_is_tried() -> None:
    assert {op.name for op in calls.OPS} == set(public_names()) - NO_CALLS | LAYERS


def drawn(op: Op) -> list[Arguments]:
    """Good arguments, as they are and spoilt in the way of this op."""
    made = [op.make(Rng(SEED, number)) for number in range(100)]
    if op.mistake is None:
        return made
    return [*made, *(op.mistake(Rng(SEED, number), dict(given)) for number, given in enumerate(made))]


@pytest.mark.parametrize("name", sorted({op.name for op in calls.OPS}))
def test_every_parameter_of_an_op_is_drawn(name: str) -> None:
    ops = [op for op in calls.OPS if op.name == name]
    given = {name for op in ops for made in drawn(op) for name, value in made.items() if value is not None}
    assert given == set(inspect.signature(calls.function_of(ops[0])).parameters)


@pytest.mark.parametrize("part", run.SIZES)
def test_a_random_trial_finds_nothing(part: str) -> None:
    _, wrong = run.run(part, SEED, run.SIZES[part][1])
    assert not wrong, f"python op_tests/stress/run.py {part} --small --seed {SEED}\n" + "\n".join(wrong[:5])
