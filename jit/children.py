"""Child processes: they end with this one, and their status is seen even where SIGCHLD is ignored."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1
_DEFAULT, _IGNORE = 0, 1  # SIG_DFL and SIG_IGN of signal.h


def ending_with_parent() -> Callable[[], None]:
    """Return the function that a child runs before ``exec``, to get SIGTERM when this process ends, even by SIGKILL.

    ninja passes the signal on to its compilers. Without it they would compile on, into a directory that the next build
    sweeps. The calling thread has to outlive the child, as one that waits for it does.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up here: a forked child should do next to nothing

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before it could be asked
            os._exit(1)

    return before_exec


_lock = threading.Lock()
_waiting = 0


@contextlib.contextmanager
def waited_for() -> Iterator[None]:
    """Let children be waited for in the block, also in a process that ignores SIGCHLD, as some servers do.

    There the kernel forgets a child's status, and Python takes that for success. An ignored signal stays ignored across
    ``exec``, so that the child cannot wait for its own children either.
    """
    global _waiting
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    libc = ctypes.CDLL(None)  # Python's own function is for the main thread only
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    with _lock:
        _waiting += 1
        libc.signal(signal.SIGCHLD, _DEFAULT)
    try:
        yield
    finally:
        with _lock:
            _waiting -= 1
            if not _waiting:
                libc.signal(signal.SIGCHLD, _IGNORE)
