"""KDA of one layer: decay, convolution, norms, delta rule over T tokens, gated norm; one kernel.

    fused bf16 [B T, >= 4P + K + H], what `in_proj` gives: q | k | v | gate | low rank | strength
    state f32 [L, S, H, V, K] and window bf16 [L, S, taps - 1, 3P], the whole stacks
    -> heads bf16 [B T, P], and
       without `commit` records f32 [B, T, H, K]: update, key, log decay; nothing else is written
       with `commit` state and window, in place, after each sequence's first `count` tokens

P = H K; V = K = 128. Rounding, as in profile V: convolution with SiLU once to bf16; the low-rank
decay's product once to bf16; the recurrence's output once to bf16; the gated norm once to bf16.
Everything between is f32. Norms of q and k, and the scale of q, are applied to the products with
the state: S (k / |k|) = (S k) / |k|.

One CTA per sequence and head. Its warpgroups take 64 rows of the state each; the rows of a state
do not depend on each other. What is per token (convolution, decay) they share. Slot < 0 is a pad
row: nothing of it is read but its projections, nothing written but zeros to heads and records.
A sequence at position 0 has no history: state and window count as zeros. What a token at or beyond
`count` gives means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import common

WIDTH = 128  # of a head
ROWS = 64  # of the state per warpgroup
GROUPS = WIDTH // ROWS
MAX_TOKENS = 8
EIGHT = 8  # numbers of 16 bits in the smallest copy
L2_EPS = 1e-6  # added to the sum of squares


class Weights(NamedTuple):
    """The stacks of all KDA layers, as the checkpoint has them."""

    f_b_proj: jax.Array  # bf16 [L, P, K]
    conv1d: jax.Array  # f32 [L, 3P, taps]
    A_log: jax.Array  # f32 [L, H]
    dt_bias: jax.Array  # f32 [L, P]
    o_norm: jax.Array  # f32 [L, K]


class Rows(NamedTuple):
    """Where each sequence stands."""

    slot: jax.Array  # i32 [B]
    position: jax.Array  # i32 [B]
    count: jax.Array  # i32 [B]


def limits(
    fused: jax.Array, state: jax.Array, window: jax.Array, w: Weights, rows: Rows
) -> list[str]:
    """Unmet conditions, each with what was found and what is expected."""
    out: list[str] = []
    common.expect(out, "rank of state", state.ndim, 5, state.ndim == 5)
    if out:
        return out
    batch, heads = rows.slot.shape[0], state.shape[2]
    n, p = fused.shape[0], heads * WIDTH
    tokens = n // batch
    ok = n == batch * tokens and 1 <= tokens <= MAX_TOKENS
    common.expect(out, "rows", n, f"{batch} sequences of 1..{MAX_TOKENS} tokens", ok)
    common.expect(out, "rows", n, f"1..{common.MAX_ROWS}", 1 <= n <= common.MAX_ROWS)
    found = state.shape[3:]
    common.expect(out, "state of a head", found, (WIDTH, WIDTH), found == (WIDTH, WIDTH))
    least = 4 * p + WIDTH + heads
    columns = fused.shape[1]
    ok = columns >= least and columns % 8 == 0
    common.expect(out, "columns of fused", columns, f"a multiple of 8, at least {least}", ok)
    common.expect(out, "channels of window", window.shape[3], 3 * p, window.shape[3] == 3 * p)
    taps = w.conv1d.shape[2]
    ok = window.shape[2] == taps - 1
    common.expect(out, "rows of window", window.shape[2], taps - 1, ok)
    bf16, f32 = jnp.bfloat16, jnp.float32
    for name, array, wanted in (
        ("fused", fused, bf16),
        ("state", state, f32),
        ("window", window, bf16),
        ("f_b_proj", w.f_b_proj, bf16),
        ("conv1d", w.conv1d, f32),
    ):
        common.expect(out, f"dtype of {name}", array.dtype, wanted.__name__, array.dtype == wanted)
    return out


def reference(
    fused: jax.Array,
    state: jax.Array,
    window: jax.Array,
    w: Weights,
    layer: int | jax.Array,
    rows: Rows,
    *,
    eps: float,
    lower_bound: float,
    commit: bool,
) -> tuple[jax.Array, ...]:
    """The same in plain jnp."""
    f32, bf16 = jnp.float32, jnp.bfloat16
    batch, heads = rows.slot.shape[0], state.shape[2]
    tokens, p, taps = fused.shape[0] // batch, heads * WIDTH, w.conv1d.shape[2]
    x = fused.astype(f32).reshape(batch, tokens, -1)
    raw, gate, low, strength = jnp.split(x[..., : 4 * p + WIDTH + heads], [3 * p, 4 * p, -heads], 2)
    live = rows.slot >= 0
    past = live & (rows.position > 0)
    slot = jnp.maximum(rows.slot, 0)
    s = jnp.where(past[:, None, None, None], state[layer, slot], 0.0)
    before = jnp.where(past[:, None, None], window[layer, slot], 0).astype(f32)
    history = jnp.concatenate([before, raw], axis=1)
    mixed = sum(w.conv1d[layer, :, i] * history[:, i : i + tokens] for i in range(taps))
    q, k, v = jnp.split(_rounded(mixed / (1 + jnp.exp(-mixed))), 3, axis=-1)
    q, k, v, gate = (a.reshape(batch, tokens, heads, WIDTH) for a in (q, k, v, gate))
    z = _rounded(jnp.einsum("btk,pk->btp", low, w.f_b_proj[layer].astype(f32), precision="highest"))
    a = jnp.exp(w.A_log[layer])[:, None]
    z = (z + w.dt_bias[layer]).reshape(batch, tokens, heads, WIDTH)
    g = lower_bound / (1 + jnp.exp(-a * z))
    beta = 1 / (1 + jnp.exp(-strength))
    key = k / jnp.sqrt(jnp.sum(k * k, -1, keepdims=True) + L2_EPS)
    query = q / jnp.sqrt(jnp.sum(q * q, -1, keepdims=True) + L2_EPS) * WIDTH**-0.5
    updates, outputs = [], []
    for t in range(tokens):
        new = s * jnp.exp(g[:, t])[:, :, None]
        u = beta[:, t, :, None] * (v[:, t] - jnp.sum(new * key[:, t, :, None], -1))
        new = new + u[..., None] * key[:, t, :, None]
        updates.append(u)
        outputs.append(jnp.sum(new * query[:, t, :, None], -1))
        s = jnp.where((t < rows.count)[:, None, None, None], new, s) if commit else new
    o = _rounded(jnp.stack(outputs, 1))
    y = o * lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + eps) * w.o_norm[layer]
    keep = live[:, None, None, None]
    y = jnp.where(keep, _rounded(y / (1 + jnp.exp(-gate))), 0).astype(bf16)
    y = y.reshape(-1, p)
    if not commit:
        return y, *(jnp.where(keep, r, 0) for r in (jnp.stack(updates, 1), key, g))
    at = rows.count[:, None] + jnp.arange(taps - 1)
    kept = jnp.take_along_axis(history, at[..., None], axis=1).astype(bf16)
    target = jnp.where(live, rows.slot, state.shape[1])
    return (
        y,
        state.at[layer, target].set(s, mode="drop"),
        window.at[layer, target].set(kept, mode="drop"),
    )


def _rounded(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x.astype(jnp.float32), 8, 7)


def kda(
    fused: jax.Array,
    state: jax.Array,
    window: jax.Array,
    w: Weights,
    layer: int | jax.Array,
    rows: Rows,
    *,
    eps: float,
    lower_bound: float,
    commit: bool,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """(heads, update, key, log decay) or, with `commit`, (heads, state, window); see the module.

    Raises:
        ValueError: `limits` are not met.
    """
    common.require(limits(fused, state, window, w, rows), "kda")
    batch, heads = rows.slot.shape[0], state.shape[2]
    shape = Shape(fused.shape[0] // batch, heads, w.conv1d.shape[2], commit)
    call = common.kernel(
        body_of(shape, eps, lower_bound, interpret),
        "k3_kda",
        interpret=interpret,
        own_barriers=True,
        read_once=True,
        out_type=outputs(batch, shape),
        grid=(batch, heads),
        grid_names=("sequence", "head"),
        num_threads=GROUPS,
        thread_name="wg",
        scratch_types=scratch(shape),
    )
    operands = *w, common.layer_operand(layer), *rows
    if not commit:
        return call(fused, state, window, *operands)
    held = jax.new_ref(state), jax.new_ref(window)
    (y,) = call(fused, *held, *operands)
    return y, jax.freeze(held[0]), jax.freeze(held[1])


@dataclass(frozen=True)
class Shape:
    """What the kernel is built for: tokens of a sequence, heads, taps, which outputs."""

    tokens: int
    heads: int
    taps: int
    commit: bool

    @property
    def p(self) -> int:
        """Width of all heads."""
        return self.heads * WIDTH


def outputs(batch: int, s: Shape) -> list[jax.ShapeDtypeStruct]:
    """Of the kernel: heads, and without commit the records."""
    record = jax.ShapeDtypeStruct((batch, s.tokens, s.heads, WIDTH), jnp.float32)
    heads = jax.ShapeDtypeStruct((batch * s.tokens, s.p), jnp.bfloat16)
    return [heads] if s.commit else [heads, record, record, record]


def scratch(s: Shape) -> dict[str, Any]:
    """Scratch memory of a CTA, by the names under which the body takes it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    bf16, f32 = jnp.bfloat16, jnp.float32
    t, history = s.tokens, s.taps - 1 + s.tokens
    return dict(
        states=plgpu.SMEM((GROUPS, ROWS, WIDTH), f32, transforms=common.tiled(f32, WIDTH)),
        f_b=plgpu.SMEM((GROUPS, ROWS, WIDTH), bf16, transforms=common.tiled(bf16, WIDTH)),
        low=plgpu.SMEM((t, WIDTH), bf16),
        gates=plgpu.SMEM((t, WIDTH), bf16),
        strength=plgpu.SMEM((t, EIGHT), bf16),
        past=plgpu.SMEM((3, history, WIDTH), bf16),
        rows_=plgpu.SMEM((4, t, WIDTH), f32),
        z=plgpu.SMEM((t, WIDTH), f32),
        outs=plgpu.SMEM((t, WIDTH), f32),
        sums=plgpu.SMEM((3, t, 4), f32),
        loaded=plgpu.Barrier(num_barriers=GROUPS, num_arrivals=2),
        small=plgpu.Barrier(num_barriers=1, num_arrivals=9),
        ready=plgpu.Barrier(num_barriers=4, num_arrivals=GROUPS),
    )


