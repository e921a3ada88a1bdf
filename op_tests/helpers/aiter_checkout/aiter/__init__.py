"""A package in the form of aiter's: stubs, and helpers of its tests."""


from torch import Tensor

from .jit.core import compile_ops


@compile_ops("module_sample_develop", develop=True)
def scale(factor: float, x: Tensor, out: Tensor, bias: Tensor | None = None, beyond: int = 0) -> None: ...


@compile_ops("module_sample_develop", develop=True)
def fail_hard(x: Tensor) -> None: ...


@compile_ops("module_unknown_place", develop=True)
def unbuilt(x: Tensor) -> None: ...


@compile_ops("module_needs_kernels", develop=True)
def needs_kernels(x: Tensor) -> None: ...
