"""The small kernels of a step on a GPU: clusters and register code, real shapes."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import attn_res
from parity.kernel_env import needs_gpu, same

pytestmark = [pytest.mark.gpu, needs_gpu]
BF16, F32 = jnp.bfloat16, jnp.float32
ROWS = [1, 2, 8, 13, 64]


def normal(seed, *shape, scale=1.0, dtype=BF16):
    x = jax.random.normal(jax.random.key(seed), shape, F32)
    return (x * scale).astype(dtype)


def with_nan_row(x, row=1):
    return x.at[row].set(jnp.nan) if x.shape[0] > row else x


def repeats_equal(call, *args, times=100):
    """The same bits from every call."""
    first = jax.tree.leaves(call(*args))
    for _ in range(times):
        for a, b in zip(first, jax.tree.leaves(call(*args)), strict=True):
            assert bool(jnp.all((a == b) | (jnp.isnan(a) & jnp.isnan(b))))


def attn_res_operands(rows, count, d=7168, bank=8):
    snapshots = normal(0, rows, bank, d).at[:, count:].set(jnp.nan)
    prefix, delta = with_nan_row(normal(1, rows, d)), normal(2, rows, d)
    weights = normal(3, d), normal(4, 1, d, scale=0.02), normal(5, d)
    return prefix, snapshots, jnp.int32(count), delta, *weights


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("count", "kw"), [(0, {"snapshot": True}), (5, {}), (8, {"reset": True})])
def test_attn_res(rows, count, kw, eager):
    args = attn_res_operands(rows, count)
    kw = kw | {"shared": normal(6, rows, 7168, dtype=F32), "eps": 1e-5}
    tuning = attn_res.Tuning(eager=eager)
    call = jax.jit(lambda *a: attn_res.attn_res(*a, tuning=tuning, **kw))
    got, want = call(*args), attn_res.reference(*args, **kw)
    same(got[0], want[0], 2e-3)
    same(got[1], want[1], 0.0, "max_abs")
    same(got[2], want[2], 0.0, "max_abs")
    repeats_equal(call, *args)


@pytest.mark.parametrize(("d", "parts"), [(512, 1), (512, 2), (2048, 8), (2560, 5)])
def test_attn_res_of_other_widths(d, parts):
    args = attn_res_operands(3, 2, d, bank=5)
    got = attn_res.attn_res(*args, eps=1e-5, tuning=attn_res.Tuning(parts=parts))
    for a, b in zip(got, attn_res.reference(*args, eps=1e-5), strict=True):
        same(a, b, 2e-3)


@pytest.mark.parametrize("rows", [1, 64])
def test_attn_res_with_prefetch(rows):
    """Whole stacks, more than the limit, more shares than rows: nothing changes."""
    args = attn_res_operands(rows, 3)
    stacks = [(normal(7, 3, n, 7168), jnp.int32(2)) for n in (3, 768, 3208)]
    for limit in (16 << 20, 1 << 20, 0):
        tuning = attn_res.Tuning(prefetch_bytes=limit)
        got = attn_res.attn_res(*args, eps=1e-5, prefetch=stacks, tuning=tuning)
        for a, b in zip(got, attn_res.attn_res(*args, eps=1e-5), strict=True):
            same(a, b, 0.0, "max_abs")
