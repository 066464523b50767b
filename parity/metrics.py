"""How far two arrays are apart: NumPy only, everything in float64.

Conventions: `got` is ours, `want` is the reference. Logit arrays are [rows, vocabulary], natural
logarithms. A metric never hides a value: NaN and infinities are compared as a pattern first, and
only positions that are finite on both sides enter the numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Metrics = dict[str, Any]
ELEMENT_FLOOR = 1e-4


def distance(got: np.ndarray, want: np.ndarray) -> Metrics:
    """Distances of two arrays of equal shape.

    Returns:
        `max_abs`, `max_rel` (max_abs over the largest |want|), `max_element` (largest error over
        the element's own |want| plus `ELEMENT_FLOOR` of the largest), `rel_l2`, `cos_diff` (1 -
        2<a,b> / (|a|^2 + |b|^2)), `rms` of the difference, `worst` index of the largest difference,
        `worst_got`, `worst_want`, `pattern_equal` (NaN and signed infinities at the same places),
        `exact` (equal everywhere) and `elements`.

    Raises:
        ValueError: the shapes differ.
    """
    if got.shape != want.shape:
        raise ValueError(f"shape {got.shape} cannot be compared with {want.shape}")
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    same = pattern_equal(a, b)
    both = np.isfinite(a) & np.isfinite(b)
    error = np.where(both, a - np.where(both, b, 0.0), 0.0)
    a0, b0 = np.where(both, a, 0.0), np.where(both, b, 0.0)
    size = np.abs(error)
    worst = np.unravel_index(int(size.argmax()), size.shape) if size.size else ()
    peak = float(np.abs(b0).max(initial=0.0))
    max_abs = float(size.max(initial=0.0))
    scale = np.abs(b0) + ELEMENT_FLOOR * peak
    norms = float((a0 * a0).sum() + (b0 * b0).sum())
    return {
        "max_abs": max_abs,
        "max_rel": max_abs / peak if peak else max_abs,
        "max_element": float((size / np.where(scale, scale, 1.0)).max(initial=0.0)),
        "rel_l2": _ratio(float(np.sqrt((error**2).sum())), float(np.sqrt((b0**2).sum()))),
        "cos_diff": float((error**2).sum()) / norms if norms else 0.0,
        "rms": float(np.sqrt((error**2).mean())) if error.size else 0.0,
        "worst": [int(i) for i in worst],
        "worst_got": float(a[worst]) if size.size else None,
        "worst_want": float(b[worst]) if size.size else None,
        "pattern_equal": same,
        "exact": bool(same and max_abs == 0.0),
        "elements": int(size.size),
    }


def _ratio(a: float, b: float) -> float:
    return a / b if b else a


def pattern_equal(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether NaN, +inf and -inf stand at the same places."""
    return all(
        bool(np.array_equal(test(got), test(want))) for test in (np.isnan, np.isposinf, np.isneginf)
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of rows [..., vocabulary], float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl_rows(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL(reference || ours) in nats for every row of logits [rows, vocabulary]."""
    p, q = log_softmax(want), log_softmax(got)
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)


def margin_rows(logits: np.ndarray) -> np.ndarray:
    """Best minus second best logit of every row."""
    best = np.partition(np.asarray(logits, np.float64), -2, axis=-1)[..., -2:]
    return best[..., 1] - best[..., 0]


def top_k_overlap(got: np.ndarray, want: np.ndarray, k: int = 10) -> float:
    """Mean share of the reference's k best ids that are among our k best."""
    k = min(k, want.shape[-1])
    a, b = (
        np.argsort(-np.asarray(x, np.float64), axis=-1, kind="stable")[:, :k] for x in (got, want)
    )
    return float(np.mean([len(np.intersect1d(x, y)) / k for x, y in zip(a, b, strict=True)]))


def logit_distance(got: np.ndarray, want: np.ndarray) -> Metrics:
    """`distance` of logits [rows, vocabulary] and what matters for the choice of a token.

    Returns:
        Also `kl_mean`, `kl_median`, `kl_max`, `top1` (share of equal argmax), `top10` (overlap),
        `flip_row` (first row with another argmax, None if there is none), `flip_margin` (the
        reference's margin there) and `flip_margin_max` (largest reference margin of such a row).
    """
    found = distance(got, want)
    if not found["pattern_equal"]:
        return found
    kl = kl_rows(want, got)
    a, b = np.argmax(got, -1), np.argmax(want, -1)
    flips = np.flatnonzero(a != b)
    margins = margin_rows(want)
    return found | {
        "kl_mean": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        "kl_max": float(kl.max()),
        "top1": float((a == b).mean()),
        "top10": top_k_overlap(got, want),
        "flip_row": int(flips[0]) if flips.size else None,
        "flip_margin": float(margins[flips[0]]) if flips.size else None,
        "flip_margin_max": float(margins[flips].max()) if flips.size else 0.0,
    }


def first_divergence(
    got: np.ndarray, want: np.ndarray, margins: np.ndarray | None = None
) -> Metrics:
    """Where two id sequences part.

    Args:
        got: ids [n].
        want: ids [n].
        margins: the reference's margin at each id, if known.

    Returns:
        `equal_prefix`, `length`, and at the first difference `got_id`, `want_id`, `margin`.
    """
    n = min(len(got), len(want))
    differing = np.flatnonzero(np.asarray(got[:n]) != np.asarray(want[:n]))
    first = int(differing[0]) if differing.size else n
    found: Metrics = {"equal_prefix": first, "length": len(want)}
    if first < n:
        found |= {"got_id": int(got[first]), "want_id": int(want[first])}
        if margins is not None:
            found["margin"] = float(margins[first])
    return found


def set_flips(got: np.ndarray, want: np.ndarray, gap: np.ndarray) -> Metrics:
    """Rows whose chosen expert sets differ.

    Args:
        got: ids [rows, k] in any order.
        want: ids [rows, k] in any order.
        gap: score distance between the last chosen and the first rejected expert, [rows].

    Returns:
        `rows`, `flipped` (count), `flipped_share`, `flip_gap_max` (largest gap of a flipped row),
        `gap_min` and `flip_rows` (the first ten).
    """
    differ = (np.sort(got, -1) != np.sort(want, -1)).any(-1)
    rows = np.flatnonzero(differ)
    return {
        "rows": len(differ),
        "flipped": len(rows),
        "flipped_share": float(differ.mean()) if len(differ) else 0.0,
        "flip_gap_max": float(gap[rows].max()) if rows.size else 0.0,
        "gap_min": float(gap.min()) if len(gap) else None,
        "flip_rows": [int(r) for r in rows[:10]],
    }
