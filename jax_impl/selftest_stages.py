"""Every stage of a backend beside `auto`'s, on equal inputs, both against `auto` in float32.

The backend's outputs are the next stage's inputs on all three sides, so that errors do not chain.
Weights may be random: what is compared is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_impl.backend import AUTO, Backend
from jax_impl.cache import Cache, StepInputs
from jax_impl.collectives import all_gather
from jax_impl.model import layer_weights, place
from jax_impl.numerics import Numerics
from jax_impl.params import Moe, Weights
from jax_impl.stages import standard
from jax_impl.stages.contract import Delta, Routed, plain, whole
from jax_impl.stages.paged import write_rows
from jax_impl.static import Static

RATIO = 2.0  # of a backend's error to `auto`'s, both rounding to bf16 at the same points
FLOOR = 1e-5  # two f32 sums in another order
MOST = 1.2e-2  # about ten chained roundings of up to 2^-9 each
FP8_ROWS = 2.0**-5  # values that differ by bf16 noise fall to two sides of a step of 2^-4 / sqrt(3)
GAP = 1e-6  # two f32 scores in another summation order


class Distance(NamedTuple):
    """Relative L2 distance from float32 (of `router_gap`: a difference of scores)."""

    backend: Any  # f32 []
    auto: Any  # f32 []


Distances = dict[str, Distance]  # by `stage.quantity`


def most(name: str, auto: float, fp8: bool) -> float:
    """Largest distance that a backend may have where `auto` has `auto`."""
    if name == "route.router_gap":
        return GAP
    bound = FP8_ROWS if fp8 and name == "mla.kv_latent" else MOST
    return min(bound, max(RATIO * auto, FLOOR))


def exact(static: Static) -> Static:
    """The same sizes, rounding nowhere."""
    return replace(static, run=replace(static.run, compute="float32", decode_backend="auto"))


def mla_over(cached: jax.Array) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Standard MLA whose new rows go into its cache, but whose heads attend over `cached`.

    For a row that falls to the other side of an FP8 step is no error of the attention.
    """

    def mla(static, w, layer, x, inputs, kv_latent, kv_scale):
        q, gate, rows = standard.mla_inputs(static, w, x, inputs)
        kv_latent = write_rows(inputs, layer, rows, kv_latent, kv_scale, static.context)
        return standard.mla_attend(static, w, layer, q, gate, inputs, cached, kv_scale), kv_latent

    return mla


