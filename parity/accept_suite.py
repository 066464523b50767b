"""The acceptance rules: worked examples, exact enumeration, forced lengths, the same uniforms.

`jax_impl` and `torch_ref` answer the same questions; where both decide random steps, they must
decide them equally. `chi_square` adds whole sampled runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from parity import metrics
from parity.accept_examples import BLOCK_NUMBERS, GIVEN, GROUPS, LENGTHS, SCHEDULES, D, Group, T
from parity.accept_sides import SIDES, Batch, JaxSide, Law, Setting, TorchSide, joint_of
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, compare, judge

Side = JaxSide | TorchSide
WHERE = Where("accept", "rules", "-", against="worked example")


def check_accept(*, runs: bool = True) -> Iterator[Verdict]:
    """Everything; without `runs` only what needs no model."""
    for name, side in SIDES.items():
        at = WHERE.at(ours=name)
        yield from check_examples(at, side)
        yield from check_enumeration(at, side)
        yield from check_forced_six(at, side)
    yield from check_equal_decisions()
    if runs:
        from parity.chi_square import check_sampled_runs

        yield from check_sampled_runs()


# ---- worked examples ----


def check_examples(where: Where, side: Side) -> Iterator[Verdict]:
    """Tokens, distributions, thresholds, schedules."""
    for group in GROUPS:
        dtype = "float32" if side.name == "jax" else "float64"  # what each computes in
        yield from _group(where.at(case=group.name, dtype=dtype), side, group, dtype)
    for name, drafts, full, carried, thresholds in BLOCK_NUMBERS:
        c, h = side.block_numbers(T, D if full else None, drafts)
        at = where.at(case=f"block {name}")
        if c is not None:
            yield compare(at, "carried products", c, np.array(carried, float), "printed")
        yield compare(at, "thresholds", h, np.array(thresholds, float), "printed")
    _, h = side.block_numbers(T[:3], T[:2], (1, 2))
    at = where.at(case="block, no denominator")
    yield compare(at, "thresholds", h, np.ones(2), "enumeration")
    for length, rates, k, unconditional, conditional in SCHEDULES:
        given = Setting("synthetic", length, rates)
        found = side.schedule(given, k)
        at = where.at(case=f"schedule of {length if rates is None else rates}, K {k}")
        yield compare(at, "rates", found[0], np.array(unconditional, float), "schedule")
        yield compare(at, "conditional", found[1], np.array(conditional, float), "schedule")


def _group(where: Where, side: Side, group: Group, dtype: str) -> Iterator[Verdict]:
    examples, n = group.examples, len(group.examples)
    tile = lambda a: np.tile(a.astype(dtype), (n, 1, 1))  # noqa: E731
    batch = Batch(
        tile(group.logits), np.array([e.drafts for e in examples]),
        tile(np.log(D)) if group.full else None, np.full(n, group.temperature),
        np.array([e.uniforms for e in examples]), tile(group.noise),
    )  # fmt: skip
    setting = Setting(group.rule, None, GIVEN if group.rule == "synthetic" else None)
    found = side.decide(setting, batch)
    wrong = [
        f"{e.id}: {got} for {list(e.tokens)}"
        for e, got in zip(examples, found.tokens, strict=True)
        if got != list(e.tokens)
    ]
    note = "; ".join(wrong) or ", ".join(e.id for e in examples)
    yield judge(where, "tokens", {"exact": not wrong}, tolerance("equal"), note)
    named = [i for i, e in enumerate(examples) if e.last is not None]
    if named and group.temperature > 0:
        rows = [examples[i].last for i in named]
        want = np.array([T[r] if isinstance(r, int) else r for r in rows])
        yield compare(where, "last distribution", found.last[named], want, "printed")


# ---- exact enumeration ----


def law_of(seed: int, size: int) -> Law:
    """A distribution per context."""

    def law(context: tuple[int, ...]) -> np.ndarray:
        key = [seed, *(t + 1 for t in context)]
        return np.random.default_rng(key).dirichlet(np.ones(size))

    return law


def check_enumeration(where: Where, side: Side) -> Iterator[Verdict]:
    """What comes out has the target's distribution; accepted counts are the known ones."""
    at = where.at(against="the target's joint distribution", dtype="float64")
    for rule in ("standard", "block"):
        for size, k in ((2, 4), (3, 3), (4, 2)):
            for point in (False, True):
                target, draft = law_of(1, size), law_of(2, size)
                _, joint = side.enumerate(rule, target, draft, k, point=point)
                case = f"{rule}, V {size}, K {k}{', one-hot' if point else ''}"
                yield _variation(at.at(case=case), joint, joint_of(target, k + 1))
        for k, want in enumerate(LENGTHS[rule], start=1):
            lengths, joint = side.enumerate(rule, lambda c: T[len(c)], lambda c: D[len(c)], k)
            case = f"{rule}, tables, K {k}"
            own = at.at(case=case)
            yield _variation(own, joint, joint_of(lambda c: T[len(c)], k + 1))
            own = own.at(against="worked example")
            yield compare(own, "accepted counts", lengths, np.array(want), "enumeration")
    for rule, mean in (("standard", Fraction(10, 9)), ("block", Fraction(11, 9))):
        p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
        lengths, joint = side.enumerate(rule, lambda c, p=p: p, lambda c, q=q: q, 2)
        own = at.at(case=f"{rule}, two tokens of two")
        yield _variation(own, joint, joint_of(lambda c, p=p: p, 3))
        own = own.at(against="worked example")
        yield compare(
            own, "mean accepted", lengths @ np.arange(3), float(mean), "enumeration",
            note=f"{mean}",
        )  # fmt: skip


