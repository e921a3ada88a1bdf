"""How every public op refuses arguments that are not tensors or numbers, or are on a different device."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from stress import calls

import hipforge
from hipforge import devices
from hipforge.errors import ConfigError, GuardError
from hipforge.ops import reference
from hipforge.ops.core import dispatch
from hipforge.ops.core.arguments import naming_arguments
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.mxfp4_gemm import run_mxfp4
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv, smallm_mxfp8_mfma

BF16 = torch.bfloat16


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def _product(quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]], names: str) -> dict[str, Any]:
    return dict(zip(names.split(), (*quantize(_normal(4, 256)), *quantize(_normal(16, 256))), strict=True))


def _raw(**numbers: int) -> dict[str, Any]:
    return {**_product(reference.quantize_mxfp8, "Xq Xs Wq Ws"), "out_dtype": BF16, **numbers}


# What is no public op, and what takes operands of these shapes below.
OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "smallm_mxfp8_gemv": (smallm_mxfp8_gemv, _raw(block_n=8)),
    "smallm_mxfp8_mfma": (smallm_mxfp8_mfma, _raw(n_sub=1, k_splits=2)),
    "run_mxfp4": (
        run_mxfp4, _product(reference.quantize_mxfp4, "xq x_scale wq w_scale") | {"m_sub": 1, "n_sub": 1, "k_splits": 2}
    ),
    "quantize_mxfp8": (reference.quantize_mxfp8, {"x": _normal(4, 64)}),
    "quantize_mxfp4": (reference.quantize_mxfp4, {"x": _normal(4, 64)}),
    "mxfp8_mm": (reference.mxfp8_mm, _product(reference.quantize_mxfp8, "xq x_scale wq w_scale")),
}  # fmt: skip
PUBLIC = {op.name: op for op in calls.OPS if op.call is None}
EVERY = [*PUBLIC, *OTHERS]


def _made(op: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The op, and arguments of a good call of it, as many as can be."""
    if op in OTHERS:
        return OTHERS[op][0], copy.deepcopy(OTHERS[op][1])
    return calls.function_of(PUBLIC[op]), calls.good_arguments(PUBLIC[op])


def _call(op: str, **changed: Any) -> Any:
    function, arguments = _made(op)
    return function(**{**arguments, **changed})


def _tensors(op: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in _made(op)[1].items() if torch.is_tensor(value)}


@pytest.mark.parametrize("op", EVERY)
def test_what_is_no_tensor_is_refused_under_its_name(op: str) -> None:
    assert _call(op) is not None
    for name in _tensors(op):
        said = rf"\b{name.removesuffix('_tensor')}(_tensor)?'? must be (a torch.Tensor|a tensor|one of Tensor, float)"
        for wrong in ([[1.0]], np.ones((4, 64), dtype=np.float32), "tensor", {"a": 1}):
            with pytest.raises(GuardError, match=said):
                _call(op, **{name: wrong})


@pytest.mark.parametrize("op", EVERY)
def test_one_meta_tensor_among_real_ones_never_gives_a_result(op: str) -> None:
    # torch takes the fake of an operator as soon as one tensor is meta: the result would be whatever memory held.
    tensors = _tensors(op)
    for name, tensor in tensors.items():
        try:
            result = _call(op, **{name: tensor.to("meta")})
        except (GuardError, RuntimeError):
            continue
        if len(tensors) == 1:
            assert calls.results(result)[0].is_meta
        else:
            assert result is None, "None sends the caller to a fallback"


@pytest.mark.parametrize("op", EVERY)
def test_what_is_no_integer_is_refused_under_its_name(op: str) -> None:
    function, arguments = _made(op)
    parameters = inspect.signature(function).parameters
    for name, value in arguments.items():
        optional = parameters[name].default is None
        if type(value) is int and name != "top_k":  # accepted because callers pass it
            for wrong in (2.5, "8", *(() if optional else (None,))):
                with pytest.raises(GuardError, match=name):
                    _call(op, **{name: wrong})


