"""Modules that take aiter's struct, as pybind11 functions and as C functions: calls, errors, faults, other structs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hipforge import aiter_compat
from hipforge.aiter_compat import compile_ops, tensors
from hipforge.errors import ConfigError, EmulatorFault, GuardError
from hipforge.jit import registry

CHECKOUT = Path(__file__).resolve().parents[1] / "helpers" / "aiter_checkout"
CONFIG = CHECKOUT / "aiter/jit/optCompilerConfig.json"
ADDED = aiter_compat.register(CONFIG)


@compile_ops("module_sample_develop", develop=True)
def scale(factor: float, x: Tensor, out: Tensor, bias: Tensor | None = None, beyond: int = 0) -> None: ...


@compile_ops("module_sample_develop", develop=True)
def dtype_of(x: Tensor) -> int: ...


@compile_ops("module_sample_develop", develop=True)
def current_stream() -> int: ...


@compile_ops("module_sample_develop")
def total(values: list[int]) -> int: ...


@compile_ops("module_sample_develop", develop=True)
def fail_hard(x: Tensor) -> None: ...


@compile_ops("module_sample_ctypes", ffi_type="ctypes")
def scale_c(
    out: Tensor,
    x: Tensor,
    bias: Tensor | None,
    factor: float,
    beyond: int | None = None,
    negate: bool = False,
    mode: str | None = None,
) -> None: ...


@compile_ops("module_sample_ctypes", fc_name="padded", ffi_type="ctypes")
def padded_rows(m: int) -> int: ...


def rows(m: int = 3, n: int = 100) -> Tensor:
    return torch.arange(m * n, dtype=torch.float32).view(m, n)


# ---- the two forms ---------------------------------------------------------------------------------------------------


def test_a_pybind11_function_takes_structs_and_its_output_may_be_any_argument() -> None:
    x, bias = rows(), torch.arange(100.0)
    out = torch.empty_like(x)
    scale(2.0, x, out)
    assert torch.equal(out, 2 * x)
    scale(2.0, x=x, out=out, bias=bias)
    assert torch.equal(out, 2 * x + bias)


def test_a_c_function_takes_pointers_to_structs_and_null_for_none() -> None:
    x, bias = rows(), torch.arange(100.0)
    out = torch.empty_like(x)
    scale_c(out, x, None, 2.0)
    assert torch.equal(out, 2 * x)
    scale_c(out, x, bias, 0.5, negate=True, mode="plain")
    assert torch.equal(out, -0.5 * x + bias)


def test_strides_and_offsets_of_views_reach_the_kernel() -> None:
    wide = rows(4, 130)
    x = wide[1:, 7:107]
    for call in (lambda out: scale(3.0, x, out), lambda out: scale_c(out, x, None, 3.0)):
        out = torch.zeros(3, 100)
        call(out)
        assert torch.equal(out, 3 * x)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("float16", 2), ("bfloat16", 3), ("float32", 4), ("uint32", 7), ("int32", 8), ("int16", 9), ("int8", 10),
     ("uint8", 11), ("int64", 12), ("uint64", 13), ("float8_e4m3fn", 0), ("float8_e8m0fnu", 1)],
)  # fmt: skip
def test_every_dtype_has_the_number_of_the_header(dtype: str, number: int) -> None:
    assert dtype_of(torch.empty(1, dtype=getattr(torch, dtype))) == number


def test_what_the_struct_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(GuardError, match=r"argument 'x' is torch\.bool.*it has .*float16"):
        dtype_of(torch.empty(1, dtype=torch.bool))
    with pytest.raises(GuardError, match="argument 'x' has 9 dimensions; aiter_tensor_t holds at most 8"):
        dtype_of(torch.empty(1, 1, 1, 1, 1, 1, 1, 1, 1))
    with pytest.raises(GuardError, match=r"'x' must be a torch\.Tensor; got int"):
        dtype_of(5)


def test_values_are_returned_and_lists_are_passed() -> None:
    assert padded_rows(257) == 512
    assert total([1, 2, 40]) == 43
    assert isinstance(current_stream(), int)


def test_every_tensor_counts_as_written() -> None:
    assert [item.name for item in scale.stub.signature.parameters if item.mutated] == ["x", "out", "bias"]
    schema = scale.stub.signature.schema()
    assert schema == (
        "scale(float factor, Tensor(a1!) x, Tensor(a2!) out, Tensor(a3!)? bias=None, SymInt beyond=0) -> ()"
    )


def test_a_traced_call_gives_the_same() -> None:
    def twice(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scale(2.0, x, out)
        return out + 1

    x = rows()
    assert torch.equal(torch.compile(twice, backend="aot_eager", fullgraph=True)(x), 2 * x + 1)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_check_of_the_module_raises_in_both_forms() -> None:
    whole, out = torch.ones(3, 4, dtype=torch.int32), torch.empty(3, 4)
    with pytest.raises(RuntimeError, match="x must be float32 of two dimensions"):
        scale(1.0, whole, out)
    with pytest.raises(RuntimeError, match="scale_c failed: x must be float32 of two dimensions"):
        scale_c(out, whole, None, 1.0)
    with pytest.raises(RuntimeError, match="mode must be plain"):
        scale_c(out, rows(3, 4), None, 1.0, mode="other")
    scale_c(out, rows(3, 4), None, 1.0)  # the last error was that of the last call


def test_an_abort_of_the_module_raises_and_the_process_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=r"called abort\(\); it wrote the reason to the standard error"):
        fail_hard(rows())
    assert "planted: not supported" in capfd.readouterr().err
    out = torch.empty(3, 100)
    scale(1.0, rows(), out)
    assert torch.equal(out, rows())


def test_an_abort_outside_a_call_still_ends_the_process() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from op_tests.jit import test_aiter_structs as t\n"
        "from hipforge.jit.call import python_module\n"
        "from hipforge.jit import loader\n"
        "t.dtype_of(t.rows())\n"
        "made = loader.load('module_sample_develop', None, t.tensors.devices.current().arch_of())\n"
        "core = loader.load('module_aiter_core', None, t.tensors.devices.current().arch_of())\n"
        "take = python_module.import_extension(core.path / 'module.so', 'module_aiter_core').aiter_tensor_t\n"
        "module = python_module.import_extension(made.path / 'module.so', 'module_sample_develop')\n"
        "module.fail_hard(take(0, 0, 0, [], [], 4, 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(CHECKOUT.parents[2])], capture_output=True, text=True)
    assert done.returncode == -6, done.stderr


def test_a_status_without_a_reason_is_named() -> None:
    @compile_ops("module_sample_ctypes", ffi_type="ctypes")
    def quiet_failure(x: int) -> None: ...

    with pytest.raises(RuntimeError, match="quiet_failure failed with status 7 and gave no reason"):
        quiet_failure(1)


def test_a_function_that_is_not_there_is_named_in_both_forms() -> None:
    @compile_ops("module_sample_ctypes", ffi_type="ctypes")
    def absent(x: int) -> None: ...

    @compile_ops("module_sample_develop", fc_name="missing", develop=True)
    def other(x: int) -> None: ...

    with pytest.raises(ConfigError, match=r"exports no C function 'absent'.*AITER_C_ITFS"):
        absent(1)
    with pytest.raises(ConfigError, match="defines no 'missing'; it defines: current_stream"):
        other(1)


@pytest.mark.parametrize("form", ["develop", "ctypes"])
def test_an_access_out_of_bounds_names_the_tensor_and_the_source_line(form: str) -> None:
    x = rows(1, 100)
    out = torch.empty(200)[:100].view(1, 100)
    with pytest.raises(EmulatorFault, match=r"(?s)x.*scale_rows\.h:7"):
        if form == "develop":
            scale(1.0, x, out, None, 8)
        else:
            scale_c(out, x, None, 1.0, 8)


# ---- the JSON of a checkout ------------------------------------------------------------------------------------------


def test_a_checkout_is_registered_as_it_is_and_each_refused_entry_says_why() -> None:
    builds = ["module_aiter_core", "module_sample_develop", "module_sample_ctypes", "module_generated"]
    builds += ["module_block_wide"]
    assert [*builds, "module_needs_kernels"] == ADDED
    assert set(ADDED.refused) == {"module_executable", "module_unknown_place"}
    assert "built by a Makefile" in ADDED.refused["module_executable"]
    assert "{AITER_ELSEWHERE} is not defined" in ADDED.refused["module_unknown_place"]


def test_a_stub_of_a_refused_module_says_why_at_its_call() -> None:
    @compile_ops("module_unknown_place", develop=True)
    def stub(x: Tensor) -> None: ...

    with pytest.raises(ConfigError, match="AITER_ELSEWHERE"):
        stub(rows())


def test_only_names_modules_and_a_refused_one_among_them_is_an_error() -> None:
    assert aiter_compat.register(CONFIG, only=["module_sample_ctypes"]) == ["module_sample_ctypes"]
    with pytest.raises(ConfigError, match="built by a Makefile"):
        aiter_compat.register(CONFIG, only=["module_executable"])
    with pytest.raises(ConfigError, match="there is no module 'module_x'; it has module_aiter_core"):
        aiter_compat.register(CONFIG, only=["module_x"])


def test_generators_defines_and_flags_of_single_sources_reach_the_build() -> None:
    @compile_ops("module_generated")
    def archs(x: int) -> str: ...

    @compile_ops("module_generated")
    def is_hip(x: int) -> int: ...

    assert archs(0) == "gfx950;gfx942 without planted"
    assert is_hip(0) == 1  # of a source that is called .cpp
    entry = registry.module("module_sample_develop")
    assert entry.flags_extra_hip[-2:] == ("-mllvm", "-amdgpu-early-inline-all=true")
    assert {"-DENABLE_CK=0", "-DUSE_ROCM=1", "-std=c++20"} <= set(entry.flags_extra_hip)
    assert entry.flags_extra_hip[entry.flags_extra_hip.index("-Xarch_gfx950") + 1] == "-D__Float4_e2m1fn_x2"
    stand_ins = (f"${{CSRC}}/aiter/stand_ins/{name}" for name in ("rocprim", "hipcub", "hiprand"))
    assert entry.extra_include == (str(CHECKOUT / "csrc/include"), *stand_ins)


def test_defines_of_the_caller_win(tmp_path: Path) -> None:
    copy = shutil.copytree(CHECKOUT, tmp_path / "copy")
    values = json.loads(CONFIG.read_text())
    config = copy / "aiter/jit/optCompilerConfig.json"
    config.write_text(json.dumps({"module_own_name": values["module_sample_ctypes"]}))
    aiter_compat.register(config, defines={"ENABLE_CK": 1, "MINE": "x"})
    flags = registry.module("module_own_name").flags_extra_hip
    assert "-DENABLE_CK=1" in flags and "-DMINE=x" in flags and "-DENABLE_CK=0" not in flags


# ---- stand-ins for header libraries ---------------------------------------------------------------------------------


@compile_ops("module_block_wide", ffi_type="ctypes")
def block_sums(out: Tensor, x: Tensor) -> None: ...


@compile_ops("module_block_wide", ffi_type="ctypes")
def block_sort(keys: Tensor) -> None: ...


@compile_ops("module_block_wide", ffi_type="ctypes")
def random_numbers(numbers: Tensor, uniform: Tensor, seed: int, offset: int) -> None: ...


THREADS, ITEMS = 192, 3  # of block_wide.cu: three waves


def test_block_wide_sums_are_those_of_the_items_in_order() -> None:
    x = torch.randint(-1000, 1000, (THREADS * ITEMS,), dtype=torch.int32)
    out = torch.zeros(4, THREADS * ITEMS, dtype=torch.int32)
    block_sums(out, x)
    inclusive = x.cumsum(0, dtype=torch.int32)
    assert torch.equal(out[0], inclusive) and torch.equal(out[1], inclusive - x)
    assert torch.equal(out[2, :THREADS], torch.arange(THREADS, dtype=torch.int32).cumsum(0, dtype=torch.int32))
    assert torch.equal(out[3, :THREADS], inclusive[-1].expand(THREADS))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_block_wide_sorts_are_ascending_with_the_sign_and_with_equal_keys(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    keys = torch.randint(limits.min, limits.max, (THREADS * ITEMS,), dtype=dtype)
    keys[:4] = torch.tensor([limits.max, limits.min, 0, 0], dtype=dtype)
    expected = keys.sort().values
    block_sort(keys)
    assert torch.equal(keys, expected)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 as its paper has it: two multiplications a round, each half exchanged with the other pair."""
    for round_ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        keys = [(key[0] + round_ * 0x9E3779B9) % 2**32, (key[1] + round_ * 0xBB67AE85) % 2**32]
        high = [second >> 32 ^ counter[1] ^ keys[0], first >> 32 ^ counter[3] ^ keys[1]]
        counter = [high[0], second % 2**32, high[1], first % 2**32]
    return counter