def shared_bytes(s: Shape) -> int:
    """Shared memory of a CTA."""
    history = s.taps - 1 + s.tokens
    per_token = WIDTH * (2 * 2 + 6 * 4) + EIGHT * 2 + 3 * 4 * 4
    return WIDTH * WIDTH * 6 + s.tokens * per_token + 3 * history * WIDTH * 2 + 4096


@dataclass(frozen=True)
class _Cta:
    """One sequence and head while the kernel is traced."""

    s: Shape
    interpret: bool
    sequence: Any
    head: Any
    wg: Any
    layer: Any
    w: Weights
    gates: Any  # bf16 [T, K]
    strength: Any  # bf16 [T, 8], of this head and its neighbours
    past: Any  # bf16 [3, taps - 1 + T, K]: rows of q, k, v before and in this step
    rows: Any  # f32 [4, T, K]: q, k (neither normalised), v, decay
    sums: Any  # f32 [3, T, 4]: parts of the sums of squares of q, k, output

    @property
    def channels(self) -> Any:
        """This head's channels within P."""
        from jax.experimental import pallas as pl

        return pl.ds(self.head * WIDTH, WIDTH)

    def total(self, kind: int, t: Any) -> Any:
        """A complete sum of squares, a scalar."""
        parts = [self.sums[kind, t, i] for i in range(4)]
        return (parts[0] + parts[1]) + (parts[2] + parts[3])

    def each(self, work: Any) -> None:
        """`work(c, t, ..)` for the tokens whose per-token work belongs to this warpgroup.

        Loops over tokens stay loops: unrolled they take a minute to compile.
        """
        mine = (self.s.tokens - self.wg + GROUPS - 1) // GROUPS
        lax.fori_loop(0, mine, lambda i, _: work(self.wg + GROUPS * i), None)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