ODD_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")  # torch warns about prototypes
@pytest.mark.parametrize("op", PUBLIC)
def test_tensors_without_a_plain_storage_are_refused(op: str) -> None:
    for name, good in _tensors(op).items():
        made = 0
        for make in ODD_TENSORS.values():
            try:
                odd = make(good)
            except (RuntimeError, NotImplementedError, IndexError):  # torch has none of this dtype or shape
                continue
            made += 1
            with pytest.raises(GuardError):
                _call(op, **{name: odd})
        assert made


@pytest.mark.parametrize("dtype", [[], {}, "bfloat16", None, 3])
@pytest.mark.parametrize("op", ["mxfp8_gemv", "mxfp4_gemm", "grouped_gemm_mxfp8", "scaled_mm"])
def test_a_dtype_that_is_none_is_refused_even_unhashable(op: str, dtype: object) -> None:
    with pytest.raises(GuardError, match=r"out_dtype must be a torch\.dtype, as torch\.bfloat16; got"):
        _call(op, out_dtype=dtype)


@pytest.mark.parametrize("op", ["decode_attention_fp8", "decode_attention_splitk", "rms_norm"])
def test_explain_says_which_argument_of_the_op_is_missing_or_unknown(op: str) -> None:
    first, second, *_ = inspect.signature(getattr(hipforge, op)).parameters
    with pytest.raises(TypeError, match=rf"^{op}\(\) missing a required argument: '{second}'$"):
        hipforge.explain(op, torch.zeros(1, 64))
    given = {name: torch.zeros(1, 64) for name in inspect.signature(getattr(hipforge, op)).parameters}
    with pytest.raises(TypeError, match=rf"^{op}\(\) got an unexpected keyword argument '{first}_'$"):
        hipforge.explain(op, **given, **{f"{first}_": 1})


def test_an_error_that_no_argument_explains_stays_what_it_is() -> None:
    def broken(x: torch.Tensor, n: int = 1) -> None:
        raise KeyError("a mistake of the op's own")

    with pytest.raises(KeyError, match="a mistake of the op's own"):
        naming_arguments(broken)(torch.zeros(1))
    with pytest.raises(GuardError, match="broken: n must be an int"):
        naming_arguments(broken)(torch.zeros(1), "one")


def test_an_integer_past_64_bits_is_refused_by_torch_paths_too() -> None:
    with pytest.raises(GuardError, match="a_div must fit 64 bits"):
        _call("grouped_mxfp8_linear", a_div=2**63)


def test_a_layer_without_tokens_is_checked_like_any_other() -> None:
    made = _made("fused_moe_mxfp8")[1]
    empty = {name: made[name][:0] for name in ("hidden", "hidden_scale", "topk_weights", "topk_ids", "out")}
    whole = {**made, **empty, "w1_bias": torch.zeros(2, 64), "w2_bias": torch.zeros(2, 64)}
    assert hipforge.fused_moe_mxfp8(**whole) is whole["out"]
    for name, value in whole.items():
        if isinstance(value, torch.Tensor):
            sparse = torch.empty(value.shape, dtype=value.dtype, layout=torch.sparse_coo)
            for wrong in (value.to(torch.complex64), value.to("meta"), sparse):
                with pytest.raises(GuardError):
                    hipforge.fused_moe_mxfp8(**{**whole, name: wrong})
    for wrong in ({"alpha": 1j}, {"beta": 1j}, {"limit": 1j}, {"interleaved": "8"}, {"block_m": 0}):
        with pytest.raises(GuardError, match=next(iter(wrong))):
            hipforge.fused_moe_mxfp8(**{**whole, **wrong})


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        ("grouped_fp8_linear", "a_scale"), ("grouped_gemm_fp8", "a_scale"), ("grouped_swiglu_fp8", "a_scale"),
        ("fused_moe_mxfp8", "hidden"), ("fused_moe_mxfp4", "hidden"), ("fused_moe_fp8", "hidden"),
    ],
)  # fmt: skip
def test_operands_of_another_dtype_are_refused_under_the_callers_names(op: str, argument: str) -> None:
    with pytest.raises(GuardError, match=rf"\b{argument}\b") as raised:
        _call(op, **{argument: _tensors(op)[argument].double()})
    own = set(inspect.signature(_made(op)[0]).parameters)
    foreign = {"x", "x_scale", "xq", "wq"} - own
    assert not foreign & set(re.findall(r"\w+", str(raised.value))), raised.value


