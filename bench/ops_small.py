"""Cases of the small kernels for `python -m bench ops`: what stands between a layer's products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops_problem import Problem, attn_res64, bf16_round, f64, normal, stack_depth


def attn_res_case(m: int, count: int, seed: int) -> Problem:
    """The depth mixture as after a MoE layer: the delta in two parts. Rows come from L2."""
    from jax_impl.numerics import Numerics, f32
    from jax_impl.ops.attn_res import attn_res as mix
    from jax_impl.ops.norm import rmsnorm
    from pallas_kernels.attn_res import attn_res

    nx, d, bank = Numerics(), 7168, 8
    key = jax.random.key(seed)
    shapes = [(m, d), (m, d), (d,), (1, d), (d,)]
    prefix, delta, res_norm, res_proj, norm = (
        normal(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes)
    )
    res_proj = res_proj * 0.02
    shared = jax.random.normal(jax.random.fold_in(key, 8), (m, d), jnp.float32)
    snapshots = normal(jax.random.fold_in(key, 9), (m, bank, d))
    args = prefix, snapshots, jnp.int32(count), delta, res_norm, res_proj, norm

    def kernel(shared: jax.Array, *args: Any) -> jax.Array:
        return attn_res(*args, eps=1e-5, shared=shared)[0]

    def plain(prefix, snapshots, count, delta, res_norm, res_proj, norm, shared):
        delta = nx.round(f32(delta) + f32(nx.round(shared)))
        new = nx.round(f32(prefix) + f32(delta))
        return rmsnorm(nx, mix(nx, new, snapshots, count, res_norm, res_proj, 1e-5), norm, 1e-5)

    fast, standard = jax.jit(kernel), jax.jit(plain)

    def exact(_: int, rows: np.ndarray) -> np.ndarray:
        both = bf16_round(f64(delta) + bf16_round(f64(shared)))
        weights = [f64(res_norm), f64(res_proj)[0], f64(norm)]
        new = bf16_round(f64(prefix) + both)
        return attn_res64(new, f64(snapshots)[:, :count], weights, 1e-5)[rows]

    return Problem(
        lambda _: fast(shared, *args),
        2 * m * d * (count + 6),
        1,
        exact,
        lambda _: standard(*args, shared),
        np.arange(m),
    )


def topk_case(m: int, seed: int) -> Problem:
    """The router's choice and the units; compared are the weights, in the order of the ids."""
    from jax_impl.ops.router import choose_experts
    from pallas_kernels.topk import topk

    e, k, layers, scaling = 896, 16, 12, 2.5
    key = jax.random.key(seed)
    logits = jax.random.normal(key, (m, e), jnp.float32)
    bias = jax.random.normal(jax.random.fold_in(key, 1), (layers, e), jnp.float32) * 0.1
    # all outputs leave the program, so that nothing of the kernel's work is dead
    fast = jax.jit(lambda x, b, layer: topk(x, b, layer, k=k, scaling=scaling))
    standard = jax.jit(lambda x, b: choose_experts(x, b, k, scaling=scaling)[1])

    def exact(layer: int, rows: np.ndarray) -> np.ndarray:
        score = 1 / (1 + np.exp(-f64(logits)[rows]))
        order = np.argsort(-(score + f64(bias[layer])), axis=-1, kind="stable")[:, :k]
        chosen = np.take_along_axis(score, order, axis=-1)
        return chosen / chosen.sum(-1, keepdims=True) * scaling

    return Problem(
        lambda layer: fast(logits, bias, layer).weights,
        4 * (m * e + e + 2 * m * k),
        layers,
        exact,
        lambda layer: standard(logits, bias[layer]),
        np.arange(m),
    )


def vocab_case(
    m: int,
    k: int,
    markov: bool,
    seed: int,
    layers: int | None = None,
    ranks: int = 16,
    vocabulary: int = 163840,
) -> Problem:
    """This rank's logits with max and argmax; `markov`: base logits, rows by number."""
    from jax_impl.numerics import Numerics
    from pallas_kernels.vocab import vocab

    nx, n = Numerics(), vocabulary // ranks
    layers = layers or stack_depth(2 * n * k)
    key = jax.random.key(seed)
    table = normal(key, (vocabulary if markov else m, k))
    ids = (jnp.arange(m, dtype=jnp.int32) * 7919 + 5) % table.shape[0]
    ws = [normal(jax.random.fold_in(key, i), (n, k), k**-0.5) for i in range(layers)]
    base = jax.random.normal(jax.random.fold_in(key, 99), (m, n), jnp.float32)

    def kernel(table: jax.Array, w: jax.Array, base: jax.Array, ids: jax.Array) -> Any:
        return vocab(table, w, base, ids=ids) if markov else vocab(table, w)

    def plain(table: jax.Array, w: jax.Array, base: jax.Array, ids: jax.Array) -> jax.Array:
        return base + nx.project(table[ids], w) if markov else nx.linear(table, w)

    # ids and maxima leave the program too, so that their reduction is part of it
    fast, standard = jax.jit(kernel), jax.jit(plain)

    def exact(layer: int, rows: np.ndarray) -> np.ndarray:
        x = f64(table[ids] if markov else table)[rows]
        y = x @ f64(ws[layer]).T
        return y + f64(base)[rows] if markov else y

    return Problem(
        lambda layer: fast(table, ws[int(layer)], base, ids)[0],
        2 * n * k + 2 * m * k + 4 * m * n * (1 + markov),
        layers,
        exact,
        lambda layer: standard(table, ws[layer], base, ids),
        np.arange(m),
    )


def cases() -> dict[str, Callable[[], Problem]]:
    """Every case by name."""
    out: dict[str, Callable[[], Problem]] = {}
    for m in (1, 8, 64):
        out[f"attn_res.two_deltas.rows{m}"] = lambda m=m: attn_res_case(m, 8, 19)
        out[f"vocab.head.tp16.rows{m}"] = lambda m=m: vocab_case(m, 7168, False, 29)
        out[f"vocab.markov.tp16.rows{m}"] = lambda m=m: vocab_case(m, 256, True, 31)
        out[f"topk.rows{m}"] = lambda m=m: topk_case(m, 23)
    return out
