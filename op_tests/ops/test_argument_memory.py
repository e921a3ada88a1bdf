"""Every tensor of every op is looked at before any memory is read or written: freed, shortened, signed, or shared."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable

import pytest
import torch
from stress import calls
from stress.calls import good_arguments
from stress.case import Arguments, Op, Rng
from stress.quantised import own_fp8
from torch._subclasses.fake_tensor import FakeTensorMode

import hipforge
from hipforge import GuardError, emulator
from hipforge.jit.call import abi, tensors
from hipforge.ops.core import dispatch

OPS = {op.name: op for op in calls.OPS}


@pytest.fixture(scope="module", autouse=True)
def binder() -> None:
    """A key is made by the binding from the first kernel on; in torch none is loaded."""
    abi.process_binder()


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same elements in rows that are longer, as a slice of a fused projection has them."""
    if x.dim() < 2:
        return x.clone()
    wide = torch.zeros((*x.shape[:-1], x.shape[-1] + 16), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def resized(x: torch.Tensor, part: float) -> torch.Tensor:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    x.untyped_storage().resize_(int(last * x.element_size() * part))
    return x


# Each as a tensor of its own and as a view of longer rows.
SPOILT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "freed": (lambda x: resized(x.clone(), 0), lambda x: resized(padded(x), 0)),
    "shortened": (
        lambda x: resized(x.clone(memory_format=torch.contiguous_format), 0.5), lambda x: resized(padded(x), 0.5)
    ),
    "signed": (lambda x: torch._neg_view(x.clone()),) * 2,
}  # fmt: skip


def call(op: Op, given: Arguments) -> object:
    return calls.function_of(op)(**given)


@pytest.mark.parametrize("name", OPS)
def test_the_calls_that_are_spoilt_below_are_right(name: str, path: str) -> None:
    op = OPS[name]
    given = good_arguments(op)
    before = copy.deepcopy(given)
    result = call(op, given)
    if path == "kernel" or result is not None:
        assert op.judge(before, result, given) is None


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("name", OPS)
def test_memory_that_is_not_what_it_says_is_refused(name: str, spoil: str, path: str) -> None:
    op = OPS[name]
    given = good_arguments(op)
    names = [key for key, value in given.items() if isinstance(value, torch.Tensor) and key not in op.fixed]
    for decided, (number, argument) in itertools.product((False, True), enumerate(names)):
        if not decided or number == 0:  # one good call serves: what is refused changes no decision
            prepare(op, given, decided)
        # One way for the call that decides, the other for the one that finds the decision.
        spoilt = {**copy.deepcopy(given), argument: SPOILT[spoil][(number + decided) % 2](given[argument])}
        before = {key: other.clone() for key, other in spoilt.items() if tensor_is_sound(other)}
        try:
            result = call(op, spoilt)
        except GuardError:
            for key, other in before.items():
                assert calls.bits(other) == calls.bits(spoilt[key]), f"{key} was written, then {argument} refused"
        else:
            assert result is None, f"{argument} was taken"


def prepare(op: Op, given: Arguments, decided: bool) -> None:
    """Have the next call decide, or find the decision of a good one, after which the binding alone looks at tensors."""
    dispatch.clear_decisions()
    if decided:
        call(op, copy.deepcopy(given))


def tensor_is_sound(value: object) -> bool:
    return isinstance(value, torch.Tensor) and tensors.problem(value) is None


def over(value: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for ``value`` that begins in the last bytes of ``other``'s, and a copy of ``other`` there."""
    flat = other.contiguous().reshape(-1).view(torch.uint8)
    needed = value.numel() * value.element_size()
    pool = torch.zeros(flat.numel() + needed + 64, dtype=torch.uint8)
    pool[: flat.numel()] = flat
    at = (flat.numel() - 1) // 16 * 16
    memory = pool[at : at + needed].view(value.dtype).view(value.shape)
    return memory, pool[: flat.numel()].view(other.dtype).view(other.shape)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.writes and name != "moe_align_block_size"])
