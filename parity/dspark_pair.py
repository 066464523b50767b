"""Speculative decoding of `jax_impl` against `torch_ref` and against plain decoding.

Greedy drafts, standard rule, temperature 0, K = 7: accepted counts and tokens of both must be equal
step by step, and the text must be the plain one. The pair is any target with its drafter, or a
small one whose drafter is often right, made on the spot: there all counts from 0 to K must occur,
or nothing was shown about them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_impl.backend import choose_backend
from jax_impl.cache import Cache, StepInputs, make_cache
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import RunConfig
from jax_impl.draft_weights import open_draft
from jax_impl.generate import load_with_progress
from jax_impl.loader import load_draft
from jax_impl.make_tiny import make_checkpoint
from jax_impl.speculate import build_speculative_prefill, build_speculative_step
from jax_impl.static import DraftStatic, Static
from jax_impl.step import build_step
from parity import metrics
from parity.driver import KERNEL_RUNS, PAGE, load, poison
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


class Pair(NamedTuple):
    """Checkpoint directories."""

    target: Path
    draft: Path


class JaxPair:
    """A target with its drafter, one sequence; `auto` runs the prefill of any backend."""

    def __init__(
        self, pair: Pair, dtype: str, profile: str, longest: int, decode_backend: str = "auto"
    ) -> None:
        """Loads both.

        Raises:
            BackendUnavailableError: the backend cannot run here.
        """
        checkpoint = open_draft(pair.draft)
        self.pages = -(-longest // PAGE)
        run = RunConfig(
            compute=dtype, profile=profile, slots=3, pages=self.pages + 5, page_size=PAGE,
            decode_backend=decode_backend,
        )  # type: ignore[arg-type]  # fmt: skip
        target = Checkpoint.open(pair.target)
        self.backend = choose_backend(run, target.config)
        if decode_backend == "auto":
            config, self.weights = load(pair.target.resolve())
        else:
            config, self.weights = target.config, load_with_progress(target, run)
        self.small, self.longest = load_draft(checkpoint), longest
        self.static = Static(config, run)
        self.draft = DraftStatic(checkpoint.config, run)
        self.table = np.random.default_rng(0).permutation(run.pages)[None, : self.pages]

    def cache(self) -> Cache:
        """Full of NaN."""
        return poison(make_cache(self.static.config, self.static.run, draft=self.draft.config))

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
        step = build_speculative_step(self.static, self.draft, self.backend, drafts=k)
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
        step = build_step(self.static, self.backend, "all")
        cache = self.cache().replace(draft_kv=None)
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
        pair = Pair(directory / "target", directory / "draft")
        for dtype, profile in runs:
            where = Where("dspark", f"tiny, seed {seed}", f"greedy, K {K}", dtype, profile)
            yield from _run(where, pair, PROMPT, steps, every=True)


def check_drafted(
    pair: Pair, prompt: np.ndarray, steps: int, backend: str = "auto"
) -> Iterator[Verdict]:
    """A given pair behind a prompt; through the kernels in what they compute in."""
    kernels = backend != "auto"
    for dtype, profile in KERNEL_RUNS if kernels else RUNS:
        where = Where("compare", pair.target.name, f"drafts, greedy, K {K}", dtype, profile)
        where = where.at(ours=f"jax {backend}") if kernels else where
        yield from _run(where, pair, prompt, steps, backend)


def tokens_of(prompt: int, steps: int) -> int:
    """The most that so many steps behind a prompt write."""
    return prompt + (steps + 2) * (K + 1)


def _run(
    where: Where, pair: Pair, prompt: np.ndarray, steps: int, backend: str = "auto", *,
    every: bool = False,
) -> Iterator[Verdict]:  # fmt: skip
    longest = tokens_of(len(prompt), steps)
    ours = JaxPair(pair, where.dtype, where.profile, longest, backend)
    own = ours.speculate(prompt, steps, K)
    histogram = own.histogram(K)
    missing = [a for a, n in enumerate(histogram) if not n]
    counts = f"steps by accepted count 0..{K}: {histogram}"
    if every:
        note = counts + (f"; no step accepted {missing}" if missing else "")
        at = where.at(against="itself")
        yield judge(at, "every count occurs", {"exact": not missing}, tolerance("equal"), note)
    if where.dtype == "float32":  # in bf16 two correct programs part at a near-tie
        theirs = torch_text(pair, where, prompt, steps)
        at = where.at(against="torch_ref, same dtype and profile")
        yield _equal(at, "accepted counts", own.accepted, theirs.accepted, "step")
        yield _equal(at, "emitted ids", own.ids, theirs.ids, "token")
    ids, margins = ours.plain(prompt, len(own.ids), K)
    at = where.at(against="plain decoding, same steps")
    yield against_plain(at, own.ids, ids, margins, counts)


def torch_text(pair: Pair, where: Where, prompt: np.ndarray, steps: int) -> Text:
    """The same with `torch_ref`."""
    from parity.torch_threads import one_thread
    from torch_ref.draft import Draft
    from torch_ref.model import Model
    from torch_ref.numerics import Numerics
    from torch_ref.speculation import Rule, generate

    nm = Numerics(DTYPES[where.dtype], where.profile)
    target = Model.load(pair.target, nm)
    draft = Draft.load(pair.draft, target, nm)
    with one_thread():
        found = generate(target, draft, prompt.tolist(), steps, K, Rule("standard"))
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


def against_plain(
    where: Where, ids: list[int], plain: np.ndarray, margins: np.ndarray, more: str = ""
) -> Verdict:
    """Equal up to the first place where the plain margin allows another choice."""
    found = {"margin": 0.0} | metrics.first_divergence(np.array(ids), plain, margins)
    equal = found["equal_prefix"]
    note = f"{equal} of {len(plain)} tokens equal, smallest margin {margins.min():.3g}"
    if equal < len(plain):
        note += (
            f"; first divergence at token {equal}: {found['got_id']} for {found['want_id']}, "
            f"margin {found['margin']:.3g}"
        )
    note += f"; {more}" if more else ""
    return judge(where, "text", found, tolerance("speculative_text", where.dtype), note)