@pytest.mark.parametrize("op", ["fused_moe_mxfp4", "fused_moe_mxfp8", "decode_attention_fp8"])
def test_none_is_no_operand(op: str) -> None:
    for argument in {"w1_scale", "w2_scale", "v_cache", "seqlens"} & _tensors(op).keys():
        with pytest.raises(GuardError, match=f"{argument} must be a torch.Tensor; got NoneType"):
            _call(op, **{argument: None})


def test_a_layer_whose_tokens_choose_no_expert_is_refused() -> None:
    given = _tensors("fused_moe_mxfp8")
    with pytest.raises(GuardError, match=r"topk_ids must have at least one choice per token; got shape \(\d+, 0\)"):
        _call("fused_moe_mxfp8", **{name: given[name][:, :0] for name in ("topk_weights", "topk_ids")})


def _attention(d: int) -> dict[str, Any]:
    cache = torch.ones(1, 20, 1, d).to(fp8_dtypes("cpu")[0])
    lengths = torch.tensor([20], dtype=torch.int32)
    return {"q": _normal(1, 1, 2, d), "k_cache": cache, "v_cache": cache, "block_tables": None, "seqlens": lengths}


@pytest.mark.parametrize("d", [64, 12], ids=["kernel", "torch"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scale": 1j}, "scale"), ({"causal": object()}, "causal"), ({"causal": 1}, "causal"),
        ({"k_scale": 1j}, "k_scale"), ({"scale": "1"}, "scale"), ({"softcap": 1j}, "softcap"),
    ],
)  # fmt: skip
def test_torch_takes_no_number_or_flag_that_the_kernel_refuses(d: int, wrong: dict[str, Any], said: str) -> None:
    hipforge.decode_attention_fp8(**_attention(d))
    with pytest.raises(GuardError, match=said):
        hipforge.decode_attention_fp8(**{**_attention(d), **wrong})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int32])
def test_a_float8_layer_and_its_product_are_floating_point(dtype: torch.dtype) -> None:
    for rows in (0, 16):
        with pytest.raises(GuardError, match="input must be floating point; got"):
            hipforge.Float8Linear(16, 16)(torch.ones(rows, 16).to(dtype))
        a = torch.ones(rows, 32).to(torch.float8_e4m3fn)
        with pytest.raises(GuardError, match="out_dtype must be a floating-point dtype; got"):
            hipforge.scaled_mm(a, torch.ones(16, 32).to(a.dtype).t(), torch.ones(1), torch.ones(1), out_dtype=dtype)


