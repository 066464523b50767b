"""Acceptance rules: worked examples, settings, filters, randomness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import acceptance, sampling
from jax_impl.acceptance import Rows, accept, block_thresholds, carried, last_weights
from jax_impl.acceptance_config import Acceptance, parse_rates
from jax_impl.config import ConfigError

T = np.array(
    [[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.4, 0.1], [0.05, 0.15, 0.3, 0.5]]
)
D = np.array([[0.2, 0.5, 0.1, 0.2], [0.5, 0.25, 0.15, 0.1], [0.1, 0.3, 0.2, 0.4]])
NOISE = np.array(
    [[0.1, -0.2, 0.3, 1.5], [0.4, 0, -0.5, 0.9], [1.2, 0.7, -0.1, 0.2], [0, 0.25, 0.6, -0.3]]
)
TOLERANCE = 1e-5  # of the six decimals in the examples


def judge(method, drafts, uniforms, *, full=True, temperature=1.0, logits=None):
    """Emitted tokens per example, and the distributions the last one was drawn from."""
    n = len(drafts)
    target = jnp.log(jnp.asarray(np.tile(T, (n, 1, 1)), jnp.float32)) if logits is None else logits
    draft = jnp.log(jnp.asarray(np.tile(D, (n, 1, 1)), jnp.float32)) if full else None
    ids, u = jnp.asarray(drafts, jnp.int32), jnp.asarray(uniforms, jnp.float32)
    heat = jnp.full(n, temperature, jnp.float32)
    tokens, count = jax.jit(accept, static_argnums=(0, 6))(
        method, target, ids, draft, heat, u, lambda row: jnp.asarray(NOISE, jnp.float32)[row]
    )
    weights = last_weights(
        Rows(jax.nn.log_softmax(target), ids, draft), count - 1, block=method.rule == "block"
    )
    emitted = [t[:c].tolist() for t, c in zip(np.asarray(tokens), np.asarray(count), strict=True)]
    assert all(
        (t[c:] == -1).all() for t, c in zip(np.asarray(tokens), np.asarray(count), strict=True)
    )
    return emitted, np.asarray(weights / jnp.sum(weights, -1, keepdims=True))


def check(examples, method, **settings):
    """`examples`: (drafts, uniforms, emitted, last distribution or row of T)."""
    emitted, last = judge(method, [e[0] for e in examples], [e[1] for e in examples], **settings)
    for (_, _, want, row), found, share in zip(examples, emitted, last, strict=True):
        assert found == want
        np.testing.assert_allclose(share, T[row] if isinstance(row, int) else row, atol=TOLERANCE)


def test_greedy_examples():
    logits = np.array([[0.1, 2, -1, 0.5], [1.5, 0.2, 1.4, -0.3], [0, 0, 3, 1], [0.3, 0.9, 0.9, -2]])
    drafts = [[1, 0, 2], [1, 2, 2], [3, 0, 2], [1, -1, 2], [-1, -1, -1]]
    want = [[1, 0, 2, 1], [1, 0], [1], [1, 0], [1]]
    logits = jnp.asarray(np.tile(logits, (5, 1, 1)), jnp.float32)
    for rule in ("standard", "block"):
        for full in (True, False):
            found, _ = judge(
                Acceptance(rule),
                drafts,
                np.full((5, 3), 0.5),
                full=full,
                temperature=0.0,
                logits=logits,
            )
            assert found == want


def test_standard_examples():
    check(
        [
            ([1, 0, 2], [0.55, 0.15, 0.99], [1, 0, 2, 2], 3),
            ([1, 0, 2], [0.55, 0.25, 0.99], [1, 1], [0, 0.777778, 0, 0.222222]),
            ([1, 0, 2], [0.65, 0.01, 0.01], [0], [0.666667, 0, 0.333333, 0]),
            ([0, 3, -1], [0.99, 0.99, 0.01], [0, 3, 0], 2),
            ([3, 1, 3], [0.45, 0.95, 0.30], [3, 1, 0], [0.428571, 0, 0.571429, 0]),
            ([-1, 0, 2], [0.01, 0.01, 0.01], [3], 0),
        ],
        Acceptance("standard", "probabilistic"),
    )
    check(
        [
            ([0, 1, 2], [0.35, 0.55, 0.38], [0, 1, 2, 2], 3),
            ([0, 1, 2], [0.35, 0.65, 0.10], [0, 3], [0.25, 0, 0.25, 0.5]),
            ([3, 1, 2], [0.20, 0.10, 0.10], [0], [0.444444, 0.333333, 0.222222, 0]),
        ],
        Acceptance("standard"),
        full=False,
    )


def test_block_examples():
    check(
        [
            ([1, 0, 2], [0.2, 0.5, 0.2], [1, 0, 2, 2], 3),
            ([1, 0, 2], [0.2, 0.5, 0.3], [1, 1], [0, 0.846154, 0, 0.153846]),
            ([1, 0, 2], [0.3, 0.1, 0.5], [0], [0.666667, 0, 0.333333, 0]),
            ([0, 1, 2], [0.999, 0.999, 0.999], [0, 1, 2, 2], 3),
            ([2, 1, 3], [0.9, 0.9, 0.5], [2, 1, 0], [0.428571, 0, 0.571429, 0]),
            ([3, 0, 2], [0.99, 0.99, 0.15], [3, 0, 2, 2], 3),
            ([1, 1, -1], [0.1, 0.55, 0.01], [1, 1, 0], 2),
            ([1, 1, -1], [0.95, 0.65, 0.01], [1, 1, 0], 2),
        ],
        Acceptance("block", "probabilistic"),
    )
    check(
        [
            ([0, 1, 2], [0.25, 0.20, 0.09], [0, 1, 2, 2], 3),
            ([0, 1, 2], [0.20, 0.20, 0.50], [0, 3], [0.25, 0, 0.25, 0.5]),
            ([0, 1, 2], [0.25, 0.20, 0.50], [3], [0, 0.5, 0.333333, 0.166667]),
        ],
        Acceptance("block"),
        full=False,
    )


@pytest.mark.parametrize(
    ("drafts", "full", "c", "h"),
    [
        ([1, 0, 2], True, [0.6, 0.12, 0.24], [0.245283, 0, 0.24]),
        ([0, 1, 2], True, [1, 1, 1], [1, 1, 1]),
        ([2, 1, 3], True, [1, 1, 0.25], [1, 1, 0.25]),
        ([3, 0, 2], True, [0.5, 0.1, 0.2], [0.090909, 0, 0.2]),
        ([1, 1, -1], True, [0.6, 1, None], [0.245283, 1, None]),
        ([0, 1, 2], False, [0.4, 0.24, 0.096], [0.210526, 0.159292, 0.096]),
    ],
)
def test_block_thresholds(drafts, full, c, h):
    rows = Rows(jnp.log(T)[None], jnp.array([drafts]), jnp.log(D)[None] if full else None)
    keep = [i for i, x in enumerate(h) if x is not None]
    found = np.exp(np.asarray(carried(rows)[0, 1:]))
    np.testing.assert_allclose(found[keep], [c[i] for i in keep], atol=TOLERANCE)
    found = np.asarray(block_thresholds(rows)[0])
    np.testing.assert_allclose(found[keep], [h[i] for i in keep], atol=TOLERANCE)


def test_block_where_draft_equals_target_accepts_everything():
    same = Rows(jnp.log(T[[0, 1, 2]])[None], jnp.array([[1, 2]]), jnp.log(T[[0, 1]])[None])
    assert np.asarray(block_thresholds(same)).tolist() == [[1, 1]]


SYNTHETIC = Acceptance("synthetic", rates=(0.9, 0.72, 0.36))
SYNTHETIC_DRAFTS = [[3, 3, 3], [3, 3, 3], [1, 0, 1], [3, -1, 0]]
SYNTHETIC_UNIFORMS = [[0.89, 0.79, 0.49], [0.89, 0.81, 0.1], [0.5, 0.5, 0.7], [0.5, 0.0001, 0.1]]


def test_synthetic_examples():
    found, _ = judge(SYNTHETIC, SYNTHETIC_DRAFTS, SYNTHETIC_UNIFORMS, temperature=0.0)
    assert found == [[3, 3, 3, 3], [3, 1], [1, 0, 2], [3, 1]]
    want = {
        True: [3, [0, 0.777778, 0, 0.222222], [0.428571, 0, 0.571429, 0], 1],
        False: [3, [0.125, 0.75, 0.125, 0], [0.333333, 0, 0.533333, 0.133333], 1],
    }
    emitted = [[3, 3, 3, 2], [3, 1], [1, 0, 0], [3, 1]]
    for full, rows in want.items():
        examples = zip(SYNTHETIC_DRAFTS, SYNTHETIC_UNIFORMS, emitted, rows, strict=True)
        check(list(examples), SYNTHETIC, full=full)


def test_an_empty_residual_falls_back_to_the_target():
    rows = Rows(jnp.log(T[[0, 1]])[None], jnp.array([[2]]), jnp.log(T[[0]])[None])
    weights = np.asarray(last_weights(rows, jnp.array([0]), block=False))[0]
    np.testing.assert_allclose(weights, T[0], atol=1e-6)


@pytest.mark.parametrize(
    ("length", "drafts", "rates"),
    [
        (1.0, 3, [0, 0, 0]),
        (1.25, 3, [0.25, 0, 0]),
        (2.0, 3, [1, 0, 0]),
        (3.5, 7, [1, 1, 0.5, 0, 0, 0, 0]),
        (5.3, 7, [1, 1, 1, 1, 0.3, 0, 0]),
        (4.0, 3, [1, 1, 1]),
        (8.0, 7, [1] * 7),
        (3.78, 7, [1, 1, 0.78, 0, 0, 0, 0]),
    ],
)
def test_lengths_to_schedules(length, drafts, rates):
    method = Acceptance("synthetic", length=length)
    np.testing.assert_allclose(method.schedule(drafts), rates, atol=1e-12)
    assert np.isclose(1 + sum(method.schedule(drafts)), length)


def test_rates_to_conditional_rates_and_the_label():
    np.testing.assert_allclose(SYNTHETIC.conditional(3), [0.9, 0.8, 0.5])
    found = Acceptance("synthetic", length=4.0).describe(7)
    assert found["label"] == "synthetic acceptance"
    assert found["acceptance_length"] == 4.0
    assert f"{found['draft_acceptance_rate']:.6f}" == "0.428571"
    assert found["schedule_kind"] == "minimum variance"
    assert "label" not in Acceptance("block").describe(7)


@pytest.mark.parametrize(
    ("settings", "drafts", "message"),
    [
        ({"rule": "synthetic", "length": 0.5}, 7, "length: found 0.5, expected 1..8"),
        ({"rule": "synthetic", "length": 9}, 7, "length: found 9, expected 1..8"),
        ({"rule": "synthetic", "length": float("nan")}, 7, "length: found nan"),
        ({"rule": "synthetic"}, 7, "rule 'synthetic': found neither, expected length or rates"),
        ({"rule": "synthetic", "length": 2.0, "rates": (1.0,)}, 1, "found length and rates"),
        ({"length": 2.0}, 7, "expected rule 'synthetic'"),
        ({"rule": "synthetic", "rates": (0.5, 0.6)}, 2, "not rising"),
        ({"rule": "synthetic", "rates": (0.5,)}, 2, "expected 2 numbers"),
        ({"rule": "fly"}, 3, "rule: found 'fly'"),
        ({"drafting": "beam"}, 3, "drafting: found 'beam'"),
        ({}, 8, "drafts: found 8, expected 1..7"),
        ({}, 0, "drafts: found 0, expected 1..7"),
    ],
)
def test_refused_settings(settings, drafts, message):
    with pytest.raises(ConfigError, match=message):
        Acceptance(**settings).require(drafts)


def test_rates_of_the_command_line_are_parsed_strictly():
    assert parse_rates("0.9,0.72,.36,1,1e-3") == (0.9, 0.72, 0.36, 1.0, 0.001)
    assert parse_rates("-1") == (-1.0,)  # out of range is for `problems`
    for wrong in ("", "1,", ",1", "1, 0.5", "1 0.5", "nan", "inf", "1_0", "0x1", "[1]", "0.5;0.1",
                  "\u0661,0.5", "1e\u0662"):  # fmt: skip
        with pytest.raises(ValueError, match="expected decimal numbers with commas between"):
            parse_rates(wrong)


def test_problems_name_what_the_user_typed():
    wrong = Acceptance("synthetic", "beam", length=9.0, rates=(0.5,))  # type: ignore[arg-type]
    found = wrong.problems(8, "--{}".format)
    starts = ["--drafts", "--drafting", "--rule 'synthetic'", "--length", "--rates"]
    assert [p.partition(":")[0] for p in found] == starts
    assert "found --length and --rates, expected --length or --rates" in found[2]


def test_six_of_eight_tokens_every_step():
    method = Acceptance("synthetic", length=6)
    n = 4096
    u = sampling.acceptance_uniforms(
        jnp.arange(n, dtype=jnp.uint32), jnp.full(n, 5), 7, salted=False
    )
    rows = Rows(jnp.zeros((n, 8, 2)), jnp.zeros((n, 7), jnp.int32), None)
    assert (np.asarray(acceptance.synthetic(rows, u, method.conditional(7))) == 5).all()


# ---- filters ----


def reference_filter(logits, temperature, top_k, top_p, min_p):
    """Temperature, min-p, top-k, top-p on one row, in NumPy."""
    x = logits / temperature
    p = np.exp(x - x.max())
    keep = p >= min_p * p.max()
    order = np.argsort(-np.where(keep, x, -np.inf), kind="stable")
    if top_k:
        keep &= np.isin(np.arange(len(x)), order[:top_k])
    share = np.where(keep, p, 0) / p[keep].sum()
    total = 0.0
    for i in order:
        keep[i] &= total < top_p
        total += share[i]
    return np.where(keep, p, 0) / p[keep].sum()


def test_filters_against_numpy():
    rng = np.random.default_rng(7)
    settings = [
        (t, k, p, m)
        for t in (0.3, 1.0, 2.5)
        for k, p, m in [
            (0, 1, 0),
            (3, 1, 0),
            (0, 0.6, 0),
            (0, 1, 0.2),
            (5, 0.7, 0.05),
            (1, 1, 0),
            (0, 1e-9, 0),
        ]
    ]
    logits = rng.normal(size=(len(settings), 2, 12)) * 2
    heat, k, p, m = (np.array(column) for column in zip(*settings, strict=True))
    with jax.enable_x64(True):
        filters = sampling.Filters(jnp.asarray(k), jnp.asarray(p), jnp.asarray(m))
        found = np.exp(sampling.log_probabilities(jnp.asarray(logits), jnp.asarray(heat), filters))
    for i, row in enumerate(settings):
        for j in range(2):
            np.testing.assert_allclose(
                found[i, j], reference_filter(logits[i, j], *row), atol=1e-12
            )


def test_filters_of_float32_rows_leave_unfiltered_rows_alone():
    logits = jnp.asarray(np.random.default_rng(8).normal(size=(2, 1, 1000)), jnp.float32)
    filters = sampling.Filters(jnp.array([0, 4]), jnp.array([1.0, 1.0]), jnp.array([0.0, 0.0]))
    found = sampling.log_probabilities(logits, jnp.ones(2), filters)
    plain = sampling.log_probabilities(logits, jnp.ones(2))
    assert np.array_equal(found[0], plain[0])
    assert np.isfinite(found[1]).sum() == 4


def test_a_draft_outside_the_filtered_set_is_rejected():
    filters = sampling.Filters(jnp.array([2]), jnp.array([1.0]), jnp.array([0.0]))
    noise = lambda row: jnp.zeros((1, 4))  # noqa: E731
    tokens, count = accept(
        Acceptance("standard", "probabilistic"), jnp.log(T)[None], jnp.array([[3, 0, 0]]),
        jnp.log(D)[None], jnp.ones(1), jnp.full((1, 3), 1e-6), noise, filters,
    )  # fmt: skip
    assert np.asarray(count).tolist() == [1]
    assert int(tokens[0, 0]) in (0, 1)


# ---- randomness ----


def first_tokens(draft_noise, rule, seeds=60_000):
    """Chi-square of the first emitted token of `seeds` requests, everything drawn as in a step."""
    drafts, v = 2, 6
    rng = np.random.default_rng(5)
    target, draft = (rng.dirichlet(np.ones(v), drafts + 1) for _ in range(2))
    seed, position = jnp.arange(seeds, dtype=jnp.uint32), jnp.full(seeds, 17)
    q = jnp.log(jnp.asarray(np.tile(draft[:drafts], (seeds, 1, 1)), jnp.float32))
    p = jnp.log(jnp.asarray(np.tile(target, (seeds, 1, 1)), jnp.float32))
    heat = jnp.ones(seeds)
    ids = [
        sampling.pick(q[:, k], heat, draft_noise(seed, position + k, k, v)) for k in range(drafts)
    ]
    u = sampling.acceptance_uniforms(seed, position, drafts, salted=rule == "block")
    tokens, _ = accept(
        Acceptance(rule, "probabilistic"), p, jnp.stack(ids, 1), q, heat, u,
        lambda row: sampling.token_noise(seed, position + row + 1, v),
    )  # fmt: skip
    counts, want = np.bincount(np.asarray(tokens[:, 0]), minlength=v), seeds * target[0]
    return float(((counts - want) ** 2 / want).sum())


CHI2 = 25.7  # 5 degrees of freedom, exceeded by chance once in 10,000


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_emitted_tokens_follow_the_target_with_the_steps_own_noise(rule):
    assert first_tokens(sampling.draft_noise, rule) < CHI2


def test_drafting_with_the_targets_noise_is_rejected():
    shared = lambda seed, position, number, width: sampling.token_noise(seed, position + 1, width)  # noqa: E731
    assert first_tokens(shared, "standard") > 2 * CHI2


def test_uniforms_depend_on_seed_and_position_alone():
    seed, position = jnp.array([3, 9, 3], jnp.uint32), jnp.array([5, 5, 6])
    u = np.asarray(sampling.acceptance_uniforms(seed, position, 4, salted=False))
    assert np.array_equal(u[0, 1:], u[2, :-1])  # the same positions
    order = jnp.array([2, 0, 1])
    again = np.asarray(sampling.acceptance_uniforms(seed[order], position[order], 4, salted=False))
    assert np.array_equal(again, u[np.asarray(order)])
    salted = np.asarray(sampling.acceptance_uniforms(seed, position, 4, salted=True))
    assert not np.isin(salted, u).any()
    assert not np.isin(salted[0, 1:], salted[2, :-1]).any()  # the same positions, other numbers
    assert (u > 0).all() and (u < 1).all()
