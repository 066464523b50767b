"""Cases of the kernels that do several stages' work, for `python -m bench ops`.

`mix` is AttnRes with the products of what it gives; compared are x and the products, side by side.
`experts_row` is the choice of one row, its routed experts and the shared experts' second product.
What keeps more of a layer in one kernel beside these is in `bench.ops_kda` and `bench.ops_mla`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops_experts import Sizes, expert_layers, routed64
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

EPS, BANK, COUNT = 1e-5, 8, 5
WEIGHTS = {  # rows of one rank's matrices that read x
    "kda": (3208,),
    "mla": (2112, 768),
    "route": (56, 224, 768),  # the last with SiTU, 384 columns
}


def mix_case(m: int, kind: str, seed: int, layers: int | None = None, d: int = 7168) -> Problem:
    """AttnRes behind a MoE layer, and the first products of one kind of stage."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.attn_res import attn_res
    from jax_impl.ops.norm import rmsnorm
    from jax_impl.ops.situ import situ
    from pallas_kernels import meeting, mix_products, route
    from pallas_kernels.skinny import Projection

    nx, sizes, key = Numerics(), WEIGHTS[kind], jax.random.key(seed)
    layers = layers or stack_depth(2 * sum(sizes) * d)
    prefix, delta = (normal(jax.random.fold_in(key, i), (m, d)) for i in range(2))
    shared = jax.random.normal(jax.random.fold_in(key, 2), (m, d), jnp.float32)
    bank = normal(jax.random.fold_in(key, 3), (m, BANK, d))
    stacks = [
        normal(jax.random.fold_in(key, 4 + i), (layers, d), s) for i, s in enumerate((1, 0.02, 1))
    ]
    ws = [
        normal(jax.random.fold_in(key, 9 + i), (layers, n, d), d**-0.5) for i, n in enumerate(sizes)
    ]
    last = len(ws) - 1 if kind == "route" else None  # with SiTU

    def kernel(layer: Any, rows: Any, stacks: Any, ws: Any) -> jax.Array:
        prefix, bank, delta, shared = rows
        res_norm, res_proj, norm = stacks
        mix = mix_products.Mix(
            prefix, bank, jnp.int32(COUNT), delta, res_norm, res_proj, norm, layer, shared
        )
        items = [Projection(w, jnp.bfloat16) for w in ws]
        if last:
            gate, down, both = ws
            items = route.items(gate, down, both, SITU)
        x, _, _, ys, _ = mix_products.mix_products(mix, items, meeting.counters(), layer, eps=EPS)
        return _beside(x, *ys)

    def plain(layer: Any, rows: Any, stacks: Any, ws: Any) -> jax.Array:
        prefix, bank, delta, shared = rows
        res_norm, res_proj, norm = (w[layer] for w in stacks)
        new = nx.round(prefix + nx.round(delta + nx.round(shared)))
        mixed = attn_res(nx, new, bank, jnp.int32(COUNT), res_norm, res_proj[None], EPS)
        x = rmsnorm(nx, mixed, norm, EPS)
        ys = [
            nx.project(x, w[layer]) if kind == "route" and i == 0 else nx.linear(x, w[layer])
            for i, w in enumerate(ws)
        ]
        if last:
            gate, up = jnp.split(ys[last], 2, axis=-1)
            ys[last] = situ(nx, gate, up, *SITU)
        return _beside(x, *ys)

    def exact(layer: int, rows: np.ndarray) -> np.ndarray:
        new = bf16_round(f64(prefix) + bf16_round(f64(delta) + bf16_round(f64(shared))))
        x = attn_res64(new, f64(bank)[:, :COUNT], [f64(w[layer]) for w in stacks], EPS)
        ys = [x @ f64(w[layer]).T for w in ws]
        if last:
            ys[last] = situ64(*np.split(ys[last], 2, axis=-1))
        return np.concatenate([x, *ys], axis=-1)[rows]

    fast, standard, rows = jax.jit(kernel), jax.jit(plain), (prefix, bank, delta, shared)
    return Problem(
        lambda layer: fast(layer, rows, stacks, ws),
        2 * d * (sum(sizes) + 3 + m * (COUNT + 7)),
        layers,
        exact,
        lambda layer: standard(layer, rows, stacks, ws),
        np.arange(m),
    )


