"""Shapes as people type them: ``1,768,6144``, ``1x768x6144`` or ``m=1,k=6144,n=768``; the order is M, N, K."""

from __future__ import annotations

from collections.abc import Sequence

from hipforge.errors import ConfigError

_MOST = 2**63 - 1


def parse(text: str, names: Sequence[str], example: Sequence[int]) -> list[int]:
    """Return the numbers of a shape in the order of ``names``.

    Args:
        text: positive integers separated by ``,`` or ``x``, in the order of ``names``; or each as ``name=value``, in
            any order and in either case.
        names: such as ``("M", "N", "K")``.
        example: one number per name, for the message.

    Raises:
        ConfigError: another count of numbers, one that is not a positive integer, or a name that is unknown, missing
            or given twice.

    >>> parse("k=6144,m=1,n=768", ("M", "N", "K"), (4, 768, 6144))
    [1, 768, 6144]
    """
    parts = [part.strip() for part in text.split(",")]
    if "=" in text:
        pairs = [part.partition("=") for part in parts]
        values = [value.strip() for _, _, value in pairs]
        given = [name.strip().upper() for name, _, _ in pairs]
        if sorted(given) != sorted(names):
            raise _wrong(text, names, example)
        values = [values[given.index(name)] for name in names]
    else:
        values = [part.strip() for part in text.lower().replace("x", ",").split(",")]
    if len(values) != len(names) or not all(value.isdecimal() and value.strip("0") for value in values):
        raise _wrong(text, names, example)
    beyond = [value for value in values if len(value) > len(str(_MOST)) or int(value) > _MOST]
    if beyond:
        raise ConfigError(f"shape {text!r}: {beyond[0]} is beyond {_MOST}, the largest size of a dimension")
    return [int(value) for value in values]


def _wrong(text: str, names: Sequence[str], example: Sequence[int]) -> ConfigError:
    plain = ",".join(map(str, example))
    named = ",".join(f"{name.lower()}={value}" for name, value in zip(names, example, strict=True))
    return ConfigError(f"shape {text!r}: expected {','.join(names)} as positive integers, as in {plain} or {named}")