class _Constants(NamedTuple):
    """This head's weights of the per-token work, one number per thread; read before all waiting."""

    taps: list[list[jax.Array]]  # f32 [K] of q, k, v and tap
    rate: jax.Array  # f32 [K], exp(A_log)
    bias: jax.Array  # f32 [K]
    norm: jax.Array  # f32 [K]


def _constants(c: _Cta) -> _Constants:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=1)
    taps = []
    for part in range(3):
        rows = c.w.conv1d.at[c.layer, pl.ds(part * c.s.p + c.head * WIDTH, WIDTH)]
        taps.append(
            [plgpu.load(rows.at[:, i], layout=layout, optimized=False) for i in range(c.s.taps)]
        )
    rate = lax.broadcast_in_dim(jnp.exp(c.w.A_log[c.layer, c.head]), (WIDTH,), ())
    return _Constants(taps, rate, c.w.dt_bias[c.layer, c.channels], c.w.o_norm[c.layer])


def _convolve(c: _Cta, t: Any, k: _Constants) -> None:
    """Convolution of token t: q, k, v to `rows`, sums of squares of q and k."""
    for part, taps in enumerate(k.taps):
        terms = [weight * c.past[part, t + i].astype(jnp.float32) for i, weight in enumerate(taps)]
        total = sum(terms[1:], terms[0])
        value = (total * _sigmoid(total)).astype(jnp.bfloat16).astype(jnp.float32)
        c.rows[part, t] = value
        if part < 2:
            common.store_partial_sums(value * value, c.sums.at[part, t], c.interpret)


