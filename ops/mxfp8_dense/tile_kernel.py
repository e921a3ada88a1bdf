"""The MX-FP8 GEMM whose tiles pass through LDS, for any M: its stub, its raw op and which tile a shape gets."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_int
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.mxfp8_dense.raw import new_result

KERNEL = "mxfp8_gemm_tiles"
MAX_M = 16384
MAX_K = 1 << 22
K_STEP = 128
K_SPLITS = (1, 2, 4, 8)

# (rows of X, rows of W) of a tile -> modelled microseconds of one K step of 128 when all compute units are busy:
# chosen to come near `hipforge time` at the 15 shapes of MiniMax-M3 with M = 96 to 256, and at (2048, 6144, 6144).
TILES: Mapping[tuple[int, int], float] = MappingProxyType(
    {(256, 256): 1.33, (128, 192): 0.78, (128, 128): 0.61, (128, 64): 0.46, (64, 64): 0.30}
)
SMALLEST_TILE = min(TILES)
START_US = 3.0  # of a launch, with the first loads and the last stores
MEET_US = 1.0  # of each meeting, until the last work-group of a tile knows that it is the last
PARTIAL_US = 1.3e-4  # per partial sum of a tile, which one compute unit reads


def tile_number(tile: tuple[int, int]) -> int:
    """Return how the module's variants name a tile."""
    return tile[0] * 1000 + tile[1]


def modelled_us(m: int, n: int, k: int, tile: tuple[int, int], k_splits: int, cu_count: int) -> float:
    """Return a rough modelled time: rounds of work-groups times steps, and the addition of a split K's parts."""
    groups = -(-m // tile[0]) * -(-n // tile[1]) * k_splits
    steps = -(-k // (K_STEP * k_splits))
    reduced = (
        0.0 if k_splits == 1 else MEET_US * (k_splits.bit_length() - 1) + k_splits * tile[0] * tile[1] * PARTIAL_US
    )
    return START_US + -(-groups // cu_count) * steps * TILES[tile] + reduced


def choice(tile: tuple[int, int], k_splits: int) -> Choice:
    """Return this kernel in a configuration."""
    return Choice(KERNEL, MappingProxyType({"tile": tile_number(tile), "k_splits": k_splits}))


def splits_to_try(k: int) -> list[int]:
    """Return the numbers of parts that K can be cut into."""
    return [k_splits for k_splits in K_SPLITS if k_splits <= -(-k // K_STEP)]


def tile_choice(m: int, n: int, k: int, cu_count: int) -> Choice:
    """Return the tile and split of K with the least modelled time, the larger tile and fewer splits in a tie."""
    pairs = [(tile, splits) for splits in splits_to_try(k) for tile in TILES]
    tile, k_splits = min(pairs, key=lambda pair: modelled_us(m, n, k, pair[0], pair[1], cu_count))
    return choice(tile, k_splits)


def split_workspace(m: int, n: int, tile: int, k_splits: int, device: torch.device) -> torch.Tensor | None:
    """Return where work-groups that share a tile leave their sums and meet; None where K is not split.

    Its contents mean nothing before and after a launch, and no other launch may use it at the same time.
    """
    if k_splits < 2:
        return None
    rows, columns = divmod(tile, 1000)
    tiles, parts = -(-m // rows) * -(-n // columns), min(k_splits, K_SPLITS[-1])
    meetings = 2 * (parts - 1)  # float32 of 64-bit words
    return torch.empty(tiles * (parts * rows * columns + meetings), dtype=torch.float32, device=device)


@compile_ops("module_mxfp8_gemm", variant=lambda *given: {"HF_TILE": given[-2]}, mutates=("out", "workspace"))
def mxfp8_gemm_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None,
    workspace: torch.Tensor | None,
    tile: int,
    k_splits: int,
) -> None:
    """Write Xq @ Wq^T + bias into ``out`` [M, N] bf16; ``workspace`` is what :func:`split_workspace` returns."""


def mxfp8_gemm_tiles(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: int = tile_number((128, 128)),
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the tile kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_dense`.

    Args:
        Xq: activations [M, K]; K a multiple of 32, at most 2^22.
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        bias: bfloat16 [N], added in float32 before the only rounding.
        tile: rows of X times 1000 plus rows of W that a work-group multiplies: 256256, 128192, 128128, 128064
            or 64064.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 128); their sums are added in a fixed order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    out = new_result(Xq, Wq)
    accepted = [tile_number(one) for one in TILES]
    if require_int("tile", tile) not in accepted:
        raise GuardError(f"tile must be one of {', '.join(map(str, accepted))}; got {tile}")
    workspace = split_workspace(out.shape[0], out.shape[1], tile, require_int("k_splits", k_splits), out.device)
    mxfp8_gemm_out(out, Xq, Xs, Wq, Ws, bias, workspace, tile, k_splits)
    return out
