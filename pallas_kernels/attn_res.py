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

The weights are [D] each, or with `layer` stacks [L, D] of which that row is meant. A width that is
no multiple of 512 is filled with zeros first and the results are cut again: copies, for small
models.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import attn_res_registers as registers
from pallas_kernels import cluster_sum, common, mailbox

SPANS = (1024, 512, 256)  # columns of a CTA: 8, 4 or 2 neighbours per thread, one load
MIN_PARTS = 2  # st.async, of which mailboxes are made, is illegal in a kernel without clusters
MAX_PARTS = 8  # cluster size that every device takes
FILL = MIN_PARTS * SPANS[-1]
MEETINGS = 2  # of a row's parts


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut.

    Attributes:
        parts: CTAs per row, a cluster; D / parts is one of `SPANS`.
        eager: read all rows of the bank at once, before `count` is known, instead of only `count`.
    """

    parts: int = 7
    eager: bool = True


def default_tuning(rows: int, d: int) -> Tuning:
    """The widest loads that fit; not measured.

    7168 columns are 7 parts of 1024 at any number of rows: 64 clusters are four CTAs per
    multiprocessor, all resident. Waiting for `count` costs a memory latency, reading all of the
    bank costs bytes: 4 MB instead of 7 at 64 rows, and nothing at few.
    """
    parts = [d // span for span in SPANS if d % span == 0]
    fits = [count for count in parts if MIN_PARTS <= count <= MAX_PARTS]
    return Tuning(parts=fits[0] if fits else MIN_PARTS, eager=rows <= 16)


def limits(
    prefix: jax.Array,
    snapshots: jax.Array,
    delta: jax.Array,
    *,
    shared: jax.Array | None = None,
    tuning: Tuning | None = None,
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    n, d = prefix.shape
    filled = common.round_up(d, FILL)
    out: list[str] = []
    t = tuning or default_tuning(n, filled)
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    ok = MIN_PARTS <= t.parts <= MAX_PARTS
    common.expect(out, "parts", t.parts, f"{MIN_PARTS}..{MAX_PARTS}", ok)
    wanted = f"{t.parts} times one of {SPANS}"
    common.expect(out, "width", d, wanted, filled in [t.parts * span for span in SPANS])
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
    return out


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
    weights = res_norm, res_proj, norm
    weighted, scale, new = _mixture_plainly(
        prefix, snapshots, count, delta, *weights, eps, reset, shared, layer
    )
    new = new.astype(jnp.bfloat16)
    if snapshot:
        snapshots = snapshots.at[:, count].set(new)
    return _rounded(weighted * scale).astype(jnp.bfloat16), new, snapshots


def unscaled_reference(
    *arrays: jax.Array,
    eps: float,
    reset: bool = False,
    shared: jax.Array | None = None,
    layer: int | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What `unscaled_row` makes, bf16 [N, D], and the factors of the rows, f32 [N, 1].

    The operands are those of `reference`.
    """
    weighted, scale, _ = _mixture_plainly(*arrays, eps, reset, shared, layer)
    return _rounded(weighted).astype(jnp.bfloat16), scale