def _decay(c: _Cta, t: Any, k: _Constants, z: Any, lower_bound: float, record: Any) -> None:
    """Decay of token t from its low-rank product in `z` f32 [T, K]."""
    g = lower_bound * _sigmoid(k.rate * (z[t] + k.bias))
    c.rows[3, t] = jnp.exp(g)
    if record is not None:
        record[c.sequence, t, c.head] = g


def _recur(c: _Cta, state: jax.Array, count: Any, outs: Any, update: Any) -> jax.Array:
    """The delta rule on this warpgroup's rows of the state, [64, K], over all tokens."""
    from jax.experimental import pallas as pl

    mine = pl.ds(c.wg * ROWS, ROWS)

    def row(kind: int, t: Any) -> jax.Array:
        return lax.broadcast_in_dim(c.rows[kind, t], (ROWS, WIDTH), (1,))

    def column(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (ROWS, WIDTH), (0,))

    def wide(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (ROWS,), ())

    def token(t: Any, state: jax.Array) -> jax.Array:
        beta = _sigmoid(c.strength[t, lax.rem(c.head, EIGHT)].astype(jnp.float32))
        key_scale = lax.rsqrt(c.total(1, t) + L2_EPS)
        query_scale = lax.rsqrt(c.total(0, t) + L2_EPS) * WIDTH**-0.5
        key = row(1, t)
        new = state * row(3, t)
        error = c.rows[2, t, mine] - (new * key).sum(axis=1) * wide(key_scale)
        u = error * wide(beta)
        new = new + key * column(u * wide(key_scale))
        outs[t, mine] = (new * row(0, t)).sum(axis=1) * wide(query_scale)
        if update is not None:
            update[c.sequence, t, c.head, mine] = u
        if c.s.commit:
            new = jnp.where(lax.broadcast_in_dim(t < count, new.shape, ()), new, state)
        return new

    return lax.fori_loop(0, c.s.tokens, token, state)


def _finish(c: _Cta, t: Any, k: _Constants, outs: Any, eps: float, heads: Any) -> None:
    """Gated norm of token t."""
    row = c.sequence * c.s.tokens + t
    o = outs[t].astype(jnp.bfloat16).astype(jnp.float32)
    scale = lax.rsqrt(c.total(2, t) * (1 / WIDTH) + eps)
    gate = c.gates[t].astype(jnp.float32)
    y = o * lax.broadcast_in_dim(scale, (WIDTH,), ()) * k.norm
    heads[row, c.channels] = (y * _sigmoid(gate)).astype(jnp.bfloat16)


