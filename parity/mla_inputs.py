"""Inputs of the MLA kernels, and what they should give: standard formulas and float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.numerics import Numerics
from jax_impl.ops import mla as mla_ops
from jax_impl.ops.norm import rmsnorm
from pallas_kernels import mla_attend, mla_query, mla_value, paged

EPS = 1e-6
PAGE = 64


@dataclass(frozen=True)
class Case:
    """One step of `tokens` tokens for each sequence, pads included.

    Attributes:
        arrays: q, kv_a, kv_b, norm, gate, table, ends, place, as the kernels take them, and
            kv_scale (None unless FP8).
        cache: [L, P, page, row], or its shape; unused pages hold NaN.
        heads, tokens, latent, nope: sizes.
    """

    arrays: dict[str, Any]
    cache: Any
    heads: int
    tokens: int
    latent: int
    nope: int

    @property
    def scale(self) -> float:
        """Of the scores."""
        return (self.nope + self.cache.shape[3] - self.latent) ** -0.5


def make(
    lengths: list[int],
    tokens: int,
    heads: int,
    dtype: Any,
    kv_scale: float | None = None,
    *,
    counts: list[int] | None = None,
    sizes: tuple[int, int, int] = (512, 128, 128),
    page: int = PAGE,
    layers: int = 2,
    seed: int = 0,
    filled: bool = False,
) -> Case:
    """Sequences that have `lengths` rows after this step; length 0 is a pad row.

    `counts` real tokens of each (default: all); `sizes` are latent, nope and value width; with
    `filled` the cache already holds rows of this step.
    """
    latent, nope, value = sizes
    row, batch = latent + 64, len(lengths)
    n, rng = batch * tokens, np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        x = rng.standard_normal(shape, np.float32)
        return (x * np.float32(scale)).astype(jnp.bfloat16)

    def live(x: np.ndarray) -> np.ndarray:
        return np.where(np.asarray(ends).reshape(-1, 1) > 0, x, np.nan).astype(x.dtype)

    counts = [tokens if length else 0 for length in lengths] if counts is None else counts
    position = jnp.asarray([x - c for x, c in zip(lengths, counts, strict=True)], jnp.int32)
    ends = paged.ends(position, jnp.asarray(counts, jnp.int32), tokens)
    used = [-(-length // page) for length in lengths]
    pages = sum(used) + 2
    order = rng.permutation(pages)
    table = np.full((batch, max([*used, 1]) + 1), -1, np.int32)
    for i, count in enumerate(used):
        table[i, :count], order = order[:count], order[count:]
    table = jnp.asarray(table)
    factor = None if kv_scale is None else jnp.float32(kv_scale)
    written = np.zeros((pages, page), bool)  # rows that hold something before the step
    for i, length in enumerate(lengths):
        rows = np.arange(length if filled else length - counts[i])
        written[np.asarray(table)[i, rows // page], rows % page] = True
    # every layer alike: the kernels read one, and memory is what counts at long contexts
    rows = mla_ops.to_cache(jnp.asarray(normal(pages, page, row)), jnp.dtype(dtype), factor)
    rows = np.where(written[..., None], np.asarray(rows), np.asarray(np.nan, rows.dtype))
    cache = jnp.broadcast_to(jnp.asarray(rows), (layers, pages, page, row))
    arrays = dict(
        q=live(normal(n, heads * (nope + 64))),
        kv_a=live(normal(n, row)),
        kv_b=normal(layers, heads * (nope + value), latent, scale=nope**-0.5),
        norm=normal(layers, latent),
        gate=live(normal(n, heads * value)),
        table=table,
        ends=ends,
        place=paged.place(ends, table, page),
        kv_scale=factor,
    )
    arrays = {k: x if x is None else jnp.asarray(x) for k, x in arrays.items()}
    return Case(arrays, cache, heads, tokens, latent, nope)


def repaged(case: Case, page: int) -> Case:
    """The same sequences and rows in pages of another size; what no sequence owns holds NaN."""
    table, old = np.asarray(case.arrays["table"]), np.asarray(case.cache)
    layers, _, held, row = old.shape
    lengths = np.asarray(case.arrays["ends"]).max(axis=1)
    used = -(-lengths // page)
    order = np.random.default_rng(page).permutation(used.sum() + 2)
    pages = np.full((layers, len(order), page, row), np.nan, old.dtype)
    new = np.full((len(lengths), used.max() + 1), -1, np.int32)
    for i, (length, count) in enumerate(zip(lengths, used, strict=True)):
        new[i, :count], order = order[:count], order[count:]
        at = np.arange(length)
        rows = old[:, table[i, at // held], at % held]
        pages[:, new[i, at // page], at % page] = rows
    place = paged.place(case.arrays["ends"], jnp.asarray(new), page)
    arrays = case.arrays | {"table": jnp.asarray(new), "place": place}
    return replace(case, arrays=arrays, cache=jnp.asarray(pages))


def shapes(batch: int, tokens: int, heads: int, dtype: Any, kv_scale: float | None) -> Case:
    """A case of real sizes without data, for compiling: tables for 131072 rows."""
    s, bf16, i32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.int32
    n = batch * tokens
    arrays = dict(
        q=s((n, heads * 192), bf16),
        kv_a=s((n, 576), bf16),
        kv_b=s((2, heads * 256, 512), bf16),
        norm=s((2, 512), bf16),
        gate=s((n, heads * 128), bf16),
        table=s((batch, 131072 // PAGE), i32),
        ends=s((batch, tokens), i32),
        place=s((n,), i32),
        kv_scale=None if kv_scale is None else s((), jnp.float32),
    )
    return Case(arrays, s((2, 4096, PAGE, 576), dtype), heads, tokens, 512, 128)


def kernels(case: Case, *, interpret: bool = False, tuning: Any = None) -> Any:
    """Arrays, cache, layer -> (heads [N, H V], cache): the three kernels."""
    parts_step = parts_of(case, interpret=interpret, tuning=tuning)

    def step(a: dict[str, Any], cache: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
        parts, cache = parts_step(a, cache, layer)
        rest = a["ends"], a["gate"], a["kv_b"], layer
        return mla_value.value(parts, *rest, heads=case.heads, interpret=interpret), cache

    return step


def parts_of(case: Case, *, interpret: bool = False, tuning: Any = None) -> Any:
    """Arrays, cache, layer -> (parts, cache): the first two of them."""
    batch, fp8 = case.arrays["ends"].shape[0], case.cache.dtype == jnp.float8_e4m3fn
    t = tuning or mla_attend.default_tuning(batch, case.tokens * case.heads, fp8)
    same: dict[str, Any] = dict(heads=case.heads, interpret=interpret)

    def step(a: dict[str, Any], cache: jax.Array, layer: Any) -> tuple[Any, jax.Array]:
        held = jax.new_ref(cache)
        q = mla_query.query(
            *(a["q"], a["kv_a"], a["kv_b"], layer, a["norm"], held, layer, a["place"]),
            a["kv_scale"],
            eps=EPS,
            tokens=case.tokens,
            columns=t.columns,
            **same,
        )
        cache = jax.freeze(held)
        parts = mla_attend.attend(
            *(q, cache, layer, a["table"], a["ends"], a["kv_scale"]),
            latent=case.latent,
            scale=case.scale,
            tuning=t,
            **same,
        )
        return parts, cache

    return step


def standard(case: Case, *, write: bool = True) -> Any:
    """The same by the standard path's formulas; q is taken as it is.

    With `write` False the rows of this step are in the cache already.
    """
    nx, latent = Numerics(), case.latent
    batch, page = case.arrays["ends"].shape[0], case.cache.shape[2]

    def step(a: dict[str, Any], cache: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
        made = rmsnorm(nx, a["kv_a"][:, :latent], a["norm"][layer], EPS)
        rows = jnp.concatenate([made, a["kv_a"][:, latent:]], axis=-1)
        at = jnp.where(a["place"] >= 0, a["place"], cache.shape[1] * page)
        stored = mla_ops.to_cache(rows, cache.dtype, a["kv_scale"])
        if write:
            cache = cache.at[layer, at // page, at % page].set(stored, mode="drop")
        kv = cache[layer, jnp.maximum(a["table"], 0)].reshape(batch, -1, cache.shape[3])
        key = jnp.arange(kv.shape[1])
        length = jnp.max(a["ends"], axis=1)
        kv = mla_ops.from_cache(nx, kv, a["kv_scale"])
        kv = jnp.where((key < length[:, None])[..., None], kv, 0)
        value = a["gate"].shape[1] // case.heads
        w_uk, w_uv = mla_ops.split_kv_b(a["kv_b"][layer], case.nope, value)
        q = a["q"].reshape(batch, case.tokens, case.heads, -1)
        visible = key < a["ends"][..., None]
        o = mla_ops.absorbed_attention(nx, q, kv, w_uk, w_uv, visible, scale=case.scale)
        y = mla_ops.output_gate(nx, o.reshape(a["gate"].shape), a["gate"])
        return jnp.where((a["ends"] > 0).reshape(-1, 1), y, 0), cache

    return step


def exact(case: Case, cache: jax.Array, layer: int) -> np.ndarray:
    """Heads [N, H V] in float64 from the rows that `cache` holds after the step."""
    a = case.arrays

    def f64(x: jax.Array) -> np.ndarray:
        return np.asarray(x.astype(jnp.float32), np.float64)

    batch, tokens = a["ends"].shape
    ends, table = np.asarray(a["ends"]), np.asarray(a["table"])
    q = f64(a["q"]).reshape(batch, tokens, case.heads, -1)
    value = a["gate"].shape[1] // case.heads
    w = f64(a["kv_b"][layer]).reshape(case.heads, case.nope + value, -1)
    gate = 1 / (1 + np.exp(-f64(a["gate"]).reshape(batch, tokens, case.heads, value)))
    factor = 1.0 if a["kv_scale"] is None else float(a["kv_scale"])
    out = np.zeros((batch, tokens, case.heads, value))
    for b in range(batch):
        if not ends[b].any():
            continue
        pages = table[b, : -(-int(ends[b].max()) // cache.shape[2])]
        kv = f64(cache[layer, jnp.asarray(pages)]).reshape(-1, cache.shape[3]) * factor
        for t in range(tokens):
            seen = kv[: ends[b, t]]
            if not len(seen):
                continue
            rows = np.einsum("hi,hir->hr", q[b, t, :, : case.nope], w[:, : case.nope])
            rows = np.concatenate([rows, q[b, t, :, case.nope :]], axis=1)
            score = case.scale * (seen @ rows.T)
            share = np.exp(score - score.max(0))
            mean = (share / share.sum(0)).T @ seen[:, : case.latent]
            out[b, t] = np.einsum("hr,hvr->hv", mean, w[:, case.nope :]) * gate[b, t]
    return out.reshape(batch * tokens, -1)
