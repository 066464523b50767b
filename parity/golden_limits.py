"""Limits of a recorded model that follow from its folder: from its bf16 run, from recorded gaps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from parity import metrics
from parity.driver import Arrays
from parity.folders import Folder
from parity.tolerances import BF16, F32, Tolerance, tolerance
from parity.verdict import Verdict, Where, failed, judge

STREAM_STAT = "streams_bf16_vs_f64_rms"  # of golden.json, under `stats`
Whole = tuple[np.ndarray, Arrays]  # logits [T, V] and stage outputs of the whole recorded sequence


def stream_limit(folder: Folder, dtype: str) -> Tolerance:
    """Limit for the streams of a chained model: in bf16 twice what the folder recorded.

    Never above the limit of the table, which also holds where nothing was recorded.
    """
    general = tolerance("stream", dtype)
    stats = folder.meta.get("stats")
    found = stats.get(STREAM_STAT) if dtype == BF16 and isinstance(stats, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return general
    if not 0 < 2 * found < general.limit:
        return general
    reason = (
        f"twice what the published bf16 run shows in the last layer of {folder.name} ({found:g}, "
        f"{STREAM_STAT} in golden.json); the injected comparison is the sharp one"
    )
    return dataclasses.replace(general, limit=2 * found, reason=reason)


def logit_noise(g: Arrays) -> float | None:
    """What bf16 did to a logit of the recorded run, in rows in which no expert was exchanged.

    The rms distance to float64 of the median row: the few rows with other experts are off by ten
    times as much and do not move it.
    """
    if "logits_bf16" not in g:
        return None
    error = np.asarray(g["logits_bf16"], np.float64) - np.asarray(g["logits_f64"], np.float64)
    return float(np.sqrt(np.median((error**2).mean(-1))))


def greedy_verdict(
    at: Where, quantity: str, ids: np.ndarray, want: np.ndarray, found: metrics.Metrics,
    g: Arrays, whole: Callable[[], Whole],
) -> Verdict:  # fmt: skip
    """Ids are right up to the first place where the recorded margin allows another choice.

    In bf16 the exact logit of another id must be near that of the recorded one, and they must reach
    as far as the recorded bf16 run did. A run that leaves the text earlier has to have a reason
    that the recording knows (`explanation`), and fails without one; so does one that just ends.

    Args:
        at: whose ids they are.
        quantity: name of the verdict.
        ids: ours [n].
        want: recorded [n].
        found: where they part, see `metrics.first_divergence`.
        g: the recorded tensors; without `bf16_greedy_ids` the margin alone decides.
        whole: our run of the whole recorded sequence, asked for only where it matters.
    """
    limit, note = tolerance("greedy", at.dtype), f"{found['equal_prefix']} of {len(want)} equal"
    found = {"margin": 0.0} | found
    if at.dtype != F32 and "bf16_greedy_ids" in g:
        reach = metrics.first_divergence(np.asarray(g["bf16_greedy_ids"]), want)["equal_prefix"]
        found["recorded_bf16_prefix"] = reach
        note += f", the recorded bf16 run reached {reach}"
        below = deficit(g, found)
        if below is not None:
            found["margin"] = below
        if found["equal_prefix"] < reach:
            known = explanation(g, found, whole)
            note += f"; {known or 'nothing recorded explains that'}"
            if not known:
                found["margin"] = math.inf
    if "got_id" not in found and found["equal_prefix"] < len(want):
        found["margin"], note = math.inf, f"{note}; found no further id"
    return judge(at, quantity, found, limit, note)


def deficit(g: Arrays, found: metrics.Metrics) -> float | None:
    """How far the exact logit of the first other id is below that of the recorded one.

    None if there is no other id, or no recorded logits at its place.
    """
    row, exact = len(g["prompt_ids"]) - 1 + found["equal_prefix"], g["logits_f64"]
    if "got_id" not in found or row >= len(exact):
        return None
    return float(exact[row, found["want_id"]]) - float(exact[row, found["got_id"]])


def explanation(g: Arrays, found: metrics.Metrics, whole: Callable[[], Whole]) -> str:
    """Why a bf16 run may choose another id before the recorded bf16 run does; empty if it may not.

    Either its exact logit is below that of the recorded id by little against what bf16 did to a
    logit in the recorded run. Or our run has other experts in the row that chooses, the first of
    them on a recorded near-tie, and the whole sequence in one step chooses the same other id.
    """
    below = deficit(g, found)
    if below is None:
        return ""
    row = len(g["prompt_ids"]) - 1 + found["equal_prefix"]
    noise, factor = logit_noise(g), tolerance("greedy_noise", BF16).limit
    if noise is not None and below <= factor * noise:
        return f"its logit is {below:.3g} below, with a noise of {noise:.3g} per logit"
    if below > tolerance("greedy", BF16).limit:
        return ""
    logits, record = whole()
    if int(np.argmax(logits[row])) != found["got_id"]:
        return ""
    for name in sorted(k.split(".")[0] for k in record if k.endswith(".ids")):
        want, gap = (g.get(f"seq.{name}.router_{k}") for k in ("idx", "gap"))
        if want is None or gap is None:
            return ""  # it may be here that the experts part
        if set(record[f"{name}.ids"][row]) == set(np.asarray(want)[row]):
            continue
        near = float(gap[row]) <= tolerance("router_injected", BF16).limit
        text = f"another expert in {name} at a recorded gap of {float(gap[row]):.2g}"
        return f"{text}, its logit is {below:.3g} below" if near else ""
    return ""


def router_choice(
    at: Where, got: np.ndarray, want: np.ndarray, gap: np.ndarray | None, key: str
) -> Verdict:
    """Chosen expert sets.

    Without recorded gaps float32 has to choose the same sets, and bf16 is judged by the share of
    rows that differ.
    """
    if got.shape != want.shape:
        return failed(at, "router_idx", f"shape: found {got.shape}, expected {want.shape}")
    note = "" if gap is not None else "gaps are not recorded"
    gaps = np.full(len(want), np.inf) if gap is None else np.asarray(gap)
    if gap is None and at.dtype != "float32":
        key = "router_chained"
    found = metrics.set_flips(got, want, gaps)
    return judge(at, "router_idx", found, tolerance(key, at.dtype), note)