def test_philox_has_the_published_vectors() -> None:
    """Of Random123's kat_vectors."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([2**32 - 1] * 4, [2**32 - 1] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("offset", [0, 1, 7, 4 * (2**32 - 1), 4 * (2**32 - 1) + 3])
def test_random_numbers_are_philox_of_seed_subsequence_and_offset(offset: int) -> None:
    seed = 0x0123456789ABCDEF
    numbers = torch.zeros(2, 8, dtype=torch.int32)
    uniform = torch.zeros(2, 4)
    random_numbers(numbers, uniform, seed, offset)
    for subsequence in range(2):
        stream: list[int] = []
        for block in range(offset // 4, offset // 4 + 4):
            stream += philox([block % 2**32, block >> 32, subsequence, 0], [seed % 2**32, seed >> 32])
        expected = torch.tensor(stream[offset % 4 :][:12])
        assert torch.equal(numbers[subsequence].long() % 2**32, expected[:8])
        assert torch.equal(uniform[subsequence], (expected[8:].float() * 2**-32) + 2**-32)


# ---- another commit's struct -----------------------------------------------------------------------------------------


def layout_with(folder: Path, *changes: tuple[str, str]) -> tensors.Layout:
    """Return the layout of the checkout's header after changes of its text."""
    header = folder / "aiter_tensor.h"
    text = (CHECKOUT / "csrc/include/aiter_tensor.h").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    header.write_text(text)
    return tensors._layout(header, "gfx950")


