"""Acceptance by exact enumeration in float64: what comes out has the target's distribution."""

from __future__ import annotations

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import acceptance
from jax_impl.acceptance import Rows, block_thresholds, carried, last_weights
from jax_impl.sampling import Filters, log_probabilities

T = np.array(
    [[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.4, 0.1], [0.05, 0.15, 0.3, 0.5]]
)
D = np.array([[0.2, 0.5, 0.1, 0.2], [0.5, 0.25, 0.15, 0.1], [0.1, 0.3, 0.2, 0.4]])


def enumerate_rule(rule, target, draft, context, one_hot=False):
    """P(accepted = a) and the joint distribution of the first K + 1 tokens, by exact sums.

    `target(prefix)`, `draft(prefix)`: distributions after a prefix of tokens. The drafts are drawn
    from `draft`; what follows an emitted prefix comes from `target`. With `one_hot` drafts the
    rule is not told their distribution.
    """
    vocabulary, drafts = context
    paths = np.array(list(itertools.product(range(vocabulary), repeat=drafts)))
    p = np.array([[target(tuple(d[:i])) for i in range(drafts + 1)] for d in paths])
    q = np.array([[draft(tuple(d[:i])) for i in range(drafts)] for d in paths])
    with jax.enable_x64(True):
        rows = Rows(jnp.log(p), jnp.asarray(paths), None if one_hot else jnp.log(q))
        assert rows.target.dtype == jnp.float64
        if rule == "block":
            h = np.asarray(block_thresholds(rows))
        else:
            h = np.exp(np.minimum(np.asarray(rows.log_ratio), 0.0))
        ends = np.ones((len(paths), drafts + 1))
        for a in range(drafts + 1):
            if rule == "block":  # the last success counts
                ends[:, a] = (h[:, a - 1] if a else 1) * np.prod(1 - h[:, a:], axis=1)
            else:  # the first failure counts
                ends[:, a] = np.prod(h[:, :a], axis=1) * (1 - h[:, a] if a < drafts else 1)
        last = [
            np.asarray(last_weights(rows, jnp.full(len(paths), a), block=rule == "block"))
            for a in range(drafts + 1)
        ]
    drawn = np.prod(np.take_along_axis(q, paths[..., None], 2)[..., 0], axis=1)
    joint = np.zeros((vocabulary,) * (drafts + 1))
    for d, chance, end, *weights in zip(paths, drawn, ends, *last, strict=True):
        for a, w in enumerate(weights):
            for x, share in enumerate(w / w.sum()):
                spread(joint, (*d[:a], x), chance * end[a] * share, target)
    return drawn @ ends, joint


def spread(joint, prefix, mass, target):
    """Adds `mass` to every continuation of `prefix`, as the target continues it."""
    if len(prefix) == joint.ndim:
        joint[prefix] += mass
        return
    for x, share in enumerate(target(prefix)):
        spread(joint, (*prefix, x), mass * share, target)


def joint_of(target, vocabulary, length):
    """The target's own joint distribution."""
    joint = np.zeros((vocabulary,) * length)
    spread(joint, (), 1.0, target)
    return joint


def tables(seed, vocabulary, peak=1.0):
    """A distribution per prefix."""

    def table(prefix):
        key = [seed, *(t + 1 for t in prefix)]
        return np.random.default_rng(key).dirichlet(np.full(vocabulary, peak))

    return table


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("vocabulary", "drafts"), [(3, 3), (4, 2), (2, 4)])
def test_the_output_has_the_targets_distribution(rule, one_hot, vocabulary, drafts):
    target, draft = tables(1, vocabulary), tables(2, vocabulary)
    if one_hot:  # certain drafts: the drafter's best token, whatever its distribution
        peaked = tables(2, vocabulary)
        draft = lambda prefix: np.eye(vocabulary)[np.argmax(peaked(prefix))] + 0.0  # noqa: E731
    with np.errstate(divide="ignore"):
        lengths, joint = enumerate_rule(rule, target, draft, (vocabulary, drafts), one_hot)
    want = joint_of(target, vocabulary, drafts + 1)
    assert 0.5 * np.abs(joint - want).sum() < 1e-12
    assert abs(lengths.sum() - 1) < 1e-12


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("filters", [(2, 1, 0), (0, 0.7, 0), (0, 1, 0.4), (3, 0.8, 0.1)])
def test_the_output_has_the_filtered_targets_distribution(rule, filters):
    """The target is restricted as the step does it; the drafts come from all tokens."""
    free, draft = tables(1, 4), tables(2, 4)
    limits = Filters(*(jnp.asarray([x]) for x in filters))

    def target(prefix):
        with jax.enable_x64(True):
            logits = jnp.log(free(prefix))[None]
            return np.exp(np.asarray(log_probabilities(logits, jnp.ones(1), limits)))[0]

    with np.errstate(divide="ignore"):
        lengths, joint = enumerate_rule(rule, target, draft, (4, 2))
    want = joint_of(target, 4, 3)
    assert (want == 0).any() and 0.5 * np.abs(joint - want).sum() < 1e-12
    assert abs(lengths.sum() - 1) < 1e-12


