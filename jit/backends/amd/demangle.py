"""Readable names of kernel symbols: ``_Z4axpyIfLi2EEvPT_PKS0_S0_i`` → ``axpy<float, 2>``.

A reader of the part of the Itanium name grammar that kernel names use: nested and template names whose arguments are
builtin types, pointers, references, integer and bool literals, and named types. Parameter types are dropped. Where a
name needs more of the grammar, the plain function name is returned, or the symbol itself if there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

_BUILTINS = {
    "v": "void", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char", "s": "short",
    "t": "unsigned short", "i": "int", "j": "unsigned int", "l": "long", "m": "unsigned long", "x": "long long",
    "y": "unsigned long long", "f": "float", "d": "double", "DF16_": "_Float16", "DF16b": "__bf16", "Dh": "half",
}  # fmt: skip
_SUFFIXES = {"i": "", "j": "u", "l": "l", "m": "ul", "x": "ll", "y": "ull"}


class _Beyond(Exception):
    """The symbol uses grammar that this reader does not cover."""


def base_name(symbol: str) -> str:
    """Return the plain function name, without namespaces and template arguments."""
    return _names(symbol)[0]


def short_name(symbol: str) -> str:
    """Return the name with namespaces and template arguments, without parameter types."""
    return _names(symbol)[1]


def fit(name: str, columns: int | None) -> str:
    """Return ``name`` in at most ``columns`` characters, ``…`` for its middle where it is longer; None: in full.

    >>> fit("hf::smallm_mxfp8_gemv<1, 8>", 16)
    'hf::smal…v<1, 8>'
    """
    if columns is None or len(name) <= columns:
        return name
    kept = columns - 1
    return name[: kept - kept // 2] + "…" + name[len(name) - kept // 2 :]


@lru_cache(maxsize=4096)
def _names(symbol: str) -> tuple[str, str]:
    if not symbol.startswith("_Z"):
        return symbol, symbol
    reader = _Reader(symbol, 2)
    try:
        spoken = reader.name()
    except (_Beyond, IndexError, ValueError):
        spoken = reader.last_source_name or symbol
    return reader.last_source_name or symbol, spoken


@dataclass
class _Reader:
    text: str
    at: int
    last_source_name: str = ""
    substitutions: list[str] = field(default_factory=list)

    def take(self, prefix: str) -> bool:
        if self.text.startswith(prefix, self.at):
            self.at += len(prefix)
            return True
        return False

    def digits(self) -> int:
        start = self.at
        while self.text[self.at].isdigit():
            self.at += 1
        return int(self.text[start : self.at])

    def source_name(self) -> str:
        length = self.digits()
        name = self.text[self.at : self.at + length]
        self.at += length
        return "(anonymous namespace)" if name.startswith("_GLOBAL__N") else name

    def name(self, *, function: bool = True) -> str:
        if self.take("N"):
            return self._nested(function=function)
        self.take("L")  # internal linkage
        spoken = self.source_name()
        if function:
            self.last_source_name = spoken
        self.substitutions.append(spoken)
        if self.text.startswith("I", self.at):
            spoken += self.template_args()
            if not function:
                self.substitutions.append(spoken)
        return spoken

    def _nested(self, *, function: bool) -> str:
        while self.text[self.at] in "rVK":
            self.at += 1
        prefix = ""
        while not self.take("E"):
            if self.text[self.at] == "I":
                prefix += self.template_args()
            elif self.text[self.at] == "S":
                prefix = self.substitution()
                continue
            else:
                self.take("L")
                part = self.source_name()
                if function:
                    self.last_source_name = part
                prefix = f"{prefix}::{part}" if prefix else part
            self.substitutions.append(prefix)
        return prefix.replace("(anonymous namespace)::", "")

    def template_args(self) -> str:
        self.at += 1
        args: list[str] = []
        depth = 0
        while True:
            if self.take("E"):
                if depth == 0:
                    return f"<{', '.join(args)}>"
                depth -= 1
            elif self.take("J"):
                depth += 1
            elif self.take("L"):
                args.append(self.literal())
            else:
                args.append(self.type())

    def literal(self) -> str:
        if self.take("b"):
            value = "true" if self.text[self.at] == "1" else "false"
            self.at += 1
        else:
            code = self.text[self.at]
            if code in _SUFFIXES:
                self.at += 1
                suffix, cast = _SUFFIXES[code], ""
            else:
                suffix, cast = "", f"({self.type()})"
            sign = "-" if self.take("n") else ""
            value = f"{cast}{sign}{self.digits()}{suffix}"
        if not self.take("E"):
            raise _Beyond
        return value

    def type(self) -> str:
        for code, shown in (("P", "*"), ("R", "&"), ("O", "&&")):
            if self.take(code):
                return self._remember(self.type() + shown)
        if self.take("K"):
            return self._remember(self.type() + " const")
        for code, spoken in _BUILTINS.items():
            if self.take(code):
                return spoken
        if self.take("Dv"):
            count = self.digits()
            if not self.take("_"):
                raise _Beyond
            return self._remember(f"{self.type()} vector[{count}]")
        if self.text[self.at] == "S":
            return self.substitution()
        if self.text[self.at] == "N" or self.text[self.at].isdigit():
            return self.name(function=False)
        raise _Beyond

    def _remember(self, spoken: str) -> str:
        self.substitutions.append(spoken)
        return spoken

    def substitution(self) -> str:
        self.at += 1
        if self.take("t"):
            return self._remember(f"std::{self.source_name()}")
        end = self.text.index("_", self.at)
        digits = self.text[self.at : end]
        self.at = end + 1
        return self.substitutions[int(digits, 36) + 1 if digits else 0]
