"""Recorded folders of kind `dspark`: a drafter, and what it made of the streams of its target.

Both implementations start from the recorded taps: context vectors, context rows of every layer, the
block's hidden rows, logits before and after the Markov bias, drafts. The target gives embedding and
output head; it is another folder, see `find_target`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity import metrics
from parity.folders import Folder, FolderError, read_json, read_tensors
from parity.golden_model import EPS, RUNS
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, compare, judge, not_run

SIDES = ("jax", "torch")
_NEEDED = ("taps", "draft_ids", "base_logits_f64")
_RECORDED_ONLY = ("taps", "bf16_draft_ids", "target_greedy_ids", "anchor_id")

Arrays = dict[str, np.ndarray]


class TargetError(ValueError):
    """The target of a drafter cannot be told; the message says what was looked at."""


@dataclass(frozen=True)
class DraftCase:
    """One recorded block: P context tokens, then the anchor, then K drafts."""

    name: str
    anchor: int
    recorded: Arrays

    @property
    def taps(self) -> np.ndarray:
        """Streams of the context, [P, G D]."""
        return np.asarray(self.recorded["taps"], np.float32)

    @property
    def drafts(self) -> int:
        """K."""
        return len(self.recorded["draft_ids"])


def check_dspark(
    folder: Folder,
    runs: tuple[tuple[str, str], ...] = RUNS,
    sides: tuple[str, ...] = SIDES,
) -> Iterator[Verdict]:
    """Compares a drafter's folder under the given (dtype, profile) runs."""
    where = Where("dspark", folder.name, "-")
    try:
        target = find_target(folder)
        cases, problems = read_cases(folder, target)
    except TargetError as error:
        yield not_run(where, "all", str(error))
        return
    for name, problem in problems.items():
        yield not_run(where.at(case=name), "all", problem)
    if not cases:
        if not problems:
            yield not_run(where, "all", "golden.safetensors has no tensors named caseN.*")
        return
    for side in sides:
        for dtype, profile in runs:
            at = where.at(dtype=dtype, profile=profile, ours=side)
            try:
                drafter = _side(side)(folder.path, target, dtype, profile, cases)
            except (ValueError, OSError) as error:  # also the errors of both loaders
                yield not_run(at, "all", f"this side cannot load the pair: {error}")
                break
            for case in cases:
                yield from compare_case(at.at(case=case.name), case, drafter(case))


def _side(side: str) -> Callable[..., Callable[[DraftCase], Arrays]]:
    if side == "jax":
        from parity.draft_jax import open_drafter
    else:
        from parity.draft_torch import open_drafter
    return open_drafter


# ---- what belongs together ----