def _huge(rows: int) -> dict[str, Callable[[], Any]]:
    x, one = torch.zeros(1, 256, dtype=BF16).expand(rows, 256), torch.ones(1)
    return {
        "router_gemm": lambda: hipforge.router_gemm(x, torch.ones(4, 256, dtype=BF16)),
        "swiglu_fp8": lambda: hipforge.swiglu_fp8(x, one),
        "mxfp8_quantize": lambda: hipforge.mxfp8_quantize(x),
        "rms_norm": lambda: hipforge.rms_norm(x, torch.ones(256, dtype=BF16), 1e-5),
        "fused_moe_mxfp8": lambda: _call(
            "fused_moe_mxfp8", hidden=x[:, :64], hidden_scale=None, topk_ids=torch.zeros(1, 1).long().expand(rows, 1),
            topk_weights=torch.ones(1, 1).expand(rows, 1), out=None,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("op", _huge(1))
def test_want_of_memory_names_the_op_the_bytes_and_what_to_do(op: str) -> None:
    rows = 2**44  # every result is past the 2^47 bytes that a process can address
    with pytest.raises(hipforge.OutOfMemoryError) as raised:
        _huge(rows)[op]()
    said = str(raised.value)
    assert re.match(rf"{op} needs more memory than there is: \d+ bytes \([\d.]+ GiB\)\. Free memory", said), said
    assert "fewer rows at a time" in said and str(rows) in said
    assert isinstance(raised.value, torch.OutOfMemoryError)  # callers that catch torch's error keep working


def test_a_result_whose_size_no_number_holds_reads_alike() -> None:
    x = torch.zeros(1, 256, dtype=BF16).expand(2**54, 256)
    with pytest.raises(hipforge.OutOfMemoryError, match=r"^rms_norm needs .*: a tensor of 2\^63 bytes or more"):
        hipforge.rms_norm(x, torch.ones(256, dtype=BF16), 1e-5)


def test_a_gpus_want_of_memory_reads_alike() -> None:
    def full(x: torch.Tensor) -> None:
        raise torch.OutOfMemoryError(
            "HIP out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of ..."
        )

    with pytest.raises(hipforge.OutOfMemoryError, match=r"full needs more memory than there is: 64.00 GiB\. Free"):
        naming_arguments(full)(torch.zeros(1))


@pytest.mark.parametrize("op", ["mxfp8_linear", "mxfp4_linear"])
@pytest.mark.parametrize("start", [0, 16, 40])
def test_a_bias_in_the_memory_of_the_output_is_refused(op: str, start: int) -> None:
    given = _product(getattr(reference, f"quantize_{op.removesuffix('_linear')}"), "xq x_scale wq w_scale")
    function, out = getattr(hipforge, op), torch.zeros(4, 16, dtype=BF16)
    with pytest.raises(GuardError, match="out is written and must not share memory with bias"):
        function(**given, out=out, bias=out.view(-1)[start : start + 16])
    both = torch.zeros(80, dtype=BF16)
    assert torch.equal(function(**given, out=both[:64].view(4, 16), bias=both[64:]), function(**given))


def test_messages_hold_no_control_characters_but_line_breaks_and_tabs() -> None:
    said = str(ConfigError("a\x1b[2Jb\x07\x9b\u202ec\td\ne\r", 5))
    assert said == str(("a\\x1b[2Jb\\x07\\x9b\\u202ec\td\ne\\r", 5))
    assert str(GuardError("é ٣ ×")) == "é ٣ ×"


def test_an_out_that_requires_grad_is_refused_on_every_path() -> None:
    out = torch.empty_like(_call("mxfp8_linear")).requires_grad_()
    with pytest.raises(GuardError, match="out is written and requires grad"):
        _call("mxfp8_linear", out=out)
    with torch.no_grad():
        assert _call("mxfp8_linear", out=out) is out


def test_buffers_of_a_sorting_beyond_int32_are_refused_before_they_are_allocated() -> None:
    for block_m, experts, said in (
        (4096, 2**20, r"at most 2\^31 - 1, as indices are int32"),
        (1, 2**20 + 1, "num_experts must be at most 1048576; got 1048577"),
        (16, -1, "num_experts must be at least 0; got -1"),
    ):
        with pytest.raises(GuardError, match=said):
            hipforge.moe_align_block_size(torch.tensor([[0, 1]]), block_m, experts)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_any_integer_is_an_integer_on_torch_paths_too(
    kind: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**_made("grouped_mxfp8_linear")[1], "out": None}
    want = hipforge.grouped_mxfp8_linear(**given)
    monkeypatch.setattr(devices, "current", lambda: devices.Device("reference", None))
    dispatch.clear_decisions()
    changed = {name: kind(given[name]) for name in ("num_valid_tokens", "block_m", "a_div")}
    assert torch.equal(hipforge.grouped_mxfp8_linear(**{**given, **changed}), want)
    for none in (kind(0), False):
        assert hipforge.grouped_mxfp8_linear(**{**given, "num_valid_tokens": none}).shape == (0, want.shape[1])
    alone = hipforge.moe_align_block_size(torch.tensor([[0, 1]]), 1, 3)
    given |= {**alone._asdict(), "num_valid_tokens": 2, "block_m": 1, "a_div": 2, "mul_weight_by": None}
    one = hipforge.grouped_mxfp8_linear(**given)
    assert torch.equal(hipforge.grouped_mxfp8_linear(**{**given, "block_m": True}), one)
    dispatch.clear_decisions()


def test_a_window_is_any_integer() -> None:
    given = _attention(64)
    tables = {"block_tables": torch.tensor([[0]], dtype=torch.int32)}
    cache = torch.ones(2, 32, 1, 64).to(given["k_cache"].dtype)
    paged = {**given, **tables, "k_cache": cache, "v_cache": cache}
    want = hipforge.decode_attention_fp8(**paged, window=4)
    for window in (np.int64(4), torch.tensor(4)):
        assert torch.equal(hipforge.decode_attention_fp8(**paged, window=window), want)


@pytest.mark.parametrize(
    "value", [torch.tensor(2.0).to_sparse(), torch.tensor(2.0, device="meta")], ids=["sparse", "meta"]
)
def test_a_tensor_that_torch_cannot_compare_is_no_number(value: torch.Tensor) -> None:
    with pytest.raises(GuardError, match=r"weight_offset must be a float; got a torch\.Tensor"):
        hipforge.rms_norm(_normal(4, 64), _normal(64), 1e-5, weight_offset=value)


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weight": _normal(63)}, "weight must"), ({"weight": torch.ones(64)}, "weight must"),
        ({"residual": _normal(4, 32)}, "residual must"), ({"residual": torch.ones(4, 64)}, "residual must"),
        ({"epsilon": -(2**70)}, "epsilon must"), ({"scale_tensor": torch.ones(2)}, "scale must be one float32"),
        ({"next_buffer": _normal(4, 64), "alias": "residual"}, "must not share memory"),
    ],
    ids=str,
)  # fmt: skip
def test_a_norm_in_torch_refuses_what_the_kernel_refuses(
    wrong: dict[str, Any], said: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "torch":
        monkeypatch.setattr(devices, "current", lambda: devices.Device("reference", None))
    dispatch.clear_decisions()
    given = {**_made("residual_rms")[1], **wrong}
    if given.pop("alias", None):
        given["next_buffer"] = given["residual"]
    with pytest.raises(GuardError, match=said):
        hipforge.residual_rms(**given)
    gate_up = _normal(4, 64)
    with pytest.raises(GuardError, match="must not share memory"):
        hipforge.swiglu_fp8(gate_up, torch.ones(1), next_buffer=gate_up)
    dispatch.clear_decisions()


def test_routing_weights_are_floating_point() -> None:
    with pytest.raises(GuardError, match=r"topk_weights must be floating point; got int64"):
        _call("fused_moe_mxfp8", topk_weights=_tensors("fused_moe_mxfp8")["topk_weights"].long())


def test_a_tensor_of_one_integer_chooses_a_variant_like_the_integer() -> None:
    want = _call("smallm_mxfp8_mfma", n_sub=2)
    assert torch.equal(_call("smallm_mxfp8_mfma", n_sub=torch.tensor(2)), want)


def test_torch_ops_take_traced_tensors_inside_their_mode_and_outside() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        a = torch.zeros(16, 32, dtype=torch.float8_e4m3fn)
        one = torch.ones(1)
        assert hipforge.scaled_mm(a, a.t(), one, one).shape == (16, 16)
    outside = hipforge.scaled_mm(a, a.t(), one, one)
    assert outside.shape == (16, 16) and outside.fake_mode is mode