FIELDS = {
    "ptr": (0, 8), "numel_": (8, 8), "ndim": (16, 4), "shape": (24, 64), "strides": (88, 64), "dtype_": (152, 4),
    "device_id": (156, 4),
}  # fmt: skip


def test_the_struct_of_the_header_is_what_is_filled() -> None:
    layout = tensors.layout_of(registry.module("module_sample_ctypes"), "gfx950")
    assert layout.size == 160 and layout.dimensions == 8
    assert layout.offsets == {name: offset for name, (offset, _) in FIELDS.items()}


@pytest.mark.parametrize(
    ("size", "fields", "message"),
    [
        (168, {}, "has 168 bytes, of which hipforge knows 160"),
        (160, {"ndim": (16, 8)}, "ndim has 8 bytes; hipforge fills 4"),
        (168, {"shape": (32, 64), "strides": (96, 64), "dtype_": (160, 4), "device_id": (164, 4)},
         "12 bytes before shape"),
    ],
)  # fmt: skip
def test_a_struct_of_another_form_is_refused_with_the_difference(
    size: int, fields: dict[str, tuple[int, int]], message: str
) -> None:
    """What a build says of such a header; the next tests build some."""
    with pytest.raises(ConfigError, match=message):
        tensors._checked(CONFIG, [{"aiter_tensor_t": (0, size), **FIELDS, **fields}, {}])


@pytest.mark.parametrize(("old", "new"), [("numel_", "count"), ("AITER_DTYPE_u64", "AITER_DTYPE_ulong")])
def test_a_struct_that_lacks_a_name_is_refused(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(ConfigError, match="are not those that hipforge fills"):
        layout_with(tmp_path, (old, new))


def test_fields_in_another_order_are_filled_where_they_are(tmp_path: Path) -> None:
    end = "  int device_id;\n"
    assert layout_with(tmp_path, ("  size_t numel_;\n", ""), (end, f"{end}  size_t numel_;\n")).offsets["numel_"] == 152


def test_the_port_of_the_guide_keeps_the_order_of_the_arguments() -> None:
    registry.register(CHECKOUT / "port/modules.json")

    @compile_ops("module_scale_rows", fc_name="scale", ffi_type="ctypes")
    def ported(factor: float, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None: ...

    x, bias = rows(), torch.arange(100.0)
    out = torch.empty_like(x)
    ported(2.0, x, out, bias)
    assert torch.equal(out, 2 * x + bias)
    with pytest.raises(GuardError, match=r"x must be \[M, N\]; got 1 dimensions"):
        ported(2.0, x[0], out)