def find_target(folder: Folder) -> Path:
    """The checkpoint that a drafter was made for.

    `target` of golden.json (a folder beside this one, inside it, or a path) decides; without it
    the only folder beside this one whose configuration has the drafter's hidden size, vocabulary
    and target depth.

    Raises:
        TargetError: none or several fit, or the named one is not there or does not fit.
    """
    draft = _config(folder.path)
    named = folder.meta.get("target")
    if isinstance(named, str) and named:
        places = [folder.path.parent / named, folder.path / named, folder.path.parent / "target"]
        for place in places[:2]:
            if (place / "config.json").is_file():
                if wrong := _mismatch(draft, _config(place)):
                    raise TargetError(f"target {place} does not fit this drafter: {wrong}")
                return place.resolve()
        raise TargetError(
            f"golden.json names the target {named!r}; found no {places[0] / 'config.json'}. Put "
            "that checkpoint beside this folder."
        )
    beside = sorted(p.parent for p in folder.path.parent.glob("*/config.json"))
    fitting, seen = [], []
    for place in beside:
        config = _config(place)
        if place.resolve() == folder.path.resolve() or "k3_dspark" in str(config.get("model_type")):
            continue
        wrong = _mismatch(draft, config)
        seen.append(f"{place.name} ({wrong or 'fits'})")
        if not wrong:
            fitting.append(place)
    if len(fitting) == 1:
        return fitting[0].resolve()
    looked = "; ".join(seen) or "no other checkpoint"
    raise TargetError(
        f"{'no' if not fitting else 'more than one'} target for this drafter beside "
        f"{folder.path}: found {looked}. Put the checkpoint beside it, or name it in golden.json "
        "under 'target'."
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        return read_json(path / "config.json")
    except FolderError as error:
        raise TargetError(str(error)) from None


def _mismatch(draft: dict[str, Any], target: dict[str, Any]) -> str:
    text = target.get("text_config", target)
    pairs = (
        ("hidden_size", draft.get("target_hidden_size", draft.get("hidden_size"))),
        ("vocab_size", draft.get("vocab_size")),
        ("num_hidden_layers", draft.get("target_num_hidden_layers", text.get("num_hidden_layers"))),
    )
    wrong = [f"{n} {text.get(n)} instead of {want}" for n, want in pairs if text.get(n) != want]
    return ", ".join(wrong)


def read_cases(folder: Folder, target: Path) -> tuple[list[DraftCase], dict[str, str]]:
    """All cases, and for each unusable one what it lacks.

    The anchor is `anchor_id` of the case in golden.json or among its tensors; without it, what the
    target's own recording has at that position.
    """
    grouped: dict[str, Arrays] = {}
    for name, value in folder.tensors.items():
        if found := re.fullmatch(r"(case\d+)\.(.+)", name):
            grouped.setdefault(found[1], {})[found[2]] = value
    cases, problems = [], {}
    for name, recorded in sorted(grouped.items(), key=lambda item: int(item[0][4:])):
        missing = [n for n in _NEEDED if n not in recorded]
        anchor = None if missing else _anchor(folder, target, name, recorded)
        if missing:
            problems[name] = f"golden.safetensors lacks {', '.join(missing)} of this case"
        elif anchor is None:
            problems[name] = "no anchor_id for this case in golden.json or golden.safetensors"
        else:
            cases.append(DraftCase(name, anchor, recorded))
    return cases, problems


def _anchor(folder: Folder, target: Path, name: str, recorded: Arrays) -> int | None:
    if "anchor_id" in recorded:
        return int(np.asarray(recorded["anchor_id"]).reshape(-1)[0])
    listed = folder.meta.get("cases", [])
    number = int(name[4:])
    if isinstance(listed, dict):
        entry = listed.get(name, {})
    else:
        entry = listed[number] if number < len(listed) else {}
    if isinstance(entry, dict) and "anchor_id" in entry:
        return int(entry["anchor_id"])
    file = target / "golden.safetensors"
    ids = read_tensors(file).get("seq_ids", ()) if file.exists() else ()
    at = len(recorded["taps"])
    return int(ids[at]) if at < len(ids) else None


# ---- judging ----


def compare_case(where: Where, case: DraftCase, own: Arrays) -> Iterator[Verdict]:
    """Verdicts for everything recorded, `own` under the recorded names."""
    g = case.recorded
    ids, parted = _drafts(where, case, own)
    yield ids
    for name in ("base_logits", "logits"):
        if f"{name}_f64" not in g:
            continue
        # behind the first other draft the bias is that of another token
        rows = slice(None) if name == "base_logits" else slice(parted + 1)
        got, want = own[name][rows], np.asarray(g[f"{name}_f64"], np.float64)[rows]
        yield compare(where, name, got, want, "draft_logits", logits=True)
    judged = {"draft_ids", "base_logits_f64", "logits_f64", *_RECORDED_ONLY}
    for name in sorted(set(g) - judged):
        if name not in own:
            yield not_run(where, name, "recorded, but not produced by this side")
            continue
        want = np.asarray(g[name], np.float64)
        yield compare(where, name, own[name], want, "draft_stream")


def _drafts(where: Where, case: DraftCase, own: Arrays) -> tuple[Verdict, int]:
    """Drafts are right up to the first place where the recorded margin allows another choice.

    In bf16 they must also reach as far as the recorded bf16 run did, whatever the margin.
    """
    g, want = case.recorded, np.asarray(case.recorded["draft_ids"])
    margins = (
        metrics.margin_rows(g["logits_f64"]) if "logits_f64" in g else np.full(len(want), np.inf)
    )
    found = {"margin": 0.0} | metrics.first_divergence(own["draft_ids"], want, margins)
    note = f"{found['equal_prefix']} of {len(want)} equal, smallest margin {margins.min():.3g}"
    if where.dtype != "float32" and "bf16_draft_ids" in g:
        reach = metrics.first_divergence(np.asarray(g["bf16_draft_ids"]), want)["equal_prefix"]
        note += f", the recorded bf16 run reached {reach}"
        if found["equal_prefix"] < reach:
            found["margin"] = float("inf")
    verdict = judge(where, "draft_ids", found, tolerance("drafts", where.dtype), note)
    return verdict, found["equal_prefix"]


__all__ = ["EPS", "SIDES", "DraftCase", "TargetError", "check_dspark", "find_target"]
