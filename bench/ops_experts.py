"""Cases of the routed experts, for `python -m bench ops`."""

from __future__ import annotations

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
    from pallas_kernels import experts, experts_pack

    e, k, z, m = *sizes[:3], sizes.width // ranks
    per_expert = 3 * m * z // 2 + 3 * m * z // 32
    rng = np.random.default_rng(seed)
    layers = 2 if n > 8 else 4
    key = jax.random.key(seed)

    def layer_arrays(key: jax.Array) -> tuple[jax.Array, ...]:
        a, b, c, d = jax.random.split(key, 4)
        return (
            jax.random.bits(a, (e, 2 * m, z // 2), jnp.uint8),
            jax.random.randint(b, (e, 2 * m, z // 32), 114, 122).astype(jnp.uint8),
            jax.random.bits(c, (e, z, m // 2), jnp.uint8),
            jax.random.randint(d, (e, z, m // 32), 114, 122).astype(jnp.uint8),
        )

    make = jax.jit(lambda key: experts_pack.pack(*layer_arrays(key)))
    w13, w2 = (
        jnp.stack(parts)
        for parts in zip(*(make(jax.random.fold_in(key, i)) for i in range(layers)), strict=True)
    )
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
        raw = layer_arrays(jax.random.fold_in(key, draw % layers))
        return plain(latent, all_ids[draw], weights, *raw)

    def exact(draw: int, rows: np.ndarray) -> np.ndarray:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = np.concatenate([table, -table])
        layer = draw % layers
        raw = jax.jit(lambda a, b: experts_pack.unpack(a, b, width=m, latent=z))

        def dense(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
            both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
            return table[both] * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=-1)

        x, out = f64(latent), np.zeros((len(rows), z))
        g = np.asarray(weights, np.float64)
        for r, row in enumerate(rows):
            for j, expert in enumerate(ids[draw][row]):
                a = w13[layer, expert * m // 32 : (expert + 1) * m // 32]
                b = w2[layer, expert * z // 64 : (expert + 1) * z // 64]
                c1, s1, c2, s2 = (np.asarray(v)[0] for v in raw(a, b))
                gate, up = np.split(dense(c1, s1) @ x[row], 2)
                out[r] += g[row, j] * (dense(c2, s2) @ situ64(gate, up))
        return out

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
