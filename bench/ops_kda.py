"""Cases of the KDA kernels for `python -m bench ops`: heads and records, as in a verification.

`kda_out` has the output projection in the same kernel; compared is what it gives.

Nothing is committed: a state that is written in place would be another one in every call, so that
neither errors nor repetitions could be compared. The commit is `kda_commit`, in `bench rank-slice`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ops_problem import Problem, bf16_round, f64, normal, stack_depth

EPS, LOWER_BOUND, TAPS, WIDTH = 1e-5, -5.0, 4, 128
SETTINGS: dict[str, Any] = {"eps": EPS, "lower_bound": LOWER_BOUND, "commit": False}


def kda_out_case(
    batch: int, tokens: int, heads: int, seed: int, layers: int | None = None, d: int = 7168
) -> Problem:
    """As `kda_case`, and the output projection to d columns."""
    from jax_impl.numerics import Numerics
    from pallas_kernels import kda_out, meeting

    layers = layers or stack_depth(2 * d * heads * WIDTH)
    inner = kda_case(batch, tokens, heads, seed, layers)
    a, n, p = (
        _arrays(jax.random.key(seed), batch, batch * tokens, heads, layers),
        batch * tokens,
        heads * WIDTH,
    )
    w = normal(jax.random.key(seed + 1), (layers, d, p), p**-0.5)
    rows, settings = _rows(batch, tokens), SETTINGS

    def kernel(fused, state, window, weights, layer, w):
        args = fused, state, window, weights, layer, rows, w, meeting.counters()
        return kda_out.kda_out(*args, **settings)

    fast = jax.jit(kernel)
    project = jax.jit(lambda y, w, layer: Numerics().project(y, w[layer]))
    given = a["fused"], a["state"], a["window"], _weights(a)
    return Problem(
        lambda layer: fast(*given, layer, w)[1],
        inner.bytes + 2 * d * p + 4 * n * d,
        layers,
        lambda layer, chosen: bf16_round(inner.exact(layer, chosen)) @ f64(w[layer]).T,
        lambda layer: project(inner.standard(layer), w, layer),
        np.arange(n),
    )


def kda_case(batch: int, tokens: int, heads: int, seed: int, layers: int | None = None) -> Problem:
    """`batch` sequences with a history, each with `tokens` tokens; L2-cold without `layers`."""
    from jax_impl.numerics import Numerics, f32
    from jax_impl.ops.kda import log_decay, recurrence, short_conv
    from jax_impl.ops.norm import gated_rmsnorm, l2norm
    from pallas_kernels import kda

    nx, n, p = Numerics(), batch * tokens, heads * WIDTH
    columns = 4 * p + WIDTH + heads
    state_bytes = 4 * batch * p * WIDTH + 2 * batch * (TAPS - 1) * 3 * p
    own = 2 * p * WIDTH + 4 * 3 * p * TAPS + 4 * (heads + p + WIDTH)
    moved = state_bytes + own + 2 * n * columns + 4 * 3 * n * p + 2 * n * p
    layers = layers or stack_depth(state_bytes + own)
    a = _arrays(jax.random.key(seed), batch, n, heads, layers)
    w, rows, settings = _weights(a), _rows(batch, tokens), SETTINGS
    # all outputs leave the program, so that nothing of the kernel's work is dead
    fast = jax.jit(lambda x, s, o, w, layer: kda.kda(x, s, o, w, layer, rows, **settings))

    def plain(fused: jax.Array, state: jax.Array, window: jax.Array, w: Any, layer: Any) -> Any:
        x = fused[:, :columns].reshape(batch, tokens, -1)
        raw, gate, low, strength = jnp.split(x, [3 * p, 4 * p, 4 * p + WIDTH], axis=-1)
        by_head = lambda x: x.reshape(batch, tokens, heads, WIDTH)  # noqa: E731
        z = by_head(nx.linear(low, w.f_b_proj[layer]))
        mixed = short_conv(nx, raw, window[layer], w.conv1d[layer])
        q, k, v = map(by_head, jnp.split(mixed, 3, axis=-1))
        g = log_decay(z, w.dt_bias[layer].reshape(heads, WIDTH), w.A_log[layer], LOWER_BOUND)
        beta = jax.nn.sigmoid(f32(strength))
        q, k = l2norm(q) * WIDTH**-0.5, l2norm(k)
        _, o, _ = recurrence(state[layer], q, k, f32(v), g, beta, rows.count)
        return gated_rmsnorm(nx, nx.round(o), by_head(gate), w.o_norm[layer], EPS).reshape(n, p)

    standard = jax.jit(plain)
    given = a["fused"], a["state"], a["window"], w
    return Problem(
        lambda layer: fast(*given, layer)[0],
        moved,
        layers,
        lambda layer, chosen: _exact(a, layer, batch, tokens, heads)[chosen],
        lambda layer: standard(*given, layer),
        np.arange(n),
    )


def _weights(a: dict[str, jax.Array]) -> Any:
    from pallas_kernels.kda import Weights

    return Weights(*(a[name] for name in Weights._fields))


def _rows(batch: int, tokens: int) -> Any:
    from pallas_kernels.kda import Rows

    index = jnp.arange(batch, dtype=jnp.int32)
    return Rows(index, index + 100, jnp.full(batch, tokens, jnp.int32))


def _arrays(key: Any, batch: int, n: int, heads: int, layers: int) -> dict[str, jax.Array]:
    """What the kernel reads, by name: its weights, projections, state and window."""
    p = heads * WIDTH
    columns = 4 * p + WIDTH + heads
    wide = (  # name, shape, scale; f32 but for the first three
        ("fused", (n, columns + -columns % 8), 1.0),
        ("window", (layers, batch, TAPS - 1, 3 * p), 1.0),
        ("f_b_proj", (layers, p, WIDTH), WIDTH**-0.5),
        ("conv1d", (layers, 3 * p, TAPS), 0.5),
        ("A_log", (layers, heads), 0.5),
        ("dt_bias", (layers, p), 0.5),
        ("o_norm", (layers, WIDTH), 1.0),
        ("state", (layers, batch, heads, WIDTH, WIDTH), 0.3),
    )
    keys = jax.random.split(key, len(wide))
    return {
        name: normal(k, shape, scale)
        if place < 3
        else scale * jax.random.normal(k, shape, jnp.float32)
        for place, (k, (name, shape, scale)) in enumerate(zip(keys, wide, strict=True))
    }


def _exact(a: dict[str, jax.Array], layer: int, batch: int, tokens: int, heads: int) -> np.ndarray:
    """Heads [N, P] in float64, rounded to bf16 where both paths round, but not at the end."""
    p = heads * WIDTH
    x = f64(a["fused"]).reshape(batch, tokens, -1)[..., : 4 * p + WIDTH + heads]
    raw, gate, low, strength = np.split(x, [3 * p, 4 * p, 4 * p + WIDTH], axis=-1)
    own = {name: np.asarray(f64(a[name][layer])) for name in a if name != "fused"}
    history = np.concatenate([own["window"], raw], axis=1)
    mixed = sum(own["conv1d"][:, i] * history[:, i : i + tokens] for i in range(TAPS))
    mixed = bf16_round(mixed / (1 + np.exp(-mixed)))
    shape = batch, tokens, heads, WIDTH
    q, k, v = (part.reshape(shape) for part in np.split(mixed, 3, axis=-1))
    z = bf16_round(low @ own["f_b_proj"].T) + own["dt_bias"]
    decay = LOWER_BOUND / (1 + np.exp(-np.exp(own["A_log"])[:, None] * z.reshape(shape)))
    beta = 1 / (1 + np.exp(-strength))
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * WIDTH**-0.5
    s, out = own["state"], np.zeros(shape)
    for t in range(tokens):
        s = s * np.exp(decay[:, t])[:, :, None]
        update = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", s, k[:, t]))
        s = s + update[..., None] * k[:, t, :, None]
        out[:, t] = np.einsum("bhvk,bhk->bhv", s, q[:, t])
    o = bf16_round(out)
    y = o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS) * own["o_norm"]
    return (y / (1 + np.exp(-gate.reshape(shape)))).reshape(batch * tokens, p)


def cases() -> dict[str, Callable[[], Problem]]:
    """Every case by name; building one allocates its states."""
    out: dict[str, Callable[[], Problem]] = {}
    for ranks in (16, 8):
        for batch, tokens in ((1, 1), (8, 1), (64, 1), (1, 8), (8, 8)):
            name = f"kda.tp{ranks}.rows{batch * tokens}.tokens{tokens}"
            args = batch, tokens, 96 // ranks, 37
            out[name] = lambda args=args: kda_case(*args)
    for batch, tokens in ((1, 1), (8, 1), (1, 8)):  # as many as the kernel takes
        name = f"kda_out.tp16.rows{batch * tokens}.tokens{tokens}"
        out[name] = lambda args=(batch, tokens, 6, 41): kda_out_case(*args)
    return out
