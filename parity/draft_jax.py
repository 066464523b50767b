"""The drafter of `jax_impl` on recorded taps.

All cases of a folder run in one batch, over one cache full of NaN with scattered pages, so that
one program per dtype and profile is compiled whatever the context lengths are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import drafter
from jax_impl.backend import AUTO
from jax_impl.cache import Cache, StepInputs, make_cache
from jax_impl.config import RunConfig
from jax_impl.draft_weights import DraftWeights, open_draft
from jax_impl.loader import load_draft
from jax_impl.params import Weights
from jax_impl.stages.draft import combine, draft_layer
from jax_impl.static import DraftStatic, Static
from parity.driver import PAGE, load
from parity.golden_dspark import EPS, Arrays, DraftCase


def open_drafter(
    draft: Path, target: Path, dtype: str, profile: str, cases: list[DraftCase]
) -> Callable[[DraftCase], Arrays]:
    """A function from a case to everything recorded about it, by recorded name.

    Raises:
        ConfigError, CheckpointError: a checkpoint is not implemented, damaged, or of another pair.
    """
    config, weights = load(target)
    checkpoint = open_draft(draft)
    checkpoint.config.require_target(config)
    longest = max(len(c.taps) + c.drafts for c in cases)
    each = -(-longest // PAGE)
    run = RunConfig(
        compute=dtype, profile=profile, mla_norm_eps=EPS, slots=len(cases),
        pages=each * len(cases) + 3, page_size=PAGE,
    )  # type: ignore[arg-type]  # fmt: skip
    static, small = Static(config, run), DraftStatic(checkpoint.config, run)
    found = {}
    for drafts in sorted({c.drafts for c in cases}):  # one program per block length
        group = [c for c in cases if c.drafts == drafts]
        found |= _run_batch(static, small, weights, load_draft(checkpoint), group, each)
    return lambda case: found[case.name]


def _run_batch(
    static: Static, draft: DraftStatic, weights: Weights, small: DraftWeights,
    cases: list[DraftCase], each: int,
) -> dict[str, Arrays]:  # fmt: skip
    """Results by case name."""
    lengths = [len(c.taps) for c in cases]
    width = max(lengths)
    taps = np.zeros((len(cases), width, cases[0].taps.shape[1]), np.float32)
    for row, case in zip(taps, cases, strict=True):
        row[: len(case.taps)] = case.taps
    pages = np.random.default_rng(0).permutation(static.run.pages)[: each * len(cases)]
    table = pages.reshape(len(cases), each)
    inputs = StepInputs(
        tokens=jnp.zeros((len(cases), width), jnp.int32), count=jnp.asarray(lengths, jnp.int32),
        position=jnp.zeros(len(cases), jnp.int32), slot=jnp.arange(len(cases)),
        page_table=jnp.asarray(table, jnp.int32), temperature=jnp.zeros(len(cases)),
        seed=jnp.zeros(len(cases), jnp.uint32),
    )  # fmt: skip
    empty = make_cache(static.config, static.run, draft=draft.config)
    cache = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), empty)
    anchors = jnp.asarray([c.anchor for c in cases], jnp.int32)
    run = jax.jit(partial(_program, static, draft, cases[0].drafts))
    flat = jnp.asarray(taps.reshape(-1, taps.shape[-1]), static.nx.dtype)
    found = {k: _f64(v) for k, v in run(weights, small, cache, inputs, flat, anchors).items()}
    rows = found.pop("rows")[:, table].reshape(
        draft.config.num_hidden_layers, len(cases), -1, draft.config.kv_row
    )
    results, rank = {}, draft.config.kv_lora_rank
    for i, (case, length) in enumerate(zip(cases, lengths, strict=True)):
        own = {name: value[i] for name, value in found.items()}
        own["context"] = own["context"][:length]
        for layer in range(draft.config.num_hidden_layers):
            own[f"layers.{layer}.context_latent"] = rows[layer, i, :length, :rank]
            own[f"layers.{layer}.context_k_pe"] = rows[layer, i, :length, rank:]
        results[case.name] = own
    return results


def _program(
    static: Static, draft: DraftStatic, drafts: int, weights: Weights, small: DraftWeights,
    cache: Cache, inputs: StepInputs, taps: jax.Array, anchors: jax.Array,
) -> dict[str, jax.Array]:  # fmt: skip
    batch = anchors.shape[0]
    cache = drafter.write_context(draft, AUTO, small, cache, inputs, taps, inputs.count)
    following = inputs.replace(position=inputs.position + inputs.count)
    block = drafter.block_inputs(draft, following, anchors, drafts)
    x = AUTO.embed(static, weights.root, block)
    hidden, _ = AUTO.draft_block(draft, small, x, block, cache.draft_kv, cache.kv_scale)
    base = AUTO.logits(static, weights.root, hidden)[0].reshape(batch, drafts, -1)
    _, logits = AUTO.draft_markov(draft, small.root, base, block, sample=False)
    _, after = drafter.propose(
        static, draft, AUTO, weights, small, cache, following, anchors, drafts=drafts, sample=False
    )
    found = {"base_logits": base, "logits": logits, "draft_ids": after.tokens[:, 1:]}
    found |= {"rows": cache.draft_kv}
    kv = cache.draft_kv
    for layer in range(draft.config.num_hidden_layers):
        sliced = jax.tree.map(lambda a, i=layer: a[i], small.layer)
        x, kv = draft_layer(draft, sliced, layer, x, block, kv, cache.kv_scale)
        found[f"layers.{layer}.hidden_out"] = x.reshape(batch, drafts, -1)
    found["final_hidden"] = hidden.reshape(batch, drafts, -1)
    return found | {"context": combine(draft, small.root, taps).reshape(batch, -1, x.shape[-1])}


def _f64(x: jax.Array) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return np.asarray(x)
    return np.asarray(x.astype(jnp.float32), np.float64)