def body_of(s: Shape, eps: float, lower_bound: float, interpret: bool) -> Any:
    """The kernel's body.

    It needs no automatic barriers (`common.kernel`): what a thread stores for others stands before
    an arrival of all threads (`ready`, which orders it) or a barrier, and the new state lies where
    the same thread read the old one.

    In another kernel it takes `place`, that is (sequence, head, warpgroup), and calls `made` when
    this warpgroup's heads are written.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(
        fused,  # bf16 [N, 4P + K + H]
        state,  # f32 [L, S, H, V, K]
        window,  # bf16 [L, S, taps - 1, 3P]
        f_b_proj,
        conv1d,
        a_log,
        dt_bias,
        o_norm,
        layer,  # i32 [1]
        slots,  # i32 [B]
        positions,  # i32 [B]
        counts,  # i32 [B]
        heads,  # bf16 [N, P]
        *records,  # f32 [B, T, H, K]: update, key, log decay
        states,
        f_b,
        low,
        gates,
        strength,
        past,
        rows_,
        z,
        outs,
        sums,
        loaded,
        small,
        ready,
        place=None,
        made=None,
    ):
        names = "sequence", "head", "wg"
        sequence, head, wg = place or (lax.axis_index(name) for name in names)
        at, slot, count = layer[0], slots[sequence], counts[sequence]
        w = Weights(f_b_proj, conv1d, a_log, dt_bias, o_norm)
        c = _Cta(s, interpret, sequence, head, wg, at, w, gates, strength, past, rows_, sums)
        here = jnp.maximum(slot, 0)
        update, key, g = records or (None, None, None)
        first, before = sequence * s.tokens, s.taps - 1

        def meet(i):
            plgpu.barrier_arrive(ready.at[i])
            plgpu.barrier_wait(ready.at[i])

        def mine(ref):
            return ref.at[at, here, head, pl.ds(wg * ROWS, ROWS)]

        def load():
            plgpu.copy_gmem_to_smem(mine(state), states.at[wg], loaded.at[wg])
            share = f_b_proj.at[at, pl.ds(head * WIDTH + wg * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(share, f_b.at[wg], loaded.at[wg])

        def load_small():
            tokens = pl.ds(first, s.tokens)
            for first_column, width, target in (
                (4 * s.p, WIDTH, low),
                (3 * s.p + head * WIDTH, WIDTH, gates),
                (4 * s.p + WIDTH + head // EIGHT * EIGHT, EIGHT, strength),
            ):
                source = fused.at[tokens, pl.ds(first_column, width)]
                plgpu.copy_gmem_to_smem(source, target, small.at[0])
            for part in range(3):
                channels = pl.ds(part * s.p + head * WIDTH, WIDTH)
                old = window.at[at, here, :, channels]
                plgpu.copy_gmem_to_smem(old, past.at[part, pl.ds(0, before)], small.at[0])
                new = fused.at[tokens, channels]
                plgpu.copy_gmem_to_smem(new, past.at[part, pl.ds(before, s.tokens)], small.at[0])

        def forget():  # no history: zeros before the first token
            for part in range(3):
                for i in range(before):
                    past[part, i] = jnp.zeros((WIDTH,), jnp.bfloat16)

        def work():
            history = positions[sequence] > 0
            pl.when(wg == 0)(load_small)
            load()
            k = _constants(c)
            plgpu.barrier_wait(small.at[0])
            pl.when((wg == 0) & jnp.logical_not(history))(forget)
            meet(0)
            c.each(lambda t: _convolve(c, t, k))
            plgpu.barrier_wait(loaded.at[wg])
            matrix = f_b[wg].astype(jnp.float32)

            def low_rank(t, _):
                line = lax.broadcast_in_dim(low[t].astype(jnp.float32), (ROWS, WIDTH), (1,))
                product = (matrix * line).sum(axis=1).astype(jnp.bfloat16)
                z[t, pl.ds(wg * ROWS, ROWS)] = product.astype(jnp.float32)

            lax.fori_loop(0, s.tokens, low_rank, None)
            meet(1)
            c.each(lambda t: _decay(c, t, k, z, lower_bound, g))
            meet(2)
            old = states[wg]
            old = jnp.where(lax.broadcast_in_dim(history, old.shape, ()), old, 0.0)
            new = _recur(c, old, count, outs, update)

            def keep():
                if s.commit:
                    states[wg] = new
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(states.at[wg], mine(state))
                if key is not None:
                    c.each(lambda t: _record_key(c, t, key))

            if made is None:  # or behind the heads, for which somebody waits
                keep()
            meet(3)
            c.each(lambda t: _squares(c, t, outs))
            if GROUPS > 1:  # a token's sums stay with its warpgroup
                common.barrier(interpret)
            c.each(lambda t: _finish(c, t, k, outs, eps, heads))
            if made is not None:
                made()
                keep()
            if s.commit:
                pl.when(wg == 0)(lambda: _store_window(c, window, here, count))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def pad():
            c.each(lambda t: _zeros(c, t, heads, records))
            if made is not None:
                made()

        pl.when(slot >= 0)(work)
        pl.when(slot < 0)(pad)

    return body


def _record_key(c: _Cta, t: Any, key: Any) -> None:
    scale = lax.rsqrt(c.total(1, t) + L2_EPS)
    key[c.sequence, t, c.head] = c.rows[1, t] * lax.broadcast_in_dim(scale, (WIDTH,), ())


def _squares(c: _Cta, t: Any, outs: Any) -> None:
    o = outs[t].astype(jnp.bfloat16).astype(jnp.float32)
    common.store_partial_sums(o * o, c.sums.at[2, t], c.interpret)


def _store_window(c: _Cta, window: Any, slot: Any, count: Any) -> None:
    """The last taps - 1 raw projections after `count` tokens."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    kept = c.s.taps - 1
    for part in range(3):
        channels = pl.ds(part * c.s.p + c.head * WIDTH, WIDTH)
        source = c.past.at[part, pl.ds(count, kept)]
        plgpu.copy_smem_to_gmem(source, window.at[c.layer, slot, :, channels])


def _zeros(c: _Cta, t: Any, heads: Any, records: Any) -> None:
    heads[c.sequence * c.s.tokens + t, c.channels] = jnp.zeros((WIDTH,), jnp.bfloat16)
    for record in records:
        record[c.sequence, t, c.head] = jnp.zeros((WIDTH,), jnp.float32)
