"""A step without a checkpoint: sizes by preset, and caches and inputs with random contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.cache import Cache, StepInputs
from jax_impl.config import RELEASED_CONFIG, ModelConfig, RunConfig
from jax_impl.sharding import Placement, make_spread_cache
from jax_impl.static import Static
from jax_impl.tiny_presets import PRESETS, text_config


def load_config(preset: str) -> ModelConfig:
    """The released model's configuration, or that of a small preset."""
    if preset == "k3":
        return ModelConfig.load(RELEASED_CONFIG)
    return ModelConfig.from_dict(text_config(PRESETS[preset].target), source=f"preset {preset}")


@dataclass(frozen=True)
class Case:
    """One kind of step: B sequences of T rows each; `verify` commits what was accepted only."""

    name: str
    batch: int
    tokens: int

    @property
    def verifies(self) -> bool:
        """Whether the step judges drafts."""
        return self.tokens > 1


def cases(rows: tuple[int, ...], drafts: int) -> list[Case]:
    """`rowsN` for every number of rows, and `verifyN` of one sequence where there are drafts."""
    found = [Case(f"rows{n}", n, 1) for n in rows]
    return [*found, Case(f"verify{drafts + 1}", 1, drafts + 1)] if drafts else found


def run_for(
    found: Sequence[Case], context: int, page_size: int, kv_dtype: str, backend: str
) -> RunConfig:
    """Settings with room for the largest of the cases; an FP8 cache has scale 1."""
    most = max(case.batch for case in found)
    return RunConfig(
        slots=most, page_size=page_size, pages=most * -(-context // page_size),
        kv_dtype=kv_dtype, kv_scale=1.0 if kv_dtype == "float8_e4m3fn" else None,
        decode_backend=backend,
    )  # type: ignore[arg-type]  # fmt: skip


def random_cache(config: ModelConfig, run: RunConfig, placement: Placement, seed: int) -> Cache:
    """A cache in which every slot and page holds random finite values."""
    empty = make_spread_cache(config, run, placement)
    sizes = {"kda_state": 0.1, "conv_window": 1.0, "kv_latent": 1.0}

    @partial(jax.jit, donate_argnums=0)
    def fill(old: jax.Array, key: Any, size: float) -> jax.Array:
        drawn = size * jax.random.uniform(key, old.shape[1:], jnp.float32, -2, 2)
        return jnp.broadcast_to(drawn, old.shape).astype(old.dtype)

    keys = jax.random.split(jax.random.key(seed + 2, impl="rbg"), len(sizes))
    filled = {
        name: fill(getattr(empty, name), key, size)
        for (name, size), key in zip(sizes.items(), keys, strict=True)
    }
    return replace(empty, **filled)


def make_inputs(
    config: ModelConfig, run: RunConfig, case: Case, context: int, steps: int, seed: int
) -> tuple[StepInputs, jax.Array]:
    """Inputs at the end of a context, and random tokens i32 [steps, B, T] of every step.

    The position is the same in every step, which keeps the context what it is said to be; pages are
    scattered over the cache.
    """
    rng = np.random.default_rng(seed + 3)
    width = run.pages_for(context)
    pages = rng.permutation(run.pages)[: case.batch * width].reshape(case.batch, width)
    whole = lambda value, dtype: jnp.full(case.batch, value, dtype)  # noqa: E731
    tokens = rng.integers(0, config.vocab_size, (steps, case.batch, case.tokens), np.int32)
    inputs = StepInputs(
        tokens=jnp.asarray(tokens[0]),
        count=whole(case.tokens, jnp.int32),
        position=whole(context - case.tokens, jnp.int32),
        slot=jnp.arange(case.batch, dtype=jnp.int32),
        page_table=jnp.asarray(pages, jnp.int32),
        temperature=whole(0, jnp.float32),
        seed=whole(seed, jnp.uint32),
    )
    return inputs, jnp.asarray(tokens)


def random_stream(static: Static, case: Case, seed: int) -> tuple[jax.Array, ...]:
    """Prefix, bank and delta of a check, in the compute dtype."""
    c, rows = static.config, case.batch * case.tokens
    keys = jax.random.split(jax.random.key(seed + 4), 3)
    shapes = ((rows, c.hidden_size), (rows, c.num_snapshots, c.hidden_size), (rows, c.hidden_size))
    return tuple(
        jax.random.normal(k, s, jnp.float32).astype(static.nx.dtype)
        for k, s in zip(keys, shapes, strict=True)
    )
