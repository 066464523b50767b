"""One row's routed experts with their weighted sum, by pairs of CTAs: part of `experts_row`.

    x bf16 [1, Z], w13 and w2 as in `experts`; the chosen experts' numbers and weights in shared
    memory -> h bf16 [k, m/32, 8, 32] as between the two kernels, total f32 or bf16 [1, Z]

Rounding as in `experts`; the sum over the experts in another order, which is fixed.

A CTA makes at most one tile of h, its warpgroups sharing K; the warpgroup that finishes it tells
all CTAs. A pair of CTAs then makes 64 columns of the result for all chosen experts, of which each
of their warpgroups has the same number: what it adds up are 64 numbers, and they meet in the first
CTA, those of the second one by a mailbox. So nothing has to pass through global memory to be added,
and no second meeting of all CTAs is needed.

A warpgroup asks for its tiles of W2 as soon as it has multiplied the blocks of W13 that lay in
their place: they are in its registers before h is there, and do not stand in front of the looks at
the counter. Of h it needs one column of eight, which goes straight from global memory to registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common, experts, mailbox, meeting, mxfp4
from pallas_kernels.experts import Tuning
from pallas_kernels.experts_pack import HALF
from pallas_kernels.row_product import LINE, RowUnits
from pallas_kernels.units import COLUMNS

CTAS = 2  # of a pair
_MADE = 4  # columns of h, of which the first is the row's: one number per thread
_MOST = 512  # experts of a warpgroup times their width: W2 and h have to fit into registers


@dataclass(frozen=True)
class Pairs:
    """Both products and the sum of one row while their kernel is traced."""

    chosen: int
    latent: int
    width: int
    betas: tuple[float, float]
    t: Tuning
    hidden: tuple[int, int]  # rows and columns of the product beside
    dtype: Any = jnp.float32  # of the total

    @property
    def tiles(self) -> int:
        """Of h, one of a CTA at most."""
        return self.chosen * (self.width // HALF)

    @property
    def beside(self) -> RowUnits:
        """What the CTAs without a tile of h have to do in that time."""
        return RowUnits(*self.hidden, self.t.ctas - self.tiles)

    @property
    def per(self) -> int:
        """Experts of a warpgroup behind the meeting."""
        return self.chosen // (CTAS * self.t.warpgroups)

    @property
    def steps(self) -> int:
        """Blocks of W13 of a warpgroup."""
        return self.latent // experts.block_of(self.latent) // self.t.warpgroups

    @property
    def lines(self) -> int:
        """Lines of a warpgroup's place for weights, first W13's, then W2's."""
        first = self.steps * mxfp4.tile_lines(experts.block_of(self.latent))
        return max(first, self.per * mxfp4.tile_lines(self.width))

    def limits(self, words: int) -> list[str]:
        """Unmet conditions, each with what was found and expected; `words` of the choice."""
        out: list[str] = []
        t, tiles = self.t, self.latent // mxfp4.ROWS
        ok = self.tiles < t.ctas
        common.expect(out, "tiles of W13", self.tiles, f"fewer than {t.ctas} CTAs", ok)
        if not ok:
            return out
        out += self.beside.limits(t.warpgroups)
        wgs, limit = CTAS * t.warpgroups, common.SHARED_MEMORY
        ok = self.chosen % wgs == 0
        common.expect(out, "chosen experts in pairs", self.chosen, f"a multiple of {wgs}", ok)
        held = self.per * self.width
        common.expect(out, "numbers of a warpgroup", held, f"at most {_MOST}", held <= _MOST)
        common.expect(out, "CTAs in pairs", t.ctas, "an even number", t.ctas % CTAS == 0)
        pairs = t.ctas // CTAS
        common.expect(out, "tiles of the latent", tiles, f"at most {pairs} pairs", tiles <= pairs)
        if not out:
            used = self.shared_bytes(words)
            common.expect(out, "shared memory", used, f"at most {limit} bytes", used <= limit)
        return out

    def shared_bytes(self, words: int) -> int:
        """Of one CTA, `words` i32 of the choice included."""
        wgs, m = self.t.warpgroups, mxfp4.ROWS
        ring = wgs * self.lines * 128 + COLUMNS * self.latent * 2
        beside = self.beside.per * self.beside.lines * LINE * 2
        sums = wgs * m * COLUMNS * 4 + CTAS * wgs * m * 4
        return max(ring, beside) + sums + 4 * words + 4096

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of h and the total."""
        h = (self.chosen, self.width // HALF, COLUMNS, HALF)
        total = jax.ShapeDtypeStruct((1, self.latent), self.dtype)
        return [jax.ShapeDtypeStruct(h, jnp.bfloat16), total]

    def cta(self) -> Any:
        """Number of this CTA in the grid."""
        return lax.axis_index("pair") * CTAS + lax.axis_index("half")

    def grid(self) -> dict[str, Any]:
        """CTAs, warpgroups and scratch memory, as `run` takes it."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        z, wgs, bf16, f32 = self.latent, self.t.warpgroups, jnp.bfloat16, jnp.float32
        ring = plgpu.SMEM((wgs, self.lines, mxfp4.LINE), jnp.uint32)
        scratch = dict(
            memory=plgpu.RefUnion(
                [ring, plgpu.SMEM((z // 32, COLUMNS, 32), bf16)], [self.beside.place()]
            ),
            sums=plgpu.SMEM((wgs, mxfp4.ROWS, COLUMNS), f32),
            parts=plgpu.SMEM((CTAS * wgs, mxfp4.ROWS), f32),
            mail=mailbox.scratch(1),
            came=plgpu.Barrier(num_barriers=self.beside.per),
            full=plgpu.Barrier(num_barriers=wgs * self.steps),
            done=plgpu.Barrier(num_barriers=1, num_arrivals=wgs),
            full_down=plgpu.Barrier(num_barriers=wgs, num_arrivals=self.per),
            weighed=plgpu.Barrier(num_barriers=1),
            summed=plgpu.Barrier(num_barriers=1, num_arrivals=wgs),
        )
        return dict(
            grid=(self.t.ctas // CTAS,), grid_names=("pair",), cluster=(CTAS,),
            cluster_names=("half",), num_threads=wgs, thread_name="wg", scratch_types=scratch,
        )  # fmt: skip

    def run(
        self, table: Any, a: Any, b: Any, which: Any, met: Any, h: Any, total: Any, shares: Any, *,
        memory: Any, sums: Any, parts: Any, mail: Any,
        came: Any, full: Any, done: Any, full_down: Any, weighed: Any, summed: Any,
        prepare: Callable[..., None], weigh: Callable[[], None],
    ) -> None:  # fmt: skip
        """The body. `table` as `down` reads it, `which` layer; `shares` shared f32 bits i32 [k].

        `prepare(xs, item, items, beside)` comes first and leaves x in `xs` where the CTA has an
        item, a tile of h, and otherwise makes the product beside, with `beside`, memory and
        barriers for it; behind it the table is there. `weigh()`, called by the last warpgroup while
        W13 is on its way, leaves the weights in `shares`. `met` i32 [1] counts tiles of h.
        """
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        (ws, xs), (units,) = memory
        t, wg = self.t, lax.axis_index("wg")
        mailbox.open_mail(mail, [t.warpgroups * mxfp4.ROWS * 4])
        item, mine = self._item()
        tile, half = lax.axis_index("pair"), lax.axis_index("half")
        has_tile = tile < self.latent // mxfp4.ROWS
        first = (half * t.warpgroups + wg) * self.per  # of the chosen

        def request() -> None:
            lines, tiles = mxfp4.tile_lines(self.width), self.latent // mxfp4.ROWS
            for s in range(self.per):
                source = b.at[which, table[first + s, 0] * tiles + tile]
                place = ws.at[wg, pl.ds(s * lines, lines)]
                plgpu.copy_gmem_to_smem(source, place, full_down.at[wg])

        def settle() -> None:
            weigh()
            plgpu.barrier_arrive(weighed.at[0])

        prepare(xs, item, mine, (units, came))
        pl.when(mine > 0)(lambda: self._issue(table, a, which, item, wg, ws, full))
        mailbox.enter()  # the other CTA has come long since: nobody waits
        pl.when(wg == t.warpgroups - 1)(settle)
        ask = partial(pl.when(has_tile), request)
        held = ws, xs, sums, h, met, full, done
        pl.when(mine > 0)(lambda: self._gate_up(item, wg, *held, ask))
        pl.when(mine == 0)(ask)

        @pl.when(has_tile)
        def _():
            plgpu.barrier_wait(weighed.at[0])
            plgpu.barrier_wait(full_down.at[wg])
            down = _Down(self.per, self.width, self.tiles)
            own, member = pl.ds(first, self.per), half * t.warpgroups + wg
            down.run(ws.at[wg], met, h.at[own], shares.at[own], parts.at[member], mail)
            plgpu.barrier_arrive(summed.at[0])

            @pl.when((half == 0) & (wg == 0))
            def _():
                plgpu.barrier_wait(summed.at[0])
                mailbox.receive(mail, 0)
                _finish(parts, total.at[0, pl.ds(tile * mxfp4.ROWS, mxfp4.ROWS)])

    def _item(self) -> tuple[Any, Any]:
        """The tile of h that is this CTA's, and whether there is one: 0 or 1."""
        cta, ctas = self.cta(), self.t.ctas
        start, end = cta * self.tiles // ctas, (cta + 1) * self.tiles // ctas
        return start, end - start

    def _issue(
        self, table: Any, w: Any, which: Any, item: Any, wg: Any, ws: Any, full: Any
    ) -> None:
        """Ask for this warpgroup's blocks of a tile of W13."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        tiles, lines = self.width // HALF, mxfp4.tile_lines(experts.block_of(self.latent))
        tile = table[item // tiles, 0] * tiles + lax.rem(item, tiles)
        for j in range(self.steps):
            at = wg * self.steps + j
            source = w.at[which, tile, pl.ds(at * lines, lines)]
            plgpu.copy_gmem_to_smem(source, ws.at[wg, pl.ds(j * lines, lines)], full.at[at])

    def _gate_up(
        self, item: Any, wg: Any, ws: Any, xs: Any, sums: Any, h: Any, met: Any,
        full: Any, done: Any, ask: Callable[[], None],
    ) -> None:  # fmt: skip
        """A tile of h; `ask` for W2 when its place in `ws` is free."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        block, tiles = experts.block_of(self.latent), self.width // HALF
        lines = mxfp4.tile_lines(block)
        # the block behind which W2's place is free; all of it is this warpgroup's alone
        last = min(self.steps, -(-self.per * mxfp4.tile_lines(self.width) // lines)) - 1

        def step(j, acc):
            at = wg * self.steps + j
            plgpu.barrier_wait(full.at[at])
            operand = xs.at[pl.ds(at * (block // 32), block // 32)]
            weights = ws.at[wg, pl.ds(j * lines, lines)]
            acc = mxfp4.multiply(acc, weights, operand, block, interpret=False)
            pl.when(j == last)(ask)  # `multiply` has had the warps meet behind their reads
            return acc

        sums[wg] = lax.fori_loop(0, self.steps, step, mxfp4.zeros())
        plgpu.barrier_arrive(done.at[0])  # each thread behind its own stores

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_wait(done.at[0])
            made = experts.situ_of_sums(sums, self.t.warpgroups, self.betas, _MADE)
            h[item // tiles, lax.rem(item, tiles), pl.ds(0, _MADE)] = made
            meeting.arrive(met, copied=False)  # its warps meet behind their stores


# $0 a product $1, rounded to bf16, times the weight at $2
_WEIGHTED = """
{
.reg .b16 zero, rounded;
.reg .b32 value, weight;
ld.shared.b32 weight, [$2];
mov.b16 zero, 0;
cvt.rn.bf16.f32 rounded, $1;
mov.b32 value, {zero, rounded};
mul.rn.f32 $0, value, weight;
}
"""
# Column 0 is that of the row, which every fourth lane has. $0, $1 the sums of its rows g and g + 8
# of the warp's 16, to places 2 g and 2 g + 1 of these in the first CTA; $2 thread, $3 places of the
# warpgroup in this CTA, $4 mailbox
_TELL = """
{
.reg .pred mine, other;
.reg .b32 at, box, cta;
and.b32 at, $2, 3;
setp.eq.u32 mine, at, 0;
mov.u32 cta, %cluster_ctarank;
setp.ne.and.u32 other, cta, 0, mine;
setp.eq.and.u32 mine, cta, 0, mine;
shl.b32 at, $2, 1;
add.u32 at, at, $3;
@mine st.shared.v2.b32 [at], {$0, $1};
mov.b32 cta, 0;
mapa.shared::cluster.u32 at, at, cta;
mapa.shared::cluster.u32 box, $4, cta;
@other SEND.v2.b32 [at], {$0, $1}, [box];
}
""".replace("SEND", mailbox.SEND)
# $0 thread, $1 the warpgroups' places, $2 the tile's columns of the total
_FINISH = """
{
.reg .pred out;
.reg .b32 at, row, bit, sum, part;
.reg .b64 to;
setp.ge.u32 out, $0, ROWS;
@out bra READY;
mad.lo.u32 at, $0, 4, $1;
ld.shared.b32 sum, [at];
PARTS
and.b32 row, $0, 0x30;
and.b32 bit, $0, 1;
mad.lo.u32 row, bit, 8, row;
shr.u32 bit, $0, 1;
and.b32 bit, bit, 7;
add.u32 row, row, bit;
mul.wide.u32 to, row, SIZE;
add.u64 to, to, $2;
STORE
READY:
}
"""


@dataclass(frozen=True)
class _Down:
    """A warpgroup's experts from their tiles of W2 to what they add to the total, in registers."""

    per: int
    width: int
    arrivals: int  # at the meeting behind which h is there

    def run(self, ws: Any, met: Any, h: Any, shares: Any, part: Any, mail: Any) -> None:
        """Experts' tiles `ws`, h [per, ..] and weights; the sums go to `part` of the first CTA."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 6)
        call(self._code)(ws, met, h, shares, part, mail)

    def _code(self, _: Any, ws: Any, met: Any, h: Any, shares: Any, part: Any, mail: Any) -> None:
        reg = common.Registers()
        blocks = self._blocks(reg, reg.shared_address(ws))
        meeting.look(reg, met, self.arrivals)
        operands, at = self._operands(reg, reg.global_address(h)), reg.shared_address(shares)
        totals: list[Any] = []
        for s in range(self.per):
            zero = reg.arith.constant(reg.f32, reg.ir.FloatAttr.get(reg.f32, 0.0))
            sums, words = [zero] * 4, iter(operands[s])
            for block in blocks[s]:
                sums = mxfp4.multiply_block(reg, block, lambda _, words=words: next(words), sums)
            # of the rows g and g + 8, the first of the lane's two columns; volatile, as the
            # weights have come by way of a barrier
            place = reg.add(at, 4 * s)
            terms = [
                reg.ptx(_WEIGHTED, sums[i], place, results=1, kind=reg.f32, volatile=True)[0]
                for i in (0, 2)
            ]
            so_far = totals or [None] * len(terms)
            pairs = zip(so_far, terms, strict=True)
            totals = [b if a is None else reg.arith.addf(a, b) for a, b in pairs]
        to = reg.shared_address(part), reg.shared_address(mail)
        reg.ptx(_TELL, *totals, reg.thread(), *to, volatile=True)

    def _blocks(self, reg: common.Registers, base: Any) -> list[list[mxfp4.Block]]:
        """Of each expert's tile the blocks."""
        lines, starts = mxfp4.tile_lines, range(0, self.width, 128)

        def one(s: int, k0: int) -> mxfp4.Block:
            at = reg.add(base, (s * lines(self.width) + lines(k0)) * 4 * mxfp4.LINE)
            return mxfp4.load_block(reg, at, min(128, self.width - k0))

        return [[one(s, k0) for k0 in starts] for s in range(self.per)]

    def _operands(self, reg: common.Registers, base: Any) -> list[list[Any]]:
        """Of each expert the lane's part of h, 32 numbers after the other.

        That is column 0, which four lanes have, and else zeros.
        """
        lane = reg.ptx("and.b32 $0, $1, 31;", reg.thread(), results=1)[0]
        at, groups = reg.wide_add(base, reg.mul(lane, 16)), self.width // 32

        def one(number: int) -> Any:
            return reg.load_or_zeros("ld.global.v4.b32", at, lane, 4, 2 * COLUMNS * 32 * number)

        return [[one(s * groups + i) for i in range(groups)] for s in range(self.per)]


def _finish(parts: Any, out: Any) -> None:
    """By a warpgroup: the sum of `parts` f32 [warpgroups, 64] to `out`, global f32 or bf16 [64]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows = mxfp4.ROWS
    more = "".join(
        f"ld.shared.b32 part, [at+{4 * rows * i}];\nadd.rn.f32 sum, sum, part;\n"
        for i in range(1, parts.shape[0])
    )
    size, store = out.dtype.itemsize, "st.global.b32 [to], sum;"
    if size == 2:
        store = "{ .reg .b16 half; cvt.rn.bf16.f32 half, sum; st.global.b16 [to], half; }"
    text = _FINISH.replace("ROWS", str(rows)).replace("PARTS", more)
    text = text.replace("SIZE", str(size)).replace("STORE", store)

    def code(_: Any, source: Any, target: Any) -> None:
        reg = common.Registers()
        places = reg.shared_address(source), reg.global_address(target)
        reg.ptx(text, reg.thread(), *places, volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)(code)(parts, out)
