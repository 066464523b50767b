"""The acceptance rules of both implementations behind one interface, for `accept_suite`.

A side decides batches of steps, tells thresholds and schedules, and enumerates a step exactly. JAX
runs under 64 bits where float64 goes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_impl import acceptance
from jax_impl.acceptance import Rows
from jax_impl.acceptance_config import Acceptance
from jax_impl.sampling import Filters, log_probabilities
from torch_ref import speculation
from torch_ref.speculation import Rule, Sampling

Law = Callable[[tuple[int, ...]], np.ndarray]  # tokens so far -> distribution of the next


class Setting(NamedTuple):
    """A rule; `length` or `rates` (unconditional) for the synthetic one only."""

    rule: str
    length: float | None = None
    rates: tuple[float, ...] | None = None


class Batch(NamedTuple):
    """N steps of K drafts over V tokens."""

    logits: np.ndarray  # [N, K + 1, V]
    drafts: np.ndarray  # [N, K]
    draft_logits: np.ndarray | None  # [N, K, V]; None: drafts are certain
    temperature: np.ndarray  # [N]
    uniforms: np.ndarray  # [N, K]
    noise: np.ndarray  # [N, K + 1, V]
    filters: list[tuple[int, float, float]] | None = None  # top_k (0: off), top_p, min_p


class Decided(NamedTuple):
    """Emitted tokens, and the normalised distribution of the last one."""

    tokens: list[list[int]]
    last: np.ndarray


@partial(jax.jit, static_argnums=0)
def _decide(method, logits, drafts, draft_logits, temperature, uniforms, noise, limits):
    at = jnp.arange(logits.shape[0])
    tokens, count = acceptance.accept(
        method, logits, drafts, draft_logits, temperature, uniforms,
        lambda row: noise[at, row], limits,
    )  # fmt: skip
    p = log_probabilities(logits, temperature, limits)
    q = None if draft_logits is None else log_probabilities(draft_logits, temperature)
    rows = Rows(p, drafts, q)
    weights = acceptance.last_weights(rows, count - 1, block=method.rule == "block")
    return tokens, count, weights


@jax.jit
def _block_numbers(rows: Rows):
    return acceptance.carried(rows)[:, 1:], acceptance.block_thresholds(rows)


@partial(jax.jit, static_argnums=1)
def _numbers(rows: Rows, rule: str):
    """Thresholds [N, K] and, by accepted count, following distributions [K + 1, N, V]."""
    block = rule == "block"
    token_by_token = jnp.exp(jnp.minimum(rows.log_ratio, 0.0))
    h = acceptance.block_thresholds(rows) if block else token_by_token
    n, k = rows.drafts.shape
    last = [acceptance.last_weights(rows, jnp.full(n, a), block=block) for a in range(k + 1)]
    return h, jnp.stack(last)


class JaxSide:
    """`jax_impl`."""

    name = "jax"

    def decide(self, setting: Setting, batch: Batch) -> Decided:
        """All steps at once, in the dtype of the logits."""
        with jax.enable_x64(batch.logits.dtype == np.float64):
            b, rows = batch, len(batch.drafts)
            pad = -rows % 8  # few shapes, few compilations
            full = lambda a: np.concatenate([a, a[:1].repeat(pad, 0)])  # noqa: E731
            real = lambda a: jnp.asarray(full(a), dtype)  # noqa: E731
            limits, dtype = None, b.logits.dtype
            if b.filters is not None:
                top_k, top_p, min_p = (np.array(f) for f in zip(*b.filters, strict=True))
                limits = Filters(real(top_k).astype(jnp.int32), real(top_p), real(min_p))
            tokens, count, weights = _decide(
                Acceptance(setting.rule, "greedy", *setting[1:]), real(b.logits),
                real(b.drafts).astype(jnp.int32),
                None if b.draft_logits is None else real(b.draft_logits),
                real(b.temperature), real(b.uniforms), real(b.noise), limits,
            )  # fmt: skip
            tokens, count = np.asarray(tokens)[:rows], np.asarray(count)[:rows]
            weights = np.asarray(weights, np.float64)[:rows]
        emitted = [t[:n].tolist() for t, n in zip(tokens, count, strict=True)]
        return Decided(emitted, weights / weights.sum(-1, keepdims=True))

    def block_numbers(
        self, p: np.ndarray, q: np.ndarray | None, drafts: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Carried products c_1.. and thresholds h_0.. of the valid drafts, float64."""
        with jax.enable_x64(True):
            rows = _rows(p[None], None if q is None else q[None], np.array([drafts]))
            valid = len(drafts) - drafts.count(-1)
            c, h = (np.asarray(x)[0, :valid] for x in _block_numbers(rows))
            return np.exp(c), h

    def schedule(self, setting: Setting, k: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Unconditional and conditional acceptance rates."""
        method = Acceptance(setting.rule, "greedy", *setting[1:])
        return method.schedule(k), method.conditional(k)

    def enumerate(
        self, rule: str, target: Law, draft: Law, k: int, *, point: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """P(accepted = 0..K) and the joint distribution of the first K + 1 tokens, float64."""
        size = len(target(()))
        paths = np.array(list(itertools.product(range(size), repeat=k)))
        p = np.array([[target(tuple(d[:i])) for i in range(k + 1)] for d in paths])
        q = np.array([[draft(tuple(d[:i])) for i in range(k)] for d in paths])
        if point:
            q = np.eye(size)[q.argmax(-1)]
        with jax.enable_x64(True):
            rows = _rows(p, None if point else q, paths)
            h, last = (np.asarray(x) for x in _numbers(rows, rule))
        ends = _ends(h, last_success=rule == "block")
        drawn = np.prod(np.take_along_axis(q, paths[..., None], 2)[..., 0], axis=1)
        joint = np.zeros((size,) * (k + 1))
        for i in np.flatnonzero(drawn):
            for a in range(k + 1):
                share = drawn[i] * ends[i, a] * last[a][i] / last[a][i].sum()
                for x in range(size):
                    head = (*paths[i, :a].tolist(), x)
                    joint[head] += share[x] * joint_of(target, k - a, head)
        return drawn @ ends, joint


class TorchSide:
    """`torch_ref`."""

    name = "torch"

    def decide(self, setting: Setting, batch: Batch) -> Decided:
        """One step after the other."""
        rule, outcomes = Rule(*setting), []
        real = torch.from_numpy
        for i, drafts in enumerate(batch.drafts):
            limits = {}
            if batch.filters is not None:
                top_k, top_p, min_p = batch.filters[i]
                limits = {"top_k": top_k or None, "top_p": top_p, "min_p": min_p}
            q = None if batch.draft_logits is None else real(batch.draft_logits[i])
            outcomes.append(
                speculation.accept(
                    rule,
                    real(batch.logits[i]),
                    drafts.tolist(),
                    Sampling(float(batch.temperature[i]), **limits),
                    draft_logits=q,
                    uniforms=batch.uniforms[i],
                    noise=real(batch.noise[i]),
                )
            )
        last = np.stack([o.last.double().numpy() for o in outcomes])
        return Decided([o.tokens for o in outcomes], last)

    def block_numbers(
        self, p: np.ndarray, q: np.ndarray | None, drafts: tuple[int, ...]
    ) -> tuple[None, np.ndarray]:
        """Thresholds only: the plan does not keep its carried products."""
        masses = None if q is None else torch.from_numpy(q)
        return None, np.array(
            speculation.plan(Rule("block"), torch.from_numpy(p), masses, drafts).threshold
        )

    def schedule(self, setting: Setting, k: int) -> tuple[list[float], list[float]]:
        """Unconditional and conditional acceptance rates."""
        rule = Rule(*setting)
        return rule.unconditional(k), rule.conditional(k)

    def enumerate(
        self, rule: str, target: Law, draft: Law, k: int, *, point: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """P(accepted = 0..K) and the joint distribution of the first K + 1 tokens, float64."""
        found = speculation.enumerate_step(
            Rule(rule), lambda c: torch.from_numpy(target(c)),
            lambda c: torch.from_numpy(draft(c)), k, point=point,
        )  # fmt: skip
        return found.accepted.numpy(), found.joint.numpy()


SIDES = {"jax": JaxSide(), "torch": TorchSide()}


def _rows(p: np.ndarray, q: np.ndarray | None, drafts: np.ndarray) -> Rows:
    with np.errstate(divide="ignore"):
        log_q = None if q is None else jnp.asarray(np.log(q))
        return Rows(jnp.asarray(np.log(p)), jnp.asarray(drafts), log_q)


def _ends(h: np.ndarray, *, last_success: bool) -> np.ndarray:
    """P(accepted = a) per path from thresholds [N, K]: the last success or the first failure."""
    n, k = h.shape
    ends = np.ones((n, k + 1))
    for a in range(k + 1):
        if last_success:
            ends[:, a] = (h[:, a - 1] if a else 1) * np.prod(1 - h[:, a:], axis=1)
        else:
            ends[:, a] = np.prod(h[:, :a], axis=1) * (1 - h[:, a] if a < k else 1)
    return ends


def joint_of(law: Law, length: int, head: tuple[int, ...] = ()) -> np.ndarray:
    """Probability of `length` tokens after `head` under a law, [V] * length."""
    if length == 0:
        return np.ones(())
    return np.stack([p * joint_of(law, length - 1, (*head, x)) for x, p in enumerate(law(head))])
