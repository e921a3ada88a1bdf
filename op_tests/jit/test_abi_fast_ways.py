"""What the binding asks of torch's libraries and remembers: the answers of Python, and never a stale one."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch
from helpers.abi_module import environment, renamed_add

from hipforge.jit.call import abi, torch_functions
from hipforge.jit.call.signature import signature_of

has_functions = pytest.mark.skipif(
    torch_functions.find(abi.dtype_codes()) is None, reason="this torch lacks a function that tensors are read by"
)


@pytest.fixture
def binder(library):
    return abi.make_binder(environment(library, "host"))


def test_a_torch_that_has_every_function_is_read_by_them():
    folder, functions = Path(torch.__file__).parent / "lib", torch_functions._FUNCTIONS
    has = all(hasattr(ctypes.CDLL(str(folder / f"lib{name}.so")), symbol) for name, symbol in functions)
    assert has == (torch_functions.find(abi.dtype_codes()) is not None)


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "offset": lambda x: x[1:, 2:],
    "expanded": lambda x: x[:1].expand(5, -1),
    "scalar": lambda x: x[1, 2],
    "empty": lambda x: x[:0],
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
}


@has_functions
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", abi.dtype_codes(), ids=str)
def test_torchs_functions_say_of_a_tensor_what_python_says(binder, dtype, view):
    x = VIEWS[view](torch.zeros(4, 64, dtype=torch.uint8).view(dtype))
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            found, said, modes = binder.facts(x)
        assert (said, modes) == (recording, 0)
        storage = x.untyped_storage().nbytes(), x.storage_offset()
        assert found == (*abi.read_tensor(x), *storage, x.is_neg(), x.requires_grad)


@has_functions
def test_numbers_of_dtypes_are_found_where_new_memory_is_filled():
    usual = torch_functions.find(abi.dtype_codes())
    torch.use_deterministic_algorithms(True)
    try:
        assert torch_functions.find(abi.dtype_codes()) == usual
    finally:
        torch.use_deterministic_algorithms(False)


@has_functions
def test_functions_that_disagree_with_python_are_not_used(library, monkeypatch):
    found = torch_functions.find(abi.dtype_codes())
    assert found is not None
    codes = bytearray(found[-1])
    codes[15] = 9  # bfloat16 read as float32
    monkeypatch.setattr(torch_functions, "find", lambda _: (*found[:-1], bytes(codes)))
    assert abi.make_binder(environment(library, "host")).facts(torch.zeros(1)) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("reading", ["functions", "python"])
def test_modes_are_counted(library, reading):
    from torch._subclasses.fake_tensor import FakeTensorMode

    binder = abi.make_binder(environment(library, "host"), reading=reading)
    assert binder.modes() == 0
    with FakeTensorMode():
        assert binder.modes() == 1
    counted = []
    torch.jit.trace(lambda x: counted.append(binder.modes()) or x + 1, torch.zeros(1), check_trace=False)
    assert counted == [1] and binder.modes() == 0


def test_arguments_that_a_decision_tells_apart_have_different_descriptions(binder):
    x = torch.zeros(4, 6)
    different = [
        (x,), (x[:3],), (x.t(),), (x.half(),), (x[None],), (x, x), (x.to("meta"),), (None,), (), (True,), (1,), (1.0,),
        (False,), (0,), (-1,), (2**32 - 1,), (2**40,), (2**70,), (torch.float32,), (torch.bfloat16,), ("a", 1),
        (1, "a"), ("a",), ((1, 2),), (1, 2), (torch.zeros(2**33 // 2, device="meta"),), (torch.zeros(6, 4).t(),),
    ]  # fmt: skip
    for one, two in itertools.combinations(different, 2):
        assert binder.describe(*one) != binder.describe(*two), (one, two)
    for arguments in different:
        again = [a.clone(memory_format=torch.preserve_format) if isinstance(a, torch.Tensor) else a for a in arguments]
        assert hash(binder.describe(*arguments)) == hash(binder.describe(*again))
        assert binder.describe(*arguments) == binder.describe(*again)
    many = [torch.zeros(1, 2, 3, 4)] * 60  # more than the words hold
    assert binder.describe(*many) == binder.describe(*many) != binder.describe(*many[:-1], torch.zeros(1, 2, 3, 5))


def test_a_description_says_whether_a_tensor_is_contiguous(binder):
    x = torch.zeros(4, 6, 2)
    views = [x, x[:1], x[:, :1], x[:, 1:2], x[..., :1], x[1:, :3], x.transpose(0, 2), x[:0], x[:, :0],
             x[:, :, :0].transpose(0, 1), x[0, 0, 0], x[::2], x[:1].expand(4, 6, 2), x[0, 0, :1].expand(1, 1, 1),
             x.to("meta")[:, :3]]  # fmt: skip
    assert {view.is_contiguous() for view in views} == {True, False}
    for view in views:
        packed = torch.empty(view.shape, device=view.device)
        assert (binder.describe(view) == binder.describe(packed)) == view.is_contiguous(), (view.shape, view.stride())


def test_a_variant_is_chosen_once_for_a_shape_and_again_for_another(library, binder):
    signature = signature_of(renamed_add, mutates=("out",))
    bound = {rows: abi.bind(library, "renamed_add", signature, binder=binder) for rows in (1, 2)}
    asked = []

    def variant(out, x, n):
        asked.append((x.shape[0], n))
        return {"ROWS": x.shape[0]}

    call = binder.dispatch("op", signature.names, (), variant, bound, pytest.fail)
    for rows, n in [(1, 5), (1, 5), (2, 5), (1, 5), (2, 5), (2, 6), (1, 5)] + [(1, n) for n in range(200)]:
        out, x = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
        call(out, x, n)
        assert torch.equal(out, x + n)
    assert asked[:4] == [(1, 5), (1, 5), (2, 5), (2, 6)]  # the first call learns the signature, the second remembers


@has_functions
def test_an_operator_goes_past_autograd_only_where_torch_has_nothing_to_do(binder):
    went = []
    route = binder.route(
        {"kernel": lambda *args: went.append("kernel")},
        lambda *args, **kwargs: went.append("slow"),
        torch._C._functorch.maybe_current_level,
    )
    x, weight = torch.zeros(3), torch.nn.Parameter(torch.zeros(3))

    def way(*args, **kwargs):
        went.clear()
        route(*args, **kwargs)
        return went[0]

    assert way(x, 3, None, 1.5, True, "s", torch.float32) == "kernel"
    assert way(x, weight) == "slow"
    assert way(x, n=3) == way(x.to("meta")) == way([x]) == "slow"
    with torch.no_grad():
        assert way(x, weight) == "kernel"
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert way(x) == "slow"
    assert way(mode.from_tensor(x)) == "slow"
    ways = []
    torch.vmap(lambda t: ways.append(way(x)) or t)(torch.zeros(2))
    torch.func.grad(lambda t: ways.append(way(x)) or t.sum())(torch.zeros(2))
    assert ways == ["slow", "slow"]
