"""Cases of the products and of what is fused with them, for `python -m bench ops`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops_problem import (
    SITU,
    Problem,
    attn_res64,
    bf16_round,
    f64,
    normal,
    situ64,
    stack_depth,
)


def skinny_case(m: int, n: int, k: int, seed: int, layers: int | None = None, **kw: Any) -> Problem:
    """A projection; without `layers` as many as are L2-cold; keywords go to the kernel."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.situ import situ
    from pallas_kernels.skinny import skinny

    nx = Numerics()
    layers = layers or stack_depth(2 * n * k)
    kx, kw_ = jax.random.split(jax.random.key(seed))
    x = normal(kx, (m, k))
    w = jnp.stack([normal(jax.random.fold_in(kw_, i), (n, k), k**-0.5) for i in range(layers)])
    fused = kw.get("situ") is not None
    rounded = kw.get("out_dtype") == jnp.bfloat16

    def total(y: jax.Array) -> jax.Array:
        return jnp.sum(y, 0) if y.ndim == 3 else y

    fast = jax.jit(lambda x, w, layer: total(skinny(x, w, layer, **kw)))

    def plain(x: jax.Array, w: jax.Array, layer: jax.Array) -> jax.Array:
        if fused:
            gate, up = jnp.split(nx.linear(x, w[layer]), 2, axis=-1)
            return situ(nx, gate, up, *SITU)
        return nx.linear(x, w[layer]) if rounded else nx.project(x, w[layer])

    standard = jax.jit(plain)

    def exact(layer: int, rows: np.ndarray) -> np.ndarray:
        y = f64(x)[rows] @ f64(w[layer]).T
        return situ64(*np.split(y, 2, axis=-1)) if fused else y

    return Problem(
        lambda layer: fast(x, w, layer),
        2 * n * k + 2 * m * k,
        layers,
        exact,
        lambda layer: standard(x, w, layer),
        np.arange(m),
    )


def route_case(m: int, ranks: int, seed: int, layers: int | None = None) -> Problem:
    """Router share, latent-down share and the shared experts' first product over one x."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.situ import situ
    from pallas_kernels.route import route

    nx, k = Numerics(), 7168
    rows = 896 // ranks, 3584 // ranks, 12288 // ranks
    layers = layers or stack_depth(2 * sum(rows) * k)
    key = jax.random.key(seed)
    x = normal(key, (m, k))
    ws = [
        jnp.stack(
            [normal(jax.random.fold_in(key, 10 * i + n), (n, k), k**-0.5) for i in range(layers)]
        )
        for n in rows
    ]
    fast = jax.jit(
        lambda x, layer, *ws: jnp.concatenate(
            [y.astype(jnp.float32) for y in route(x, *ws[:3], layer=layer, betas=SITU)], axis=-1
        )
    )

    def plain(x: jax.Array, layer: jax.Array, *ws: jax.Array) -> jax.Array:
        gate, up = jnp.split(nx.linear(x, ws[2][layer]), 2, axis=-1)
        parts = nx.project(x, ws[0][layer]), nx.linear(x, ws[1][layer]), situ(nx, gate, up, *SITU)
        return jnp.concatenate([p.astype(jnp.float32) for p in parts], axis=-1)

    standard = jax.jit(plain)

    def exact(layer: int, chosen: np.ndarray) -> np.ndarray:
        ys = [f64(x)[chosen] @ f64(w[layer]).T for w in ws]
        return np.concatenate([ys[0], ys[1], situ64(*np.split(ys[2], 2, axis=-1))], axis=-1)

    return Problem(
        lambda layer: fast(x, layer, *ws),
        2 * sum(rows) * k + 2 * m * k,
        layers,
        exact,
        lambda layer: standard(x, layer, *ws),
        np.arange(m),
    )


def latent_up_case(m: int, ranks: int, seed: int, layers: int | None = None) -> Problem:
    """Latent norm and up projection."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.norm import rmsnorm
    from pallas_kernels.latent_up import latent_up

    nx, k, n = Numerics(), 3584, 7168 // ranks
    layers = layers or stack_depth(2 * n * k)
    key = jax.random.key(seed)
    x, norm = normal(key, (m, k)), normal(jax.random.fold_in(key, 1), (k,))
    w = jnp.stack([normal(jax.random.fold_in(key, i), (n, k), k**-0.5) for i in range(layers)])
    fast = jax.jit(lambda x, norm, w, layer: latent_up(x, norm, w, layer, eps=1e-5)[0])
    standard = jax.jit(lambda x, norm, w, layer: nx.linear(rmsnorm(nx, x, norm, 1e-5), w[layer]))

    def exact(layer: int, rows: np.ndarray) -> np.ndarray:
        v = f64(x)[rows]
        v = v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * f64(norm)
        return v @ f64(w[layer]).T

    return Problem(
        lambda layer: fast(x, norm, w, layer),
        2 * n * k + 2 * m * k,
        layers,
        exact,
        lambda layer: standard(x, norm, w, layer),
        np.arange(m),
    )


def attn_res_case(m: int, count: int, seed: int) -> Problem:
    """The depth mixture with 8 places in the bank; weights are small, the rows come from L2."""
    from jax_impl.numerics import Numerics, f32
    from jax_impl.ops.attn_res import attn_res as mix
    from jax_impl.ops.norm import rmsnorm
    from pallas_kernels.attn_res import attn_res

    nx, d, bank = Numerics(), 7168, 8
    key = jax.random.key(seed)
    prefix, delta, res_norm, res_proj, norm = (
        normal(jax.random.fold_in(key, i), shape)
        for i, shape in enumerate([(m, d), (m, d), (d,), (1, d), (d,)])
    )
    res_proj = res_proj * 0.02
    snapshots = normal(jax.random.fold_in(key, 9), (m, bank, d))
    args = prefix, snapshots, jnp.int32(count), delta, res_norm, res_proj, norm
    fast = jax.jit(lambda *args: attn_res(*args, eps=1e-5)[0])

    def plain(prefix, snapshots, count, delta, res_norm, res_proj, norm):
        new = nx.round(f32(prefix) + f32(delta))
        return rmsnorm(nx, mix(nx, new, snapshots, count, res_norm, res_proj, 1e-5), norm, 1e-5)

    standard = jax.jit(plain)

    def exact(_: int, rows: np.ndarray) -> np.ndarray:
        new = bf16_round(f64(prefix) + f64(delta))
        weights = [f64(res_norm), f64(res_proj)[0], f64(norm)]
        return attn_res64(new, f64(snapshots)[:, :count], weights, 1e-5)[rows]

    return Problem(
        lambda _: fast(*args),
        2 * m * d * (count + 4),
        2,
        exact,
        lambda _: standard(*args),
        np.arange(m),
    )
