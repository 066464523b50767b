"""Recorded verification steps: are the drafts that the engine accepted the ones we would propose?

A greedy step accepts the leading drafts that are the text, so its count says what the engine's
drafter proposed up to the first draft that the target did not confirm. Our drafter is put at the
same anchor, behind the same text, and has to propose the same as far as that is known. Where it
does not, its own logits must be near a tie: the unit is what bf16 does to `torch_ref`'s drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from parity.records import Record, Text
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, judge

if TYPE_CHECKING:
    from jax_impl.static import DraftStatic
    from parity.driver import Driver

Propose = Callable[[Text], np.ndarray]  # draft logits [steps, K, V] at the recorded anchors


class Step(NamedTuple):
    """One verification step of a text.

    Attributes:
        anchor: place of the anchor among the text's ids; the drafts stand behind it.
        told: the accepted drafts as far as the text reaches.
        following: the text's id behind them; None if the text ends or all K were accepted.
        draft: the rejected draft, if recorded.
    """

    anchor: int
    told: np.ndarray
    following: int | None
    draft: int | None


def steps_of(text: Text, k: int) -> list[Step]:
    """The steps behind a text's accepted counts; each but the last emits its count and one more."""
    assert text.accepted is not None
    found, anchor = [], 0
    for i, count in enumerate(text.accepted.tolist()):
        told = text.ids[anchor + 1 : anchor + 1 + count]
        end = anchor + 1 + count
        whole = count < k and end < len(text.ids)
        known = None if text.drafts is None or not whole else int(text.drafts[i, count])
        found.append(
            Step(
                anchor,
                told,
                int(text.ids[end]) if whole else None,
                None if known is None or known < 0 else known,
            )
        )
        anchor = end
    return found


def comparable(record: Record, text: Text) -> str | None:
    """Why a text's counts say nothing about the drafts, or None if they do."""
    how = record.meta["speculation"]  # at temperature 0 drafts are the best ones in any mode
    if not text.greedy:
        return "the counts of a sampled run depend on the engine's random numbers"
    if how["rejection_sample_method"] not in ("standard", "block"):
        return f"rule {how['rejection_sample_method']!r} does not accept by the text alone"
    return None


def check_steps(
    where: Where, record: Record, text: Text, ours: np.ndarray, noise: float
) -> Verdict:
    """Our drafts [steps, K, V] against the recorded counts; `noise` is the unit of a deficit."""
    k, limit = record.meta["speculation"]["drafts"], tolerance("engine_drafts")
    assert text.accepted is not None
    reasons, deficits, counts = [], [], []
    for i, (step, logits) in enumerate(zip(steps_of(text, k), ours, strict=True)):
        place, deficit = _first_difference(step, logits)
        counts.append(place if deficit is not None else int(text.accepted[i]))
        if deficit is not None:
            deficits.append(deficit)
            reasons.append(f"step {i}: draft {place} of {len(step.told)} accepted, {deficit:.2g}")
    equal = len(ours) - len(deficits)
    found = {
        "deficit_over_noise": max(deficits, default=0.0) / noise,
        "deficits": deficits,
        "steps": len(ours),
        "equal": equal,
        "draft_noise": noise,
        "histogram": np.bincount(text.accepted, minlength=k + 1).tolist(),
    }
    note = (
        f"{equal} of {len(ours)} steps propose what was accepted; recorded counts 0..{k}: "
        f"{found['histogram']}; first other draft and its deficit: {'; '.join(reasons) or 'none'} "
        f"(explained: up to {limit.limit * noise:.2f})"
    )
    at = where.at(case=f"{text.case} {text.kind}, accepted counts")
    return judge(at, "drafts of each step", found, limit, note)


def _first_difference(step: Step, logits: np.ndarray) -> tuple[int, float | None]:
    """Place of the first draft of ours that cannot be the engine's, and how far it is ahead."""
    best = logits.argmax(-1)
    for place, want in enumerate(step.told):
        if best[place] != want:
            return place, float(logits[place, best[place]] - logits[place, want])
    place = len(step.told)
    if step.following is None:
        return place, None
    mine, row = best[place], logits[place]
    if step.draft is not None:
        same = mine == step.draft
        return place, None if same else float(row[mine] - row[step.draft])
    if mine != step.following:
        return place, None
    return place, float(row[mine] - np.partition(row, -2)[-2])  # the engine proposed another


