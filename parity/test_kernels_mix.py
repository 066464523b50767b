"""AttnRes and the products of what it gives, in one kernel."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import attn_res, common, meeting, mix_products, route, skinny
from pallas_kernels.mix_products import Mix
from pallas_kernels.skinny import Projection
from parity.kernel_env import needs_gpu, needs_interpreter, same, same_bits

BF16, F32 = jnp.bfloat16, jnp.float32
SITU = (4.0, 25.0)


def normal(seed, *shape, scale=1.0, dtype=BF16):
    return (jax.random.normal(jax.random.key(seed), shape, F32) * scale).astype(dtype)


def operands(rows, d, count, two, bank=8):
    """Two layers' weights, of which the second is meant; NaN in a row and beyond `count`."""
    stacks = [jnp.stack([w * jnp.nan, w]) for w in (normal(3, d), normal(4, d, scale=0.02))]
    mix = Mix(
        normal(1, rows, d), normal(0, rows, bank, d).at[:, count:].set(jnp.nan), jnp.int32(count),
        normal(2, rows, d), *stacks, stacks[0], 1, normal(6, rows, d, dtype=F32) if two else None,
    )  # fmt: skip
    if rows > 1:
        mix = mix._replace(prefix=mix.prefix.at[1].set(jnp.nan))
    return mix


def agree(got, want):
    same(got[0], want[0], 2e-3)
    same(got[1], want[1], 0.0, "max_abs")
    same(got[2], want[2], 0.0, "max_abs")
    for a, b in zip(got[3], want[3], strict=True):
        same(a, b, 4e-3)


@needs_interpreter
def test_both_kernels_in_the_interpreter():
    d, count = 512, 2
    mix = operands(2, d, count, True, bank=3)
    items = [Projection(normal(7, 2, 64, d, scale=d**-0.5), BF16)]
    tuning = mix_products.Tuning(attn_res.Tuning(2), skinny.Tuning(splits=2, warpgroups=1))
    call = dict(eps=1e-5, snapshot=True)
    *got, counters = mix_products.mix_products(
        mix, items, meeting.counters(), 1, tuning=tuning, interpret=True, **call
    )
    assert not counters.any()
    agree(got, mix_products.reference(mix, items, 1, tuning=tuning, **call))
    assert not common.races_found()


def test_a_row_made_by_each_cluster_is_scaled_behind_the_products():
    """One rounding of x in both forms, of equal relative size; so products agree within two."""
    mix = operands(1, 512, 2, True, bank=3)
    items = [Projection(normal(7, 2, 64, 512, scale=512**-0.5)), Projection(normal(8, 2, 64, 512))]
    once = mix_products.Tuning(attn_res.Tuning(2), skinny.Tuning(splits=2))
    found, scaled = (
        mix_products.reference(mix, items, 1, eps=1e-5, tuning=replace(once, each=each))
        for each in (True, False)
    )
    agree(found, scaled)
    assert not same_bits(found[3][0], scaled[3][0])


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, (3208,)), (2, (3208,)), (4, (2112, 768)), (8, (56, 224, 768)), (1, (448,)), (8, (64, 64))],
)
def test_default_tuning_meets_the_limits(rows, sizes):
    d = 7168
    wide, stack = jnp.zeros((rows, d), BF16), jax.ShapeDtypeStruct((2, d), BF16)
    mix = Mix(wide, jnp.zeros((rows, 8, d), BF16), 0, wide, stack, stack, stack, 0)
    items = [Projection(jax.ShapeDtypeStruct((1, n, d), BF16), BF16) for n in sizes]
    assert mix_products.limits(mix, items) == []


def test_limits_name_found_and_expected():
    wide, d = jnp.zeros((9, 7168), BF16), 7168
    mix = Mix(wide, jnp.zeros((9, 8, d), BF16), 0, wide, wide, wide, wide, 0)
    items = [Projection(jax.ShapeDtypeStruct((1, 64, d), BF16), BF16)]
    tuning = mix_products.Tuning(attn_res.Tuning(7), skinny.Tuning(stages=2), rows=3)
    assert mix_products.limits(mix, items, tuning=tuning) == [
        "rows: found 9, expected 1..8",
        "rows of a cluster: found 3, expected 1..2",
        "splits: found 1, expected 2, 4 or 8",
    ]


def products(kind, d=7168):
    if kind == "route":
        ws = [normal(7 + i, 2, n, d, scale=d**-0.5) for i, n in enumerate((56, 224, 768))]
        return route.items(*ws, SITU, 16)
    sizes = (3208,) if kind == "kda" else (2112, 768)
    return [Projection(normal(7 + i, 2, n, d, scale=d**-0.5), BF16) for i, n in enumerate(sizes)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(
    ("kind", "count", "kw", "two"),
    [
        ("kda", 0, {"snapshot": True}, True),
        ("mla", 8, {}, True),
        ("route", 3, {"reset": True}, False),
    ],
)
def test_in_one_kernel(rows, kind, count, kw, two):
    """Against the reference; the same bits from every call, many in one program as well."""
    items = products(kind if rows <= 2 else "route")
    kw = kw | {"eps": 1e-5}

    @partial(jax.jit, static_argnums=1)
    def call(mix, times, ws):
        held = [replace(p, w=w) for w, p in zip(ws, items, strict=True)]
        out = []
        for _ in range(times):  # counters that a kernel before it leaves, as in a step
            _, counters = skinny.projections(mix.prefix, held[:1], 1, zeros=True)
            out.append(mix_products.mix_products(mix, held, counters, 1, **kw)[:4])
        return out

    mix, ws = operands(rows, 7168, count, two), [p.w for p in items]
    (first,) = call(mix, 1, ws)
    agree(first, mix_products.reference(mix, items, 1, **kw))
    for _ in range(20):
        for found in call(mix, 5, ws):
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(found), strict=True):
                assert same_bits(a, b)
