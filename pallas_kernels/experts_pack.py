"""The routed experts' weights as their kernels read them, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import mxfp4

HALF = mxfp4.ROWS // 2  # gate rows of a tile of W13


def pack(
    w13_packed: jax.Array, w13_scale: jax.Array, w2_packed: jax.Array, w2_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The checkpoint's arrays [.., E, rows, columns] -> (w13, w2) as the kernels read them.

    A tile of W13 holds 32 gate rows and the 32 up rows that belong to them, in the order in which
    W2's product wants its K (`mxfp4.unit_rows`), so that h needs no permutation.
    """
    return pack_gate_up(w13_packed, w13_scale), pack_down(w2_packed, w2_scale)


def pack_gate_up(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The half of `pack` that concerns w13."""
    rows = w13_rows(codes.shape[-2] // 2)
    return _merged(mxfp4.pack(codes[..., rows, :], scales[..., rows, :]))


def pack_down(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The half of `pack` that concerns w2."""
    return _merged(mxfp4.pack(codes, scales))


def _merged(a: jax.Array) -> jax.Array:  # experts and tiles as one axis: TMA has five
    return a.reshape(*a.shape[:-4], -1, *a.shape[-2:])


def unpack(
    w13: jax.Array, w2: jax.Array, *, width: int, latent: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The inverse of `pack`; `width` is m of this rank, `latent` is Z."""

    def split(a: jax.Array, tiles: int) -> jax.Array:
        return a.reshape(*a.shape[:-3], -1, tiles, *a.shape[-2:])

    inverse = jnp.argsort(w13_rows(width))
    codes, scales = mxfp4.unpack(split(w13, width // HALF), latent)
    w2_codes, w2_scales = mxfp4.unpack(split(w2, latent // mxfp4.ROWS), width)
    return codes[..., inverse, :], scales[..., inverse, :], w2_codes, w2_scales


def w13_rows(width: int) -> jax.Array:
    """The checkpoint's rows of gate and up in the order of the tiles."""
    order = jnp.asarray(mxfp4.unit_rows(width))[:, None]
    return jnp.concatenate([order, order + width], axis=1).reshape(-1)
