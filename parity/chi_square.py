"""Sampled speculative runs on a small pair: the first two tokens have the target's distribution.

The prompt and the token after it are fixed. The drafter proposes after it with every request's own
seed, two speculative steps run, and the first two tokens that they emit are counted. The law they
are held against is that of plain sampling, computed from the logits of the plain step: the first
token's, and the joint one of both. Seeds are fixed, so that a result is the same every time.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import gammaincc

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO
from jax_impl.cache import StepInputs, make_cache
from jax_impl.config import RunConfig
from jax_impl.draft_weights import open_draft
from jax_impl.drafter import propose
from jax_impl.loader import load_draft
from jax_impl.make_tiny import make_checkpoint
from jax_impl.speculate import build_speculative_prefill, build_speculative_step
from jax_impl.static import DraftStatic, Static
from jax_impl.step import build_step
from parity.driver import PAGE, load
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, judge

SEED, K, BATCH, ROUNDS = 2, 7, 64, 16
# after these the target is undecided (2.4 nats) and the drafter off by 0.42 in total variation, so
# that acceptance and rejection both occur; after most others one token has all the probability
PROMPT, ANCHOR = np.array([72, 268, 82, 128, 226]), 70
TEMPERATURE = 2.0
METHODS = (
    Acceptance("standard", "probabilistic"),
    Acceptance("block", "probabilistic"),
    Acceptance("standard", "greedy"),
)
SMALLEST = 5.0  # expected count of a bin; rarer outcomes are counted together


def chi_square(counts: np.ndarray, law: np.ndarray) -> dict[str, float]:
    """Pearson's test of counts [X] against probabilities [X]; rare outcomes share one bin.

    Returns:
        `statistic`, `degrees`, `p` and `surprise`, which is -log10 p.
    """
    expected = law / law.sum() * counts.sum()
    common = expected >= SMALLEST
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    keep = wanted > 0
    statistic = float(((observed - wanted)[keep] ** 2 / wanted[keep]).sum())
    if observed[~keep].sum():
        statistic = math.inf  # what cannot happen, happened
    degrees = max(int(keep.sum()) - 1, 1)
    p = float(gammaincc(degrees / 2, statistic / 2)) if math.isfinite(statistic) else 0.0
    surprise = -math.log10(p) if p > 0 else math.inf
    return {"statistic": statistic, "degrees": degrees, "p": p, "surprise": surprise}


class Sampler:
    """BATCH sequences with the same prompt; only their seeds differ."""

    def __init__(self, directory: Path) -> None:
        """Loads the pair, computes in float32."""
        config, self.weights = load((directory / "target").resolve())
        checkpoint = open_draft(directory / "draft")
        self.small = load_draft(checkpoint)
        each = -(-(len(PROMPT) + 3 * (K + 1)) // PAGE)
        run = RunConfig(compute="float32", slots=BATCH, pages=each * BATCH, page_size=PAGE)  # type: ignore[arg-type]
        self.static, self.draft = Static(config, run), DraftStatic(checkpoint.config, run)
        self.table = np.arange(each * BATCH, dtype=np.int32).reshape(BATCH, each)

    def inputs(self, tokens: np.ndarray) -> StepInputs:
        """A step over tokens [BATCH, n] from position 0, greedy."""
        padded = np.full((BATCH, K + 1), -1, np.int32)
        padded[:, : tokens.shape[1]] = tokens
        return StepInputs(
            tokens=jnp.asarray(padded), count=jnp.full(BATCH, tokens.shape[1]),
            position=jnp.zeros(BATCH, jnp.int32), slot=jnp.arange(BATCH),
            page_table=jnp.asarray(self.table), temperature=jnp.zeros(BATCH),
            seed=jnp.zeros(BATCH, jnp.uint32),
        )  # fmt: skip

    def laws(self) -> tuple[np.ndarray, np.ndarray]:
        """Plain sampling after the anchor: the first token's law [X], the joint one [X, X]."""
        step, vocabulary = build_step(self.static), self.static.config.vocab_size

        def after(tokens: np.ndarray) -> np.ndarray:
            cache = make_cache(self.static.config, self.static.run)
            _, out, _ = step(self.weights, cache, self.inputs(tokens))
            scaled = np.asarray(out.logits[:, -1], np.float64) / TEMPERATURE
            shares = np.exp(scaled - scaled.max(-1, keepdims=True))
            return shares / shares.sum(-1, keepdims=True)

        known = np.append(PROMPT, ANCHOR)
        first = after(np.tile(known, (BATCH, 1)))[0]
        rows = []
        for start in range(0, vocabulary, BATCH):
            ids = np.minimum(np.arange(start, start + BATCH), vocabulary - 1)
            tokens = np.concatenate([np.tile(known, (BATCH, 1)), ids[:, None]], axis=1)
            rows.append(after(tokens)[: min(BATCH, vocabulary - start)])
        return first, first[:, None] * np.concatenate(rows)

    def sample(self, method: Acceptance, rounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs `rounds` batches, each request with a seed of its own.

        Returns:
            First two emitted tokens [N, 2], accepted counts of the first step [N], and the
            drafter's own law of the first draft [X] (one token where it takes the largest).
        """
        both, drawn = (self.weights, self.small), method.drafting == "probabilistic"
        settings = self.static, self.draft, AUTO, method, K
        prefill, step = build_speculative_prefill(*settings), build_speculative_step(*settings)
        draft = jax.jit(partial(propose, *settings[:3], drafts=K, sample=drawn))
        empty = make_cache(self.static.config, self.static.run, draft=self.draft.config)
        ready, _, start = prefill(*both, empty, self.inputs(np.tile(PROMPT, (BATCH, 1))))
        anchors = jnp.full(BATCH, ANCHOR, jnp.int32)
        tokens, counts = [], []
        for number in range(rounds):
            inputs = start.replace(
                seed=jnp.arange(number * BATCH, (number + 1) * BATCH, dtype=jnp.uint32),
                temperature=jnp.full(BATCH, TEMPERATURE, jnp.float32), draft_logits=None,
            )  # fmt: skip
            cache, first = draft(*both, jax.tree.map(jnp.copy, ready), inputs, anchors)
            cache, one, following = step(*both, cache, first)
            _, two, _ = step(*both, cache, following)
            counts.append(np.asarray(one.count) - 1)
            for b, n in enumerate(np.asarray(one.count)):
                emitted = [*np.asarray(one.tokens)[b, :n], *np.asarray(two.tokens)[b]]
                tokens.append(emitted[:2])
        law = np.zeros(self.static.config.vocab_size)
        if first.draft_logits is None:
            law[int(first.tokens[0, 1])] = 1.0
        else:
            law = np.asarray(jax.nn.softmax(first.draft_logits[0, 0] / TEMPERATURE), np.float64)
        return np.array(tokens), np.concatenate(counts), law


def check_sampled_runs(
    methods: tuple[Acceptance, ...] = METHODS, rounds: int = ROUNDS
) -> Iterator[Verdict]:
    """One test per method and quantity; the drafter's own law must be rejected by the same test."""
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        directory = Path(scratch) / "pair"
        make_checkpoint(directory, "tiny", SEED)
        sampler = Sampler(directory)
        first, joint = sampler.laws()
        size = len(first)
        for method in methods:
            where = Where(
                "accept", f"tiny, seed {SEED}", f"sampled, {method.rule}, {method.drafting}",
                "float32", "V", "law of plain sampling",
            )  # fmt: skip
            tokens, counts, own = sampler.sample(method, rounds)
            histogram = np.bincount(counts, minlength=K + 1).tolist()
            ones = np.bincount(tokens[:, 0], minlength=size)
            pairs = np.bincount(tokens[:, 0] * size + tokens[:, 1], minlength=size * size)
            for quantity, seen, law in (
                ("first token", ones, first),
                ("first two tokens", pairs, joint.reshape(-1)),
            ):
                found = chi_square(seen, law)
                note = (
                    f"{len(tokens)} runs, chi-square {found['statistic']:.1f} with "
                    f"{found['degrees']} degrees, p {found['p']:.3g}; accepted in step 1: "
                    f"{histogram}"
                )
                yield judge(where, quantity, found, tolerance("chi_square"), note)
            power = chi_square(ones, own)
            rejected = power["surprise"] > tolerance("chi_square").limit
            yield judge(
                where.at(against="the drafter's own law"), "rejected by the same test",
                power | {"exact": rejected}, tolerance("equal"), f"p {power['p']:.1e}",
            )  # fmt: skip
