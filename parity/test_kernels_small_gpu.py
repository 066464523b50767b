"""The small kernels of a step on a GPU: clusters and register code, real shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attn_res, skinny, topk, vocab
from parity.kernel_env import needs_gpu, same, same_bits

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
            assert same_bits(a, b)


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


@pytest.mark.parametrize(("d", "parts"), [(512, 2), (768, 2), (2048, 8), (2560, 5)])
def test_attn_res_of_other_widths(d, parts):
    args = attn_res_operands(3, 2, d, bank=5)
    got = attn_res.attn_res(*args, eps=1e-5, tuning=attn_res.Tuning(parts=parts))
    for a, b in zip(got, attn_res.reference(*args, eps=1e-5), strict=True):
        same(a, b, 2e-3)


def test_attn_res_of_a_layer():
    args = attn_res_operands(8, 3)
    stacks = [jnp.stack([w * jnp.nan, w]) for w in args[4:]]
    got = jax.jit(lambda i: attn_res.attn_res(*args[:4], *stacks, layer=i, eps=1e-5))(1)
    for a, b in zip(got, attn_res.attn_res(*args, eps=1e-5), strict=True):
        same(a, b, 0.0, "max_abs")


def equal_choices(got, want):
    """The same ids and units, and weights up to the last bits."""
    assert (got.ids == want.ids).all()
    same(got.weights, want.weights, 1e-6)
    count = int(want.units.count[0])
    assert int(got.units.count[0]) == count
    a, b = (np.asarray(u.table)[:count] for u in (got.units, want.units))
    used = np.arange(8) < b[:, 1:2]
    assert (a[:, :2] == b[:, :2]).all() and (a[:, 2:] == b[:, 2:])[used].all()


def router_operands(kind, rows):
    rng = np.random.default_rng(rows)
    logits = rng.standard_normal((rows, 896)).astype(np.float32)
    bias = rng.standard_normal((3, 896)).astype(np.float32) * 0.1
    if kind == "ties":
        logits, bias = np.round(logits * 2), np.zeros_like(bias)
    if kind == "equal":
        logits, bias = np.zeros_like(logits), np.zeros_like(bias)
    if kind == "not_finite":
        logits[0, 5:] = np.nan
        logits[-1, 3:6] = np.inf, -np.inf, np.nan
    if kind == "few_groups":  # all that is large lies in half of the groups
        logits[:, np.arange(896) % 32 < 15] += 8
    return jnp.asarray(logits), jnp.asarray(bias)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "not_finite", "few_groups"])
def test_topk(rows, kind):
    logits, bias = router_operands(kind, rows)
    call = jax.jit(lambda x, b, i: topk.topk(x, b, i, k=16, scaling=2.5))
    got = call(logits, bias, 1)
    equal_choices(got, topk.reference(logits, bias, 1, k=16, scaling=2.5))
    for _ in range(100):  # of the table only what is used is written
        again = call(logits, bias, 1)
        assert bool(jnp.all(again.ids == got.ids))
        equal_choices(again, got)


@pytest.mark.parametrize("tuning", [topk.Tuning(1, 4), topk.Tuning(2, 1), topk.Tuning(8, 4)])
def test_topk_however_it_is_cut(tuning):
    logits, bias = router_operands("normal", 13)
    small = logits[:, :128], bias[:, :128]
    most = min(31, 128 // -(-13 // (tuning.ctas * tuning.warpgroups)))  # of a warpgroup's rows
    few = logits[:, :32], bias[:, :32]  # padded to 128
    for args, k in (((logits, bias), 16), (small, 4), (small, most), (few, 4)):
        got = topk.topk(*args, 2, k=k, scaling=1.5, tuning=tuning)
        equal_choices(got, topk.reference(*args, 2, k=k, scaling=1.5))


def test_sigmoid_of_the_router():
    """Weights over a wide range are those of XLA's sigmoid up to a few last places."""
    logits = jnp.linspace(-80, 80, 64 * 128).reshape(64, 128)
    logits = jnp.concatenate([logits, jnp.full((64, 768), -jnp.inf)], axis=1)
    bias = jnp.zeros((1, 896))
    got = topk.topk(logits, bias, k=32, scaling=1.0, tuning=topk.Tuning(8, 4))
    chosen = jnp.take_along_axis(jax.nn.sigmoid(logits), got.ids, axis=-1)
    want = chosen / (jnp.sum(chosen, -1, keepdims=True) + topk.TINY)
    normal_range = np.asarray(chosen) > 1e-30
    a, b = (np.asarray(v)[normal_range] for v in (got.weights, want))
    assert (np.abs(a - b) <= 6 * np.spacing(b)).all()  # a score, the sum and a division


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [384, 768])
def test_topk_beside_a_product(rows, width):
    """The same choice, and the product's bits as from its own kernel."""
    logits, bias = router_operands("normal", rows)
    hidden, stack = with_nan_row(normal(8, rows, width)), normal(9, 3, 7168, width, scale=0.05)
    call = jax.jit(lambda x, b, h, w, i: topk.topk(x, b, i, k=16, scaling=2.5, shared=(h, w)))
    got = call(logits, bias, hidden, stack, 2)
    equal_choices(got, topk.topk(logits, bias, 2, k=16, scaling=2.5))
    same(got.shared, skinny.reference(hidden, [skinny.Projection(stack)], 2)[0], 1e-5)
    for _ in range(100):
        again = call(logits, bias, hidden, stack, 2)
        assert bool(jnp.all((again.shared == got.shared) | jnp.isnan(got.shared)))
        equal_choices(again, got)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("columns", [10240, 200])