def test_what_is_written_shares_no_byte_with_another_argument(name: str, path: str) -> None:
    op = OPS[name]
    given = good_arguments(op, lambda made: any(made.get(each) is not None for each in op.writes))
    pairs = [
        (written, other)
        for written in op.writes
        for other in given
        if other != written and all(isinstance(given.get(each), torch.Tensor) for each in (written, other))
    ]
    for decided, (number, (written, other)) in itertools.product((False, True), enumerate(pairs)):
        if not decided or number == 0:
            prepare(op, given, decided)
        shared = copy.deepcopy(given)
        shared[written], shared[other] = over(given[written], given[other])
        before = {key: value.clone() for key, value in shared.items() if isinstance(value, torch.Tensor)}
        try:
            result = call(op, shared)
        except GuardError as refusal:
            said = re.search(r"(\w+) is written and must not share memory with", str(refusal))
            # Keys that must be expanded are refused for that.
            assert said[1] in (written, other) if said else "must be expanded" in str(refusal), (other, refusal)
            for key, value in before.items():
                assert calls.bits(value) == calls.bits(shared[key]), f"{key} was written all the same"
        else:
            complaint = None if result is None else op.judge({**shared, **before}, result, shared)
            complaint = complaint or calls.changed_input(op, {**shared, **before}, shared)
            assert complaint is None, f"{written} over {other}: {complaint}"


@pytest.mark.parametrize("name", ["grouped_gemm_mxfp8", "grouped_mxfp8_linear"])
def test_a_weight_of_another_dtype_is_refused_before_the_output_is_zeroed(name: str, path: str) -> None:
    given = good_arguments(OPS[name], lambda made: made["mul_weight_by"] is not None and made["out"] is not None)
    given["mul_weight_by"] = given["mul_weight_by"].to(torch.uint8)
    if path == "kernel" or name == "grouped_mxfp8_linear":  # in torch the other one is None
        with pytest.raises(GuardError, match="mul_weight_by must"):
            call(OPS[name], given)
    assert given["out"].eq(7).all()


@pytest.mark.parametrize("good_before", (False, True))
def test_what_an_op_does_not_use_may_have_no_memory_or_be_the_output(good_before: bool) -> None:
    x, x_scale = hipforge.mxfp8_quantize(torch.ones(2, 64))
    w, w_scale = (part.view(2, 16, -1) for part in hipforge.mxfp8_quantize(torch.ones(32, 64)))
    slots = hipforge.moe_align_block_size(torch.tensor([[1], [0]], dtype=torch.int32), 16, 2)
    out = torch.zeros(2, 16, dtype=torch.bfloat16)
    freed = resized(torch.zeros(2, 1, dtype=torch.int32), 0)
    dispatch.clear_decisions()
    for topk_ids in (torch.zeros(2, 1, dtype=torch.int32),) * good_before + (freed, out.view(torch.int32)[:, :1]):
        y = hipforge.grouped_gemm_mxfp8(
            x, x_scale, w, w_scale, *slots, 2, 1, 16, torch.bfloat16, 1, topk_ids=topk_ids, out=out
        )
        assert y is None or (y == 64).all()


@pytest.mark.parametrize("wrong", (-1.0, torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 9)), ids=str)
def test_scales_of_heads_that_share_blocks_are_refused_before_anything_is_written(wrong: object, path: str) -> None:
    q, lse = torch.ones(1, 1, 4, 72).bfloat16(), torch.full((1, 4, 1), 7.0)
    cache, lengths = torch.ones(1, 16, 1, 72).to(own_fp8()), torch.tensor([16], dtype=torch.int32)
    options = {"return_lse": True, "lse_out": lse, "out_format": "mxfp8", "scale_out": wrong}
    with pytest.raises(GuardError, match="scale_out"):
        hipforge.decode_attention_fp8(q, cache, cache, None, lengths, **options)
    assert lse.eq(7).all()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("fused_moe_mxfp8", "alpha"),
        ("fused_moe_mxfp4", "limit"),
        ("fused_moe_fp8", "block_m"),
        ("decode_attention_splitk", "num_groups"),
        ("decode_attention_fp8", "return_lse"),
    ],
)
def test_so_it_is_by_ops_that_are_made_of_others(name: str, number: str, path: str) -> None:
    freed = torch.ones(1)
    freed.untyped_storage().resize_(0)
    with pytest.raises(GuardError, match=f"argument '{number}' reaches byte 4 of a storage of 0 bytes"):
        call(OPS[name], {**good_arguments(OPS[name]), number: freed})


