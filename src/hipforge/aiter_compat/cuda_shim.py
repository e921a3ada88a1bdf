"""``"cuda"`` as the emulator's device, in a process that runs somebody's tests: installed once, never taken back.

Tensors stay on the CPU, where the emulator reads them. A mode rewrites devices among the arguments of torch's
functions; ``torch.cuda`` gets the queries, events and streams that tests use, and every other public function of it
raises with its name. Nothing is timed: an event's ``elapsed_time`` is not a number.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hipforge import archs, devices

_CPU = torch.device("cpu")
_GPU = torch.device("cuda", 0)


def on_cpu(device: Any) -> Any:
    """Return a device argument with the GPU replaced by the CPU; other values as they are."""
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


class GpuOnCpu(TorchFunctionMode):
    """Makes the GPU's tensors those of the CPU, and says of every tensor that it is on GPU 0."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func is torch.Tensor.to:
            return _moved(args, kwargs)
        if kwargs:
            kwargs = {key: on_cpu(value) if key == "device" else value for key, value in kwargs.items()}
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if any(isinstance(item, torch.device) for item in args):
            args = tuple(on_cpu(item) for item in args)
        return func(*args, **kwargs)


def _moved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do ``tensor.to(...)``; for a device a copy, as between a CPU and a GPU: what is written then stays apart."""
    tensor, *rest = args
    asked = kwargs.get("device", rest[0] if rest else None)
    moved = torch.Tensor.to(tensor, *map(on_cpu, rest), **{key: on_cpu(value) for key, value in kwargs.items()})
    return moved.clone() if isinstance(asked, str | torch.device) and moved is tensor else moved


def _copy(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor.clone()


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _device(tensor: torch.Tensor, *_: Any) -> torch.device:
    return _GPU if tensor.device.type == "cpu" else tensor.device


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cuda: _copy,
    torch.Tensor.pin_memory: _same,
    torch.Tensor.record_stream: lambda *_: None,
    torch.Tensor.cpu: _copy,
    torch.Tensor.get_device: lambda tensor: 0,
    vars(torch._C.TensorBase)["is_cuda"].__get__: lambda tensor, *_: True,
    vars(torch._C.TensorBase)["device"].__get__: _device,
}


class Event:
    """Something that has happened: the emulator's launches have ended when they return."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    synchronize = wait = record

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return that nothing was measured."""
        return math.nan


class Stream:
    """The one stream there is."""

    cuda_stream = 0
    device = _GPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        """Do nothing: launches have ended when they return."""

    wait_stream = wait_event = record_event = synchronize

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Generator(torch._C.Generator):
    """A generator of random numbers, which are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        """Make one for the CPU whatever device is asked for."""
        return torch._C.Generator.__new__(cls, on_cpu(device))  # type: ignore[call-arg]

    def __init__(self, device: Any = "cpu") -> None:
        self.offset = 0

    def manual_seed(self, seed: int) -> Generator:
        """Set the seed; the offset is 0 again."""
        self.offset = 0
        super().manual_seed(seed)
        return self

    def get_offset(self) -> int:
        """Return how many numbers kernels have drawn by themselves, which the CPU's generator does not count."""
        return self.offset

    def set_offset(self, offset: int) -> Generator:
        """Set what ``get_offset`` returns."""
        if offset < 0 or offset % 4:
            raise RuntimeError(f"offset must be a multiple of 4, as on a GPU; got {offset}")
        self.offset = offset
        return self


class DefaultGenerator(Generator):
    """The device's: its seed is that of torch.manual_seed, and its state holds the offset too."""

    def initial_seed(self) -> int:
        """Return the seed of the CPU's default generator."""
        return torch.initial_seed()

    def manual_seed(self, seed: int) -> Generator:
        """Seed the CPU's default generator."""
        self.offset = 0
        torch.default_generator.manual_seed(seed)
        return self

    def get_state(self) -> torch.Tensor:
        """Return the state of the CPU's default generator and the offset."""
        with torch._C.DisableTorchFunction():
            return torch.cat([torch.get_rng_state(), torch.tensor([self.offset]).view(torch.uint8)])

    def set_state(self, state: torch.Tensor) -> Generator:
        """Set what ``get_state`` has returned."""
        with torch._C.DisableTorchFunction():
            torch.set_rng_state(state[:-8].clone())
            self.offset = int(state[-8:].clone().view(torch.int64))
        return self


