"""Cases of the MLA kernels for `python -m bench ops`: queries with the cache row, attention.

`mla_attend` is attention and the value projection; the cache is read, not written, because a cache
that is not donated would be copied in every call. `mla_out` is the values with their output
projection, from parts of an attention that are given, and its standard path the same formulas.
`mla_query` writes into a cache of three pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops_problem import Problem, f64, normal, stack_depth

if TYPE_CHECKING:
    from parity import mla_inputs

FP8_SCALE = 4.0


def _dtype(fp8: bool) -> tuple[Any, float | None]:
    return (jnp.float8_e4m3fn, FP8_SCALE) if fp8 else (jnp.bfloat16, None)


def _queries(case: mla_inputs.Case, columns: int) -> jax.Array:
    """Absorbed, as `mla_attend` takes them."""
    from pallas_kernels import mla_attend

    @jax.jit
    def absorbed(a: dict[str, Any]) -> jax.Array:
        w = a["kv_b"][1].reshape(case.heads, 256, 512)[:, :128].astype(jnp.float32)
        x = a["q"].reshape(a["q"].shape[0], case.heads, 192)
        rows = jnp.einsum("nhi,hir->nhr", x[..., :128].astype(jnp.float32), w, precision="highest")
        rows = jax.lax.reduce_precision(rows, 8, 7).astype(jnp.bfloat16)
        rows = jnp.concatenate([rows, x[..., 128:]], axis=-1)
        return mla_attend.arrange(rows, case.tokens, columns, case.cache.dtype)

    return absorbed(case.arrays)


def attend_case(
    batch: int,
    tokens: int,
    context: int,
    heads: int,
    fp8: bool,
    tuning: Any = None,
    layers: int | None = None,
) -> Problem:
    """`batch` sequences of `context` rows, each with `tokens` tokens at their end."""
    from pallas_kernels import mla_attend, mla_value
    from parity import mla_inputs

    dtype, scale = _dtype(fp8)
    nbytes = batch * context * 576 * (1 if fp8 else 2) + heads * 128 * 512 * 2
    layers = layers or min(stack_depth(nbytes), 64)
    lengths = [max(context, tokens)] * batch
    case = mla_inputs.make(lengths, tokens, heads, dtype, scale, layers=layers, filled=True)
    a, n = case.arrays, batch * tokens
    t = tuning or mla_attend.default_tuning(batch, tokens * heads, fp8)

    q = _queries(case, t.columns)

    def kernels(q, a, cache, layer):
        parts = mla_attend.attend(
            *(q, cache, layer, a["table"], a["ends"], a["kv_scale"]),
            heads=heads,
            latent=512,
            scale=case.scale,
            tuning=t,
        )
        return mla_value.value(parts, a["ends"], a["gate"], a["kv_b"], layer, heads=heads)

    def plain(a, cache, layer):
        return mla_inputs.standard(case, write=False)(a, cache, layer)[0]

    fast, standard = jax.jit(kernels), jax.jit(plain)
    return Problem(
        lambda layer: fast(q, a, case.cache, layer),
        nbytes,
        layers,
        lambda layer, rows: mla_inputs.exact(case, case.cache, layer)[rows],
        lambda layer: standard(a, case.cache, layer),
        np.arange(n),
        {"splits": (t.splits, "count"), "columns": (t.columns, "count")},
    )


def out_case(
    batch: int,
    tokens: int,
    context: int,
    heads: int,
    fp8: bool,
    out: int = 7168,
    layers: int | None = None,
) -> Problem:
    """Values of `batch` sequences and the projection to `out` columns, from parts."""
    from pallas_kernels import meeting, mla_attend, mla_value_out
    from parity import mla_inputs

    dtype, scale = _dtype(fp8)
    weights, n = heads * 128 * (512 + out) * 2, batch * tokens
    layers = layers or stack_depth(weights)
    lengths = [context] * batch
    case = mla_inputs.make(lengths, tokens, heads, dtype, scale, layers=layers, filled=True)
    a, t = case.arrays, mla_attend.default_tuning(batch, tokens * heads, fp8)
    attend = partial(mla_attend.reference, heads=heads, latent=512, scale=case.scale, tuning=t)
    ends, gate, kv_b = (a[name] for name in ("ends", "gate", "kv_b"))
    q = _queries(case, t.columns)
    parts = jax.jit(attend)(q, case.cache, 0, a["table"], ends, a["kv_scale"])
    w = normal(jax.random.key(43), (layers, out, heads * 128), (heads * 128) ** -0.5)

    def exact(layer: int, rows: np.ndarray) -> np.ndarray:
        latent = f64(mla_attend.merge(parts, ends, heads)[0])
        w_uv = f64(kv_b[layer]).reshape(heads, 256, 512)[:, 128:]
        values = np.einsum("nhr,hvr->nhv", latent, w_uv).reshape(n, -1)
        return ((values / (1 + np.exp(-f64(gate)))) @ f64(w[layer]).T)[rows]

    def kernel(layer, parts, ends, gate, kv_b, w):
        rest = w, meeting.counters(), layer
        return mla_value_out.value_out(parts, ends, gate, kv_b, *rest, heads=heads)[1]

    def plain(layer, parts, ends, gate, kv_b, w):
        return mla_value_out.reference(parts, ends, gate, kv_b, w, layer, heads=heads)[1]

    given = parts, ends, gate, kv_b, w
    fast, standard = jax.jit(kernel), jax.jit(plain)
    return Problem(
        lambda layer: fast(layer, *given),
        weights + parts.latent.nbytes + parts.lse.nbytes,
        layers,
        exact,
        lambda layer: standard(jnp.int32(layer), *given),
        np.arange(n),
    )


def query_case(
    batch: int, tokens: int, heads: int, fp8: bool, layers: int | None = None
) -> Problem:
    """Absorbed queries; the cache rows are written and compared by the tests, not here."""
    from pallas_kernels import mla_attend, mla_attend_cta, mla_query
    from parity import mla_inputs

    dtype, scale = _dtype(fp8)
    n, rows = batch * tokens, tokens * heads
    nbytes = heads * 128 * 512 * 2
    layers = layers or stack_depth(nbytes)
    # one sequence owns all the rows that are written
    case = mla_inputs.make([n], n, heads, dtype, scale, layers=layers)
    a = case.arrays
    columns = mla_attend.default_tuning(batch, rows, fp8).columns
    cache = jnp.zeros((2, *case.cache.shape[1:]), dtype)
    kw: dict[str, Any] = dict(eps=mla_inputs.EPS, heads=heads, tokens=tokens, columns=columns)
    undo = 1 / mla_attend_cta.Q_SHIFT if fp8 else 1.0

    def result(q: jax.Array) -> jax.Array:
        return (q[:, :rows].astype(jnp.float32) * undo).reshape(n, -1)

    def kernel(a: dict[str, Any], cache: jax.Array, layer: jax.Array) -> jax.Array:
        held = jax.new_ref(cache)
        args = a["q"], a["kv_a"], a["kv_b"], layer, a["norm"], held, 1, a["place"], a["kv_scale"]
        return result(mla_query.query(*args, **kw))

    def plain(a: dict[str, Any], cache: jax.Array, layer: jax.Array) -> jax.Array:
        args = a["q"], a["kv_a"], a["kv_b"], layer, a["norm"], cache, 1, a["place"], a["kv_scale"]
        return result(mla_query.reference(*args, **kw)[0])

    def exact(layer: int, chosen: np.ndarray) -> np.ndarray:
        x = f64(a["q"]).reshape(n, heads, 192)
        w = f64(a["kv_b"][layer]).reshape(heads, 256, 512)[:, :128]
        q = np.einsum("nhi,hir->nhr", x[..., :128], w)
        return np.concatenate([q, x[..., 128:]], axis=-1).reshape(n, -1)[chosen]

    fast, standard = jax.jit(kernel), jax.jit(plain)
    return Problem(
        lambda layer: fast(a, cache, layer),
        nbytes,
        layers,
        exact,
        lambda layer: standard(a, cache, layer),
        np.arange(n),
    )


def cases() -> dict[str, Callable[[], Problem]]:
    """Every case by name; building one allocates its cache."""
    out: dict[str, Callable[[], Problem]] = {}
    for ranks in (16, 8):
        heads = 96 // ranks
        for fp8 in (False, True):
            kind = "fp8" if fp8 else "bf16"
            for batch, tokens in ((1, 1), (8, 1), (64, 1), (1, 8), (8, 8)):
                what = f"tp{ranks}.{kind}.rows{batch * tokens}.tokens{tokens}"
                args = batch, tokens, heads, fp8
                out[f"mla_query.{what}"] = lambda args=args: query_case(*args)
                for context in (1, 513, 8192, 131072):
                    if batch > 8 and context > 8192:
                        continue  # the standard path's gathered f32 rows would not fit
                    if tokens > context:
                        continue
                    more = batch, tokens, context, heads, fp8
                    out[f"mla_attend.{what}.context{context}"] = lambda more=more: attend_case(
                        *more
                    )
    for batch, tokens in ((1, 1), (8, 1), (1, 8)):  # as many rows as the kernel takes
        name = f"mla_out.tp16.fp8.rows{batch * tokens}.tokens{tokens}.context1024"
        out[name] = lambda args=(batch, tokens, 1024, 6, True): out_case(*args)
    return out