@pytest.mark.parametrize("number", ["epsilon", "weight_offset"])
def test_a_number_that_is_a_freed_tensor_is_refused_before_a_planner_reads_it(number: str) -> None:
    freed = torch.ones(1)
    freed.untyped_storage().resize_(0)
    with pytest.raises(GuardError, match=f"argument '{number}' reaches byte 4 of a storage of 0 bytes"):
        hipforge.rms_norm(torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16(), **{"epsilon": 1e-6, number: freed})


def as_columns(x: torch.Tensor) -> torch.Tensor:
    """The same elements in an order that kernels do not read."""
    return x.t().contiguous().t()


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize(
    ("name", "written", "copied"),
    [("mxfp8_linear", "out", "wq"), ("mxfp4_linear", "out", "wq"), ("router_gemm", "out", "w"),
     ("skinny_gemm", "output", "a"), ("decode_attention_fp8", "out", "block_tables")],
)  # fmt: skip
def test_an_output_in_the_memory_of_an_operand_that_is_copied_is_refused(
    name: str, written: str, copied: str, decided: bool
) -> None:
    def fits(made: Arguments) -> bool:
        wanted = made.get(written), made.get(copied)
        return all(value is not None and min(value.shape) > 1 for value in wanted) or (
            name == "decode_attention_fp8" and None not in wanted and min(made[copied].shape) > 1
        )

    op = OPS[name]
    given = good_arguments(op, fits)
    prepare(op, given, decided)
    memory, held = over(given[written], given[copied])
    held = torch.as_strided(held, held.shape, as_columns(held).stride()).copy_(held.clone())
    with pytest.raises(GuardError, match=f"{written} is written and must not share memory with"):
        call(op, {**copy.deepcopy(given), written: memory, copied: held})


LAYERS = ("fused_moe_mxfp8", "fused_moe_mxfp4", "fused_moe_fp8")


def layer(name: str) -> Arguments:
    def fits(made: Arguments) -> bool:
        return made.get("expert_map") is not None and min(made["topk_ids"].shape) > 1

    return good_arguments(OPS[name], fits)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("spoilt", ["topk_weights", "expert_map"])
def test_what_a_layer_reads_itself_is_looked_at_first(name: str, spoilt: str) -> None:
    given = layer(name)
    value = given[spoilt].repeat(3, 1).t() if spoilt == "expert_map" else as_columns(given[spoilt].repeat(1, 2))
    given[spoilt] = resized(value[:, 0] if spoilt == "expert_map" else value[:, : given["topk_ids"].shape[1]], 0)
    with pytest.raises(GuardError, match=f"'{spoilt}' reaches byte .* of a storage of 0 bytes"):
        call(OPS[name], given)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_writes_over_nothing_that_it_was_given_but_its_input(name: str) -> None:
    given = {**layer(name), "out": torch.full(layer(name)["hidden"].shape, 7.0).bfloat16()}
    for read in ("w1", "w2", "w1_scale", "w2_scale", "topk_weights", "topk_ids", "expert_map"):
        shared = copy.deepcopy(given)
        shared["out"], shared[read] = over(given["out"], given[read])
        before = calls.bits(shared[read])
        for block in (contextlib.nullcontext(), emulator.capture()):
            shares = f"out is written and must not share memory with {read}, unless"
            with pytest.raises(GuardError, match=shares), block:
                call(OPS[name], shared)
        assert calls.bits(shared[read]) == before
    hidden = torch.randn(given["hidden"].shape).bfloat16()
    plain = {**given, "hidden": hidden, "hidden_scale": None, "out": None}
    wanted = call(OPS[name], plain)
    assert calls.bits(call(OPS[name], {**plain, "out": hidden})) == calls.bits(wanted)  # in place


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("spoil", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)])
def test_a_tensor_without_elements_is_refused_for_the_same_bits(
    spoil: Callable[[torch.Tensor], torch.Tensor], decided: bool, path: str
) -> None:
    rows, weights = torch.zeros(0, 8).half(), torch.zeros(0, 2)
    prepare(OPS["moe_combine"], {"rows": rows, "weights": weights}, decided)
    with pytest.raises(GuardError, match=r"argument 'weights' (has its negative bit set|is a tensor of zeros)"):
        hipforge.moe_combine(rows, spoil(weights))


