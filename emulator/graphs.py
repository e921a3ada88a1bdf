"""``capture``: record what a block would launch, and replay it, as ``torch.cuda.graph`` does on a GPU.

Kernels are recorded by the emulator's own HIP runtime, in a capture of the stream that ops use meanwhile. On a GPU
torch's operations are kernels of that stream too; here they run on the CPU, so each is recorded as a host function of
the graph, between the kernels that it ran between.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hipforge.emulator import library, runtime
from hipforge.errors import GuardError, HipforgeError
from hipforge.jit.call import torch_library

Mode = Literal["global", "thread_local", "relaxed"]

_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}  # hipStreamCaptureMode
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_FROM_THE_HOST = frozenset({torch.ops.aten.lift_fresh.default})  # torch.tensor([...]) and the like


class Graph:
    """What :func:`capture` recorded. The memory of every tensor that it reads or writes lives as long as it does.

    A replay reads and writes that memory, so a tensor whose ``data`` is replaced later no longer shows its results.

    Attributes:
        nodes: the kernels and torch operations in the order of the replay; set when the capture ends.

    Example:
        >>> import torch
        >>> from hipforge import emulator
        >>> x = torch.zeros(2)
        >>> with emulator.capture() as graph:
        ...     y = x + 1
        >>> graph.replay()
        >>> y.tolist(), graph.nodes
        ([1.0, 1.0], ('aten.add.Tensor',))
    """

    def __init__(self) -> None:
        self.nodes: tuple[str, ...] = ()
        self._executable = ctypes.c_void_p()
        self._kept: list[Any] = []  # tensors, and the host functions that the runtime calls
        self._memory: dict[int, tuple[torch.UntypedStorage, int, int]] = {}  # by identity: storage, address, bytes
        self._failure: BaseException | None = None

    def replay(self) -> None:
        """Run every recorded kernel and torch operation again, on what the tensors hold now.

        Raises:
            EmulatorFault: a kernel was stopped.
            GuardError: the capture has not ended, or failed; or a storage that it uses was resized since.
        """
        if not self._executable:
            raise GuardError("replay() needs a graph whose capture has ended without an error")
        for storage, address, size in self._memory.values():
            if storage.data_ptr() != address or storage.nbytes() < size:
                raise GuardError(
                    f"a storage of {size} bytes that the graph uses has {storage.nbytes()} now or has moved: it was "
                    "resized after the capture (untyped_storage().resize_); capture the graph again"
                )
        native = runtime.load().library
        self._failure = None
        status = native.hfemu_graph_launch(self._executable, native.hfemu_stream())
        if self._failure is not None:
            raise self._failure
        if status:
            library.raise_last_error("replay of a graph", fault=True)

    def _keep(self, *values: Any) -> None:
        """Keep tensors, and the storages that they have now: ``x.data = y`` would free that of x."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                self._kept.append(leaf)
                if leaf.layout == torch.strided and leaf.device.type == "cpu":
                    storage = leaf.untyped_storage()
                    self._memory.setdefault(storage._cdata, (storage, storage.data_ptr(), storage.nbytes()))

    def _finish(self, recorded: ctypes.c_void_p) -> None:
        native = runtime.load().library
        _check(native.hipGraphInstantiate(ctypes.byref(self._executable), recorded, None, None, ctypes.c_size_t(0)))
        names = (native.hfemu_graph_nodes(recorded) or b"").decode().splitlines()
        described = iter(self._torch_names)
        self.nodes = tuple(next(described) if name == "hipLaunchHostFunc" else name for name in names)
        _check(native.hipGraphDestroy(recorded))

    @property
    def _torch_names(self) -> list[str]:
        return [each.name for each in self._kept if isinstance(each, _Operation)]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Graph cannot be copied or pickled: a replay writes the memory of its capture; capture again")

    def __del__(self) -> None:
        if self._executable:
            runtime.load().library.hipGraphExecDestroy(self._executable)