def _mixture_plainly(
    prefix, snapshots, count, delta, res_norm, res_proj, norm, eps, reset, shared, layer
):
    """Norm * mixture f32 [N, D], rsqrt(mean(mixture^2) + eps) [N, 1], the new prefix f32."""
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
    scale = lax.rsqrt(jnp.mean(mixed * mixed, -1, keepdims=True) + eps)
    return norm.astype(f32) * mixed, scale, new


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
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, the new prefix and the snapshots; see the module's docstring.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(prefix, snapshots, delta, shared=shared, tuning=tuning), "attn_res")
    n, real = prefix.shape
    missing = -real % FILL
    if missing:
        prefix, snapshots, delta, shared, res_norm, res_proj, norm = (
            None if a is None else common.filled(a, FILL)
            for a in (prefix, snapshots, delta, shared, res_norm, res_proj, norm)
        )
    d = real + missing
    t = tuning or default_tuning(n, d)
    two, stacked = shared is not None, layer is not None
    form = Form(n, d, real, eps, reset, snapshot, two, stacked, t, interpret)
    rows = jax.ShapeDtypeStruct((n, d), jnp.bfloat16)
    call = common.kernel(
        _body(form),
        "k3_attn_res",
        interpret=interpret,
        out_type=[rows, rows],
        **_cut(form, snapshots.shape[1]),
    )
    flat = (-1,) if layer is None else (-1, d)
    weights = [w.reshape(flat) for w in (res_norm, res_proj, norm)]
    if layer is not None:
        weights.append(common.layer_operand(layer))
    deltas = (delta,) if shared is None else (delta, shared)
    held = jax.new_ref(snapshots) if snapshot else snapshots
    x, new = call(prefix, held, common.layer_operand(count), *weights, *deltas)
    snapshots = jax.freeze(held) if snapshot else snapshots
    return tuple(a[..., :real] for a in (x, new, snapshots)) if missing else (x, new, snapshots)


def scratch_shapes(t: Tuning, bank: int) -> dict[str, tuple[int, ...]]:
    """What a row needs in the shared memory of each of its CTAs, f32, as `one_row` takes it."""
    warps, sums = cluster_sum.WARPS * t.parts, 2 * bank + 2
    return dict(score_parts=(warps, sums), norm_parts=(warps, 1), totals=(sums,))


