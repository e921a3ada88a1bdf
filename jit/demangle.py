"""Readable names of kernel symbols: ``_Z4axpyIfLi2EEvPT_PKS0_S0_i`` → ``axpy<float, 2>``.

libstdc++ demangles them; return and parameter types and anonymous namespaces are dropped. A symbol that it cannot read
is its own name, as is every symbol without libstdc++.
"""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from typing import Any

# libstdc++ before GCC 13 cannot read the 16-bit floats; no device code has these two types.
_STAND_INS = (("DF16b", "g", "__float128", "__bf16"), ("DF16_", "e", "long double", "_Float16"))


def base_name(symbol: str) -> str:
    """Return the plain function name, without namespaces and template arguments."""
    name = short_name(symbol)
    name = name[: _opening(name, "<>")] if name.endswith(">") else name
    return name.rpartition("::")[2]


@lru_cache(maxsize=4096)
def short_name(symbol: str) -> str:
    """Return the name with namespaces and template arguments, without parameter types; of what is demangled too."""
    name = symbol
    if symbol.startswith("_Z"):
        mangled = symbol
        for code, stand_in, _, _ in _STAND_INS:
            mangled = mangled.replace(code, stand_in)
        found = _demangled(mangled)
        if found is None:
            return symbol
        name = found
        for _, _, shown, wanted in _STAND_INS:
            name = name.replace(shown, wanted)
    name = re.sub("(?<=>) (?=>)", "", name.replace("(anonymous namespace)::", ""))
    if name.endswith(")"):
        name = name[: _opening(name, "()")]
    depth = 0
    for at in range(len(name) - 1, -1, -1):  # a template's name begins with its return type
        depth += (name[at] in ")>") - (name[at] in "(<")
        if name[at] == " " and not depth:
            return name[at + 1 :]
    return name


def fit(name: str, columns: int | None) -> str:
    """Return ``name`` in at most ``columns`` characters, ``…`` for its middle where it is longer; None: in full.

    >>> fit("hf::smallm_mxfp8_gemv<1, 8>", 16)
    'hf::smal…v<1, 8>'
    """
    if columns is None or len(name) <= columns:
        return name
    kept = columns - 1
    return name[: kept - kept // 2] + "…" + name[len(name) - kept // 2 :]


def _opening(name: str, pair: str) -> int:
    """Return the place of the bracket that ``name``'s last character closes."""
    depth = 0
    for at in range(len(name) - 1, 0, -1):
        depth += (name[at] == pair[1]) - (name[at] == pair[0])
        if not depth:
            return at
    return len(name)


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.free.argtypes = (ctypes.c_void_p,)
    return library


def _demangled(symbol: str) -> str | None:
    library = _library()
    text = library and library.__cxa_demangle(symbol.encode(), None, None, None)
    if not text:
        return None
    try:
        return ctypes.string_at(text).decode()
    finally:
        library.free(text)