def torch_proposals(target: Path, draft: Path, dtype: str, profile: str, k: int) -> Propose:
    """The drafter of `torch_ref`.

    Raises:
        FileNotFoundError, ValueError: the drafter is no usable checkpoint for this target.
    """
    import torch

    from parity.op_torch import DTYPES
    from parity.torch_threads import one_thread
    from torch_ref.draft import Draft, DraftState
    from torch_ref.model import Model
    from torch_ref.numerics import Numerics

    nm = Numerics(DTYPES[dtype], profile)
    drafter = Draft.load(draft, Model.load(target, nm), nm)

    def propose(text: Text) -> np.ndarray:
        with one_thread():
            _, taps = drafter.target_pass(torch.from_numpy(text.fed), drafter.target.new_state())
            state, rows = drafter.new_state(), []
            drafter.write_context(taps, state)
            for step in steps_of(text, k):
                position = len(text.prompt) + step.anchor
                seen = DraftState([r[:position] for r in state.rows])
                out = drafter.propose(int(text.ids[step.anchor]), position, seen, k)
                rows.append(out.logits.double().numpy())
        return np.stack(rows)

    return propose


def jax_proposals(
    target: Path, draft: Path, dtype: str, profile: str, k: int, longest: int, tp: int = 1
) -> Propose:
    """The drafter of `jax_impl` on `tp` ranks; the streams it reads come from one recorded pass.

    Raises:
        ConfigError, CheckpointError: the drafter is no usable checkpoint for this target, or one of
            them cannot be cut over so many ranks, or there are fewer devices.
    """
    import jax.numpy as jnp

    from jax_impl.draft_weights import open_draft
    from jax_impl.loader import load_draft
    from jax_impl.sharding import make_spread_cache, require_ranks
    from jax_impl.static import DraftStatic
    from parity.driver import Driver, Session, host, poison, step_inputs

    checkpoint = open_draft(draft)
    driver = Driver.open(target, dtype, profile, longest + k, tp=tp)
    config, placement = checkpoint.config, driver.placement
    config.require_target(driver.config)
    require_ranks(driver.config, driver.run, tp, config)
    small = load_draft(checkpoint, placement=placement)
    read, block = _programs(driver, DraftStatic(config, driver.run, placement.ranks), k)

    def propose(text: Text) -> np.ndarray:
        sequence = Session(driver).sequence(slot=2)
        cache = poison(make_spread_cache(driver.config, driver.run, placement, config))
        inputs = step_inputs([(sequence, text.fed)], longest, driver.pages)
        cache, rows = read(driver.weights, small, cache, inputs), []
        for step in steps_of(text, k):
            sequence.position = len(text.prompt) + step.anchor
            anchor = text.ids[step.anchor : step.anchor + 1]
            inputs = step_inputs([(sequence, anchor)], 1, driver.pages)
            out = block(driver.weights, small, cache, inputs, jnp.asarray(anchor, jnp.int32))
            rows.append(host(out)[0].astype(np.float64))
        return np.stack(rows)

    return propose


def _programs(driver: Driver, draft: DraftStatic, k: int) -> tuple[Callable, Callable]:
    """Two programs over the driver's ranks, from the weights of both models and a cache.

    The first feeds a text and writes the drafter's context: (..., inputs) -> cache, donated. The
    second drafts behind anchors [B]: (..., inputs, anchors) -> logits f32 [B, K, V].
    """
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from jax_impl import drafter, sharding
    from jax_impl.backend import AUTO
    from jax_impl.model import forward

    static, mesh = driver.static, driver.placement.mesh

    def read(weights, small, cache, inputs):
        found = forward(static, AUTO, weights, cache, inputs, taps=draft.config.target_layer_ids)
        return drafter.write_context(
            draft, AUTO, small, found.cache, inputs, found.taps, inputs.count
        )

    def block(weights, small, cache, inputs, anchors):
        inputs = drafter.block_inputs(draft, inputs, anchors, k)
        base, _ = drafter.base_logits(static, draft, AUTO, weights, small, cache, inputs)
        _, logits = AUTO.draft_markov(draft, small.root, base, inputs, sample=False)
        return logits.astype(jnp.float32)

    cache = sharding.cache_specs(driver.run)
    takes = (
        sharding.weight_specs(driver.config, driver.run),
        sharding.draft_specs(draft.config, draft.ranks.size),
        cache, sharding.input_specs(),
    )  # fmt: skip
    return (
        sharding.spread(read, mesh, takes, cache, donate=2),
        sharding.spread(block, mesh, (*takes, P()), sharding.spec(2), donate=()),
    )


def draft_noise(exact: list[np.ndarray], rounded: list[np.ndarray]) -> float:
    """Rms by which bf16 moves a draft's logit against the others of its row, over all steps.

    The target's streams are part of it, with every expert that rounding exchanges.
    """
    squares = []
    for a, b in zip(exact, rounded, strict=True):
        error = b - a
        squares.append(np.square(error - error.mean(-1, keepdims=True)).ravel())
    return float(np.sqrt(np.concatenate(squares).mean()))