def properties(_: Any = 0) -> types.SimpleNamespace:
    """Return what ``torch.cuda.get_device_properties`` would, of the emulated GPU."""
    info = archs.get(devices.current().arch_of())
    return types.SimpleNamespace(
        name=f"hipforge emulator of {info.name}", gcnArchName=info.name, multi_processor_count=info.cu_count,
        warp_size=info.wave, total_memory=_MEMORY, L2_cache_size=4 << 20, major=9,
        minor=5 if info.name == "gfx950" else 4, max_threads_per_multi_processor=2048,
        shared_memory_per_block=info.lds_bytes,
    )  # fmt: skip


_MEMORY = 64 << 30


def _replacements() -> dict[str, Any]:
    found = properties()
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_name": found.name, "get_device_capability": (found.major, found.minor),
        "mem_get_info": (_MEMORY, _MEMORY), "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
        "max_memory_reserved": 0, "is_current_stream_capturing": False, "is_bf16_supported": True,
        "get_sync_debug_mode": 0,
    }  # fmt: skip
    idle = (
        "synchronize", "empty_cache", "set_device", "seed", "seed_all", "init", "reset_peak_memory_stats",
        "set_sync_debug_mode", "ipc_collect", "set_stream",
    )  # fmt: skip
    generator = DefaultGenerator()
    made: dict[str, Any] = {name: _answering(value) for name, value in {**answers, **dict.fromkeys(idle)}.items()}
    made.update(
        get_device_properties=properties, memory_stats=lambda *_: {}, Event=Event, Stream=Stream, device=Stream,
        current_stream=Stream, default_stream=Stream, stream=Stream,
        default_generators=(generator,), initial_seed=generator.initial_seed,
        manual_seed=_without_result(generator.manual_seed), manual_seed_all=_without_result(generator.manual_seed),
        get_rng_state=lambda *_: generator.get_state(), set_rng_state=_without_result(generator.set_state),
    )  # fmt: skip
    return made


def _answering(value: Any) -> Callable[..., Any]:
    """Return a new function, since torch.compile's rules know functions by identity."""
    return lambda *_, **__: value


def _without_result(function: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a function that passes its first argument on; the second is a device."""

    def call(value: Any, *_: Any) -> None:
        function(value)

    return call


def _refusing(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"torch.cuda.{name} is not there on the emulator: hipforge's stand-in for the GPU has no such function"
        )

    return refused


def _in_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's call of its autograd engine with the mode on, which is off inside ``Tensor.backward``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with GpuOnCpu():
            return run(*args, **kwargs)

    return call


def install() -> None:
    """Install the stand-in for this process.

    Example (in a process of its own)::

        from hipforge.aiter_compat import cuda_shim
        cuda_shim.install()
        torch.zeros(4, device="cuda")
    """
    made = _replacements()
    for name in dir(torch.cuda):
        value = getattr(torch.cuda, name)
        own = callable(value) and str(getattr(value, "__module__", "")).startswith("torch.cuda")
        if name in made:
            setattr(torch.cuda, name, made[name])
        elif own and not name.startswith("_") and not (isinstance(value, type) and issubclass(value, BaseException)):
            setattr(torch.cuda, name, _refusing(name))
    set_default = torch.set_default_device
    # torch asks the default device after every mode, so that it has to be the CPU itself.
    torch.set_default_device = lambda device: set_default(on_cpu(device))
    torch.Generator = Generator  # type: ignore[misc]
    torch._C._cuda_getCurrentRawStream = _answering(0)
    torch.autograd._engine_run_backward = _in_backward(torch.autograd._engine_run_backward)
    GpuOnCpu().__enter__()