def test_what_has_no_truth_is_refused_before_attention_is_written(path: str) -> None:
    op = OPS["decode_attention_fp8"]
    given = {**good_arguments(op, lambda made: made.get("out") is not None), "return_lse": torch.zeros(2)}
    before = calls.bits(given["out"])
    with pytest.raises(GuardError, match="return_lse must be True or False"):
        call(op, given)
    assert calls.bits(given["out"]) == before


def test_an_output_of_another_dtype_is_refused_where_torch_would_convert(path: str) -> None:
    with pytest.raises(GuardError, match=r"out must be .*; got float16"):
        hipforge.router_gemm(torch.zeros(2, 16).bfloat16(), torch.zeros(3, 16), out=torch.zeros(2, 3).half())


def test_a_true_number_of_groups_is_one(path: str) -> None:
    op = OPS["decode_attention_splitk"]
    # Of a ragged batch tokens of no sequence stay unwritten.
    given = good_arguments(op, lambda made: made["num_groups"] == 1 and made.get("cu_seqlens_q") is None)
    want = call(op, given)
    got = call(op, {**given, "num_groups": True})
    assert all(map(torch.equal, calls.results(got), calls.results(want)))


def test_a_complex_number_in_a_tensor_is_a_float_or_refused_by_name(path: str) -> None:
    x, weight, zero = torch.ones(2, 64).half(), torch.ones(64).half(), torch.zeros((), dtype=torch.complex64)
    if path == "kernel":
        assert hipforge.rms_norm(x, weight, zero).eq(1).all()
        return
    with pytest.raises(GuardError, match=r"epsilon must be a float; got a torch\.Tensor"):
        hipforge.rms_norm(x, weight, zero)


def test_a_fake_tensor_without_its_mode_is_computed_or_refused_by_name(path: str) -> None:
    fake = FakeTensorMode().from_tensor(torch.ones(2, 64))
    x8, scale, _ = hipforge.fp8_quant_tensorwise(fake)
    assert x8.shape == (2, 64) and scale.shape == ()
    try:
        result = hipforge.moe_combine(fake, top_k=2)
    except GuardError as error:
        assert "rows is a FakeTensor; make the call under its FakeTensorMode" in str(error)
    else:
        assert result.shape == (1, 64)


@pytest.mark.parametrize("decided", [False, True])
def test_an_output_in_the_memory_of_an_operand_that_is_padded_is_refused(decided: bool) -> None:
    x, w = (torch.zeros(rows, 72, dtype=torch.uint8).view(own_fp8()) for rows in (3, 8))
    given = {"xq": x, "x_scale": torch.ones(1), "wq": w, "w_scale": torch.ones(1), "out": torch.zeros(3, 8).bfloat16()}
    prepare(OPS["fp8_gemm"], given, decided)
    given["out"], given["wq"] = over(given["out"], w)
    with pytest.raises(GuardError, match="out is written and must not share memory with wq"):
        hipforge.fp8_gemm(**given)


@pytest.mark.parametrize("k", [64, 200])
def test_no_rows_have_no_blocks(k: int, path: str) -> None:
    q, scales = hipforge.fp8_quant_blocks(torch.zeros(0, k))
    assert q.shape == (0, k) and scales.shape == (0, -(-k // 128))


@pytest.mark.parametrize("name", ["grouped_mxfp8_linear", "grouped_fp8_linear", "grouped_mxfp4_linear"])
@pytest.mark.parametrize(
    "changed", [{"a_div": 2**31}, {"num_tokens_post_padded": torch.full((1,), 16, dtype=torch.int32).expand(2**46)}],
    ids=["a_div", "padded count"],
)  # fmt: skip
def test_a_grouped_gemm_takes_counts_that_no_kernel_counts_to(name: str, changed: Arguments) -> None:
    """The output is filled with zeros before the kernel's own checks: nothing may be left for those to refuse."""
    op = OPS[name]
    call = next(
        given
        for number in range(100)
        if (given := op.make(Rng(3, number)))["num_valid_tokens"] > 0 and given["a_q"].numel() and given["w"].numel()
    )
    given = {**call, "a_div": call["num_valid_tokens"], **changed}
    given["out"] = torch.full((call["num_valid_tokens"], call["w"].shape[1]), 7.0).bfloat16()
    plain = {**given, "a_div": call["num_valid_tokens"], "num_tokens_post_padded": given["num_tokens_post_padded"][:1]}
    function = getattr(hipforge, name)
    assert torch.equal(function(**given), function(**{**plain, "out": None}))
