"""The drafter against recorded outputs, what a block sees, the confidence head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jax_impl import drafter
from jax_impl.backend import AUTO
from jax_impl.cache import Cache, StepInputs, make_cache
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.draft_config import DraftConfig
from jax_impl.draft_weights import (
    DraftWeights,
    open_draft,
)
from jax_impl.loader import load_draft
from jax_impl.ops.draft import confidence
from jax_impl.params import Weights
from jax_impl.speculate import build_speculative_prefill
from jax_impl.stages.draft import combine
from jax_impl.static import DraftStatic, Static
from parity.driver import load

PAGES = [3, 9, 1, 5, 7]  # scattered; a sixth page is not there
DRAFTS = 7


@dataclasses.dataclass(frozen=True)
class Pair:
    """The recorded target and drafter."""

    config: ModelConfig
    weights: Weights
    draft: DraftConfig
    draft_weights: DraftWeights

    def statics(self, compute: str, profile: str, **draft) -> tuple[Static, DraftStatic]:
        """Settings of both; `draft` are changes to the drafter's configuration."""
        run = RunConfig(
            compute=compute, profile=profile, mla_norm_eps=1e-6, slots=3, pages=24, page_size=8
        )  # type: ignore[arg-type]
        return Static(self.config, run), DraftStatic(dataclasses.replace(self.draft, **draft), run)

    def poisoned(self, static: Static) -> Cache:
        """A cache full of NaN."""
        empty = make_cache(self.config, static.run, draft=self.draft)
        return jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), empty)


@pytest.fixture(scope="module")
def pair(golden_dir) -> Pair:
    """Target and drafter of the recording."""
    config, weights = load((golden_dir / "model_tiny16").resolve())
    checkpoint = open_draft(golden_dir / "dspark_tiny16")
    return Pair(config, weights, checkpoint.config, load_draft(checkpoint))


