"""A small target with its drafter, plain decoding of it, and steps with forced accepted counts.

The reference of every speculative step is plain decoding through the same row bucket: steps of
1 + K tokens per sequence of which one is real. Only then are products of the same shape, and bits
comparable.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO
from jax_impl.cache import PAD, Cache, StepInputs, make_cache
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_weights import DraftWeights, open_draft
from jax_impl.loader import load_draft
from jax_impl.make_tiny import make_checkpoint
from jax_impl.params import Weights
from jax_impl.speculate import (
    SpeculativePrefill,
    SpeculativeStep,
    build_speculative_prefill,
    build_speculative_step,
)
from jax_impl.static import DraftStatic, Static
from jax_impl.step import build_step
from parity.driver import load

GREEDY = Acceptance()
B, K = 8, 7  # 64 rows
PAGE, PAGES = 8, 24  # tokens per page, pages per sequence
SLOTS = np.array([3, 7, 1, 8, 5, 0, 9, 2])
STARTS = np.array([0, 1, 3, 5, 2, 8, 4, 6])  # tokens processed before the step under test
STEPS = 168  # tokens of plain text per sequence


@dataclasses.dataclass(frozen=True)
class Models:
    """Target and drafter, under one set of run settings."""

    config: ModelConfig
    weights: Weights
    draft_config: DraftConfig
    draft_weights: DraftWeights
    run: RunConfig

    @property
    def static(self) -> Static:
        """Settings of the target."""
        return Static(self.config, self.run)

    @property
    def draft(self) -> DraftStatic:
        """Settings of the drafter."""
        return DraftStatic(self.draft_config, self.run)

    def cache(self, fill: float = np.nan) -> Cache:
        """A cache full of one number."""
        empty = make_cache(self.config, self.run, draft=self.draft_config)
        return jax.tree.map(lambda a: jnp.full(a.shape, fill, a.dtype), empty)

    def step(self, method: Acceptance = GREEDY, drafts: int = K, backend=AUTO) -> SpeculativeStep:
        """The compiled step."""
        return build_speculative_step(self.static, self.draft, backend, method, drafts)

    def prefill(self, method: Acceptance = GREEDY, drafts: int = K) -> SpeculativePrefill:
        """The compiled prefill."""
        return build_speculative_prefill(self.static, self.draft, AUTO, method, drafts)


def load_models(directory: Path, run: RunConfig) -> Models:
    """A pair as `make_checkpoint` writes it."""
    config, weights = load((directory / "target").resolve())
    draft = open_draft(directory / "draft")
    return Models(config, weights, draft.config, load_draft(draft), run)


def make_models(directory: Path) -> Models:
    """Five layers, of which the last is tapped: three KDA, two MLA; bf16."""
    make_checkpoint(directory, "tiny", 0, overrides={"num_hidden_layers": 5})
    models = load_models(directory, RunConfig(slots=10, pages=B * PAGES + 3, page_size=PAGE))
    assert models.draft_config.target_layer_ids == (1, 4)
    return models


def inputs_of(tokens, count, position, *, batch=B, pages=PAGES) -> StepInputs:
    """Inputs for the first `batch` sequences; a count below 0 marks a pad row."""
    count = np.asarray(count)
    table = (
        np.random.default_rng(0).permutation(B * PAGES + 3)[: B * PAGES].reshape(B, PAGES)[:batch]
    )
    table = np.where((np.arange(PAGES) < pages) & (count[:, None] >= 0), table, -1)
    return StepInputs(
        tokens=jnp.asarray(tokens, jnp.int32),
        count=jnp.asarray(np.maximum(count, 0), jnp.int32),
        position=jnp.asarray(np.where(count < 0, 0, position), jnp.int32),
        slot=jnp.asarray(np.where(count < 0, PAD, SLOTS[:batch]), jnp.int32),
        page_table=jnp.asarray(table, jnp.int32),
        temperature=jnp.zeros(batch, jnp.float32),
        seed=jnp.arange(batch, dtype=jnp.uint32),
    )


@dataclasses.dataclass(frozen=True)
class Plain:
    """Plain greedy decoding, token by token, of B sequences.

    `text[b, i]` is the token at position i; `states[i]`, `windows[i]` are the caches of all slots
    after i tokens; `latents` the latent rows [L, B, positions, row].
    """

    text: np.ndarray
    states: list[np.ndarray]
    windows: list[np.ndarray]
    latents: np.ndarray
    cache: Cache


def decode_plainly(models: Models) -> Plain:
    """STEPS tokens of each sequence, starting with a random one at position 0."""
    step = build_step(models.static, rows="all")
    cache = models.cache().replace(draft_kv=None)
    text = np.zeros((B, STEPS + 1), int)
    text[:, 0] = np.random.default_rng(1).integers(4, models.config.vocab_size, B)
    states, windows = [as_bits(cache.kda_state)], [as_bits(cache.conv_window)]
    for i in range(STEPS):
        tokens = np.full((B, K + 1), -1)
        tokens[:, 0] = text[:, i]
        cache, out, _ = step(models.weights, cache, inputs_of(tokens, [1] * B, [i] * B))
        text[:, i + 1] = np.asarray(out.token)
        states.append(as_bits(cache.kda_state)[:, SLOTS])
        windows.append(as_bits(cache.conv_window)[:, SLOTS])
    return Plain(text, states, windows, rows_of(cache.kv_latent), cache)


def as_bits(x) -> np.ndarray:
    """As float32, in which bf16 keeps every bit."""
    return np.asarray(x.astype(jnp.float32))


def rows_of(kv) -> np.ndarray:
    """Paged rows in order of position: [L, B, positions, row]."""
    table = np.asarray(inputs_of(np.zeros((B, 1)), [1] * B, [0] * B).page_table)
    kv = as_bits(kv)[:, table]
    return kv.reshape(kv.shape[0], B, -1, kv.shape[-1])


def started(models: Models, plain: Plain, starts: np.ndarray) -> Cache:
    """A cache as plain decoding leaves it after `starts` tokens; NaN where nothing is."""
    cache = models.cache()
    state, window, kv = (
        np.array(as_bits(x)) for x in (cache.kda_state, cache.conv_window, cache.kv_latent)
    )
    table = np.asarray(inputs_of(np.zeros((B, 1)), [1] * B, [0] * B).page_table)
    for b, start in enumerate(starts):
        if start:
            state[:, SLOTS[b]] = plain.states[start][:, b]
            window[:, SLOTS[b]] = plain.windows[start][:, b]
        at = np.arange(start)
        kv[:, table[b, at // PAGE], at % PAGE] = plain.latents[:, b, :start]
    return cache.replace(
        kda_state=jnp.asarray(state),
        conv_window=jnp.asarray(window, cache.conv_window.dtype),
        kv_latent=jnp.asarray(kv, cache.kv_latent.dtype),
        draft_kv=jnp.zeros_like(cache.draft_kv),
    )


def forced(
    text: np.ndarray,
    position: np.ndarray,
    accepted: np.ndarray,
    seed: int,
    vocabulary: int,
    drafts: int = K,
):
    """Anchor and drafts [B, 1 + drafts]; exactly the first `accepted` continue the text."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (len(position), drafts + 1))
    for b, (p, a) in enumerate(zip(position, accepted, strict=True)):
        tokens[b, : a + 1] = text[b, p : p + a + 1]
        if a < drafts and tokens[b, a + 1] == text[b, p + a + 1]:
            tokens[b, a + 1] = (tokens[b, a + 1] + 1) % vocabulary
    return tokens


