"""Records of a serving engine: tokens, log-probabilities and accepted counts.

Two correct bf16 programs do not agree in every token, and the engine does not agree with itself. So
the recorded text is fed (teacher forcing) and judged by these rules:

- exact arithmetic (float32): of every greedy text at most a tenth of the rows has another best
  token;
- profile V: the median KL to the engine is at most 1.5 times the distance between `torch_ref` in
  bf16 (H) and the recorded float32 reference on the same rows (where there is none, `torch_ref` in
  float32), and equal best tokens are at most 3 points rarer than between these two;
- every row with another best token is explained: the recorded token's logit is near the best one,
  or in that row a router's choice hangs on a near-tie, which the report names and which is shown
  to do as much, see `engine_ties`. What is near is measured: see `engine_truth.Noise`;
- where accepted counts are recorded, our drafter proposes what was accepted: see `engine_steps`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jax_impl.backend import AUTO, choose_backend
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import RunConfig
from jax_impl.step import Step
from parity import engine_rules as rules
from parity.driver import KERNEL_RUNS, Driver, Session
from parity.engine_steps import (
    check_steps,
    comparable,
    draft_noise,
    jax_proposals,
    torch_proposals,
)
from parity.engine_truth import Noise, measure, torch_truths
from parity.folders import Folder
from parity.records import Record, RecordError, Text, fingerprint, parse
from parity.verdict import Verdict, Where, not_recorded, not_run

RUNS = (("float32", "V"), ("bfloat16", "V"))

Own = dict[tuple[str, str], np.ndarray]
Logits = Callable[[str, str], Own]  # (dtype, profile) -> our logits of every text


class Unavailable(Exception):
    """A checkpoint that a record names and that is not there; the message says what to do."""


def check_vllm(
    folder: Folder,
    runs: tuple[tuple[str, str], ...] = RUNS,
    checkpoint: Path | None = None,
    draft: Path | None = None,
    tp: int = 1,
    backend: str = "auto",
) -> Iterator[Verdict]:
    """Compares a folder under the given (dtype, profile) runs, on `tp` ranks.

    With another `backend` a text's tokens are fed one at a time, to its kernels, in profile V.
    `checkpoint` and `draft` stand for what the record names by a fingerprint; a checkpoint named
    by preset and seed is made first.
    """
    where = Where("vllm", folder.name, "-", against="recorded engine")
    try:
        record = parse(folder.meta, folder.tensors, str(folder.path))
        with models_of(record, checkpoint, draft) as (target, drafter):
            yield from check_record(where, record, target, drafter, runs, tp, backend)
    except (RecordError, Unavailable) as error:
        yield not_run(where, "all", str(error))


@contextmanager
def models_of(
    record: Record, target: Path | None = None, draft: Path | None = None
) -> Iterator[tuple[Path, Path | None]]:
    """Target and drafter of a record, made in a temporary place where a preset names them.

    Raises:
        Unavailable: they cannot be made, or are not the ones that the record names.
    """
    made = record.meta["checkpoint"]
    if target is not None:
        if (wanted := made.get("fingerprint")) and (found := fingerprint(target)) != wanted:
            raise Unavailable(
                f"{target} is not the checkpoint that was served: its fingerprint is {found}, the "
                f"record's is {wanted}"
            )
        yield target, draft
        return
    if "preset" not in made:
        raise Unavailable(
            "the record names its checkpoint by a fingerprint only; give its directory with "
            "--checkpoint"
        )
    from jax_impl.make_tiny import PRESETS, make_checkpoint

    if made["preset"] not in PRESETS:
        raise Unavailable(f"unknown preset {made['preset']!r}; known: {sorted(PRESETS)}")
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        directory = Path(scratch) / "made"
        make_checkpoint(directory, made["preset"], int(made["seed"]))
        yield directory / "target", draft or directory / "draft"


def check_record(
    where: Where,
    record: Record,
    target: Path,
    draft: Path | None,
    runs: tuple[tuple[str, str], ...] = RUNS,
    tp: int = 1,
    backend: str = "auto",
) -> Iterator[Verdict]:
    """All comparisons of a record: this code on `tp` ranks and, in float32, `torch_ref`.

    Raises:
        ConfigError: target or drafter cannot be cut over so many ranks, or there are fewer devices;
            before anything is computed.
        BackendUnavailableError: the backend cannot run here, likewise.
    """
    kernels = backend != "auto"
    longest = max(len(t.fed) for t in record.texts)
    runs = KERNEL_RUNS if kernels else runs
    if kernels:
        choose_backend(RunConfig(decode_backend=backend), Checkpoint.open(target).config, tp)
    if tp > 1:
        counted = any(t.accepted is not None for t in record.texts)
        _require_ranks(target, draft if counted else None, tp)
    truths = torch_truths(target, list(record.texts), lambda t: t.distribution is not None)
    noise = measure(list({id(t): t for t in truths.values()}.values()))  # equal texts once
    for side, dtype, profile in [*(("jax", *run) for run in runs), ("torch", "float32", "V")]:
        name = f"jax {backend}" if kernels and side == "jax" else side
        at = where.at(dtype=dtype, profile=profile, ours=name)
        if side == "jax":
            driver = Driver.open(target, dtype, profile, longest, tp=tp, decode_backend=backend)
            own = forced(driver, record)
        else:
            own = {key: truth.logits for key, truth in truths.items()}
        yield from judge_logits(at, record, own, truths, noise)
    yield from _accepted(where, record, target, draft, runs, longest, tp)


def _require_ranks(target: Path, draft: Path | None, tp: int) -> None:
    from jax_impl.draft_weights import open_draft
    from jax_impl.sharding import place_ranks, require_ranks

    drafter = None if draft is None else open_draft(draft).config
    require_ranks(Checkpoint.open(target).config, RunConfig(), tp, drafter)
    place_ranks(tp)


def judge_logits(
    where: Where, record: Record, own: Own, truths: rules.Truths, noise: Noise
) -> Iterator[Verdict]:
    """All rules about our logits of every text."""
    for text in record.texts:
        if text.greedy:
            yield from rules.tokens(where, text, own[text.key], truths[text.key], noise)
    for text in record.texts:
        at, truth = where.at(case=f"{text.case} {text.kind}"), truths[text.key]
        if text.distribution is not None:
            yield from rules.distributions(where, text, own[text.key], record, truth, noise)
        elif not text.greedy:
            yield not_run(at, "text", "a sampled text without log-probabilities shows nothing")
        for stage in sorted(text.stages):
            yield not_recorded(at, "stages", f"{stage} is recorded; no comparison uses it yet")
    yield from rules.best_tokens(where, record, own, truths)


def forced(driver: Driver, record: Record, step: Step | None = None) -> Own:
    """Logits [T, V] of every text: its prompt in one step, the rest in another.

    All steps have one width, so that all texts share one program; `step` replaces the built one.
    Kernels get the rest token by token.
    """
    found: Own = {}
    known: dict[tuple[bytes, int], np.ndarray] = {}
    for text in record.texts:
        key = text.fed.tobytes(), len(text.prompt)
        if key not in known:
            session = Session(driver, step=step)
            sequence = session.sequence(slot=2)
            rest, whole = text.ids[:-1], driver.longest
            steps = [(text.prompt, whole), (rest, whole)]
            if driver.backend is not AUTO:
                steps[1:] = [(rest[i : i + 1], 1) for i in range(len(rest))]
            for ids, width in steps:
                if len(ids):
                    session.step([(sequence, ids)], width)
            known[key] = sequence.rows()
        found[text.key] = known[key]
    return found


def _accepted(
    where: Where,
    record: Record,
    target: Path,
    draft: Path | None,
    runs: tuple[tuple[str, str], ...],
    longest: int,
    tp: int,
) -> Iterator[Verdict]:
    """Accepted counts of the texts that have them, against both drafters, ours on `tp` ranks."""
    texts: list[Text] = []
    for text in record.texts:
        at = where.at(case=f"{text.case} {text.kind}, accepted counts")
        if record.meta["texts"][text.kind]["speculative"] and text.accepted is None:
            yield not_recorded(at, "accepted counts", f"{text.case}.{text.kind}_accepted_counts")
        elif text.accepted is not None and (why := comparable(record, text)):
            yield not_recorded(at, "accepted counts", why)
        elif text.accepted is not None and draft is None:
            yield not_run(at, "accepted counts", "no drafter; give its directory with --draft")
        elif text.accepted is not None:
            texts.append(text)
    if not texts or draft is None:
        return
    k = record.meta["speculation"]["drafts"]
    exact, rounded = (
        [propose(t) for t in texts]
        for propose in (
            torch_proposals(target, draft, "float32", "V", k),
            torch_proposals(target, draft, "bfloat16", "H", k),
        )
    )
    noise = draft_noise(exact, rounded)
    for dtype, profile in runs:
        propose = jax_proposals(target, draft, dtype, profile, k, longest, tp)
        at = where.at(dtype=dtype, profile=profile, ours="jax")
        for text in texts:
            yield check_steps(at, record, text, propose(text), noise)
    at = where.at(dtype="float32", profile="V", ours="torch")
    for text, logits in zip(texts, exact, strict=True):
        yield check_steps(at, record, text, logits, noise)
