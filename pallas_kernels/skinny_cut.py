"""How `skinny` cuts its products: what a product is, tiles, tuning, shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import common, skinny_sm100

TILE = 64  # rows of w per cluster: the row count of a wgmma instruction
CORES = 132
WIDTH = common.BUCKETS[0]  # of the narrowest operand
MAX_SPLITS = 8  # cluster size that every device takes


@dataclass(frozen=True)
class Projection:
    """One product of a call.

    Attributes:
        w: bf16 [L, N, K].
        out_dtype: of y; bfloat16 with `situ`.
        situ: (beta, linear_beta), or None for the plain product.
        copies: how often y's columns stand side by side in the result: a gather of ranks that is
            looped back on one device writes what the ranks' peers would write.
    """

    w: jax.Array
    out_dtype: Any = jnp.float32
    situ: tuple[float, float] | None = None
    copies: int = 1

    @property
    def rows(self) -> int:
        """Rows of w."""
        return self.w.shape[1]

    @property
    def columns(self) -> int:
        """Columns of y."""
        return self.rows if self.situ is None else self.rows // 2

    def kind(self, tile: int) -> Kind:
        """The same without arrays, for tiles of that many rows."""
        out = jnp.bfloat16 if self.situ is not None else self.out_dtype
        tiles = -(-self.rows // tile)
        return Kind(self.rows, self.columns, tile, tiles, jnp.dtype(out), self.situ, self.copies)


@dataclass(frozen=True)
class Kind:
    """A product without its arrays: rows and tiles of w, what is done to the sums."""

    rows: int
    columns: int
    tile: int
    tiles: int
    dtype: Any
    situ: tuple[float, float] | None
    copies: int = 1

    @property
    def per_tile(self) -> int:
        """Columns of y that a tile gives."""
        return self.tile if self.situ is None else self.tile // 2


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        step: columns of w per pipeline step.
        stages: steps in flight per warpgroup.
        warpgroups: warpgroups per CTA, sharing the steps along K.
        splits: CTAs along K, a cluster; a power of two up to 8.
        tile: rows of w per cluster: 64 (wgmma) or 128 (tcgen05, with one warpgroup).
    """

    step: int = 128
    stages: int = 3
    warpgroups: int = 2
    splits: int = 1
    tile: int = TILE

    def meets(self, norm: bool) -> bool:
        """Whether sums meet through `cluster_sum`: those of a cluster, or with a row's squares."""
        return self.splits > 1 or norm


def default_tuning(
    m: int, rows: Sequence[int], k: int, blackwell: bool = False, norm: bool = False
) -> Tuning:
    """What measured best on an H200 for matrices of so many rows; a guess on Blackwell.

    About 100 CTAs, so K is split where there are few tiles; with more splits than that the
    cluster's barriers cost more than they bring. A step's latency is hidden by several warpgroups,
    or, for wide operands, by longer rings.
    """
    tile = skinny_sm100.TILE if blackwell else TILE
    tiles = sum(-(-n // tile) for n in rows)
    step = 128 if k % 128 == 0 else 64
    steps, splits = k // step, 1
    width = common.bucket(m)
    most = 100 if width <= 16 else 104
    while splits < MAX_SPLITS and tiles * splits * 2 <= most and steps % (splits * 2) == 0:
        splits *= 2
    if blackwell:
        warpgroups = 1
    elif width > 16:
        # one accumulator over o_proj's 1536 columns (TP8) is 1.5e-6 off, over 768 half of that;
        # longer products leave in bf16
        warpgroups = 2 if splits == 1 and 8 < steps <= 16 else 1
    elif norm:  # a step with its scaling takes long, so few in a row
        warpgroups = max(1, min(4, steps // splits))
    elif splits > 1 and steps // splits <= 8:
        warpgroups = 1
    else:
        warpgroups = 4 if splits == 1 and tiles <= 104 else 2
    stages = min(5, -(-steps // splits // warpgroups))
    cut = Tuning(step, stages, warpgroups, splits, tile)
    while cut.stages > 1 and shared_bytes(width, cut, norm) > (
        # two CTAs per multiprocessor hide each other's start and end, where they fit with two
        # stages
        common.SHARED_MEMORY // (2 if tiles * splits > CORES and cut.stages > 2 else 1)
    ):
        cut = replace(cut, stages=cut.stages - 1)
    return cut


def shared_bytes(width: int, t: Tuning, norm: bool = False) -> int:
    """Shared memory of one CTA: rings, sums, the result on its way out, squares, barriers.

    Of a cluster's sums as many as with SiTU, where fewer CTAs finish a tile.
    """
    ring = t.warpgroups * t.stages * (t.tile + width) * t.step * 2
    size = t.tile * width * 4
    finishers = min(t.splits, max(1, size // 1024))
    met = size * t.splits // finishers + 1024 if t.meets(norm) else 0  # with mailboxes
    squares = norm * (t.warpgroups + t.splits) * width * 8
    return ring + (t.warpgroups + 1) * size + met + squares + 1024


def share_of(kind: Kind, width: int, t: Tuning, interpret: bool) -> tuple[int, int]:
    """CTAs of a cluster that finish a tile, and columns of y of each."""
    if interpret:
        return 1, t.tile
    # at least one number for each of 128 threads, and 16 bytes per row for the copy engine
    finishers = min(
        t.splits, width * kind.per_tile // 128, kind.per_tile * kind.dtype.itemsize // 16
    )
    return finishers, kind.per_tile // finishers
