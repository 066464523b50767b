"""Cases of the routed experts, for `python -m bench ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops_problem import SITU, Problem, f64, normal, situ64


class Sizes(NamedTuple):
    """Experts of a layer, those that a row chooses, latent width, width over all ranks; draws."""

    experts: int = 896
    chosen: int = 16
    latent: int = 3584
    width: int = 3072
    draws: int = 24


def expert_layers(
    key: jax.Array, layers: int, sizes: Sizes, m: int
) -> tuple[Callable[[int], tuple[jax.Array, ...]], tuple[jax.Array, jax.Array]]:
    """Random experts of width m: layer -> codes and scales as in a checkpoint; w13 and w2 packed.

    Scales are near one, so that results are neither lost nor infinite.
    """
    from pallas_kernels import experts_pack

    e, z = sizes.experts, sizes.latent

    def arrays(key: jax.Array) -> tuple[jax.Array, ...]:
        a, b, c, d = jax.random.split(key, 4)
        return (
            jax.random.bits(a, (e, 2 * m, z // 2), jnp.uint8),
            jax.random.randint(b, (e, 2 * m, z // 32), 114, 122).astype(jnp.uint8),
            jax.random.bits(c, (e, z, m // 2), jnp.uint8),
            jax.random.randint(d, (e, z, m // 32), 114, 122).astype(jnp.uint8),
        )

    make = jax.jit(lambda key: experts_pack.pack(*arrays(key)))
    parts = zip(*(make(jax.random.fold_in(key, i)) for i in range(layers)), strict=True)
    w13, w2 = (jnp.stack(part) for part in parts)
    return lambda layer: arrays(jax.random.fold_in(key, layer)), (w13, w2)


def routed64(
    w13: jax.Array, w2: jax.Array, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, m: int
) -> np.ndarray:
    """The routed sum of a row x [Z] in float64, from a layer's packed weights."""
    from pallas_kernels import experts_pack

    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table, z = np.concatenate([table, -table]), len(x)
    raw = jax.jit(lambda a, b: experts_pack.unpack(a, b, width=m, latent=z))

    def dense(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        return table[both] * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=-1)

    out = np.zeros(z)
    for expert, weight in zip(ids, weights, strict=True):
        a = w13[expert * m // 32 : (expert + 1) * m // 32]
        b = w2[expert * z // 64 : (expert + 1) * z // 64]
        c1, s1, c2, s2 = (np.asarray(v)[0] for v in raw(a, b))
        gate, up = np.split(dense(c1, s1) @ x, 2)
        out += weight * (dense(c2, s2) @ situ64(gate, up))
    return out


def experts_case(
    n: int,
    ranks: int,
    seed: int,
    tuning: Any = None,
    sizes: Sizes = Sizes(),  # noqa: B008
) -> Problem:
    """Routed experts of one rank at full spread: distinct random experts of every row."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.experts import ExpertWeights, routed_experts
    from pallas_kernels import experts

    e, k, z, m = *sizes[:3], sizes.width // ranks
    per_expert = 3 * m * z // 2 + 3 * m * z // 32
    rng = np.random.default_rng(seed)
    layers = 2 if n > 8 else 4
    key = jax.random.key(seed)
    raw, (w13, w2) = expert_layers(key, layers, sizes, m)
    latent = normal(jax.random.fold_in(key, 99), (n, z))
    # another draw per call: experts of one layer are few of 896, so weights do not repeat early
    draws = sizes.draws
    ids = np.stack([[rng.permutation(e)[:k] for _ in range(n)] for _ in range(draws)]).astype(
        np.int32
    )
    weights = rng.random((n, k)).astype(np.float32)
    weights = jnp.asarray(weights / weights.sum(1, keepdims=True))
    all_ids = [jnp.asarray(i) for i in ids]
    distinct = float(np.mean([len(np.unique(i)) for i in ids]))
    fast = jax.jit(
        lambda x, i, g, a, b, layer: experts.experts(
            x, i, g, a, b, layer, width=m, betas=SITU, tuning=tuning
        )
    )
    each = [jnp.int32(i % layers) for i in range(draws)]

    plain = jax.jit(
        lambda x, i, g, *raw: routed_experts(Numerics(), x, i, g, ExpertWeights(*raw), SITU)
    )

    def standard(draw: int) -> jax.Array:
        return plain(latent, all_ids[draw], weights, *raw(draw % layers))

    def exact(draw: int, rows: np.ndarray) -> np.ndarray:
        layer, g = draw % layers, np.asarray(weights, np.float64)
        return np.stack([
            routed64(w13[layer], w2[layer], f64(latent)[row], ids[draw][row], g[row], m)
            for row in rows
        ])  # fmt: skip

    def call(layer: jax.Array) -> jax.Array:
        draw = int(layer)
        return fast(latent, all_ids[draw], weights, w13, w2, each[draw])

    problem = Problem(
        call,
        int(distinct * per_expert),
        draws,
        exact,
        standard,
        np.arange(n) if n <= 2 else np.array([0, n // 2, n - 1]),
        {"distinct_experts": (distinct, "count")},
    )
    return problem
