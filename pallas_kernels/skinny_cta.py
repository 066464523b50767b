"""A CTA of `skinny` while its kernel is traced: where it works, and how a step's data come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from pallas_kernels import row_norm
from pallas_kernels.skinny_cut import Kind, Tuning


def w_copies(kinds: Sequence[Kind]) -> int:
    """Copies that bring a step of w: with SiTU gate rows, and the up rows that belong to them."""
    return 1 if all(kind.situ is None for kind in kinds) else 2


@dataclass(frozen=True)
class Cta:
    """One CTA while its kernel is traced: sizes, places, refs.

    x bf16 [M, K]; layer i32 [1]; with a norm (scale: numbers of a row, eps) norm bf16 [L or 1, K].
    Scratch: ws bf16 [ring, tile, step], xs bf16 [ring, width, step], sums f32 [warpgroups, tile,
    width], squares f32 [warpgroups, width / 8, 16] with a norm; with tcgen05 acc f32 [128, width]
    in tensor memory and its barriers read and complete. Where sums meet, parts, row_parts and mail,
    see `cluster_sum.push_tile`. `copies` bring a step of w (`w_copies`). With `held`, xs is bf16
    [steps, width, step], all of the CTA's x, and somebody else has put it there; with `late`
    (numbers of a row, eps) not scaled, and parts of its squares in row_parts f32 [.., width].
    """

    k: int
    width: int
    t: Tuning
    scale: tuple[int, float] | None
    interpret: bool
    tile: Any  # grid places
    split: Any
    wg: Any
    x: Any
    layer: Any
    norm: Any
    ws: Any
    xs: Any
    sums: Any
    full: Any
    squares: Any = None
    acc: Any = None
    read: Any = None
    complete: Any = None
    parts: Any = None
    row_parts: Any = None
    mail: Any = None
    copies: int = 1
    held: bool = False
    late: tuple[int, float] | None = None

    @property
    def rows(self) -> int:
        """Rows of x in this call."""
        return self.x.shape[0]

    @property
    def steps(self) -> int:
        """Steps of a CTA; its warpgroup g takes g, g + warpgroups, ..."""
        return self.k // self.t.step // self.t.splits

    @property
    def mine(self) -> Any:
        """How many steps this warpgroup has."""
        return (self.steps - self.wg + self.t.warpgroups - 1) // self.t.warpgroups

    def columns(self, j: Any) -> Any:
        """Columns of w and x of this warpgroup's step j."""
        from jax.experimental import pallas as pl

        step = self.split * self.steps + self.wg + j * self.t.warpgroups
        return pl.ds(step * self.t.step, self.t.step)

    def request(self, w: Any, kind: Kind, local: Any, which: Any, j: Any, slot: Any) -> None:
        """Fill a slot with step j of tile `local` of w [L, N, K]."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        cols, size, bar = self.columns(j), self.t.tile // self.copies, self.full.at[slot]
        apart = size if kind.situ is None else kind.rows // 2
        for part in range(self.copies):
            row = local * kind.per_tile + part * apart
            into = self.ws.at[slot, pl.ds(part * size, size)]
            plgpu.copy_gmem_to_smem(w.at[which, pl.ds(row, size), cols], into, bar)

    def fetch(self, j: Any, slot: Any) -> None:
        """The part of a slot that is x."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self.held:
            return
        cols, bar = self.columns(j), self.full.at[slot]
        # a start known at run time only lets the box reach beyond the last row of x
        source = self.x.at[pl.ds(self.tile * 0, self.width), cols]
        plgpu.copy_gmem_to_smem(source, self.xs.at[slot], bar)

    def x_of(self, j: Any, slot: Any) -> Any:
        """Shared memory bf16 [width, step] with x of this warpgroup's step j."""
        return self.xs.at[self.wg + j * self.t.warpgroups if self.held else slot]

    def ready(self, j: Any, slot: Any, seen: Any) -> Any:
        """Wait for a slot; with a norm scale its x and add its squares to `seen`."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self.scale is None:
            plgpu.barrier_wait(self.full.at[slot])
            return seen
        which = self.layer[0] if self.norm.shape[0] > 1 else 0
        weights = row_norm.load_weights(self.norm.at[which, self.columns(j)])
        plgpu.barrier_wait(self.full.at[slot])
        return row_norm.scale_tile(seen, self.xs.at[slot], weights, self.width)


def fill(c: Cta, work: Callable[[Any, Any], None]) -> None:
    """Do `work(step, slot)` for the steps that this warpgroup's ring holds."""
    from jax.experimental import pallas as pl

    for s in range(c.t.stages):
        pl.when(s < c.mine)(lambda s=s: work(s, c.wg * c.t.stages + s))


def ranges(c: Cta, kinds: Sequence[Kind]) -> list[tuple[int, Kind, int, Any]]:
    """Of each product its number, its first tile, and whether this CTA's tile is one of it."""
    first, out = 0, []
    for i, kind in enumerate(kinds):
        out.append((i, kind, first, (c.tile >= first) & (c.tile < first + kind.tiles)))
        first += kind.tiles
    return out


def request(
    c: Cta, kinds: Sequence[Kind], ws: Any, rings: Sequence[Any], pace: Callable[[], None]
) -> None:
    """Ask for as much of w as there is room for, before x is there: for these warpgroups' rings.

    `pace` comes behind each request, for who makes x to get at memory too.
    """
    from jax.experimental import pallas as pl

    which, held = c.layer[0], [replace(c, wg=ring) for ring in rings]
    for i, kind, low, here in ranges(c, kinds):

        def step(j, _, w=ws[i], kind=kind, low=low):
            for one in held:

                @pl.when(j < one.mine)
                def _(one=one):
                    one.request(w, kind, one.tile - low, which, j, one.wg * one.t.stages + j)
                    pace()

        pl.when(here)(lambda step=step: lax.fori_loop(0, c.t.stages, step, None))