@pytest.fixture(scope="module")
def recorded(golden_dir) -> dict[str, np.ndarray]:
    """All recorded tensors of the drafter."""
    with safe_open(golden_dir / "dspark_tiny16" / "golden.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def inputs_of(length: int, batch: int = 1) -> StepInputs:
    """A step over the first `length` positions of each sequence."""
    table = np.array([[*PAGES, -1], [11, 2, 4, 6, 8, -1]], np.int32)[:batch]
    return StepInputs(
        tokens=jnp.zeros((batch, length), jnp.int32), count=jnp.full(batch, length),
        position=jnp.zeros(batch, jnp.int32), slot=jnp.arange(batch), page_table=jnp.asarray(table),
        temperature=jnp.zeros(batch), seed=jnp.zeros(batch, jnp.uint32),
    )  # fmt: skip


def drafted(pair: Pair, static: Static, draft: DraftStatic, taps: np.ndarray, anchor: int):
    """Context vectors, cache, base logits and next inputs, all from recorded taps."""

    @jax.jit
    def run(cache, taps):
        inputs = inputs_of(taps.shape[0])
        dw = pair.draft_weights
        cache = drafter.write_context(draft, AUTO, dw, cache, inputs, taps, inputs.count)
        following = inputs.replace(position=inputs.position + inputs.count)
        ids = jnp.array([anchor])
        block = drafter.block_inputs(draft, following, ids, DRAFTS)
        base, _ = drafter.base_logits(static, draft, AUTO, pair.weights, dw, cache, block)
        after, following = drafter.propose(
            static,
            draft,
            AUTO,
            pair.weights,
            dw,
            cache,
            following,
            ids,
            drafts=DRAFTS,
            sample=False,
        )
        return combine(draft, dw.root, taps), after, base[0], following

    return run(pair.poisoned(static), jnp.asarray(taps, static.nx.dtype))


ANCHORS = {"case0": 126, "case1": 496}


@pytest.mark.parametrize(
    ("compute", "profile"), [("float32", "V"), ("bfloat16", "V"), ("bfloat16", "H")]
)
@pytest.mark.parametrize("case", ["case0", "case1"])
def test_recorded_drafts(pair, recorded, compute, profile, case):
    static, draft = pair.statics(compute, profile)
    taps = recorded[f"{case}.taps"]
    context, cache, base, following = drafted(pair, static, draft, taps, ANCHORS[case])
    f64 = lambda a: np.asarray(a.astype(jnp.float32), np.float64)  # noqa: E731
    limit = 1e-5 if compute == "float32" else 0.03  # bf16: values up to 4, one unit is 2^-6
    assert np.abs(f64(context) - recorded[f"{case}.context"]).max() < limit
    rows = f64(cache.draft_kv)[:, PAGES].reshape(
        pair.draft.num_hidden_layers, -1, pair.draft.kv_row
    )
    for layer, row in enumerate(rows[:, : len(taps)]):
        want = [recorded[f"{case}.layers.{layer}.context_{n}"] for n in ("latent", "k_pe")]
        assert np.abs(row - np.concatenate(want, -1)).max() < limit
    difference = f64(base) - recorded[f"{case}.base_logits_f64"]
    if compute == "float32":
        assert np.abs(difference).max() < 1e-4
    else:
        assert np.sqrt((difference**2).mean()) <= 0.15
    assert np.array_equal(following.tokens[0, 1:], recorded[f"{case}.draft_ids"])
    assert int(following.tokens[0, 0]) == ANCHORS[case]
    untouched = np.delete(f64(cache.draft_kv), PAGES, axis=1)
    assert np.isnan(untouched).all()


def test_prefill_taps_context_and_drafts_end_to_end(pair, recorded, golden_dir):
    """From prompt ids alone: the target's anchor and the recorded drafts, in both cases at once."""
    static, draft = pair.statics("float32", "H")
    with safe_open(golden_dir / "model_tiny16" / "golden.safetensors", "numpy") as file:
        ids = file.get_tensor("seq_ids")[:28]
    inputs = inputs_of(28, batch=2).replace(
        tokens=jnp.asarray(np.tile(ids, (2, 1)), jnp.int32), count=jnp.array([24, 28])
    )
    step = build_speculative_prefill(static, draft, drafts=DRAFTS)
    cache, out, following = step(pair.weights, pair.draft_weights, pair.poisoned(static), inputs)
    want = [[ANCHORS[c], *recorded[f"{c}.draft_ids"]] for c in ("case0", "case1")]
    assert np.array_equal(following.tokens, want)
    assert np.array_equal(out.token, [ANCHORS["case0"], ANCHORS["case1"]])
    assert np.array_equal(following.position, [24, 28])
    assert np.array_equal(following.count, [8, 8])
    rows = np.asarray(cache.draft_kv, np.float64)[1, [11, 2, 4, 6, 8]].reshape(
        -1, pair.draft.kv_row
    )
    want = recorded["case1.layers.1.context_latent"]
    assert (
        np.abs(rows[:28, : pair.draft.kv_lora_rank] - want).max() < 2e-4
    )  # the target's f32 noise


@pytest.mark.parametrize("non_causal", [True, False])
def test_what_a_block_row_sees(pair, recorded, non_causal):
    """Row 0 depends on a later row iff the block is non-causal; a window hides old context."""
    static, draft = pair.statics("float32", "V", non_causal=non_causal, sliding_window=9)
    taps = jnp.asarray(recorded["case0.taps"])

    @jax.jit
    def run(cache, taps, ids):
        inputs = inputs_of(taps.shape[0])
        cache = drafter.write_context(
            draft, AUTO, pair.draft_weights, cache, inputs, taps, inputs.count
        )
        block = inputs.replace(
            tokens=ids[None], position=inputs.count, count=jnp.array([ids.shape[0]])
        )
        base, _ = drafter.base_logits(
            static, draft, AUTO, pair.weights, pair.draft_weights, cache, block
        )
        return base[0]

    ids = jnp.array([126, 509, 509, 509])
    first = run(pair.poisoned(static), taps, ids)
    last = run(pair.poisoned(static), taps, ids.at[3].set(17))
    same = np.array([np.array_equal(a, b) for a, b in zip(first, last, strict=True)])
    assert np.array_equal(same, [False] * 4 if non_causal else [True] * 3 + [False])
    hidden = run(pair.poisoned(static), taps.at[: 24 - 9].set(3.0), ids)
    assert np.array_equal(first, hidden)
    seen = run(pair.poisoned(static), taps.at[24 - 9].set(3.0), ids)
    assert not np.array_equal(first, seen)


def test_confidence_head(pair):
    rng = np.random.default_rng(3)
    root = pair.draft_weights.root
    hidden, previous = rng.normal(size=(5, 128)), rng.normal(size=(5, 16))
    proj, bias = (np.asarray(a, np.float64) for a in (root.confidence_proj, root.confidence_bias))
    want = 1 / (1 + np.exp(-(np.concatenate([hidden, previous], -1) @ proj[0] + bias[0])))
    got = confidence(
        jnp.asarray(hidden), jnp.asarray(previous), root.confidence_proj, root.confidence_bias
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
    plain = confidence(
        jnp.asarray(hidden), None, root.confidence_proj[:, :128], root.confidence_bias
    )
    np.testing.assert_allclose(
        plain, 1 / (1 + np.exp(-(hidden @ proj[0, :128] + bias[0]))), atol=1e-5
    )