def _beside(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-1)


def experts_row_case(
    ranks: int,
    seed: int,
    sizes: Sizes = Sizes(),  # noqa: B008
    d: int = 7168,
    hidden: int = 6144,
) -> Problem:
    """One row; compared are the routed sum and the shared product, side by side."""
    from jax_impl.numerics import Numerics
    from jax_impl.ops.experts import ExpertWeights, routed_experts
    from jax_impl.ops.router import choose_experts
    from pallas_kernels import experts_row, meeting

    nx, layers, scaling = Numerics(), 4, 2.5
    e, k, z, m, width = *sizes[:3], sizes.width // ranks, hidden // ranks
    key = jax.random.key(seed)
    raw, (w13, w2) = expert_layers(key, layers, sizes, m)
    latent, x = (normal(jax.random.fold_in(key, i), (1, n)) for i, n in ((99, z), (98, width)))
    shared = normal(jax.random.fold_in(key, 97), (layers, d, width), width**-0.5)
    bias = 0.1 * jax.random.normal(jax.random.fold_in(key, 96), (layers, e), jnp.float32)
    logits = list(jax.random.normal(jax.random.fold_in(key, 95), (sizes.draws, 1, e), jnp.float32))
    each = [jnp.int32(i % layers) for i in range(sizes.draws)]

    def kernel(logits, layer, latent, x, *weights):
        bias, shared, w13, w2 = weights
        found = experts_row.experts_row(
            experts_row.Row(latent, logits, bias, x, shared), w13, w2, meeting.counters(), layer,
            k=k, scaling=scaling, width=m, betas=SITU,
        )  # fmt: skip
        return _beside(found.routed, found.beside)

    def plain(logits, layer, latent, x, bias, shared, *weights):
        ids, shares = choose_experts(logits, bias[layer], k, scaling=scaling)
        routed = routed_experts(nx, latent, ids, shares, ExpertWeights(*weights), SITU)
        return _beside(routed, nx.project(x, shared[layer]))

    def exact(draw: int, _: np.ndarray) -> np.ndarray:
        layer, score = draw % layers, 1 / (1 + np.exp(-f64(logits[draw])[0]))
        ids = np.argsort(-(score + f64(bias[layer])), kind="stable")[:k]
        shares = score[ids] / score[ids].sum() * scaling
        routed = routed64(w13[layer], w2[layer], f64(latent)[0], ids, shares, m)
        return np.concatenate([routed, f64(x)[0] @ f64(shared[layer]).T])[None]

    fast, standard = jax.jit(kernel), jax.jit(plain)
    rest = latent, x, bias, shared
    return Problem(
        lambda layer: fast(logits[int(layer)], each[int(layer)], *rest, w13, w2),
        k * (3 * m * z // 2 + 3 * m * z // 32) + 2 * d * width + 8 * e,
        sizes.draws,
        exact,
        lambda draw: standard(logits[draw], each[draw], *rest, *raw(draw % layers)),
        np.arange(1),
    )


def cases() -> dict[str, Callable[[], Problem]]:
    """Every case by name; building one allocates its weights."""
    out: dict[str, Callable[[], Problem]] = {}
    for kind, rows in (("kda", (1, 2)), ("mla", (1, 2, 4)), ("route", (1, 2, 8))):
        for m in rows:
            out[f"mix.{kind}.tp16.rows{m}"] = lambda m=m, kind=kind: mix_case(m, kind, 47)
    out["experts_row.tp16.rows1"] = lambda: experts_row_case(16, 53)
    return out