def differences(models, plain, cache: Cache, position: np.ndarray) -> dict[str, float]:
    """Largest differences between a cache and plain decoding after `position` tokens."""
    found = {"state": 0.0, "state, relative": 0.0, "window": 0.0, "latent": 0.0}
    state, window = as_bits(cache.kda_state)[:, SLOTS], as_bits(cache.conv_window)[:, SLOTS]
    latents = rows_of(cache.kv_latent)
    for b, p in enumerate(position):
        pairs = {
            "state": (state[:, b], plain.states[p][:, b]),
            "window": (window[:, b], plain.windows[p][:, b]),
            "latent": (latents[:, b, :p], plain.latents[:, b, :p]),
        }
        for name, (got, want) in pairs.items():
            gap = np.abs(got - want)
            assert np.isfinite(gap).all(), (name, b)
            found[name] = max(found[name], float(gap.max(initial=0.0)))
            if name == "state":  # what 1e-5 absolute does not cover, relative to the value
                beyond = np.maximum(gap - 1e-5, 0) / np.maximum(np.abs(want), 1e-30)
                found["state, relative"] = max(found["state, relative"], float(beyond.max()))
    return found


def committed(models, plain, step, accepted, starts=STARTS, seed=2, seeds=None):
    """One step with forced accepted counts: outputs, differences from plain decoding."""
    tokens = forced(plain.text, starts, accepted, seed, models.config.vocab_size)
    inputs = inputs_of(tokens, [K + 1] * B, starts)
    if seeds is not None:
        inputs = inputs.replace(seed=jnp.full(B, seeds, jnp.uint32))
    cache, out, following = step(
        models.weights, models.draft_weights, started(models, plain, starts), inputs
    )
    return out, following, cache, differences(models, plain, cache, starts + accepted + 1)
