"""What the module of every kernel of the dense MX-FP8 GEMM refuses, and the workspace of a split K."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.block_gemm_subjects import MXFP8, SUBJECTS, Given, Subject, instances
from helpers.mxfp8_cases import Operands, assert_bits, integers, oracle

from hipforge import devices, emulator
from hipforge.errors import ArchError, GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.kernel import Kernel
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv_out, smallm_mxfp8_mfma_out

pytestmark = pytest.mark.gfx942("not 2_gib and not another_architecture and not workspace_of")


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def good(subject: Subject, given: Given) -> Operands:
    return integers(*subject.shape(given, 2, 8, 1024))


# What replaces an operand of M = 2, N = 8 and a K; the message.
WRONG: tuple[tuple[str, Callable[[int], torch.Tensor], str], ...] = (
    ("xq", lambda k: zeros(2, k, dtype=torch.int8), r"Xq must be contiguous float8_e4m3fn(uz)? or uint8 .*got int8"),
    ("wq", lambda k: zeros(8, k, dtype=torch.float8_e5m2), r"Wq must be .*float8_e4m3fn(uz)? or uint8.* float8_e5m2"),
    (
        "xs",
        lambda k: zeros(2, k // 32, dtype=torch.float32),
        r"Xs must be contiguous uint8 or float8_e8m0fnu .*one e8m0.*got float32",
    ),
    (
        "ws",
        lambda k: zeros(8, k // 32, dtype=torch.float8_e4m3fn),
        r"Ws must be contiguous uint8 or float8_e8m0fnu .*got float8_e4m3fn",
    ),
    ("xq", lambda k: zeros(1, 2, k), r"Xq must be .*\[rows, K\].*; got uint8 \[1, 2, \d+\]"),
    ("wq", lambda k: zeros(8), r"Wq must be .*\[rows, K\].*; got uint8 \[8\]"),
    ("wq", lambda k: zeros(8, k // 2), r"must have the same K; got Xq uint8 \[2, \d+\] and Wq uint8 \[8, \d+\]"),
    ("xs", lambda k: zeros(2, k // 32 + 1), r"Xs must be .*float8_e8m0fnu \[2, \d+\].*got uint8 \[2, \d+\]"),
    ("xs", lambda k: zeros(k // 16), r"Xs must be .*float8_e8m0fnu \[2, \d+\].*got uint8 \[\d+\]"),
    ("ws", lambda k: zeros(k // 32, 8), r"Ws must be .*float8_e8m0fnu \[8, \d+\].*got uint8 \[\d+, 8\]"),
    ("wq", lambda k: zeros(k, 8).t(), r"Wq must be contiguous"),
    ("xq", lambda k: zeros(2, 2 * k)[:, ::2], r"Xq must be contiguous"),
    ("ws", lambda k: zeros(k // 32, 8).t(), r"Ws must be contiguous.*with other strides"),
    ("xs", lambda k: zeros(2, k // 16)[:, : k // 32], r"Xs must be contiguous.*with other strides"),
    ("xq", lambda k: zeros(2 * k + 8)[8:].view(2, k), r"Xq must start at a multiple of 16 bytes"),
    ("wq", lambda k: zeros(8 * k + 8)[8:].view(8, k), r"Wq must start at a multiple of 16 bytes"),
    ("out", lambda k: zeros(2, 8, dtype=torch.float16), r"out must be contiguous bfloat16 \[2, 8\]; got float16"),
    (
        "out",
        lambda k: zeros(2, 9, dtype=torch.bfloat16),
        r"out must be contiguous bfloat16 \[2, 8\]; got bfloat16 \[2, 9\]",
    ),
    (
        "out",
        lambda k: zeros(16, dtype=torch.bfloat16),
        r"out must be contiguous bfloat16 \[2, 8\]; got bfloat16 \[16\]",
    ),
    ("out", lambda k: zeros(8, 2, dtype=torch.bfloat16).t(), r"out must be contiguous.*with other strides"),
    ("bias", lambda k: torch.zeros(8), r"bias must be contiguous bfloat16 \[8\].*; got float32"),
    (
        "bias",
        lambda k: zeros(9, dtype=torch.bfloat16),
        r"bias must be contiguous bfloat16 \[8\] = \[N\]; got bfloat16 \[9\]",
    ),
    ("bias", lambda k: zeros(16, dtype=torch.bfloat16)[::2], r"bias must be contiguous.*with other strides"),
)


def refused(subject: Subject, given: Given, case: Operands, message: str, **others: Any) -> None:
    with pytest.raises(GuardError, match=message):
        subject.run(given, case, **others)


@instances("one", MXFP8)
def test_operands_are_guarded(subject: Subject, given: Given) -> None:
    case = good(subject, given)
    for name, wrong, message in WRONG:
        changed = wrong(case.mnk[2])
        if name in ("out", "bias"):
            refused(subject, given, case, message, **{name: changed})
        else:
            refused(subject, given, case.but(**{name: changed}), message, out=case.out())
    for k in (48, 0):
        short = case.but(xq=zeros(2, k), wq=zeros(8, k))
        refused(subject, given, short, rf"K must be a positive multiple of 32.*got {k}", out=case.out())
    k = case.mnk[2]
    refused(subject, given, case.but(wq=zeros(0, k), ws=zeros(0, k // 32)), "N must be at least 1; got 0")
    most = subject.most_m(given)
    for m in (0, *(() if most > 64 else (most + 1, 128))):
        rows = case.but(xq=zeros(m, k), xs=zeros(m, k // 32))
        refused(subject, given, rows, rf"M must be between 1 and \d+; got {m}")


# Kernel, what its configuration becomes, M and K, the message.
OTHERS = (
    ("smallm_mxfp8_gemv", {"block_n": 12}, 2, 64, "block_n must be 4, 8, 16, 32 or 64.*got 12"),
    ("smallm_mxfp8_gemv", {"block_n": -8}, 2, 64, "block_n must be 4, 8, 16, 32 or 64.*got -8"),
    ("smallm_mxfp8_mfma", {"n_sub": 3}, 2, 64, "n_sub must be 1, 2 or 4.*got 3"),
    ("smallm_mxfp8_mfma", {"n_sub": -1}, 2, 64, "n_sub must be 1, 2 or 4.*got -1"),
    ("smallm_mxfp8_mfma", {"k_splits": 3}, 2, 512, "k_splits must be 1, 2, 4 or 8; got 3"),
    ("smallm_mxfp8_mfma", {"k_splits": -2}, 2, 512, "k_splits must be 1, 2, 4 or 8; got -2"),
    ("smallm_mxfp8_mfma", {"k_splits": 4}, 2, 256,
     r"k_splits must not exceed the number of K steps, ceil\(K/128\) = 2 for K = 256; got 4"),
    ("mxfp8_group_split", {"columns": 40}, 2, 512, "columns must be 16, 24, 32 or 48; got 40"),
    ("mxfp8_group_split", {"k_splits": 8}, 2, 2048, "k_splits must be 2 or 4; got 8"),
    ("mxfp8_group_split", {"k_splits": 4}, 2, 256, "k_splits must not exceed the number of K steps"),
    ("mxfp8_k_packed", {"columns": 4}, 5, 2048, "M must be between 1 and 4; got 5"),
    ("mxfp8_k_packed", {"columns": 8}, 9, 2048, "M must be between 1 and 8; got 9"),
    ("mxfp8_k_packed", {"columns": 4, "waves": 1}, 4, 256, "K must be a multiple of 512 with 4 columns"),
    ("mxfp8_k_packed", {"columns": 8}, 4, 2176, "K must be a multiple of 256 with 8 columns"),
    ("mxfp8_k_packed", {"waves": 3}, 4, 2048, "waves must be 1, 2, 4, 8 or 16; got 3"),
    ("mxfp8_k_packed", {"groups": 5, "waves": 4}, 4, 2048, "groups times waves at most 16; got groups = 5, waves = 4"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "m", "k", "message"), [one for one in OTHERS if one[0] in SUBJECTS], ids=lambda part: str(part)
)
def test_other_configurations_are_refused(name: str, changes: Given, m: int, k: int, message: str) -> None:
    subject = SUBJECTS[name]
    refused(subject, {**subject.few[0], **changes}, integers(m, 16, k, scales=(127, 127)), message)


def workspace_of(kernel: Kernel, given: Given, case: Operands) -> torch.Tensor:
    made = None if kernel.workspace is None else kernel.workspace(given, case.mnk, case.xq.device)
    assert made is not None
    return made


@pytest.mark.parametrize("name", ("smallm_mxfp8_mfma", "mxfp8_group_split", "mxfp8_gemm_tiles"))
def test_the_workspace_of_a_split_k_is_guarded(name: str) -> None:
    kernel = SUBJECTS[name].kernel
    given = next(one for one in SUBJECTS[name].every if one.get("k_splits", 1) == 2)
    case = integers(60, 40, 256)
    needed = workspace_of(kernel, given, case)

    wrong: tuple[tuple[torch.Tensor | None, str], ...] = (
        (None, rf"k_splits = 2 needs a workspace: float32 \[{', '.join(map(str, needed.shape))}\]; got None"),
        (needed.bfloat16(), "workspace must be .*float32 .*; got bfloat16"),
        (needed.flatten()[1:], rf"workspace must be .*\[{', '.join(map(str, needed.shape))}\].*got float32"),
        (torch.cat((needed, needed), -1)[..., ::2], "workspace must be contiguous.*with other strides"),
    )
    for workspace, message in wrong:
        with pytest.raises(GuardError, match=message):
            kernel.launch(case.out(), *case.args(), None, workspace, *kernel.choice(given).configuration.values())


def split(name: str, k_splits: int, which: int = 0) -> tuple[Kernel, Given]:
    """A kernel whose work-groups share K and meet in one launch, and one of its instances."""
    found = [one for one in SUBJECTS[name].every if one["k_splits"] == k_splits]
    return SUBJECTS[name].kernel, found[which]


MEETING = pytest.mark.parametrize("name", ("mxfp8_group_split", "mxfp8_gemm_tiles"))


@MEETING
def test_the_workspace_of_a_split_serves_each_replay_of_its_one_launch(name: str) -> None:
    kernel, given = split(name, 4, -1)
    case = integers(70, 40, 1024)
    space, out = workspace_of(kernel, given, case), case.out()
    launch = lambda: kernel.launch(out, *case.args(), None, space, *kernel.choice(given).configuration.values())
    launch()  # a module is not loaded in a capture
    with emulator.capture() as graph:
        launch()
    assert len(graph.nodes) == 1
    for _ in range(3):  # each replay has the number of the launch that was captured
        case.xq.copy_(case.xq.flip(0))
        with emulator.counters() as counted:
            graph.replay()
        assert_bits(out, oracle(case))
        assert counted.tensors["out"].stored == 2 * out.numel(), "more than one work-group took itself for the last"


@MEETING
def test_the_workspace_of_a_split_may_hold_what_another_launch_left(name: str) -> None:
    few, many = integers(40, 70, 1024), integers(100, 100, 2048)
    sizes = [workspace_of(*split(name, k_splits), many) for k_splits in (2, 4)]
    space = max(sizes, key=torch.Tensor.numel).flatten()
    for case, k_splits in ((many, 4), (few, 2), (many, 2), (few, 4)):
        kernel, given = split(name, k_splits)
        needed = workspace_of(kernel, given, case)
        out, part = case.out(), space[: needed.numel()].view(needed.shape)
        with emulator.counters() as counted:
            kernel.launch(out, *case.args(), None, part, *kernel.choice(given).configuration.values())
        assert_bits(out, oracle(case))
        assert counted.tensors["out"].stored == 2 * out.numel()


@pytest.mark.parametrize("name", ("smallm_mxfp8_gemv", "smallm_mxfp8_mfma"))
def test_more_than_2_gib_is_refused_before_anything_is_touched(name: str) -> None:
    # Nothing of this size is written, so that the system gives no memory for it.
    subject = SUBJECTS[name]
    n, k = 32769, 65536
    case = Operands(*(torch.empty(rows, of, dtype=torch.uint8) for rows in (1, n) for of in (k, k // 32)))
    refused(subject, subject.few[0], case, r"Wq has N\*K = 32769\*65536 = 2147549184 bytes.*2\^31 - 1.*signed 32-bit")
    k = 2**28
    case = Operands(*(torch.empty(rows, of, dtype=torch.uint8) for rows in (8, 1) for of in (k, k // 32)))
    refused(subject, subject.few[0], case, r"Xq has M\*K = 8\*268435456 = 2147483648 bytes")


def test_another_architecture_is_refused_before_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: devices.Device("emulator", "gfx942"))
    operands = zeros(2, 8, dtype=torch.bfloat16), zeros(2, 64), zeros(2, 2), zeros(8, 64), zeros(8, 2)
    for shipped, more in ((smallm_mxfp8_gemv_out, (8,)), (smallm_mxfp8_mfma_out, (None, 1, 1))):
        stub = shipped.stub
        mutated = tuple(one.name for one in stub.signature.parameters if one.mutated)
        unbound = compile_ops(stub.module_name, fc_name=stub.entry, variant=stub.variant, mutates=mutated)
        with pytest.raises(ArchError, match=r"gfx950.*gfx942"):
            unbound(shipped.__wrapped__)(*operands, *more)


def test_another_architecture_is_refused_again_before_a_launch() -> None:
    """The module asks the device itself, once in a process."""
    program = """
import torch
from hipforge import emulator
from hipforge.errors import ArchError
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv_out, smallm_mxfp8_mfma_out
zeros = lambda *shape: torch.zeros(shape, dtype=torch.uint8)
operands = torch.zeros(2, 8, dtype=torch.bfloat16), zeros(2, 64), zeros(2, 2), zeros(8, 64), zeros(8, 2)
with emulator.options(arch="gfx942"):
    for stub, more in ((smallm_mxfp8_gemv_out, (8,)), (smallm_mxfp8_mfma_out, (None, 1, 1))):
        try:
            stub(*operands, *more)
        except ArchError as error:
            print(" ".join(str(error).split()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2 and all(re.search("gfx950.*gfx942", line) for line in said)
