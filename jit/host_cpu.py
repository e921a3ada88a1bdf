"""What ``-march=native`` means on this machine, and whether a library built for some CPU can run on it."""

from __future__ import annotations

import functools

# The x86-64 levels of the psABI, by the names /proc/cpuinfo gives the features each adds.
_LEVELS = {
    "x86-64": "",
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}


@functools.cache
def _fields() -> dict[str, str]:
    fields: dict[str, str] = {}
    with open("/proc/cpuinfo") as lines:  # read line by line: 300 cores make 500 kB
        for line in lines:
            name, _, value = line.partition(":")
            if not name.strip():
                break
            fields[name.strip()] = value.strip()
    return fields


def native() -> str:
    """Return what ``-march=native`` depends on: model and feature flags of the first CPU."""
    fields = _fields()
    return " ".join(fields.get(name, "") for name in ("vendor_id", "cpu family", "model", "stepping", "flags"))


def can_run(cpu: str) -> bool:
    """Return whether code built for ``cpu``, a level such as ``x86-64-v3`` or :func:`native`'s text, runs here."""
    if cpu not in _LEVELS:
        return cpu == native()
    has = set(_fields().get("flags", "").split())
    for level, features in _LEVELS.items():
        if not has.issuperset(features.split()):
            return False
        if level == cpu:
            break
    return True
