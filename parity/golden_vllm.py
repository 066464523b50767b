"""Recorded folders of kind `vllm`: tokens and log-probabilities of the serving engine.

Two correct bf16 programs do not agree in every token, and the engine does not agree with itself. So
the recorded text is fed (teacher forcing) and judged by these rules:

- exact arithmetic (float32): of every recorded text at most a tenth of the rows has another best
  token;
- profile V: the median KL to the engine is at most 1.5 times the distance between `torch_ref` in
  bf16 (H) and the recorded float32 reference on the same rows, and equal best tokens are at most 3
  points rarer than between these two;
- every row with another best token is explained: the recorded token's logit is near the best one,
  or in that row a router's choice hangs on a near-tie, which the report names, with what exact
  arithmetic makes of the other choice. What is near is measured: see `engine_truth.Noise`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jax_impl.step import build_step
from parity import metrics
from parity.driver import Driver, Session, step_inputs
from parity.engine_truth import Noise, Text, Truth, measure, torch_truths
from parity.folders import Folder
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, judge, not_run

RUNS = (("float32", "V"), ("bfloat16", "V"))
TEXTS = ("greedy", "dspark")  # recorded under `<name>_ids`
_REFERENCES = ("reference_f32_logprobs", "reference_bf16_logprobs")

Arrays = dict[str, np.ndarray]
Truths = dict[tuple[str, str], Truth]


def check_vllm(folder: Folder, runs: tuple[tuple[str, str], ...] = RUNS) -> Iterator[Verdict]:
    """Compares a folder under the given (dtype, profile) runs; makes its checkpoint first."""
    where = Where("vllm", folder.name, "-", against="recorded engine")
    made = folder.meta.get("checkpoint")
    texts = read_texts(folder.tensors)
    if not (isinstance(made, dict) and {"preset", "seed"} <= set(made)):
        yield not_run(where, "all", "golden.json names no checkpoint with preset and seed")
        return
    if not texts:
        yield not_run(where, "all", "golden.safetensors has no caseN.prompt_ids with texts")
        return
    from jax_impl.make_tiny import PRESETS, make_checkpoint

    if made["preset"] not in PRESETS:
        yield not_run(where, "all", f"unknown preset {made['preset']!r}; known: {sorted(PRESETS)}")
        return
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        directory = Path(scratch) / "made"
        make_checkpoint(directory, made["preset"], int(made["seed"]))
        truth = torch_truths(
            directory / "target", texts, lambda t: _has_distributions(t, folder.tensors)
        )
        noise = measure(list(truth.values()))
        longest = max(len(t.fed) for t in texts)
        sides = [("jax", *run) for run in runs] + [("torch", "float32", "V")]
        for side, dtype, profile in sides:
            at = where.at(dtype=dtype, profile=profile, ours=side)
            if side == "jax":
                driver = Driver.open(directory / "target", dtype, profile, longest)
                own = [_forced(driver, t.fed) for t in texts]
            else:
                own = [truth[t.case, t.kind].logits for t in texts]
            for text, logits in zip(texts, own, strict=True):
                yield from _tokens(at, text, logits, truth[text.case, text.kind], noise)
            for text, logits in zip(texts, own, strict=True):
                if text.kind == "greedy":
                    yield from _distributions(at, text, logits, folder.tensors, truth)
            yield from _best_tokens(at, texts, own, folder.tensors, truth)


def _has_distributions(text: Text, tensors: Arrays) -> bool:
    return text.kind == "greedy" and f"{text.case}.vllm_logprobs" in tensors


def read_texts(tensors: Arrays) -> list[Text]:
    """All recorded texts of all cases."""
    names = sorted({f[0] for n in tensors if (f := re.match(r"case\d+(?=\.)", n))})
    pairs = [(c, kind) for c in names for kind in TEXTS]
    return [
        Text(c, kind, *(np.asarray(tensors[f"{c}.{n}_ids"]) for n in ("prompt", kind)))
        for c, kind in pairs
        if f"{c}.prompt_ids" in tensors and f"{c}.{kind}_ids" in tensors
    ]


def _forced(driver: Driver, ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one step of fixed width, so that all texts share one program."""
    session = Session(driver)
    sequence = session.sequence(slot=2)
    inputs = step_inputs([(sequence, ids)], driver.longest, len(sequence.pages))
    _, out, _ = build_step(driver.static, rows="all")(driver.weights, session.cache, inputs)
    return np.asarray(out.logits[0], np.float64)[: len(ids)]


# ---- tokens ----


def _tokens(
    where: Where, text: Text, logits: np.ndarray, truth: Truth, noise: Noise
) -> Iterator[Verdict]:
    """Share of equal best tokens (judged for exact arithmetic), and a reason for every other."""
    at = where.at(case=f"{text.case} {text.kind}, teacher-forced")
    differ = np.flatnonzero(np.argmax(text.judged(logits), -1) != text.ids)
    if where.dtype == "float32":
        share = {"differing_share": len(differ) / len(text.ids), "differing": len(differ)}
        note = f"{len(text.ids) - len(differ)} of {len(text.ids)} equal"
        yield judge(at, "best token", share, tolerance("engine_tokens", where.dtype), note)
    yield _explained(at, text, logits, differ, truth, noise)