def test_vocab(rows, markov, columns):
    """Logits against the reference; max and argmax against the kernel's own logits, exactly."""
    k = 256 if markov else 7168
    x, w = with_nan_row(normal(0, rows, k)), normal(1, columns, k, scale=k**-0.5)
    w = w.at[columns // 2 + 3].set(w[7])  # a tie, the largest for the last row
    x = x.at[-1].set(40 * w[7])
    base = None
    if markov:
        base = normal(2, rows, columns, dtype=F32).at[-1].set(0).at[-1, 3].set(jnp.nan)
    call = jax.jit(lambda *a: vocab.vocab(*a))
    args = (x, w) if base is None else (x, w, base)
    logits, top, best = call(*args)
    same(logits, vocab.reference(*args)[0], 1e-5 if markov else 2e-3)
    values = np.asarray(logits)
    if markov:
        values = np.where(np.isnan(values), -np.inf, values)
    assert (np.asarray(best) == np.argmax(values, -1)).all() and int(best[-1]) == 7
    assert np.array_equal(np.asarray(top), np.max(values, -1), equal_nan=True)
    repeats_equal(call, *args)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("stages", [1, 2])
def test_vocab_with_rows_of_a_table(rows, stages):
    """The same bits as from the rows themselves; numbers outside the table are clipped."""
    table, w = normal(0, 5000, 256), normal(1, 10240, 256, scale=1 / 16)
    ids = jnp.asarray(np.random.default_rng(rows).integers(0, 5000, rows), jnp.int32)
    ids = ids.at[0].set(-1).at[-1].set(5000)
    base = normal(2, rows, 10240, dtype=F32)
    for tuning in (None, skinny.Tuning(stages=stages, warpgroups=1)):
        call = jax.jit(lambda *a, t=tuning: vocab.vocab(*a[:3], ids=a[3], tuning=t))
        got = call(table, w, base, ids)
        x = table[jnp.clip(ids, 0, 4999)]
        for a, b in zip(got, vocab.vocab(x, w, base, tuning=tuning), strict=True):
            same(a, b, 0.0, "max_abs")
        repeats_equal(call, table, w, base, ids)
