"""Speculative decoding of `jax_impl` against `torch_ref` and against plain decoding.

The pair is a small target whose drafter is often right, made on the spot. Greedy drafts, standard
rule, temperature 0, K = 7: accepted counts and tokens of both must be equal step by step, and the
text must be the plain one. All counts from 0 to K must occur, or nothing was shown about them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.cache import Cache, StepInputs, make_cache
from jax_impl.config import RunConfig
from jax_impl.draft_weights import open_draft
from jax_impl.loader import load_draft
from jax_impl.make_tiny import make_checkpoint
from jax_impl.speculate import build_speculative_prefill, build_speculative_step
from jax_impl.static import DraftStatic, Static
from jax_impl.step import build_step
from parity import metrics
from parity.driver import PAGE, load
from parity.op_torch import DTYPES
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, compare, failed, judge

SEED, K, STEPS = 2, 7, 60  # of the pairs made so, this one shows all counts within the steps
PROMPT = np.arange(40, 56)
RUNS = (("float32", "V"), ("bfloat16", "V"))


@dataclass(frozen=True)
class Text:
    """What speculative decoding gave: the first token comes from the prompt alone."""

    ids: list[int]
    accepted: list[int]

    def histogram(self, k: int) -> list[int]:
        """Steps by accepted count, 0 to K."""
        return np.bincount(self.accepted, minlength=k + 1).tolist()


class JaxPair:
    """Target and drafter of a directory that `make_checkpoint` wrote, one sequence."""

    def __init__(self, directory: Path, dtype: str, profile: str, longest: int) -> None:
        """Loads both."""
        config, self.weights = load((directory / "target").resolve())
        checkpoint = open_draft(directory / "draft")
        self.small, self.longest = load_draft(checkpoint), longest
        self.pages = -(-longest // PAGE)
        run = RunConfig(
            compute=dtype, profile=profile, slots=3, pages=self.pages + 5, page_size=PAGE
        )  # type: ignore[arg-type]
        self.static = Static(config, run)
        self.draft = DraftStatic(checkpoint.config, run)
        self.table = np.random.default_rng(0).permutation(run.pages)[None, : self.pages]

    def cache(self) -> Cache:
        """Full of NaN."""
        empty = make_cache(self.static.config, self.static.run, draft=self.draft.config)
        return jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), empty)

    def inputs(self, ids: np.ndarray, width: int, position: int) -> StepInputs:
        """One sequence in slot 1; no token id stands beyond the real ones."""
        tokens = np.full((1, width), -1, np.int32)
        tokens[0, : len(ids)] = ids
        return StepInputs(
            tokens=jnp.asarray(tokens), count=jnp.array([len(ids)]),
            position=jnp.array([position]), slot=jnp.array([1]),
            page_table=jnp.asarray(self.table, jnp.int32), temperature=jnp.zeros(1),
            seed=jnp.zeros(1, jnp.uint32),
        )  # fmt: skip

    def speculate(self, prompt: np.ndarray, steps: int, k: int) -> Text:
        """Prefill in chunks of 1 + K, then `steps` steps chained on the device."""
        both = self.weights, self.small
        prefill = build_speculative_prefill(self.static, self.draft, drafts=k)
        step = build_speculative_step(self.static, self.draft, drafts=k)
        cache = self.cache()
        for start in range(0, len(prompt), k + 1):
            chunk = self.inputs(prompt[start : start + k + 1], k + 1, start)
            cache, out, following = prefill(*both, cache, chunk)
        ids, accepted = [int(out.token[0])], []
        for _ in range(steps):
            cache, found, following = step(*both, cache, following)
            count = int(found.count[0])
            ids += np.asarray(found.tokens[0, :count]).tolist()
            accepted.append(count - 1)
        return Text(ids, accepted)

    def plain(self, prompt: np.ndarray, tokens: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Plain greedy ids [tokens] and the margin of each, one token per step, same row bucket."""
        step, cache = build_step(self.static, rows="all"), self.cache().replace(draft_kv=None)
        known, margins = list(prompt), []
        for i in range(len(prompt) + tokens - 1):
            cache, out, _ = step(self.weights, cache, self.inputs(known[i : i + 1], k + 1, i))
            if i >= len(prompt) - 1:
                known.append(int(out.token[0]))
                margins.append(float(metrics.margin_rows(np.asarray(out.logits[0, :1]))[0]))
        return np.array(known[len(prompt) :]), np.array(margins)


