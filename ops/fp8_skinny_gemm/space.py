"""The configurations of the skinny fp8 GEMM: their meaning, and the rules for all of them.

The op's guard, the planner, the reader of the tuned table and the tuner all use :func:`refusal`, so they accept the
same configurations. The module checks the same rules again before a launch, and the kernel at compile time.

A work-group computes tiles of ``tile_m`` rows and ``tile_n`` columns, ``block_k`` of k at a time. ``a_producers`` and
``b_producers`` waves load the operands of a block into one of ``qsize`` slots of a queue in LDS, ``consumers`` waves
multiply them, and ``split_k`` work-groups share the k of a tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from hipforge import archs
from hipforge.errors import GuardError

# (op_m, a_lanes, b_lanes, ops), each a variant of the module: what the default rule takes, and of each instruction one
# and several lanes of either side and both depths.
TILES = (
    (8, 1, 2, 4), (8, 1, 2, 8), (8, 1, 3, 4), (8, 1, 5, 4), (8, 2, 5, 8), (8, 3, 2, 4), (16, 1, 2, 4), (16, 1, 3, 8),
    (16, 2, 5, 8), (32, 1, 2, 4), (32, 1, 2, 8), (32, 1, 5, 4),
)  # fmt: skip
OP_M, A_LANES, B_LANES, OPS = (tuple(sorted(set(values))) for values in zip(*TILES, strict=True))
MAX_WAVES = 16  # of a work-group: 1024 threads
FLAG_BYTES = 4  # one flag per slot and operand tile; the flags end at a multiple of 16
FLAG_ALIGNMENT = 16


@dataclass(frozen=True)
class Configuration:
    """The parameters of one launch.

    Attributes:
        op_m: rows of a matrix instruction: 8 (sparse), 16 or 32; with the next three one of ``TILES``.
        a_lanes: instructions side by side along m, 1 to 3.
        b_lanes: and along n, 2, 3 or 5, 16 columns each (32 for op_m 32).
        ops: depth of a block, in 4 or 8 instructions of gfx942 (512 / op_m of k each).
        a_producers: waves that load a.
        b_producers: waves that load b.
        consumers: waves that multiply; all three together at most 16.
        qsize: slots of the queue, at least a_producers / a_lanes, b_producers / b_lanes and consumers.
        split_k: parts that k is cut into, at most the number of k blocks.
    """

    op_m: int = 8
    a_lanes: int = 1
    b_lanes: int = 2
    ops: int = 4
    a_producers: int = 2
    b_producers: int = 6
    consumers: int = 2
    qsize: int = 4
    split_k: int = 1

    @property
    def tile(self) -> tuple[int, int, int, int]:
        """Return what a variant of the module fixes."""
        return self.op_m, self.a_lanes, self.b_lanes, self.ops

    @property
    def tile_m(self) -> int:
        """Return the rows of a tile."""
        return self.op_m * self.a_lanes

    @property
    def tile_n(self) -> int:
        """Return the columns of a tile."""
        return (32 if self.op_m == 32 else 16) * self.b_lanes

    @property
    def block_k(self) -> int:
        """Return the k of a slot."""
        return 512 // self.op_m * self.ops

    @property
    def waves(self) -> int:
        """Return the waves of a work-group."""
        return self.a_producers + self.b_producers + self.consumers

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of the operands in a slot, one per element."""
        return (self.tile_m + self.tile_n) * self.block_k

    @property
    def sums(self) -> int:
        """Return the registers that a lane of a consumer adds up in."""
        return self.a_lanes * self.b_lanes * (16 if self.op_m == 32 else 4)

    @property
    def max_waves(self) -> int:
        """Return the largest work-group whose waves still have registers for the sums: 512 for every four waves."""
        return MAX_WAVES if self.sums <= 64 else 8

    @property
    def lds_bytes(self) -> int:
        """Return the LDS of a work-group: the slots, and before them the flags."""
        flags = FLAG_BYTES * (self.a_lanes + self.b_lanes) * self.qsize
        return -(-flags // FLAG_ALIGNMENT) * FLAG_ALIGNMENT + self.slot_bytes * self.qsize

    def blocks(self, k: int) -> int:
        """Return how many blocks ``k`` has; the last may be partial."""
        return -(-k // self.block_k)

    def tiles(self, m: int, n: int) -> int:
        """Return how many tiles an [m, n] result takes, split parts counted."""
        return -(-m // self.tile_m) * -(-n // self.tile_n) * self.split_k

    def parameters(self) -> dict[str, int]:
        """Return the attributes by name."""
        return dataclasses.asdict(self)


Rule = Callable[[Configuration, str, int], str | None]


def _tile(c: Configuration, arch: str, k: int) -> str | None:
    if c.tile in TILES:
        return None
    return f"(op_m, a_lanes, b_lanes, ops) must be one of {', '.join(map(str, TILES))}; got {c.tile}"


def _roles(c: Configuration, arch: str, k: int) -> str | None:
    for name in ("a_producers", "b_producers", "consumers"):
        if not 1 <= getattr(c, name) <= MAX_WAVES:
            return f"{name} must be 1 to {MAX_WAVES} waves; got {getattr(c, name)}"
    return None


def _waves(c: Configuration, arch: str, k: int) -> str | None:
    if c.waves <= c.max_waves:
        return None
    why = "1024 threads" if c.max_waves == MAX_WAVES else f"a lane's {c.sums} sums take the registers of more"
    return (
        f"a_producers + b_producers + consumers must be at most {c.max_waves} waves ({why}); got {c.waves} "
        f"({c.a_producers} + {c.b_producers} + {c.consumers})"
    )


def _queue(c: Configuration, arch: str, k: int) -> str | None:
    if c.qsize >= max(-(-c.a_producers // c.a_lanes), -(-c.b_producers // c.b_lanes), c.consumers):
        return None
    return (
        "qsize must be at least a_producers / a_lanes, b_producers / b_lanes and consumers, or waves have no slot of "
        f"their own; got qsize {c.qsize} for {c.a_producers} / {c.a_lanes}, {c.b_producers} / {c.b_lanes} and "
        f"{c.consumers}"
    )


def _lds(c: Configuration, arch: str, k: int) -> str | None:
    limit = archs.get(arch).lds_bytes
    if c.lds_bytes <= limit:
        return None
    return (
        f"the queue needs {c.slot_bytes} bytes of LDS per slot and its flags; qsize = {c.qsize} exceeds the "
        f"{limit} bytes of a work-group on {arch}"
    )


def _split(c: Configuration, arch: str, k: int) -> str | None:
    if 1 <= c.split_k <= c.blocks(k):
        return None
    return f"split_k must be 1 to {c.blocks(k)}, the number of k blocks of k={k}; got {c.split_k}"


# Each may rely on the checks of those before it.
RULES: tuple[Rule, ...] = (_tile, _roles, _waves, _queue, _lds, _split)


def refusal(configuration: Configuration, arch: str, k: int) -> str | None:
    """Return the first rule that a configuration breaks for operands of ``k`` on ``arch``, or None."""
    return next((reason for rule in RULES if (reason := rule(configuration, arch, k)) is not None), None)


def require(configuration: Configuration, arch: str, k: int) -> None:
    """Raise GuardError for a configuration that :func:`refusal` has a reason against."""
    reason = refusal(configuration, arch, k)
    if reason is not None:
        raise GuardError(reason)