@pytest.mark.parametrize(
    ("rule", "drafts", "want"),
    [
        ("standard", 1, [0.3, 0.7]),
        ("block", 1, [0.3, 0.7]),
        ("standard", 2, [0.3, 0.315, 0.385]),
        ("block", 2, [0.3, 0.21, 0.49]),
        ("standard", 3, [0.3, 0.315, 0.13475, 0.25025]),
        ("block", 3, [0.3, 0.21, 0.1285, 0.3615]),
    ],
)
def test_accepted_lengths_of_the_example_tables(rule, drafts, want):
    lengths, joint = enumerate_rule(rule, lambda p: T[len(p)], lambda p: D[len(p)], (4, drafts))
    np.testing.assert_allclose(lengths, want, atol=1e-12)
    assert np.abs(joint - joint_of(lambda p: T[len(p)], 4, drafts + 1)).max() < 1e-15


@pytest.mark.parametrize(
    ("rule", "mean"), [("standard", Fraction(10, 9)), ("block", Fraction(11, 9))]
)
def test_two_tokens_of_two(rule, mean):
    target, draft = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    lengths, joint = enumerate_rule(rule, lambda p: target, lambda p: draft, (2, 2))
    assert abs(lengths @ np.arange(3) - float(mean)) < 1e-12
    np.testing.assert_allclose(joint.sum(-1), [[1 / 9, 2 / 9], [2 / 9, 4 / 9]], atol=1e-12)


def test_one_given_draft_of_three_tokens():
    p = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    q = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    with jax.enable_x64(True):
        rows = Rows(jnp.log(p)[None], jnp.array([[0, 1]]), jnp.log(q)[None])
        h = np.asarray(block_thresholds(rows))[0]
        np.testing.assert_allclose(np.exp(carried(rows)[0, 1:]), [5 / 7, 0.4464286], atol=1e-7)
        np.testing.assert_allclose(h, [0.3548387, 0.4464286], atol=1e-7)
        ends = [(1 - h[0]) * (1 - h[1]), h[0] * (1 - h[1]), h[1]]
        np.testing.assert_allclose(ends, [0.357143, 0.196429, 0.446429], atol=1e-6)
        for a, want in ((0, [0, 0.5, 0.5]), (1, [0.2727273, 0, 0.7272727])):
            w = np.asarray(last_weights(rows, jnp.array([a]), block=True))[0]
            np.testing.assert_allclose(w / w.sum(), want, atol=1e-7)
        w = np.asarray(last_weights(rows, jnp.array([1]), block=False))[0]
        np.testing.assert_allclose(w / w.sum(), [1 / 3, 0, 2 / 3], atol=1e-7)
        ratio = np.minimum(np.exp(np.asarray(rows.log_ratio)[0]), 1)
        np.testing.assert_allclose(ratio, [5 / 7, 0.625])


@pytest.mark.parametrize("one_hot", [False, True])
def test_decisions_are_those_of_the_thresholds(one_hot):
    rng = np.random.default_rng(4)
    n, k, v = 500, 5, 6
    with jax.enable_x64(True):
        draft = None if one_hot else jnp.log(rng.dirichlet(np.ones(v), (n, k)))
        rows = Rows(
            jnp.log(rng.dirichlet(np.ones(v), (n, k + 1))),
            jnp.asarray(rng.integers(0, v, (n, k))),
            draft,
        )
        u, ratio = rng.uniform(size=(n, k)), np.exp(np.asarray(rows.log_ratio))
        h = np.asarray(block_thresholds(rows))
        accepted = np.asarray(acceptance.standard(rows, jnp.asarray(u)))
        assert (accepted == np.cumprod(u < ratio, axis=1).sum(1)).all()
        accepted = np.asarray(acceptance.block(rows, jnp.asarray(u)))
        assert (accepted == np.max(np.where(u <= h, np.arange(1, k + 1), 0), axis=1)).all()
        # equality: block accepts, standard does not
        assert (np.asarray(acceptance.block(rows, jnp.asarray(h))) == k).all()
        even = Rows(rows.target[:, :k], rows.drafts[:, 1:], rows.target[:, : k - 1])
        assert (np.asarray(acceptance.standard(even, jnp.ones((n, k - 1)))) == 0).all()


# ---- wrong variants must fail the enumeration ----


def stops_at_the_first_failure(rows):
    """Token-by-token thresholds under the block rule's name."""
    return jnp.exp(jnp.minimum(rows.log_ratio, 0.0))


def without_the_product(rows):
    """Thresholds from each draft's own ratio only."""
    own = jnp.minimum(rows.log_ratio, 0.0)
    left = jnp.sum(
        jnp.maximum(
            jnp.exp(own[:, :-1, None] + rows.target[:, 1:-1]) - jnp.exp(rows.draft[:, 1:]), 0
        ),
        -1,
    )
    ahead = left / (left + 1 - jnp.exp(own[:, :-1]))
    return jnp.concatenate([ahead, jnp.exp(own[:, -1:])], axis=1)


@pytest.mark.parametrize("wrong", [stops_at_the_first_failure, without_the_product])
def test_wrong_block_thresholds_are_rejected(wrong, monkeypatch):
    monkeypatch.setitem(globals(), "block_thresholds", wrong)
    target, draft = tables(1, 3), tables(2, 3)
    _, joint = enumerate_rule("block", target, draft, (3, 3))
    assert 0.5 * np.abs(joint - joint_of(target, 3, 4)).sum() > 1e-4  # right: below 1e-12


def test_the_token_rules_residual_is_rejected_under_the_block_rule(monkeypatch):
    right = last_weights
    monkeypatch.setitem(
        globals(), "last_weights", lambda rows, a, *, block: right(rows, a, block=False)
    )
    target, draft = tables(1, 3), tables(2, 3)
    _, joint = enumerate_rule("block", target, draft, (3, 3))
    assert 0.5 * np.abs(joint - joint_of(target, 3, 4)).sum() > 1e-4  # right: below 1e-12
