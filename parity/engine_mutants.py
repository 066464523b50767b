"""Known mistakes under the rules for a recorded engine.

A mistake that moves the float32 logits of the recorded texts by more than `LIMIT` (rms) must fail
these rules. Smaller ones are within what two correct programs differ by; they are listed with the
comparison of suite `mutants` that rejects them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from jax_impl.step import Step, step
from parity.driver import Driver
from parity.engine_truth import measure, torch_truths
from parity.golden_vllm import Own, forced, judge_logits, models_of
from parity.mutants import MUTANTS, Mutant, _backend, replaced
from parity.records import Record, read_record
from parity.report import worst
from parity.verdict import Verdict, Where, failed, not_recorded

FOLDER = "vllm033_tiny"
LIMIT = 0.3


class Trial:
    """The recorded greedy texts, and what correct programs make of them; held for all mutants."""

    def __init__(self, recorded: Path, target: Path) -> None:
        """Reads the record; `target` is its checkpoint."""
        whole = read_record(recorded / FOLDER)
        texts = tuple(t for t in whole.texts if t.distribution is not None)
        self.record: Record = dataclasses.replace(whole, texts=texts)
        self.target = target
        self.longest = max(len(t.fed) for t in texts)

    @cached_property
    def truths(self):
        """Of the recorded texts; what an exchanged expert gives is kept for the next mutant."""
        return torch_truths(self.target, list(self.record.texts), lambda _: True)

    @cached_property
    def unchanged(self) -> Own:
        """Float32 logits of the code as it is."""
        return self.logits("float32")

    def logits(self, dtype: str, *, wrong_blocks: bool = False) -> Own:
        """Logits in profile V, traced anew with the functions of this moment."""
        driver = Driver.open(self.target, dtype, "V", self.longest)
        if wrong_blocks:
            config = driver.config
            size = config.attn_res_block_size + 1
            driver = dataclasses.replace(
                driver, config=dataclasses.replace(config, attn_res_block_size=size)
            )
        return forced(driver, self.record, _fresh(driver))

    def judge(self, where: Where, own: Own) -> list[Verdict]:
        """The rules."""
        noise = measure(list(self.truths.values()))
        return list(judge_logits(where, self.record, own, self.truths, noise))


def _fresh(driver: Driver) -> Step:
    static, backend = driver.static, _backend()

    def run(weights, cache, inputs):
        return step(static, backend, "all", weights, cache, inputs)

    return jax.jit(run, donate_argnums=1)


@contextlib.contextmanager
def everywhere(mutant: Mutant) -> Iterator[None]:
    """The mistake in the whole model.

    The operation tests call a function where it is defined; the model's stages may hold it under
    its own name, so it is replaced in every module that does.
    """
    if mutant.context is not None:
        with mutant.applied():
            yield
        return
    with contextlib.ExitStack() as stack:
        for holder, name, make in mutant.patches:
            original = getattr(holder, name)
            holders = [holder]
            if original.__module__ == holder.__name__:  # otherwise the mistake is of this user only
                ours = [m for n, m in sys.modules.items() if n.startswith("jax_impl.")]
                holders = [m for m in ours if getattr(m, name, None) is original]
            for module in holders:
                stack.enter_context(replaced(module, name, make))
        yield


def check_engine_mutants(recorded: Path, chosen: tuple[Mutant, ...] = MUTANTS) -> Iterator[Verdict]:
    """A control, then a verdict or a remark per mutant; makes the record's checkpoint."""
    with models_of(read_record(recorded / FOLDER)) as (target, _):
        trial = Trial(recorded, target)
        yield control(trial)
        for mutant in chosen:
            yield verdict(trial, mutant)


def _where(case: str) -> Where:
    return Where("vllm_mutants", FOLDER, case, "bfloat16", "V", "recorded engine")


def control(trial: Trial) -> Verdict:
    """The unchanged code must pass the rules by which mutants are rejected."""
    where = _where("control")
    found = trial.judge(where, trial.logits("bfloat16"))
    bad = [v for v in found if not v.passed]
    if bad or not found:
        note = f"the unchanged code fails: {bad[0].quantity}" if bad else "nothing was compared"
        return failed(where, "unchanged code passes", note)
    w = worst(found)
    note = f"nearest to its limit: {w.quantity}, {w.judged}"
    return dataclasses.replace(w, where=where, quantity="unchanged code passes", note=note)


def verdict(trial: Trial, mutant: Mutant) -> Verdict:
    """Passed: the rules reject it. A remark: they do not, and it is too small to be asked of them.

    How far it moves the float32 logits is looked up only where that decides.
    """
    where, blocks = _where(mutant.name), mutant.check == "blocks"
    with contextlib.nullcontext() if blocks else everywhere(mutant):
        found = trial.judge(where, trial.logits("bfloat16", wrong_blocks=blocks))
        rejecting = [v for v in found if v.status == "failed"]
        wrong = {} if rejecting else trial.logits("float32", wrong_blocks=blocks)
    if rejecting:
        w = worst(rejecting)
        note = f"{len(rejecting)} of {len(found)} comparisons reject it"
        quantity = f"rejected by {w.quantity}"
        return dataclasses.replace(w, where=where, quantity=quantity, status="passed", note=note)
    moved = rms(wrong, trial.unchanged)
    words = f"float32 logits move by rms {moved:.2g}"
    if moved <= LIMIT:  # a NaN is not
        return not_recorded(
            where, "rejected elsewhere",
            f"{words}, up to {LIMIT} is not asked of these rules; suite mutants rejects it by "
            f"{mutant.check}",
        )  # fmt: skip
    return failed(where, "rules", f"ACCEPTED by all {len(found)} comparisons; {words}")


def rms(got: Own, want: Own) -> float:
    """Root of the mean square over all rows and tokens of all texts."""
    squares = [np.square(got[key] - want[key]).ravel() for key in want]
    return float(np.sqrt(np.concatenate(squares).mean()))
