"""Register stubs as torch operators, ``torch.ops.hipforge.<name>``, when tracing first needs them.

An eager call goes straight to the C ABI. torch.compile, FakeTensor, meta tensors and other dispatch modes see an
operator instead: schema from the stub's annotations, mutations declared, a fake that computes nothing (results go into
tensors that already exist) unless the stub brings one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hipforge.jit.call.signature import Signature

NAMESPACE = "hipforge"

_lock = threading.Lock()


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    import torch

    return torch.library.Library(NAMESPACE, "FRAGMENT")


def register(
    signature: Signature, kernel: Callable[..., Any], gen_fake: Callable[..., Any] | None = None
) -> str:
    """Make an operator of a stub and return its name under ``torch.ops.hipforge``.

    ``kernel`` runs it on real tensors; ``gen_fake`` takes the stub's arguments and returns what the stub returns,
    without touching data. A name that is taken gets a number appended: two modules may have entries of one name.
    """
    import torch

    library = _library()
    with _lock:
        packet = getattr(torch.ops, NAMESPACE)
        name, number = signature.name, 1
        while hasattr(packet, name):
            number += 1
            name = f"{signature.name}_{number}"
        library.define(replace(signature, name=name).schema(), tags=_tags())
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", gen_fake or _nothing, lib=library)
        return name


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op whose results go into its arguments."""


def _tags() -> list[Any]:
    import torch

    # Kernels index with the strides they were given: inductor must not relayout arguments.
    layout = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    return [torch.Tag.pt2_compliant_tag, layout]