def _explained(
    where: Where, text: Text, logits: np.ndarray, differ: np.ndarray, truth: Truth, noise: Noise
) -> Verdict:
    """Every row with another best token has a small deficit or a near-tie."""
    near, tie = tolerance("engine_margin"), tolerance("engine_near_tie")
    rows, ratios = text.judged(logits), text.judged(truth.gaps) / noise.gaps
    reasons, deficits, left = [], [], []
    for row in differ:
        deficit = float(rows[row].max() - rows[row, text.ids[row]])
        deficits.append(deficit)
        reason = f"row {row}: {deficit:.2g}"
        if deficit > near.limit * noise.logit:
            ties = np.flatnonzero(ratios[row] <= tie.limit).tolist()
            reason += "".join(_near_tie(text, truth, noise, row, place) for place in ties)
            if not len(ties):
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
        f"{len(text.ids) - len(differ)} of {len(text.ids)} equal; recorded token's deficit by "
        f"row: {'; '.join(reasons) or 'none'} (explained: up to {near.limit * noise.logit:.2f}, or "
        f"a router's gap up to {tie.limit:g} times what bf16 moves it by, which {share:.0%} of all "
        "rows have)"
    )
    return judge(where, "differing rows", found, near, note)


def _near_tie(text: Text, truth: Truth, noise: Noise, row: int, place: int) -> str:
    """Names it, and the recorded token's deficit if exact arithmetic had decided otherwise."""
    at = row + len(text.prompt) - 1
    gap = truth.gaps[at, place]
    words = f", near-tie in layer {truth.layers[place]} (gap {gap:.1e}, "
    words += f"{gap / noise.gaps[place]:.2f} of its noise"
    if truth.other_choice is not None:
        other = truth.other_choice(at, place)
        words += f"; decided otherwise: {other.max() - other[text.ids[row]]:.2g}"
    return words + ")"


# ---- distributions ----


def _distributions(
    where: Where, text: Text, logits: np.ndarray, tensors: Arrays, truth: Truths
) -> Iterator[Verdict]:
    """KL and best tokens against the engine, measured by what published bf16 does to f32."""
    at = where.at(case=f"{text.case} log-probabilities")
    engine = tensors.get(f"{text.case}.vllm_logprobs")
    if engine is None:
        yield not_run(at, "kl", f"golden.safetensors lacks {text.case}.vllm_logprobs")
        return
    exact, kind = _reference(text, tensors, truth)
    if not len(engine) == len(exact) == len(logits):
        yield not_run(at, "kl", f"{len(engine)} recorded rows for {len(logits)} of the text")
        return
    own = metrics.logit_distance(logits, np.asarray(engine, np.float64))
    draws = truth[text.case, text.kind].draws
    pairs = [metrics.logit_distance(draw, exact) for draw in draws]
    yard = float(np.median([p["kl_median"] for p in pairs]))
    found = own | {"kl_ratio": own["kl_median"] / yard, "yardstick": yard}
    found |= {"yardstick_draws": [p["kl_median"] for p in pairs]}
    note = (
        f"to the engine {own['kl_median']:.2e}, largest {own['kl_max']:.2g}; torch_ref bf16 H to "
        f"{kind} " + ", ".join(f"{p['kl_median']:.2e}" for p in pairs)
    )
    published = tensors.get(f"{text.case}.reference_bf16_logprobs")
    if published is not None and len(published) == len(engine):
        between = metrics.logit_distance(
            np.asarray(published, np.float64), np.asarray(engine, np.float64)
        )
        note += f"; published bf16 to the engine {between['kl_median']:.2e}"
    yield judge(at, "median KL", found, tolerance("engine_kl", where.dtype), note)
    if where.dtype == "float32" and f"{text.case}.{_REFERENCES[0]}" in tensors:
        found = metrics.logit_distance(logits, exact)  # the same numbers as the published code
        yield judge(
            at.at(against="published float32"), "median KL", found,
            tolerance("engine_reference", where.dtype), f"largest {found['kl_max']:.1e}",
        )  # fmt: skip


def _reference(text: Text, tensors: Arrays, truth: Truths) -> tuple[np.ndarray, str]:
    """The float32 side of the yardstick, [T, V]: recorded, or else that of `torch_ref`."""
    recorded = tensors.get(f"{text.case}.{_REFERENCES[0]}")
    if recorded is None:
        return truth[text.case, text.kind].logits, "torch_ref float32"
    return np.asarray(recorded, np.float64), "the recorded float32"


def _best_tokens(
    where: Where, texts: list[Text], own: list[np.ndarray], tensors: Arrays, truth: Truths
) -> Iterator[Verdict]:
    """Equal best tokens over all recorded rows; a case alone has too few of them."""
    mine, exact_equal, rows = 0, 0, 0
    pair: list[list[int]] = []  # equal best tokens of each draw with the float32 side, by text
    for text, logits in zip(texts, own, strict=True):
        engine = tensors.get(f"{text.case}.vllm_logprobs")
        if not _has_distributions(text, tensors) or engine is None or len(engine) != len(logits):
            continue  # said by `_distributions`
        exact, _ = _reference(text, tensors, truth)
        if len(exact) != len(logits):
            continue
        best, wanted = exact.argmax(-1), engine.argmax(-1)
        mine += int((logits.argmax(-1) == wanted).sum())
        exact_equal += int((best == wanted).sum())
        draws = truth[text.case, text.kind].draws
        pair.append([int((d.argmax(-1) == best).sum()) for d in draws])
        rows += len(engine)
    if not rows:
        return
    counts = np.sum(pair, axis=0)
    found = {
        "top1_below": float(np.median(counts)) / rows - mine / rows,
        "rows": rows,
        "equal": mine,
        "pair_equal": counts.tolist(),
        "exact_equal": exact_equal,
    }
    note = (
        f"{mine} of {rows} equal to the engine's; torch_ref bf16 H to float32 "
        f"{', '.join(map(str, counts))} (by sum order, the median counts); float32 to the engine "
        f"{exact_equal}"
    )
    at = where.at(case="log-probabilities")
    yield judge(at, "equal best tokens", found, tolerance("engine_top1", where.dtype), note)
