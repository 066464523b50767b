"""Recorded folders of kind `vllm`: tokens and log-probabilities of the serving engine.

Two correct bf16 programs do not agree in every token, and the engine does not agree with itself. So
the recorded text is fed (teacher forcing), and a row with another best token must be explained: the
recorded token's logit is close to the best one, or in that row a router's choice hangs on a
near-tie. The gaps are those of `torch_ref` in float32, where no rounding blurs them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from jax_impl.step import build_recording_step
from parity import metrics
from parity.driver import Driver, Session, step_inputs
from parity.folders import Folder
from parity.op_torch import DTYPES
from parity.tolerances import tolerance
from parity.torch_threads import one_thread
from parity.verdict import Verdict, Where, judge, not_run
from torch_ref.model import Model
from torch_ref.numerics import Numerics

RUNS = (("float32", "V"), ("bfloat16", "V"))
TEXTS = ("greedy", "dspark")  # recorded under `<name>_ids`
_REFERENCES = ("reference_f32_logprobs", "reference_bf16_logprobs")

Arrays = dict[str, np.ndarray]


class Text(NamedTuple):
    """One recorded text: a prompt of P ids and what the engine made of it."""

    case: str
    kind: str
    prompt: np.ndarray
    ids: np.ndarray

    @property
    def fed(self) -> np.ndarray:
        """Everything that is fed; the last id only ends the text."""
        return np.concatenate([self.prompt, self.ids[:-1]])

    def judged(self, rows: np.ndarray) -> np.ndarray:
        """The rows that chose the recorded ids."""
        return rows[len(self.prompt) - 1 :]


class Truth(NamedTuple):
    """What `torch_ref` says about a text."""

    logits: np.ndarray  # float32 V, [T, V]
    gaps: np.ndarray  # [T, layers with experts]
    chosen: np.ndarray  # experts, ascending, [T, layers, k]
    layers: list[int]  # 0-based
    bf16: np.ndarray | None  # bf16 H, [T, V], where the engine's log-probabilities are recorded


class Own(NamedTuple):
    """What a run says about a text."""

    logits: np.ndarray  # [T, V]
    chosen: np.ndarray  # as in `Truth`


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
        with one_thread():
            truth = torch_truth(directory / "target", texts, folder.tensors)
        longest = max(len(t.fed) for t in texts)
        sides = [("jax", *run) for run in runs] + [("torch", "float32", "V")]
        for side, dtype, profile in sides:
            at = where.at(dtype=dtype, profile=profile, ours=side)
            if side == "jax":
                driver = Driver.open(directory / "target", dtype, profile, longest)
                own = [_forced(driver, t.fed, truth[t.case, t.kind].layers) for t in texts]
            else:
                own = [Own(u.logits, u.chosen) for u in (truth[t.case, t.kind] for t in texts)]
            yield from _texts(at, texts, own, truth)
            for text, found in zip(texts, own, strict=True):
                if text.kind == "greedy":
                    yield from _distributions(at, text, found.logits, folder.tensors, truth)
            yield from _best_tokens(at, texts, own, folder.tensors, truth)


def read_texts(tensors: Arrays) -> list[Text]:
    """All recorded texts of all cases."""
    names = sorted({f[0] for n in tensors if (f := re.match(r"case\d+(?=\.)", n))})
    pairs = [(c, kind) for c in names for kind in TEXTS]
    return [
        Text(c, kind, *(np.asarray(tensors[f"{c}.{n}_ids"]) for n in ("prompt", kind)))
        for c, kind in pairs
        if f"{c}.prompt_ids" in tensors and f"{c}.{kind}_ids" in tensors
    ]


def torch_truth(
    checkpoint: Path, texts: list[Text], tensors: Arrays
) -> dict[tuple[str, str], Truth]:
    """`torch_ref` on every text: float32 V with router gaps, bf16 H where it is a yardstick."""
    exact = Model.load(checkpoint, Numerics(DTYPES["float32"], "V"))
    rounded = Model.load(checkpoint, Numerics(DTYPES["bfloat16"], "H"))
    found = {}
    for text in texts:
        record: dict[str, torch.Tensor] = {}
        ids = torch.from_numpy(text.fed.astype(np.int64))
        logits = exact.forward(ids, exact.new_state(), record=record)
        gaps = {int(k[5:7]): v for k, v in record.items() if k.endswith(".router_gap")}
        bf16 = None
        if text.kind == "greedy" and f"{text.case}.vllm_logprobs" in tensors:
            bf16 = rounded.forward(ids, rounded.new_state()).double().numpy()
        layers = sorted(gaps)
        stacked = torch.stack([gaps[i] for i in layers], -1)
        chosen = torch.stack([record[f"layer{i:02d}.router_idx"] for i in layers], 1)
        found[text.case, text.kind] = Truth(
            logits.double().numpy(), stacked.double().numpy(), np.sort(chosen.numpy(), -1),
            layers, bf16,
        )  # fmt: skip
    return found


def _forced(driver: Driver, ids: np.ndarray, layers: list[int]) -> Own:
    """One recorded step of fixed width, so that all texts share one program."""
    session = Session(driver)
    sequence = session.sequence(slot=2)
    inputs = step_inputs([(sequence, ids)], driver.longest, len(sequence.pages))
    step = build_recording_step(driver.static)
    _, out, _, record = step(driver.weights, session.cache, inputs)
    chosen = np.stack([np.asarray(record[f"layer{i:02d}.ids"]) for i in layers], 1)
    logits = np.asarray(out.logits[0], np.float64)
    return Own(logits[: len(ids)], np.sort(chosen, -1)[: len(ids)])


# ---- tokens ----


def _texts(
    where: Where, texts: list[Text], own: list[Own], truth: dict[tuple[str, str], Truth]
) -> Iterator[Verdict]:
    """Share of equal tokens over all texts; per text, the rows that nothing explains."""
    other, rows, notes = 0, 0, []
    for text, found in zip(texts, own, strict=True):
        judged = text.judged(found.logits)
        differ = np.flatnonzero(np.argmax(judged, -1) != text.ids)
        other, rows = other + len(differ), rows + len(text.ids)
        notes.append(f"{text.case} {text.kind} {len(text.ids) - len(differ)} of {len(text.ids)}")
        at = where.at(case=f"{text.case} {text.kind}, teacher-forced")
        yield _explained(at, text, found, differ, truth[text.case, text.kind])
    share = {"differing_share": other / rows, "rows": rows, "differing": other}
    limit, note = tolerance("engine_tokens", where.dtype), "equal: " + ", ".join(notes)
    yield judge(where.at(case="teacher-forced"), "best token", share, limit, note)


def _explained(where: Where, text: Text, own: Own, differ: np.ndarray, truth: Truth) -> Verdict:
    """Every row with another best token has a small deficit, a near-tie or another expert.

    Another expert: this run chose another set than exact arithmetic does, in that row.
    """
    near = tolerance("engine_margin", where.dtype)
    tie = tolerance("engine_router_gap", where.dtype)
    rows, gaps = text.judged(own.logits), text.judged(truth.gaps)
    flipped = text.judged((own.chosen != truth.chosen).any(-1))
    reasons, deficits, left = [], [], []
    for row in differ:
        deficit = float(rows[row].max() - rows[row, text.ids[row]])
        deficits.append(deficit)
        reason = f"row {row}: {deficit:.2g}"
        if deficit > near.limit:
            at = int(gaps[row].argmin())
            reason += f", router gap {gaps[row, at]:.1e} in layer {truth.layers[at]}"
            others = [truth.layers[i] for i in np.flatnonzero(flipped[row])]
            reason += f", other experts in layers {others}" if others else ""
            if gaps[row, at] > tie.limit and not others:
                left.append(deficit)
                reason += " (UNEXPLAINED)"
        reasons.append(reason)
    found = {
        "margin": max(left, default=0.0),  # of the rows that nothing explains
        "deficits": deficits,
        "rows": [int(r) for r in differ],
        "near_tie_share": float((gaps.min(-1) <= tie.limit).mean()),
        "flipped_share": float(flipped.any(-1).mean()),
    }
    note = (
        f"{len(differ)} of {len(text.ids)} differ; recorded token's deficit by row: "
        f"{'; '.join(reasons) or 'none'} (a deficit up to {near.limit:g} explains a row, else a "
        f"gap up to {tie.limit:g}, which {found['near_tie_share']:.0%} of all rows have, or other "
        f"experts, which {found['flipped_share']:.0%} have)"
    )
    return judge(where, "differing rows", found, near, note)


# ---- distributions ----


def _distributions(
    where: Where, text: Text, logits: np.ndarray, tensors: Arrays,
    truth: dict[tuple[str, str], Truth],
) -> Iterator[Verdict]:  # fmt: skip
    """KL and best tokens against the engine, measured by what published bf16 does to f32."""
    at = where.at(case=f"{text.case} log-probabilities")
    engine = tensors.get(f"{text.case}.vllm_logprobs")
    references = [tensors.get(f"{text.case}.{n}") for n in _REFERENCES]
    bf16 = truth[text.case, text.kind].bf16
    if engine is None or bf16 is None or any(r is None for r in references):
        missing = [n for n in ("vllm_logprobs", *_REFERENCES) if f"{text.case}.{n}" not in tensors]
        yield not_run(at, "kl", f"golden.safetensors lacks {', '.join(missing)}")
        return
    f32, published = (np.asarray(r, np.float64) for r in references)
    if not len(engine) == len(f32) == len(published) == len(logits):
        yield not_run(at, "kl", f"{len(engine)} recorded rows for {len(logits)} of the text")
        return
    own = metrics.logit_distance(logits, np.asarray(engine, np.float64))
    pair, recorded = metrics.logit_distance(bf16, f32), metrics.logit_distance(published, f32)
    between = metrics.logit_distance(published, np.asarray(engine, np.float64))
    found = own | {"kl_ratio": own["kl_median"] / pair["kl_median"]}
    yards = {
        "torch_ref H to published float32": pair,
        "published bf16 to published float32": recorded,
        "published bf16 to the engine": between,
    }
    for name, yard in yards.items():
        found |= {f"{name}: {m}": yard[m] for m in ("kl_median", "kl_max", "top1")}
    note = f"to the engine {own['kl_median']:.2e}, largest {own['kl_max']:.2g}; " + ", ".join(
        f"{name} {yard['kl_median']:.2e}" for name, yard in yards.items()
    )
    yield judge(at, "median KL", found, tolerance("engine_kl", where.dtype), note)
    if where.dtype == "float32":  # the same numbers as the published code
        found = metrics.logit_distance(logits, f32)
        yield judge(
            at.at(against="published float32"), "median KL", found,
            tolerance("engine_reference", where.dtype), f"largest {found['kl_max']:.1e}",
        )  # fmt: skip


def _best_tokens(
    where: Where, texts: list[Text], own: list[Own], tensors: Arrays,
    truth: dict[tuple[str, str], Truth],
) -> Iterator[Verdict]:  # fmt: skip
    """Equal best tokens over all recorded rows; a case alone has too few of them."""
    names = (
        "own to the engine", "published bf16 to the engine", "published float32 to the engine",
        "published bf16 to published float32", "torch_ref H to published float32",
    )  # fmt: skip
    equal, rows = np.zeros(len(names)), 0
    for text, found in zip(texts, own, strict=True):
        recorded = [tensors.get(f"{text.case}.{n}") for n in ("vllm_logprobs", *_REFERENCES)]
        bf16 = truth[text.case, text.kind].bf16
        if text.kind != "greedy" or bf16 is None or any(r is None for r in recorded):
            continue
        if any(len(r) != len(bf16) for r in recorded):
            continue  # said by `_distributions`
        best = [np.argmax(x, -1) for x in (*recorded, found.logits, bf16)]
        engine, exact, published, mine, rounded = best
        pairs = (
            (mine, engine), (published, engine), (exact, engine), (published, exact),
            (rounded, exact),
        )  # fmt: skip
        equal += [np.sum(a == b) for a, b in pairs]
        rows += len(engine)
    if not rows:
        return
    share = dict(zip(names, (equal / rows).tolist(), strict=True))
    found = share | {"top1_below": share[names[1]] - share[names[0]], "rows": rows}
    note = f"{rows} rows; " + ", ".join(f"{name} {value:.3f}" for name, value in share.items())
    at = where.at(case="log-probabilities")
    yield judge(at, "equal best tokens", found, tolerance("engine_top1", where.dtype), note)