def _variation(where: Where, joint: np.ndarray, want: np.ndarray) -> Verdict:
    found = metrics.distance(joint, want)
    found["variation"] = 0.5 * float(np.abs(joint - want).sum())
    return judge(where, "total variation", found, tolerance("lossless"))


# ---- forced acceptance ----


def check_forced_six(where: Where, side: Side, steps: int = 200) -> Iterator[Verdict]:
    """Length 6 with 7 drafts: every step emits six tokens, the first five being the drafts."""
    rng, k, v = np.random.default_rng(5), 7, 11
    uniforms = rng.uniform(2.0**-31, 1 - 2.0**-24, (steps, k))
    uniforms[0], uniforms[1] = 2.0**-31, 1 - 2.0**-24
    for full in (False, True):
        drafts = rng.integers(0, v, (steps, k))
        batch = Batch(
            rng.normal(size=(steps, k + 1, v)), drafts,
            rng.normal(size=(steps, k, v)) if full else None,
            np.where(np.arange(steps) % 2, 1.0, 0.0), uniforms,
            rng.gumbel(size=(steps, k + 1, v)),
        )  # fmt: skip
        tokens = side.decide(Setting("synthetic", 6.0), batch).tokens
        lengths = np.array([len(t) for t in tokens])
        case = f"synthetic length 6{', drafts with q' if full else ''}"
        at = where.at(case=case, dtype="float64")
        note = f"{steps} steps emitted {lengths.min()} to {lengths.max()} tokens"
        yield compare(at, "tokens per step", lengths, np.full(steps, 6), "equal", note=note)
        emitted = np.array([t[:5] for t in tokens])
        yield compare(at, "first five are the drafts", emitted, drafts[:, :5], "equal")


# ---- the same random steps ----


def random_batch(rule: str, *, full: bool, steps: int, seed: int = 0) -> Batch:
    """Drafts near the target, some placeholders, all temperatures, half of the rows filtered."""
    rng, k, v = np.random.default_rng([seed, full, len(rule)]), 7, 24
    logits = 2 * rng.normal(size=(steps, k + 1, v))
    small = logits[:, :k] + 0.7 * rng.normal(size=(steps, k, v))
    heat = rng.choice([0.0, 0.7, 1.0, 1.6], steps)
    spread = np.where(heat > 0, heat, 1.0)[:, None, None]
    noisy = small / spread + (rng.gumbel(size=small.shape) if full else 0.0)
    drafts = noisy.argmax(-1)
    drafts[rng.uniform(size=drafts.shape) < 0.03] = -1
    choices = [(0, 1.0, 0.0), (0, 1.0, 0.0), (9, 1.0, 0.0), (0, 0.9, 0.0), (12, 0.95, 0.02)]
    filters = [choices[i] for i in rng.integers(0, len(choices), steps)]
    return Batch(
        logits, drafts, small if full else None, heat,
        np.maximum(rng.uniform(size=(steps, k)), 2.0**-31), rng.gumbel(size=logits.shape), filters,
    )  # fmt: skip


RANDOM = tuple(
    (setting, full)
    for setting in (Setting("standard"), Setting("block"), Setting("synthetic", 4.3))
    for full in (False, True)
)


def check_equal_decisions(
    steps: int = 400, settings: tuple[tuple[Setting, bool], ...] = RANDOM
) -> Iterator[Verdict]:
    """Counts and tokens of both sides on the same logits, drafts, uniforms and noise.

    Args:
        steps: random steps per setting.
        settings: rules, each with whether drafts are judged by their distribution.
    """
    for setting, full in settings:
        batch = random_batch(setting.rule, full=full, steps=steps)
        ours, theirs = (SIDES[s].decide(setting, batch) for s in ("jax", "torch"))
        at = WHERE.at(
            case=f"random, {setting.rule}{'' if full else ', one-hot'}", dtype="float64",
            against="torch_ref, same uniforms",
        )  # fmt: skip
        counts = [np.array([len(t) for t in side.tokens]) for side in (ours, theirs)]
        histogram = np.bincount(counts[0] - 1, minlength=8).tolist()
        note = f"{steps} steps by accepted count: {histogram}"
        yield compare(at, "counts", *counts, "equal", note=note)
        wrong = [i for i, t in enumerate(ours.tokens) if t != theirs.tokens[i]]
        note = f"{len(wrong)} steps differ{f', first {wrong[0]}' if wrong else ''}"
        yield judge(at, "tokens", {"exact": not wrong}, tolerance("equal"), note)
        warm = batch.temperature > 0
        yield compare(at, "last distribution", ours.last[warm], theirs.last[warm], "same_law")