@contextlib.contextmanager
def capture(mode: Mode = "global") -> Iterator[Graph]:
    """Record the kernels that ops launch, and torch's operations, in a block; nothing runs before ``replay()``.

    What the block computes holds arbitrary values until then. The ops that it calls must have been called before with
    arguments of the same shapes, or given to :func:`hipforge.warmup`: building or loading a module and reading a table
    raise HipforgeError. So do operations that need a value on the host, such as ``tensor.item()``, and copies of values
    from it, such as ``torch.tensor([1.0])``, which on a GPU end a capture.

    Args:
        mode: which calls of the HIP runtime that a graph cannot replay (allocations, for instance) are refused
            meanwhile: in this thread and those of other ``global`` captures, only in this thread, or nowhere.

    Raises:
        GuardError: a mode that does not exist, or a capture inside another one.
        HipforgeError: as above; the capture is then ended and nothing is kept of it.
        LaunchError: the HIP runtime invalidated the capture; the message says which call did.

    Example:
        >>> import torch, hipforge
        >>> from hipforge import emulator
        >>> x, weight = torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16()
        >>> hipforge.warmup(hipforge.rms_norm, x, weight, 1e-6)
        >>> with emulator.capture() as graph:
        ...     y = 2 * hipforge.rms_norm(x, weight, 1e-6)
        >>> _ = x.fill_(-3.0)
        >>> graph.replay()
        >>> y[0, 0].item(), len(graph.nodes)
        (-2.0, 2)
    """
    if mode not in _MODES:
        raise GuardError(f"mode must be one of {', '.join(_MODES)}; got {mode!r}")
    native = runtime.load().library
    if native.hfemu_capturing():
        raise GuardError("a capture is going on in this thread; end it before the next one begins")
    graph, before = Graph(), native.hfemu_stream()
    stream, recorded = ctypes.c_void_p(), ctypes.c_void_p()
    _check(native.hipStreamCreate(ctypes.byref(stream)))
    try:
        _check(native.hipStreamBeginCapture(stream, _MODES[mode]))
        native.hfemu_set_stream(stream)
        try:
            with _Recorder(graph, stream):
                yield graph
        except BaseException:
            native.hipStreamEndCapture(stream, ctypes.byref(recorded))
            if recorded:
                native.hipGraphDestroy(recorded)
            raise
        finally:
            native.hfemu_set_stream(before)
        _check(native.hipStreamEndCapture(stream, ctypes.byref(recorded)))
        graph._finish(recorded)
    finally:
        native.hipStreamDestroy(stream)


def _check(status: int) -> None:
    if status:
        library.raise_last_error(f"a HIP call (error {status})", fault=False)


class _Operation:
    """One torch operation of a graph: the host function that does it, and what it reads and writes."""

    def __init__(
        self, graph: Graph, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]
    ) -> None:
        self.name = str(function)

        def run(_: object) -> None:
            if graph._failure is not None:
                return
            try:
                with torch._C._AutoDispatchBelowAutograd():
                    found = function(*args, **kwargs)
                    for place, value in zip(results, tree_leaves(found) if results else (), strict=True):
                        place.copy_(value)
            except BaseException as error:
                graph._failure = error

        self.host_function = _HOST_FUNCTION(run)


class _Recorder(TorchDispatchMode):
    """Sees every operation of torch during a capture; :func:`torch_library.recording` knows it by its mark."""

    records_kernels = True

    def __init__(self, graph: Graph, stream: ctypes.c_void_p) -> None:
        super().__init__()
        self._graph, self._stream = graph, stream

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            raise GuardError(f"{function} was given a FakeTensor, which has no elements to capture; pass real tensors")
        self._graph._keep(args, kwargs)
        kernel = torch_library.kernel_of(function)
        if kernel is not None:  # launches are recorded by the runtime, torch's operations around them here
            with self:
                return kernel(*args, **kwargs)
        if function in _FROM_THE_HOST:
            raise HipforgeError(f"{function} copies values from the host, which a graph cannot replay; make the tensor "
                                "before the capture")  # fmt: skip
        if function.is_view:
            return function(*args, **kwargs)
        return self._record(function, args, kwargs)

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results, fresh = _results(function, args, kwargs)
        self._graph._keep(results)
        if not (fresh and function._schema.name.startswith(("aten::empty", "aten::new_empty"))):
            places = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)] if fresh else []
            operation = _Operation(self._graph, function, args, kwargs, places)
            self._graph._kept.append(operation)
            launch: Callable[..., int] = runtime.load().library.hipLaunchHostFunc
            _check(launch(self._stream, operation.host_function, None))
        return results


def _results(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Return what an operation returns, without doing it, and whether that is new memory."""
    schema = function._schema
    if schema.is_mutable:
        flags = {argument.name: argument.alias_info for argument in schema.arguments}
        given = {**dict(zip(flags, args, strict=False)), **kwargs}
        written = [given[name] for name, alias in flags.items() if alias is not None and alias.is_write]
        if torch.Tag.inplace_view in function.tags or len(schema.returns) > len(written):
            raise HipforgeError(f"{function} cannot be captured on the emulator; do it before or after the capture")
        count = len(schema.returns)
        return written[0] if count == 1 else tuple(written[:count]) or None, False
    fake_mode = FakeTensorMode()

    def fake(value: Any) -> Any:
        return fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    try:
        with fake_mode:
            described = function(*tree_map(fake, args), **tree_map(fake, kwargs))
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise HipforgeError(
            f"{function} needs a value on the host: it would synchronise, which a capture cannot; compute it before"
        ) from None
    return tree_map(real, described), True
