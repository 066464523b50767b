"""The rules that judge logits of ours against a record of a serving engine.

Every function takes `where`, the record's texts or one of them, and our logits [T, V] on `fed`, all
fed by teacher forcing. See `parity.golden_vllm` for the rules in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from parity import metrics
from parity.engine_ties import near_ties
from parity.engine_truth import THREADS, Noise, Truth
from parity.records import Distribution, Record, Text
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, judge

KL_FLOOR = 1e-8  # nats; the rounding of float32 log-probabilities, which records hold
BINS = (0.5, 1.0, 2.0)  # rows by their smallest router gap, in units of its noise

Truths = dict[tuple[str, str], Truth]


# ---- tokens ----


def tokens(
    where: Where, text: Text, logits: np.ndarray, truth: Truth, noise: Noise
) -> Iterator[Verdict]:
    """Share of equal best tokens (judged for exact arithmetic), and a reason for every other."""
    at = where.at(case=f"{text.case} {text.kind}, teacher-forced")
    wanted = Wanted(len(text.prompt) - 1, text.ids)
    differ = wanted.differing(logits)
    if where.dtype == "float32":
        share = {"differing_share": len(differ) / len(text.ids), "differing": len(differ)}
        note = f"{len(text.ids) - len(differ)} of {len(text.ids)} equal"
        yield judge(at, "best token", share, tolerance("engine_tokens", where.dtype), note)
    yield explained(at, wanted, logits, truth, noise)


class Wanted(NamedTuple):
    """What the engine holds for best in consecutive rows of a text, from row `first` on."""

    first: int
    ids: np.ndarray

    def rows(self, every: np.ndarray) -> np.ndarray:
        """Those rows of [T, ...]."""
        return every[self.first : self.first + len(self.ids)]

    def differing(self, logits: np.ndarray) -> np.ndarray:
        """Which of them have another best token in [T, V]."""
        return np.flatnonzero(self.rows(logits).argmax(-1) != self.ids)


def explained(
    where: Where, wanted: Wanted, logits: np.ndarray, truth: Truth, noise: Noise
) -> Verdict:
    """Every row with another best token has a small deficit, or a near-tie that can do as much."""
    near, tie = tolerance("engine_margin"), tolerance("engine_near_tie")
    rows, ratios = wanted.rows(logits), wanted.rows(truth.gaps) / noise.gaps
    differ = wanted.differing(logits)
    reasons, deficits, left = [], [], []
    for row in differ:
        token, best = int(wanted.ids[row]), int(rows[row].argmax())
        deficit = float(rows[row, best] - rows[row, token])
        deficits.append(deficit)
        reason = f"row {row}: {deficit:.2g}"
        if not deficit <= near.limit * noise.logit:
            excuse = near_ties(truth, noise, row + wanted.first, token, best, deficit)
            reason += excuse.words
            if not excuse.enough:
                left.append(deficit)
                reason += " (UNEXPLAINED)"
        reasons.append(reason)
    share = float((ratios.min(-1) <= tie.limit).mean())
    found = {
        "deficit_over_noise": max(left, default=0.0) / noise.logit,  # of what nothing explains
        "deficits": deficits,
        "rows": [int(r) for r in differ],
        "unexplained": len(left),
        "near_tie_share": share,
        "logit_noise": noise.logit,
        "gap_noise": noise.gaps.tolist(),
    }
    note = (
        f"{len(wanted.ids) - len(differ)} of {len(wanted.ids)} equal; recorded token's deficit by "
        f"row: {'; '.join(reasons) or 'none'} (explained: up to {near.limit * noise.logit:.2f}, or "
        f"as far as a near-tie can turn it: a router's gap up to {tie.limit:g} times what bf16 "
        f"moves it by, which {share:.0%} of all rows have)"
    )
    return judge(where, "differing rows", found, near, note)


# ---- distributions ----


def kl_rows(engine: Distribution, logits: np.ndarray) -> np.ndarray:
    """KL(engine || ours) in nats of every recorded row; `logits` are [T, V].

    Where the engine lists k tokens, everything else counts as one further outcome: a lower bound
    of the full distance, zero if and only if the listed probabilities agree.
    """
    return _kl(engine, engine.logprobs, engine.rows(logits))


def _kl(engine: Distribution, want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """`want` [R, k] or [R, V] log-probabilities, `got` logits [R, V]."""
    if engine.ids is None:
        return metrics.kl_rows(want, got)
    q = np.take_along_axis(metrics.log_softmax(got), engine.ids, -1)
    p = np.asarray(want, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q)).sum(-1)
        rest_p = np.maximum(1.0 - np.exp(p).sum(-1), 0.0)
        rest_q = np.maximum(1.0 - np.exp(q).sum(-1), np.finfo(np.float64).tiny)
        rest = np.where(rest_p > 0, rest_p * (np.log(rest_p) - np.log(rest_q)), 0.0)
    return np.maximum(terms + rest, 0.0)


def _pair_kl(engine: Distribution, exact: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """The same between two of our own logits [T, V], over what the engine lists."""
    want = metrics.log_softmax(engine.rows(exact))
    if engine.ids is not None:
        want = np.take_along_axis(want, engine.ids, -1)
    return _kl(engine, want, engine.rows(draw))


def distributions(
    where: Where, text: Text, logits: np.ndarray, record: Record, truth: Truth, noise: Noise
) -> Iterator[Verdict]:
    """KL and best tokens against the engine, measured by what bf16 does to float32."""
    engine = text.distribution
    assert engine is not None
    at = where.at(case=f"{text.case} {text.kind}, log-probabilities")
    exact, kind = _reference(text, record, truth)
    kl = kl_rows(engine, logits)
    pairs = [float(np.median(_pair_kl(engine, exact, draw))) for draw in truth.draws]
    yard = float(np.median(pairs))
    groups = by_router_margin(kl, logits, engine, truth, noise)
    found = {
        "kl_ratio": float(np.median(kl)) / max(yard, KL_FLOOR),
        "kl_median": float(np.median(kl)),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "yardstick": yard,
        "yardstick_draws": pairs,
        "yardstick_threads": list(THREADS),
        "rows": len(kl),
        "listed": None if engine.ids is None else int(engine.ids.shape[1]),
        "by_router_margin": groups,
    }
    note = (
        f"to the engine {found['kl_median']:.2e}, largest {found['kl_max']:.2g}; torch_ref bf16 H "
        f"to {kind} {_draws(pairs, '.2e')}; yardstick: their median {yard:.2e}"
    )
    if engine.ids is not None:
        note += f"; over the {found['listed']} listed tokens and the rest as one"
    published = record.references.get((text.case, "bf16"))
    if text.kind == "greedy" and published is not None:
        between = float(np.median(kl_rows(engine, published)))
        note += f"; published bf16 to the engine {between:.2e}"
    note += f"; by router margin: {'; '.join(map(_words, groups))}"
    yield judge(at, "median KL", found, tolerance("engine_kl", where.dtype), note)
    yield explained(at, Wanted(engine.first, engine.best()), logits, truth, noise)
    if where.dtype == "float32" and kind != OWN:
        found = metrics.logit_distance(logits, exact)  # the same numbers as the published code
        yield judge(
            at.at(against="published float32"), "median KL", found,
            tolerance("engine_reference", where.dtype), f"largest {found['kl_max']:.1e}",
        )  # fmt: skip


OWN = "torch_ref float32"


def _draws(values: Iterable[float], form: str) -> str:
    """The distances of all draws by what tells them apart."""
    words = (f"{v:{form}} on {n}" for n, v in zip(THREADS, values, strict=True))
    return ", ".join(words) + " thread(s)"


def _reference(text: Text, record: Record, truth: Truth) -> tuple[np.ndarray, str]:
    """The float32 side of the yardstick, [T, V]: recorded, or else that of `torch_ref`."""
    recorded = record.references.get((text.case, "f32")) if text.kind == "greedy" else None
    return (truth.logits, OWN) if recorded is None else (recorded, "the recorded float32")


def by_router_margin(
    kl: np.ndarray, logits: np.ndarray, engine: Distribution, truth: Truth, noise: Noise
) -> list[dict[str, object]]:
    """Recorded rows, grouped by how near their nearest router choice is.

    The unit is what bf16 moves the gap of that layer's router by, so rows of the first groups may
    have turned, and those of the last have not.
    """
    nearest = (engine.rows(truth.gaps) / noise.gaps).min(-1)
    equal = engine.rows(logits).argmax(-1) == engine.best()
    place, found = np.digitize(nearest, BINS), []
    for i, (low, high) in enumerate(zip((0.0, *BINS), (*BINS, None), strict=True)):
        rows = place == i
        if rows.any():
            found.append(
                {
                    "from": low, "to": high,
                    "rows": int(rows.sum()), "equal": int(equal[rows].sum()),
                    "kl_median": float(np.median(kl[rows])), "kl_max": float(kl[rows].max()),
                }
            )  # fmt: skip
    return found


def _words(group: dict[str, object]) -> str:
    reach = f"{group['from']:g} to {group['to']:g}" if group["to"] else f"above {group['from']:g}"
    return (
        f"{reach} times its noise: {group['rows']} rows, median {group['kl_median']:.1e}, "
        f"largest {group['kl_max']:.2g}, {group['equal']} equal"
    )


def best_tokens(
    where: Where, record: Record, own: dict[tuple[str, str], np.ndarray], truths: Truths
) -> Iterator[Verdict]:
    """Equal best tokens over all recorded rows; a case alone has too few of them."""
    mine, exact_equal, rows = 0, 0, 0
    pair: list[list[int]] = []  # equal best tokens of each draw with the float32 side, by text
    for text in record.texts:
        engine = text.distribution
        if engine is None or text.key not in own:
            continue
        truth = truths[text.key]
        exact, _ = _reference(text, record, truth)
        best, wanted = engine.rows(exact).argmax(-1), engine.best()
        mine += int((engine.rows(own[text.key]).argmax(-1) == wanted).sum())
        exact_equal += int((best == wanted).sum())
        pair.append([int((engine.rows(d).argmax(-1) == best).sum()) for d in truth.draws])
        rows += len(wanted)
    if not rows:
        return
    counts = np.sum(pair, axis=0)
    found = {
        "top1_below": float(np.median(counts)) / rows - mine / rows,
        "rows": rows,
        "equal": mine,
        "pair_equal": counts.tolist(),
        "pair_threads": list(THREADS),
        "yardstick": float(np.median(counts)),
        "exact_equal": exact_equal,
    }
    note = (
        f"{mine} of {rows} equal to the engine's; torch_ref bf16 H to float32 "
        f"{_draws(counts, 'd')}; yardstick: their median {found['yardstick']:g}; float32 to the "
        f"engine {exact_equal}"
    )
    at = where.at(case="log-probabilities")
    yield judge(at, "equal best tokens", found, tolerance("engine_top1", where.dtype), note)
