"""Attention residual: add the pending delta, mix over depth, norm; the snapshot on the way.

    prefix, delta [N, D] (delta bf16, or f32 and rounded once here); snapshots bf16 [N, J, D] of
    which `count` are valid -> x bf16 [N, D], new prefix bf16 [N, D] (and the snapshots, written in
    place at index `count` when `snapshot`)

With sources s_1 .. s_count and the new prefix p = round(prefix + delta) (`reset`: round(delta)),
and c = res_norm * res_proj in f32: score_i = rsqrt(mean(s_i^2) + eps) * sum(s_i c), shares =
softmax of the scores, mixture = sum of share * source in f32, x = round(norm * mixture *
rsqrt(mean(mixture^2) + eps)). Everything between the two roundings is f32, as in profile V. Rows
of the bank from `count` on may hold anything; they count as zeros, never multiplied as they are.

With `shared` f32 [N, D] the delta is round(round(delta) + round(shared)), three roundings: what
`moe_out` does last.

A row belongs to a cluster of CTAs side by side along D, one warpgroup each; a source is read once
and kept in registers. Their sums meet twice, for the scores and for the norm: every warp writes its
own into the shared memory of all CTAs (see `cluster_sum.push`).

The weights are [D] each, or with `layer` stacks [L, D] of which that row is meant.

With `prefetch` further clusters ask for layers of weight stacks to be brought towards L2, for
kernels that come later.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import cluster_sum, common

SPANS = (1024, 512, 256)  # columns of a CTA: 8, 4 or 2 neighbours per thread, one load
MAX_PARTS = 8  # cluster size that every device takes


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        parts: CTAs per row, a cluster; D / parts is one of `SPANS`.
        eager: read all rows of the bank at once, before `count` is known, instead of only `count`.
        prefetchers: clusters that only prefetch.
        prefetch_bytes: that they ask for at most.
    """

    parts: int = 7
    eager: bool = True
    prefetchers: int = 8
    prefetch_bytes: int = 16 << 20


