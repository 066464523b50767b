"""Speculative decoding of one sequence, and the exact enumeration of what a rule does.

The module hands on the rules of `torch_ref.acceptance` and the settings of `torch_ref.sampling`, so
that a caller needs this name only. Between two steps the caches of the target and the context of
the draft cover the same tokens; the newest token, the anchor, is known and processed by neither.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ref.acceptance import RULES as RULES
from torch_ref.acceptance import Outcome as Outcome
from torch_ref.acceptance import Plan as Plan
from torch_ref.acceptance import Rule as Rule
from torch_ref.acceptance import accept as accept
from torch_ref.acceptance import plan as plan
from torch_ref.draft import Draft, Proposal
from torch_ref.model import Model
from torch_ref.sampling import Sampling as Sampling
from torch_ref.sampling import draw as draw
from torch_ref.sampling import process as process

Distribution = Callable[[tuple[int, ...]], Tensor]

# --- decoding ---


class Noise(NamedTuple):
    """Where the random numbers of a sequence come from; each is asked by position and count.

    Attributes:
        uniforms: (position of the anchor, K) to [K] numbers in (0, 1).
        target: (position of the token fed in at row 0, rows) to [rows, V] Gumbel noise.
        draft: (position of the anchor, K) to [K, V] Gumbel noise, independent of `target`.
    """

    uniforms: Callable[[int, int], Tensor]
    target: Callable[[int, int], Tensor]
    draft: Callable[[int, int], Tensor]


class SpeculativeLoop:
    """Verify, accept, commit, write context, draft: one sequence, one step per call.

    Attributes:
        target_state: caches of the target, exact for every token before the anchor.
        draft_state: context of the draft, for the same tokens.
        ids: the tokens decoded so far; the last one is the anchor.
        proposal: the drafts of the next step; a test may put its own in place.
    """

    def __init__(
        self,
        draft: Draft,
        prompt: Sequence[int] | Tensor,
        k: int,
        rule: Rule,
        *,
        sampling: Sampling | None = None,
        noise: Noise | None = None,
        draw_drafts: bool = False,
    ) -> None:
        """Prefills the prompt, decodes the first token and drafts after it.

        Args:
            draft: the draft, bound to its target.
            prompt: [P] ids, P >= 1.
            k: drafts per step.
            rule: how drafts are accepted.
            sampling: settings of the request; None means temperature 0.
            noise: random numbers; needed above temperature 0 and by the synthetic rule.
            draw_drafts: above temperature 0, draw the drafts too, and judge them by the
                distribution they came from. False: the largest logits, judged as point masses.
        """
        self.draft, self.k, self.rule, self.noise = draft, k, rule, noise
        self.sampling = sampling or Sampling()
        self._random = self.sampling.temperature > 0
        self._drawn = draw_drafts and self._random
        if noise is None and (self._random or rule.name == "synthetic"):
            raise ValueError(f"rule {rule.name!r} at {self.sampling} needs noise")
        if rule.name == "synthetic":
            rule.unconditional(k)  # refuses a schedule that does not fit K before anything runs
        self.target_state, self.draft_state = draft.target.new_state(), draft.new_state()
        logits, taps = draft.target_pass(prompt, self.target_state)
        draft.write_context(taps, self.draft_state)
        self.ids = [self._first(logits[-1])]
        self.proposal = self._propose()

    @property
    def position(self) -> int:
        """Position of the anchor."""
        return self.target_state.position

    def _first(self, logits: Tensor) -> int:
        if not self._random:
            return draw(logits, 0.0, None)
        noise = self.noise.target(self.position - 1, 1)[0]
        return draw(process(logits, self.sampling), 1.0, noise)

    def _propose(self) -> Proposal:
        noise = self.noise.draft(self.position, self.k) if self._drawn else None
        return self.draft.propose(
            self.ids[-1],
            self.position,
            self.draft_state,
            self.k,
            sampling=self.sampling if self._drawn else None,
            noise=noise,
        )

    def step(self) -> Outcome:
        """One step; the states end as if only the accepted tokens had ever been processed.

        The 1 + K rows are verified on a clone. If all drafts are accepted the clone becomes the
        state, else the anchor and the accepted drafts are run again from the old state.
        """
        rows = [self.ids[-1], *self.proposal.ids.tolist()]
        position, trial = self.position, self.target_state.clone()
        logits, taps = self.draft.target_pass(rows, trial)
        chance = {}
        if self.noise is not None:
            chance["uniforms"] = self.noise.uniforms(position, self.k)
        if self._random:
            chance["noise"] = self.noise.target(position, len(rows))
        drawn_from = self.proposal.logits if self._drawn else None
        outcome = accept(
            self.rule,
            logits,
            self.proposal.ids,
            self.sampling,
            draft_logits=drawn_from,
            **chance,
        )
        kept = outcome.accepted + 1
        if kept == len(rows):
            self.target_state = trial
        else:
            self.draft.target.forward(rows[:kept], self.target_state)
        self.draft.write_context(taps[:kept], self.draft_state)
        self.ids += outcome.tokens
        self.proposal = self._propose()
        return outcome


class Generation(NamedTuple):
    """What `generate` decoded.

    Attributes:
        ids: decoded tokens, the first one from the prompt alone.
        accepted: accepted drafts per step.
        label: the rule that ran, in words; a synthetic acceptance is named as such.
    """

    ids: list[int]
    accepted: list[int]
    label: str

    def histogram(self, k: int) -> list[int]:
        """Steps by accepted count, 0 to K."""
        counts = Counter(self.accepted)
        return [counts[a] for a in range(k + 1)]


def generate(
    target: Model,
    draft: Draft,
    prompt: Sequence[int] | Tensor,
    steps: int,
    k: int,
    rule: Rule,
    *,
    sampling: Sampling | None = None,
    noise: Noise | None = None,
    draw_drafts: bool = False,
) -> Generation:
    """Decodes `steps` speculative steps after a prompt; stop tokens are not obeyed.

    Args:
        target: the target; `draft` must be bound to it.
        draft: the draft.
        prompt: [P] ids.
        steps: verify steps, each giving 1 to K + 1 tokens.
        k: drafts per step.
        rule: how drafts are accepted.
        sampling: as in `SpeculativeLoop`, as are `noise` and `draw_drafts`.
        noise: see `sampling`.
        draw_drafts: see `sampling`.

    Returns:
        One token from the prompt and those of the steps, with the accepted counts.
    """
    if draft.target is not target:
        raise ValueError("the draft is bound to another target")
    loop = SpeculativeLoop(
        draft, prompt, k, rule, sampling=sampling, noise=noise, draw_drafts=draw_drafts
    )
    accepted = [loop.step().accepted for _ in range(steps)]
    return Generation(loop.ids, accepted, rule.describe(k))


# --- enumeration ---


class Enumeration(NamedTuple):
    """Exact behaviour of one step, over all drafts and all uniforms.

    Attributes:
        joint: [V] * (K + 1), probability of the first K + 1 tokens. A step that gives fewer is
            followed by ordinary sampling from the target.
        accepted: [K + 1], probability of each accepted count.
        mean_accepted: expected accepted count.
    """

    joint: Tensor
    accepted: Tensor
    mean_accepted: float


def enumerate_step(
    rule: Rule, target_at: Distribution, draft_at: Distribution, k: int, *, point: bool = False
) -> Enumeration:
    """Sums over every draft that may be drawn; the work grows as V^(2K), so keep both small.

    Args:
        rule: any but greedy.
        target_at: gives the target's [V] distribution after some tokens.
        draft_at: the same for the draft; the tokens are drafts on the left.
        k: drafts per step.
        point: drafts are the most probable tokens, judged as point masses.

    Returns:
        The enumeration, float64.
    """
    size = target_at(()).numel()
    joint = torch.zeros((size,) * (k + 1), dtype=torch.float64)
    counts = torch.zeros(k + 1, dtype=torch.float64)
    for drafts in itertools.product(range(size), repeat=k):
        contexts = [drafts[:i] for i in range(k + 1)]
        masses = torch.stack([draft_at(c).double() for c in contexts[:k]])
        if point:
            masses = torch.nn.functional.one_hot(masses.argmax(-1), size).double()
        weight = float(torch.stack([masses[i, d] for i, d in enumerate(drafts)]).prod())
        if weight == 0:
            continue
        rows = torch.stack([target_at(c).double() for c in contexts])
        ready = plan(rule, rows, None if point else masses, drafts)
        for count, chance in enumerate(ready.probabilities()):
            counts[count] += weight * chance
            for token in range(size):
                head = (*drafts[:count], token)
                share = weight * chance * float(ready.last[count][token])
                joint[head] += share * target_joint(target_at, k - count, head)
    return Enumeration(joint, counts, float(counts @ torch.arange(k + 1.0, dtype=torch.float64)))


def target_joint(target_at: Distribution, length: int, head: tuple[int, ...] = ()) -> Tensor:
    """Probability of `length` tokens after `head` under the target alone, [V] * length, float64."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    row = target_at(head).double()
    tails = [target_joint(target_at, length - 1, (*head, x)) for x in range(row.numel())]
    return torch.stack([p * tail for p, tail in zip(row, tails, strict=True)])