def check_dspark_pair(
    runs: tuple[tuple[str, str], ...] = RUNS, seed: int = SEED, steps: int = STEPS
) -> Iterator[Verdict]:
    """All comparisons on a pair made with this seed."""
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        directory = Path(scratch) / "pair"
        make_checkpoint(directory, "tiny", seed)
        for dtype, profile in runs:
            where = Where("dspark", f"tiny, seed {seed}", f"greedy, K {K}", dtype, profile)
            yield from _run(where, directory, steps)


def _run(where: Where, directory: Path, steps: int) -> Iterator[Verdict]:
    pair = JaxPair(directory, where.dtype, where.profile, len(PROMPT) + (steps + 2) * (K + 1))
    own = pair.speculate(PROMPT, steps, K)
    histogram = own.histogram(K)
    missing = [a for a, n in enumerate(histogram) if not n]
    note = f"steps by accepted count 0..{K}: {histogram}" + (
        f"; no step accepted {missing}" if missing else ""
    )
    at = where.at(against="itself")
    yield judge(at, "every count occurs", {"exact": not missing}, tolerance("equal"), note)
    if where.dtype == "float32":  # in bf16 two correct programs part at a near-tie
        theirs = torch_text(directory, where, steps)
        at = where.at(against="torch_ref, same dtype and profile")
        yield _equal(at, "accepted counts", own.accepted, theirs.accepted, "step")
        yield _equal(at, "emitted ids", own.ids, theirs.ids, "token")
    ids, margins = pair.plain(PROMPT, len(own.ids), K)
    yield against_plain(where.at(against="jax, plain decoding"), own.ids, ids, margins)


def torch_text(directory: Path, where: Where, steps: int) -> Text:
    """The same with `torch_ref`."""
    from parity.torch_threads import one_thread
    from torch_ref.draft import Draft
    from torch_ref.model import Model
    from torch_ref.numerics import Numerics
    from torch_ref.speculation import Rule, generate

    nm = Numerics(DTYPES[where.dtype], where.profile)
    target = Model.load(directory / "target", nm)
    draft = Draft.load(directory / "draft", target, nm)
    with one_thread():
        found = generate(target, draft, PROMPT.tolist(), steps, K, Rule("standard"))
    return Text(found.ids, found.accepted)


def _equal(where: Where, quantity: str, got: list[int], want: list[int], unit: str) -> Verdict:
    found = metrics.first_divergence(np.array(got), np.array(want))
    note = f"{found['equal_prefix']} of {len(want)} equal"
    if len(got) != len(want):
        note += f"; found {len(got)} {unit}s"
        return failed(where, quantity, note, tolerance("equal"))
    if "got_id" in found:
        note += (
            f"; first difference at {unit} {found['equal_prefix']}: {found['got_id']} for "
            f"{found['want_id']}"
        )
    verdict = compare(where, quantity, got, want, "equal", note=note)
    return verdict


def against_plain(where: Where, ids: list[int], plain: np.ndarray, margins: np.ndarray) -> Verdict:
    """Equal up to the first place where the plain margin allows another choice."""
    found = {"margin": 0.0} | metrics.first_divergence(np.array(ids), plain, margins)
    equal = found["equal_prefix"]
    note = f"{equal} of {len(plain)} tokens equal, smallest margin {margins.min():.3g}"
    if equal < len(plain):
        note += (
            f"; first divergence at token {equal}: {found['got_id']} for {found['want_id']}, "
            f"margin {found['margin']:.3g}"
        )
    return judge(where, "text", found, tolerance("speculative_text", where.dtype), note)