def default_tuning(rows: int, d: int) -> Tuning:
    """The widest loads that fit; not measured.

    7168 columns are 7 parts of 1024 at any number of rows: 64 clusters are four CTAs per
    multiprocessor, all resident. Waiting for `count` costs a memory latency, reading all of the
    bank costs bytes: 4 MB instead of 7 at 64 rows, and nothing at few.
    """
    fits = [d // span for span in SPANS if d % span == 0 and d // span <= MAX_PARTS]
    return Tuning(parts=fits[0] if fits else 1, eager=rows <= 16)


def limits(
    prefix: jax.Array,
    snapshots: jax.Array,
    delta: jax.Array,
    *,
    shared: jax.Array | None = None,
    prefetch: Sequence[tuple[jax.Array, int | jax.Array]] = (),
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    n, d = prefix.shape
    out: list[str] = []
    t = tuning or default_tuning(n, d)
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    common.expect(out, "parts", t.parts, f"1..{MAX_PARTS}", 1 <= t.parts <= MAX_PARTS)
    wanted = f"{t.parts} times one of {SPANS}"
    common.expect(out, "width", d, wanted, d in [t.parts * span for span in SPANS])
    ok = snapshots.ndim == 3 and snapshots.shape[0] == n and snapshots.shape[2] == d
    common.expect(out, "shape of snapshots", snapshots.shape, (n, "J", d), ok)
    if ok:
        most = cluster_sum.MAX_SUMS // 2 - 1
        common.expect(
            out, "bank", snapshots.shape[1], f"at most {most}", snapshots.shape[1] <= most
        )
    bf16, f32 = jnp.bfloat16, jnp.float32
    common.expect(out, "dtype of prefix", prefix.dtype, "bfloat16", prefix.dtype == bf16)
    common.expect(out, "dtype of snapshots", snapshots.dtype, "bfloat16", snapshots.dtype == bf16)
    common.expect(out, "shape of delta", delta.shape, (n, d), delta.shape == (n, d))
    allowed = (bf16, f32)
    common.expect(out, "dtype of delta", delta.dtype, "bfloat16 or float32", delta.dtype in allowed)
    if shared is not None:
        common.expect(out, "shape of shared", shared.shape, (n, d), shared.shape == (n, d))
        common.expect(out, "dtype of shared", shared.dtype, "float32", shared.dtype == f32)
    return out + common.prefetch_limits(prefetch)


def _rounded(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x.astype(jnp.float32), 8, 7)


def reference(
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array,
    res_norm: jax.Array,
    res_proj: jax.Array,
    norm: jax.Array,
    *,
    eps: float,
    reset: bool = False,
    snapshot: bool = False,
    shared: jax.Array | None = None,
    layer: int | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same in plain jnp."""
    f32 = jnp.float32
    if layer is not None:
        res_norm, res_proj, norm = res_norm[layer], res_proj[layer], norm[layer]
    new = _rounded(delta)
    if shared is not None:
        new = _rounded(new + _rounded(shared))
    new = new if reset else _rounded(prefix.astype(f32) + new)
    valid = jnp.append(jnp.arange(snapshots.shape[1]) < count, True)
    sources = jnp.concatenate([snapshots.astype(f32), new[:, None]], axis=1)
    sources = jnp.where(valid[:, None], sources, 0.0)
    c = res_norm.astype(f32) * res_proj.reshape(-1).astype(f32)
    scores = lax.rsqrt(jnp.mean(sources * sources, -1) + eps) * jnp.sum(sources * c, -1)
    share = jax.nn.softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
    mixed = jnp.sum(share[..., None] * sources, axis=1)
    x = norm.astype(f32) * mixed * lax.rsqrt(jnp.mean(mixed * mixed, -1, keepdims=True) + eps)
    new = new.astype(jnp.bfloat16)
    if snapshot:
        snapshots = snapshots.at[:, count].set(new)
    return _rounded(x).astype(jnp.bfloat16), new, snapshots


def attn_res(
    prefix: jax.Array,
    snapshots: jax.Array,
    count: int | jax.Array,
    delta: jax.Array,
    res_norm: jax.Array,
    res_proj: jax.Array,
    norm: jax.Array,
    *,
    eps: float,
    reset: bool = False,
    snapshot: bool = False,
    shared: jax.Array | None = None,
    layer: int | jax.Array | None = None,
    prefetch: Sequence[tuple[jax.Array, int | jax.Array]] = (),
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, the new prefix and the snapshots; see the module's docstring.

    `prefetch` holds stacks [L, ..] and the layer of each that later kernels read.

    Raises:
        ValueError: `limits` are not met.
    """
    n, d = prefix.shape
    t = tuning or default_tuning(n, d)
    reasons = limits(prefix, snapshots, delta, shared=shared, prefetch=prefetch, tuning=t)
    common.require(reasons, "attn_res")
    from jax.experimental.pallas import mosaic_gpu as plgpu

    f32, sums = jnp.float32, 2 * snapshots.shape[1] + 2
    rows = jax.ShapeDtypeStruct((n, d), jnp.bfloat16)
    clusters = n + (t.prefetchers if prefetch else 0)
    warps = cluster_sum.WARPS * t.parts
    scratch = dict(
        score_parts=plgpu.SMEM((warps, sums), f32),
        norm_parts=plgpu.SMEM((warps, 1), f32),
        totals=plgpu.SMEM((sums,), f32),
    )
    if interpret:  # has no clusters: the parts are warpgroups of one CTA
        cut = dict(grid=(clusters,), grid_names=("row",), num_threads=t.parts, thread_name="part")
        scratch["ready"] = plgpu.Barrier(num_barriers=2, num_arrivals=t.parts)
    else:
        cut = dict(grid=(clusters,), grid_names=("row",))
        cut |= dict(cluster=(t.parts,), cluster_names=("part",))
    call = common.kernel(
        _body(n, d, eps, reset, snapshot, shared is not None, layer is not None, t, interpret),
        "k3_attn_res",
        interpret=interpret,
        out_type=[rows, rows],
        scratch_types=scratch,
        **cut,
    )
    flat = (-1,) if layer is None else (-1, d)
    weights = [w.reshape(flat) for w in (res_norm, res_proj, norm)]
    if layer is not None:
        weights.append(common.layer_operand(layer))
    deltas = (delta,) if shared is None else (delta, shared)
    held = jax.new_ref(snapshots) if snapshot else snapshots
    operands = prefix, held, common.layer_operand(count), *weights, *deltas
    x, new = call(*operands, *common.prefetch_operands(prefetch))
    return x, new, jax.freeze(held) if snapshot else snapshots


def _body(
    n: int,
    d: int,
    eps: float,
    reset: bool,
    snapshot: bool,
    two: bool,
    stacked: bool,
    t: Tuning,
    interpret: bool,
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    span = d // t.parts
    f32, bf16 = jnp.float32, jnp.bfloat16

    def one_row(row, part, ready, bank, deltas, weights, outputs, score_parts, norm_parts, totals):
        mine = pl.ds(part * span, span)
        prefix, snapshots, count = bank
        x, new = outputs
        valid = count[0]
        p = deltas[0][row, mine].astype(bf16)
        if two:
            p = (p.astype(f32) + deltas[1][row, mine].astype(bf16).astype(f32)).astype(bf16)
        if not reset:
            p = (prefix[row, mine].astype(f32) + p.astype(f32)).astype(bf16)
        which = (weights[3][0], mine) if stacked else (mine,)
        res_norm, res_proj, norm = (weight[which].astype(f32) for weight in weights[:3])
        sources = [*_sources(snapshots.at[row, :, mine], count, t.eager, interpret), p]
        where = part, t.parts, interpret
        _push_scores(sources, res_norm * res_proj, score_parts, *where)
        _store(new.at[row, mine], p, interpret)
        if snapshot:
            _store(snapshots.at[row, valid, mine], p, interpret)
        meet(ready, 0)
        shares = _shares(cluster_sum.totals(score_parts, totals, interpret), valid, d, eps)
        mixed = sources[0].astype(f32) * _wide(shares[0], span)
        for source, share in zip(sources[1:], shares[1:], strict=True):
            mixed = mixed + source.astype(f32) * _wide(share, span)
        _push_squares(mixed, norm_parts, *where)
        meet(ready, 1)
        (total,) = cluster_sum.totals(norm_parts, totals.at[pl.ds(0, 1)], interpret)
        scale = lax.rsqrt(total * (1 / d) + eps)
        _store(x.at[row, mine], (norm * mixed * _wide(scale, span)).astype(bf16), interpret)

    def meet(ready, i):
        if interpret:
            plgpu.barrier_arrive(ready.at[i])
            plgpu.barrier_wait(ready.at[i])
        else:
            cluster_sum.barrier()

    def body(
        prefix,  # bf16 [N, D]
        snapshots,  # bf16 [N, J, D]
        count,  # i32 [1]
        *others,  # weights bf16 [D] or [L, D] and layer i32 [1], delta [N, D], shared f32 [N, D],
        # operands of the prefetch, x and new bf16 [N, D]
        score_parts,  # f32 [warps, 2 (J + 1)]: sums of every warp of the row
        norm_parts,  # f32 [warps, 1]
        totals,  # f32 [2 (J + 1)]
        ready=None,
    ):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        bank, weights, outputs = (prefix, snapshots, count), others[: 3 + stacked], others[-2:]
        others = others[3 + stacked : -2]
        deltas, prefetched = others[: 1 + two], others[1 + two :]
        scratch = score_parts, norm_parts, totals
        pl.when(row < n)(
            lambda: one_row(row, part, ready, bank, deltas, weights, outputs, *scratch)
        )
        share, shares = (row - n) * t.parts + part, t.prefetchers * t.parts
        pl.when(row >= n)(
            lambda: common.prefetch_layers(prefetched, share, shares, t.prefetch_bytes, interpret)
        )

    return body


def _wide(scalar: jax.Array, span: int) -> jax.Array:
    return lax.broadcast_in_dim(scalar, (span,), ())


def _layout(span: int) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.Layout.WG_STRIDED((span,), vec_size=span // 128)


def _sources(bank: Any, count: Any, eager: bool, interpret: bool) -> list[jax.Array]:
    """Rows of a global ref bf16 [J, span], one array [span] each; zeros from `count` on."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, span = bank.shape
    if interpret:
        last = jnp.maximum(count[0] - 1, 0)
        numbers = range(rows)
        return [jnp.where(j < count[0], bank[jnp.minimum(j, last)], 0) for j in numbers]
    one = plgpu.ShapeDtypeStruct((span,), jnp.bfloat16, layout=_layout(span))
    call = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2, return_type=(one,) * rows)
    return list(call(lambda _, *refs: _load_sources(*refs, span, eager))(bank, count))


def _load_sources(bank: Any, count: Any, span: int, eager: bool) -> tuple[Any, ...]:
    reg = common.Registers()
    rows, words = bank.type.shape[0], span // 256
    strides, _ = bank.type.get_strides_and_offset()
    names = [f"r{i}" for i in range(words)]
    load = f"{{{', '.join(names)}}}" if words > 1 else names[0]
    load = f"ld.global.{f'v{words}.' if words > 1 else ''}b32 {load}, [${words}+PLACE];"
    moves = "".join(f"mov.b32 ${i}, {name};" for i, name in enumerate(names))
    clear = "".join(f"mov.b32 {name}, 0;" for name in names)
    declare = f".reg .b32 {', '.join(names)};"
    plain = "{" + declare + load + moves + "}"
    guarded = f"{{.reg .pred in; setp.gt.s32 in, ${words + 1}, NUMBER;"
    guarded += declare + clear + "@in " + load + moves + "}"

    def row(text: str, j: int, *args: Any) -> list[Any]:
        text = text.replace("PLACE", str(2 * strides[0] * j)).replace("NUMBER", str(j))
        return reg.ptx(text, *args, results=words, volatile=True)

    at = reg.wide_add(reg.global_address(bank), reg.mul(reg.thread(), 4 * words))
    number = reg.global_address(count)
    if eager:
        loaded = [row(plain, j, at) for j in range(rows)]
    (valid,) = reg.ptx("ld.global.b32 $0, [$1];", number, results=1, volatile=True)
    if eager:
        select = "{.reg .pred in; setp.gt.s32 in, $2, NUMBER; selp.b32 $0, $1, 0, in;}"
        loaded = [
            [reg.ptx(select.replace("NUMBER", str(j)), v, valid, results=1)[0] for v in source]
            for j, source in enumerate(loaded)
        ]
    else:
        loaded = [row(guarded, j, at, valid) for j in range(rows)]
    bf16 = reg.ir.BF16Type.get()
    frag = _layout(span).to_mgpu()
    out = []
    for source in loaded:
        registers = np.empty(frag.registers_shape((span,)), dtype=object)
        registers.flat[0] = reg.vector_of(source, frag.registers_element_type(bf16))
        out.append(reg.fa.FragmentedArray(_registers=registers, _layout=frag, _is_signed=None))
    return tuple(out)


def _store(target: Any, value: jax.Array, interpret: bool) -> None:
    """Value bf16 [span] to a global ref. A plain store would wait for all warps, twice."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        target[...] = value
        return

    def code(_: Any, ref: Any, fragment: Any) -> None:
        reg = common.Registers()
        words = reg.words(fragment.registers.flat[0])
        at = reg.wide_add(reg.global_address(ref), reg.mul(reg.thread(), 4 * len(words)))
        places = ", ".join(f"${i + 1}" for i in range(len(words)))
        text = f"st.global.v{len(words)}.b32 [$0], {{{places}}};"
        if len(words) == 1:
            text = "st.global.b32 [$0], $1;"
        reg.ptx(text, at, *words, volatile=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _layout(value.shape[0])))(code)(target, value)


# $0, $1 sums of squares and of products with $3, $4 so far; $2 two bf16 numbers; $5, $6 the same
_SCORE = """
{
.reg .b32 low, high, squares, products;
shl.b32 low, $2, 16;
and.b32 high, $2, 0xFFFF0000;
fma.rn.f32 squares, low, low, $5;
fma.rn.f32 products, low, $3, $6;
fma.rn.f32 squares, high, high, squares;
fma.rn.f32 products, high, $4, products;
mov.b32 $0, squares;
mov.b32 $1, products;
}
"""


def _push_scores(
    sources: Sequence[jax.Array], c: jax.Array, into: Any, part: Any, parts: int, interpret: bool
) -> None:
    """For each source the sums of s s and of s c, f32 [warps, 2 sources], to all CTAs."""

    def sums(reg: common.Registers, c: Any, *fragments: Any) -> list[Any]:
        factors = reg.elements(c.registers.flat[0])
        zero, out = reg.as_f32(reg.constant(0)), []
        for fragment in fragments:
            pair = [zero, zero]
            for i, word in enumerate(reg.words(fragment.registers.flat[0])):
                two = factors[2 * i : 2 * i + 2]
                pair = reg.ptx(_SCORE, word, *two, *pair, results=2, kind=reg.f32)
            out += pair
        return out

    def twin(c: jax.Array, *sources: jax.Array) -> list[jax.Array]:
        wide = [s.astype(jnp.float32) for s in sources]
        return [jnp.sum(v) for s in wide for v in (s * s, s * c)]

    layout = _layout(c.shape[0])
    operands = [c, *sources]
    cluster_sum.push(sums, operands, layout, into, part, parts, twin if interpret else None)


def _push_squares(mixed: jax.Array, into: Any, part: Any, parts: int, interpret: bool) -> None:
    """The sum of squares, f32 [warps, 1], to all CTAs."""

    def sums(reg: common.Registers, fragment: Any) -> list[Any]:
        values = reg.elements(fragment.registers.flat[0])
        total = reg.arith.mulf(values[0], values[0])
        for v in values[1:]:
            total = reg.ptx("fma.rn.f32 $0, $1, $1, $2;", v, total, results=1, kind=reg.f32)[0]
        return [total]

    def twin(mixed: jax.Array) -> list[jax.Array]:
        return [jnp.sum(mixed * mixed)]

    layout = _layout(mixed.shape[0])
    cluster_sum.push(sums, [mixed], layout, into, part, parts, twin if interpret else None)


def _shares(totals: Sequence[jax.Array], valid: Any, d: int, eps: float) -> list[jax.Array]:
    """Softmax of the scores of all sources, of which those of the bank from `valid` on get 0."""
    scores = []
    for j in range(len(totals) // 2):
        score = lax.rsqrt(totals[2 * j] * (1 / d) + eps) * totals[2 * j + 1]
        last = 2 * j + 2 == len(totals)
        scores.append(score if last else jnp.where(j < valid, score, -jnp.inf))
    top = functools.reduce(jnp.maximum, scores)
    shares = [jnp.exp(score - top) for score in scores]
    inverse = 1 / functools.reduce(jnp.add, shares)
    return [share * inverse for share in shares]
