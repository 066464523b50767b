"""Routed experts in the latent space (specification §3.6), MXFP4 weights dequantised in use."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_impl.numerics import Numerics, f32
from jax_impl.ops.mxfp4 import dequantise
from jax_impl.ops.situ import situ


class ExpertWeights(NamedTuple):
    """One layer's experts: E experts, latent Z, width m (this rank's share of the width)."""

    w13_packed: jax.Array  # u8 [E, 2m, Z/2]   gate rows, then up rows
    w13_scale: jax.Array  # u8 [E, 2m, Z/32]
    w2_packed: jax.Array  # u8 [E, Z, m/2]
    w2_scale: jax.Array  # u8 [E, Z, m/32]

    @property
    def number(self) -> int:
        """Experts held here."""
        return self.w13_packed.shape[0]

    def chosen(self, ids: jax.Array) -> ExpertWeights:
        """Those of `ids`, each in 0..E-1, with the shape of `ids` in place of E."""
        return ExpertWeights(*(a[ids] for a in self))


class PackedExperts(NamedTuple):
    """The same bytes in the order in which the kernels read them (`pallas_kernels.experts`)."""

    w13_tiles: jax.Array  # u32 [E 2m/64, lines, 32]
    w2_tiles: jax.Array  # u32 [E Z/64, lines, 32]
    width: int  # m
    latent: int  # Z

    @property
    def number(self) -> int:
        """Experts held here."""
        return self.w2_tiles.shape[0] // (self.latent // TILE_ROWS)

    def chosen(self, ids: jax.Array) -> ExpertWeights:
        """Those of `ids` in the checkpoint's order."""
        from pallas_kernels.experts_pack import unpack

        tiles = [a.reshape(self.number, -1, *a.shape[1:])[ids] for a in self[:2]]
        found = unpack(*tiles, width=self.width, latent=self.latent)
        return ExpertWeights(*(a.squeeze(-3) for a in found))  # one expert each


TILE_ROWS = 64  # of a packed tile

# Up to this many (row, expert) pairs each pair gathers its own expert, which writes pairs x 3mZ
# dequantised numbers. Up to DECODE_PAIRS, the largest decode step (64 rows of 16 experts), that is
# done in parts of GATHER_PAIRS; beyond it, rows are grouped by expert. A loop turn costs a GPU some
# 0.24 ms of launches, and the grouped form takes one per expert: 143 ms per layer at 64 rows on an
# H200, fit for long prefill only.
GATHER_PAIRS = 256
DECODE_PAIRS = 1024
BLOCK = 16  # rows of one expert handled together in the grouped form


def routed_experts(
    nx: Numerics,
    latent: Float[Array, "N Z"],
    ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    w: ExpertWeights | PackedExperts,
    betas: tuple[float, float],
) -> Float[Array, "N Z"]:
    """Weighted sum over the chosen experts, f32 and not rounded (ranks' shares are summed first).

    Each expert's output is rounded before it is weighted, as in both profiles. Ids outside 0..E-1
    are another rank's experts and add nothing.
    """
    form = gathered if ids.size <= GATHER_PAIRS else gathered_in_parts
    if ids.size > DECODE_PAIRS:
        form = grouped
    here = (ids >= 0) & (ids < w.number)
    r = form(nx, latent, jnp.where(here, ids, w.number), w, betas)
    return jnp.sum(jnp.where(here[..., None], f32(r) * weights[..., None], 0.0), axis=1)


def gathered(
    nx: Numerics,
    latent: Float[Array, "N Z"],
    ids: Int[Array, "N k"],
    w: ExpertWeights | PackedExperts,
    betas: tuple[float, float],
) -> Float[Array, "N k Z"]:
    """Every (row, expert) pair with its own copy of the expert's weights.

    The pairs of id E compute something that the caller drops.
    """
    mine = w.chosen(jnp.minimum(ids, w.number - 1))
    gate_up = nx.round(
        nx.einsum("nz,nkoz->nko", latent, dequantise(mine.w13_packed, mine.w13_scale))
    )
    gate, up = jnp.split(gate_up, 2, axis=-1)
    h = situ(nx, gate, up, *betas)
    return nx.round(nx.einsum("nkm,nkzm->nkz", h, dequantise(mine.w2_packed, mine.w2_scale)))


def gathered_in_parts(
    nx: Numerics,
    latent: Float[Array, "N Z"],
    ids: Int[Array, "N k"],
    w: ExpertWeights | PackedExperts,
    betas: tuple[float, float],
) -> Float[Array, "N k Z"]:
    """`gathered`, for as many rows at a time as have `GATHER_PAIRS` pairs."""
    n, k = ids.shape
    rows = max(1, GATHER_PAIRS // k)
    parts = -(-n // rows)

    def cut(a: jax.Array) -> jax.Array:  # rows added at the end compute something and are dropped
        return jnp.pad(a, ((0, parts * rows - n), (0, 0))).reshape(parts, rows, -1)

    r = lax.map(lambda part: gathered(nx, *part, w, betas), (cut(latent), cut(ids)))
    return r.reshape(parts * rows, k, -1)[:n]


def grouped(
    nx: Numerics,
    latent: Float[Array, "N Z"],
    ids: Int[Array, "N k"],
    w: ExpertWeights | PackedExperts,
    betas: tuple[float, float],
) -> Float[Array, "N k Z"]:
    """The same, expert by expert: pairs sorted by expert, `BLOCK` of them per loop turn.

    Pairs of id E are sorted last and left at zero.
    """
    n, k = ids.shape
    experts = w.number
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    count = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    start = jnp.cumsum(count) - count
    last_block = jnp.cumsum(-(-count // BLOCK))

    def turn(i, out):
        e = jnp.searchsorted(last_block, i, side="right")
        first_block = last_block[e] - -(-count[e] // BLOCK)
        within = (i - first_block) * BLOCK + jnp.arange(BLOCK)
        pair = order[jnp.minimum(start[e] + within, n * k - 1)]
        # surplus rows of a block compute something harmless and are dropped on writing
        target = jnp.where(within < count[e], pair, n * k)
        one = w.chosen(e)
        gate_up = nx.linear(latent[pair // k], dequantise(one.w13_packed, one.w13_scale))
        gate, up = jnp.split(gate_up, 2, axis=-1)
        h = situ(nx, gate, up, *betas)
        r = nx.linear(h, dequantise(one.w2_packed, one.w2_scale))
        return out.at[target].set(r, mode="drop")

    # the sum with a weight makes the loop's start vary over the ranks where its result does
    out = jnp.zeros((n * k, latent.shape[1]), nx.dtype) + 0 * w[0].ravel()[0].astype(nx.dtype)
    return lax.fori_loop(0, last_block[-1], turn, out).reshape(n, k, -1)