def chosen(static: Static, w: Moe, y: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How far experts `ids` [N, k] are from the best by score, and the weights they should have.

    A near-tie is no error. Infinite where an expert is chosen twice.

    Returns: gap f32 [], weights f32 [N, k].
    """
    scores = jax.nn.sigmoid(all_gather(static.nx.project(y, w.gate), static.ranks))
    biased = scores + w.e_score_correction_bias
    best = jax.lax.top_k(biased, ids.shape[-1])[0]
    # both sorted: where the sets are equal but for ties, so are the values
    mine = jnp.sort(jnp.take_along_axis(biased, ids, axis=-1), axis=-1)[:, ::-1]
    twice = jnp.any(jnp.diff(jnp.sort(ids, axis=-1), axis=-1) == 0)
    share = jnp.take_along_axis(scores, ids, axis=-1)
    share = share / jnp.sum(share, -1, keepdims=True) * static.config.routed_scaling_factor
    return jnp.where(twice, jnp.inf, jnp.max(jnp.abs(best - mine))), share


def rel_l2(got: jax.Array, want: jax.Array) -> jax.Array:
    """|got - want| / |want| in f32."""
    a, b = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))


def written_rows(before: jax.Array, *after: jax.Array) -> list[jax.Array]:
    """Cache rows f32 that at least one side wrote, zeros elsewhere: equal ones would hide them."""
    old, *new = (x.astype(jnp.float32) for x in (before, *after))
    changed = sum(jnp.any(x != old, axis=-1, keepdims=True) for x in new) > 0
    return [jnp.where(changed, x, 0) for x in new]


class _Sides:
    """A stage three times on equal inputs; collects distances under `stage.quantity`."""

    def __init__(self, static: Static, backend: Backend) -> None:
        self.static, self.backend = static, backend
        self.auto = replace(static, run=replace(static.run, decode_backend="auto"))
        self.exact = exact(static)
        self.found: Distances = {}

    def run(self, stage: str, weights: tuple[Any, ...], *args: Any, **settings: Any) -> list[Any]:
        """Outputs of the backend, of `auto`, and in float32; `weights` as both forms take them."""
        arrays = [_plain(self.static.nx, a) for a in args]
        mine = getattr(self.backend, stage)(self.static, *weights[:1], *args, **settings)
        return [mine, *self.standard(stage, weights, *arrays, **settings)]

    def standard(self, stage: str, weights: tuple[Any, ...], *args: Any, **settings: Any) -> Any:
        """Those of `auto`, and in float32."""
        wide = jax.tree.map(_widened, args)
        return [
            getattr(AUTO, stage)(self.auto, *weights[1:], *args, **settings),
            getattr(AUTO, stage)(self.exact, *weights[1:], *wide, **settings),
        ]

    def note(self, name: str, mine: Any, auto: Any, want: Any, want_of_auto: Any = None) -> None:
        """Distances of one quantity."""
        theirs = want if want_of_auto is None else want_of_auto
        self.found[name] = Distance(rel_l2(mine, want), rel_l2(auto, theirs))


def _plain(nx: Numerics, arg: Any) -> Any:
    """What kernels hand to each other, as the standard stages take it."""
    return whole(nx, arg) if isinstance(arg, Delta) else plain(arg)


def _widened(x: Any) -> Any:
    return x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x


def layer_stages(static: Static, backend: Backend, layer: int, verifies: bool) -> Any:
    """Jitted: (weights, cache, inputs, prefix, bank, delta) -> `Distances` of one layer's stages.

    prefix, delta [N, D] and bank [N, J, D] in the compute dtype. With `verifies` KDA leaves its
    commit pending, as after drafts.
    """

    def run(weights: Weights, cache: Cache, inputs: StepInputs, *stream: jax.Array) -> Distances:
        sides, c = _Sides(static, backend), static.config
        w = layer_weights(static, weights, layer, backend.whole_stacks)
        sliced = layer_weights(static, weights, layer)
        starts, count = c.starts_block(layer), place(static, layer).snapshots
        prefix, bank, delta = stream
        if backend.whole_stacks and layer and not c.is_dense(layer - 1):
            delta = Delta(delta, jnp.roll(delta, 1, axis=-1).astype(jnp.float32))
        found = sides.run(
            "attn_in", (w, sliced), prefix, bank, count, delta, starts_block=starts
        )  # fmt: skip
        sides.note("attn_in.x", *(plain(f[0]) for f in found))
        sides.note("attn_in.prefix", *(f[1] for f in found))
        if starts:
            sides.note("attn_in.snapshots", *(f[2][:, : count + 1] for f in found))
        x, prefix, bank = found[0]
        attention = w.attention, sliced.attention
        if c.is_mla(layer):
            heads = _mla(sides, attention, layer, x, inputs, cache)
        elif verifies:
            heads = _kda_pending(sides, attention, layer, x, inputs, cache)
        else:
            heads = _kda_step(sides, attention, layer, x, inputs, cache)
        found = sides.run(
            "attn_out", (w, sliced), heads, prefix, bank, count + starts, starts_block=starts
        )  # fmt: skip
        sides.note("attn_out.y", *(plain(f[0]) for f in found))
        sides.note("attn_out.prefix", *(f[1] for f in found))
        _feed_forward(sides, (w.mlp, sliced.mlp), found[0][0])
        return sides.found

    return jax.jit(run)


def _mla(sides: _Sides, w: Any, layer: int, x: jax.Array, inputs: StepInputs, cache: Cache) -> Any:
    at, kv, scale = sides.static.config.attn_ordinal(layer), cache.kv_latent, cache.kv_scale
    heads, after = sides.backend.mla(sides.static, w[0], at, x, inputs, kv, scale)
    x = plain(x)
    theirs, theirs_after = AUTO.mla(sides.auto, w[1], at, x, inputs, kv, scale)
    args = (sides.exact, w[1], at, _widened(x), inputs, kv, scale)
    (want, rows), (want_of_auto, _) = mla_over(after)(*args), mla_over(theirs_after)(*args)
    sides.note("mla.heads", plain(heads), theirs, want, want_of_auto)
    pages = (inputs.page_table,)
    found = written_rows(*(a[at][pages] for a in (kv, after, theirs_after, rows)))
    sides.note("mla.kv_latent", *found)
    return heads


def _kda_step(
    sides: _Sides, w: Any, layer: int, x: jax.Array, inputs: StepInputs, cache: Cache
) -> Any:
    at, slots = sides.static.config.attn_ordinal(layer), inputs.slot
    found = sides.run("kda_step", w, at, x, inputs, cache.kda_state, cache.conv_window)
    sides.note("kda_step.heads", *(plain(f[0]) for f in found))
    sides.note("kda_step.state", *(f[1][at][slots] for f in found))
    sides.note("kda_step.window", *(f[2][at][slots] for f in found))
    return found[0][0]


def _kda_pending(
    sides: _Sides, w: Any, layer: int, x: jax.Array, inputs: StepInputs, cache: Cache
) -> Any:
    at, slots = sides.static.config.attn_ordinal(layer), inputs.slot
    state, window = cache.kda_state, cache.conv_window
    found = sides.run("kda", w, at, x, inputs, state, window)
    sides.note("kda.heads", *(plain(f[0]) for f in found))
    for name in ("update", "key", "log_decay"):
        sides.note(f"kda.{name}", *(getattr(f[1][0], name) for f in found))
    sides.note("kda.raw", *(f[1][1] for f in found))
    batch, tokens = inputs.tokens.shape
    accepted = jnp.arange(batch, dtype=jnp.int32) % tokens + 1
    one = slice(at, at + 1)
    pending = [found[0][1]]
    committed = sides.run("kda_commit", (), pending, accepted, inputs, state[one], window[one])
    sides.note("kda_commit.state", *(f[0][0][slots] for f in committed))
    sides.note("kda_commit.window", *(f[1][0][slots] for f in committed))
    return found[0][0]


def _feed_forward(sides: _Sides, w: tuple[Any, Any], y: jax.Array) -> None:
    nx = sides.static.nx
    if not isinstance(w[1], Moe):
        sides.note("dense.delta", *sides.run("dense", w, y))
        return
    routed = sides.run("route", w, y)
    sides.note("route.latent", *(r.latent for r in routed))
    mine = sides.backend.experts(sides.static, w[0], routed[0])  # what `route` left pending too
    _, shared, ids, weights = mine
    sides.note("route.shared", shared, *(r.shared for r in routed[1:]))
    gaps = [chosen(sides.exact, w[1], _widened(plain(y)), i) for i in (ids, routed[1].ids)]
    sides.found["route.router_gap"] = Distance(*(gap for gap, _ in gaps))
    (_, want), (_, want_of_auto) = gaps
    sides.note("route.weights", weights, routed[1].weights, want, want_of_auto)
    same = Routed(routed[0].latent, ids, weights, shared)
    sides.note("experts.routed", *(s.routed for s in [mine, *sides.standard("experts", w, same)]))
    out = sides.run("moe_out", w, mine.routed, shared)
    sides.note("moe_out.delta", *(whole(nx, d) for d in out[:2]), out[2])


def head_stages(static: Static, backend: Backend) -> Any:
    """Jitted: (weights, prefix, bank, delta) -> `Distances` of what follows the last layer."""

    def run(weights: Weights, *stream: jax.Array) -> Distances:
        sides, root = _Sides(static, backend), (weights.root, weights.root)
        prefix, bank, delta = stream
        found = sides.run("head_in", root, prefix, bank, static.config.num_snapshots, delta)
        sides.note("head_in.hidden", *(f[0] for f in found))
        sides.note("head_in.last", *(f[1] for f in found))
        out = sides.run("logits", root, found[0][0])
        sides.note("logits.values", *(f[0] for f in out))
        # the largest of one's own logits, and where it stands, have no rounding of their own
        sides.found["logits.argmax"] = Distance(*(_off(*f) for f in out[:2]))
        return sides.found

    return jax.jit(run)


def _off(values: jax.Array, top: jax.Array, argmax: jax.Array) -> jax.Array:
    there = jnp.take_along_axis(values, argmax[:, None], axis=-1)[:, 0]
    good = (jnp.max(values, -1) == top) & (there == top)
    return jnp.where(jnp.all(good), 0.0, jnp.inf)
