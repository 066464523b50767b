"""One layer of `jax_impl` on inputs that come from elsewhere, so that errors do not chain."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.backend import AUTO, Backend
from jax_impl.model import Place, Stream, feed_forward, layer_weights, place, run_layer
from jax_impl.static import Static
from parity.driver import Arrays, Driver, Session, step_inputs

Built = Callable[..., tuple[dict[str, Any], Any]]


def fresh_layer(static: Static, starts_block: bool, backend: Backend = AUTO) -> Built:
    """A newly traced layer: (weights, snapshots, ordinal, prefix, bank, y, cache, inputs).

    It gives the record and the cache, and serves every layer of one kind: the position in the
    stacks is an operand.
    """

    def layer(w, snapshots, ordinal, prefix, bank, y, cache, inputs):
        record: dict[str, Any] = {}
        stream = Stream(prefix, bank, jnp.zeros_like(prefix))
        where = Place(starts_block, snapshots, ordinal)
        _, cache, _ = run_layer(static, backend, w, where, stream, cache, inputs, record)
        if y is not None:
            record["delta"], chosen = feed_forward(static, backend, w.mlp, y)
            record |= chosen
        record["out"] = static.nx.round(record["prefix"].astype(jnp.float32) + record["delta"])
        return record, cache

    return jax.jit(layer)


build_layer = lru_cache(maxsize=32)(fresh_layer)


def inject(
    driver: Driver, layer: int, prefix: np.ndarray, snapshots: list[np.ndarray],
    build: Callable[[Static, bool], Built] = build_layer, y: np.ndarray | None = None,
) -> Arrays:  # fmt: skip
    """Runs one layer on a sequence from its start.

    Args:
        driver: model, dtype and profile.
        layer: 0-based.
        prefix: [T, D], the running sum on entry; cast to the compute dtype.
        snapshots: each [T, D], those taken before the layer.
        build: makes the compiled layer; `fresh_layer` traces anew.
        y: [T, D], input of the feed-forward part; None feeds it what the attention part gave.

    Returns:
        Stage outputs by the names of `jax_impl.model.run_layer`, `out` (running sum on exit), and
        the layer's cache contents by recorded name without the layer.
    """
    c, static = driver.config, driver.static
    where = place(static, layer)
    bank = np.full((len(prefix), c.num_snapshots, c.hidden_size), np.nan)
    for j, snapshot in enumerate(snapshots):
        bank[:, j] = snapshot
    session = Session(driver, seed=7)
    sequence = session.sequence(slot=1)
    inputs = step_inputs([(sequence, np.zeros(len(prefix), int))], len(prefix), len(sequence.pages))
    record, session.cache = build(static, where.starts_block)(
        layer_weights(static, driver.weights, layer),
        jnp.int32(where.snapshots), jnp.int32(where.attention),
        jnp.asarray(prefix, static.nx.dtype), jnp.asarray(bank, static.nx.dtype),
        None if y is None else jnp.asarray(y, static.nx.dtype), session.cache, inputs,
    )  # fmt: skip
    sequence.position = len(prefix)
    name = f"layer{layer:02d}."
    own = {k.removeprefix(name): v for k, v in session.caches(sequence).items() if name in k}
    return own | {k: _numpy(v) for k, v in record.items()}


def _numpy(x: jax.Array) -> np.ndarray:
    if x.dtype == jnp.bfloat16:
        x = x.astype(jnp.float32)
    return np.asarray(x) if x.dtype == jnp.int32 else np.asarray(x, np.float64)