def _cut(form: Form, bank: int) -> dict[str, Any]:
    """Grid, cluster and scratch memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    t = form.t
    scratch: dict[str, Any] = {
        name: plgpu.SMEM(shape, jnp.float32) for name, shape in scratch_shapes(t, bank).items()
    }
    cut: dict[str, Any] = dict(grid=(form.rows,), grid_names=("row",), scratch_types=scratch)
    if form.interpret:  # has no clusters: the parts are warpgroups of one CTA
        scratch["ready"] = plgpu.Barrier(num_barriers=2, num_arrivals=t.parts)
        return cut | dict(num_threads=t.parts, thread_name="part")
    scratch["mail"] = mailbox.scratch(MEETINGS)
    return cut | dict(cluster=(t.parts,), cluster_names=("part",))


@dataclass(frozen=True)
class Form:
    """One form of the kernel while it is traced."""

    rows: int
    width: int
    numbers: int  # of a row that count in its means: `width` but for zeros
    eps: float
    reset: bool
    snapshot: bool
    two: bool  # deltas
    stacked: bool  # weights
    t: Tuning
    interpret: bool

    @property
    def span(self) -> int:
        """Columns of a CTA."""
        return self.width // self.t.parts

    def columns(self, part: Any) -> Any:
        """Those of a part."""
        from jax.experimental import pallas as pl

        return pl.ds(part * self.span, self.span)


def _body(form: Form) -> Any:
    def body(
        prefix,  # bf16 [N, D]
        snapshots,  # bf16 [N, J, D]
        count,  # i32 [1]
        *others,  # weights bf16 [D] or [L, D] and layer i32 [1], delta [N, D], shared f32 [N, D],
        # x and new bf16 [N, D]
        score_parts,  # f32 [warps, 2 (J + 1)]: sums of every warp of the row
        norm_parts,  # f32 [warps, 1]
        totals,  # f32 [2 (J + 1)]
        ready=None,
        mail=None,
    ):
        if mail is not None:
            mailbox.open_mail(mail, expected(form.t, snapshots.shape[1]))
        row, part = lax.axis_index("row"), lax.axis_index("part")
        weights, outputs = others[: 3 + form.stacked], others[-2:]
        inputs = prefix, snapshots, count, others[3 + form.stacked : -2], weights
        scratch = score_parts, norm_parts, totals, ready if mail is None else mail
        one_row(form, row, part, inputs, outputs, scratch)

    return body


def expected(t: Tuning, bank: int) -> list[int]:
    """Bytes in the mailboxes of a row: scores, squares."""
    return [cluster_sum.sums_bytes(t.parts, sums) for sums in (2 * bank + 2, 1)]


def one_row(form: Form, row: Any, part: Any, inputs: Any, outputs: Any, scratch: Any) -> None:
    """A part of a row, in a warpgroup, which is the first to `mailbox.enter` a cluster."""
    from jax.experimental import pallas as pl

    x, new = outputs
    score_parts, norm_parts, totals, mail = scratch
    box = partial(_box, form, mail)
    p, norm, mixed = _mixture(form, row, part, inputs, (score_parts, totals), mail, box(0))
    mine, interpret = form.columns(part), form.interpret
    registers.push_squares(mixed, norm_parts, part, interpret, box(1))
    registers.store(new.at[row, mine], p, interpret)
    if form.snapshot:
        snapshots, count = inputs[1:3]
        registers.store(snapshots.at[row, count[0], mine], p, interpret)
    _meet(form, mail, 1)
    (total,) = cluster_sum.totals(norm_parts, totals.at[pl.ds(0, 1)], interpret)
    scale = lax.rsqrt(total * (1 / form.numbers) + form.eps)
    out = (norm * mixed * _wide(scale, form.span)).astype(jnp.bfloat16)
    registers.store(x.at[row, mine], out, interpret)


def unscaled_row(
    form: Form, row: Any, part: Any, inputs: Any, scratch: Any, squares: Any, box: Any, ctas: int
) -> jax.Array:
    """A part of round(norm * mixture), bf16 [span], as `one_row`; nothing is written.

    Its sums of squares go to `squares` f32 [warps, 1] and the mailbox `box` of so many CTAs, for
    who multiplies by rsqrt(mean(mixture^2) + eps) later.
    """
    score_parts, totals, mail = scratch
    _, norm, mixed = _mixture(
        form, row, part, inputs, (score_parts, totals), mail, _box(form, mail, 0)
    )
    registers.push_squares(mixed, squares, part, form.interpret, box, ctas)
    return (norm * mixed).astype(jnp.bfloat16)


def _mixture(
    form: Form, row: Any, part: Any, inputs: Any, scratch: Any, mail: Any, box: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This part of the new prefix bf16, the norm's weights f32, the mixture f32."""
    f32, bf16, span = jnp.float32, jnp.bfloat16, form.span
    prefix, snapshots, count, deltas, weights = inputs
    score_parts, totals = scratch
    mine = form.columns(part)
    valid = count[0]
    # loads first: nothing waits for a sum before all are on their way
    p = deltas[0][row, mine].astype(bf16)
    if form.two:
        p = (p.astype(f32) + deltas[1][row, mine].astype(bf16).astype(f32)).astype(bf16)
    if not form.reset:
        p = (prefix[row, mine].astype(f32) + p.astype(f32)).astype(bf16)
    which = (weights[3][0], mine) if form.stacked else (mine,)
    res_norm, res_proj, norm = (weight[which].astype(f32) for weight in weights[:3])
    bank = snapshots.at[row, :, mine]
    sources = [*registers.sources(bank, count, form.t.eager, form.interpret), p]
    if not form.interpret:
        mailbox.enter()
    registers.push_scores(sources, res_norm * res_proj, score_parts, part, form.interpret, box)
    _meet(form, mail, 0)
    sums = cluster_sum.totals(score_parts, totals, form.interpret)
    shares = _shares(sums, valid, form.numbers, form.eps)
    mixed = sources[0].astype(f32) * _wide(shares[0], span)
    for source, share in zip(sources[1:], shares[1:], strict=True):
        mixed = mixed + source.astype(f32) * _wide(share, span)
    return p, norm, mixed


def _box(form: Form, mail: Any, number: int) -> Any:
    return None if form.interpret else mailbox.box(mail, number)


def _meet(form: Form, mail: Any, i: int) -> None:
    """Wait for all parts of the row."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if form.interpret:
        plgpu.barrier_arrive(mail.at[i])
        plgpu.barrier_wait(mail.at[i])
    else:
        mailbox.receive(mail, i)


def _wide(scalar: jax.Array, span: int) -> jax.Array:
    return lax.broadcast_in_dim(scalar, (span,), ())


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
