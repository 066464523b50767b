"""The step on several ranks: against recorded numbers, `torch_ref`, and one rank.

Every setting is checked in three ways. Logits: sequences of unequal length, in shuffled slots and
scattered pages, some of them absent from some steps, each row against the recorded float64 logits
(`model_tiny16`) or those of `torch_ref` (a `tp16` checkpoint made on the spot). Tokens: those that
these steps choose, against the best of the same logits. Replicas: what is equal on all ranks by
construction is so bit for bit.

A setting with `verify` feeds 1 + K tokens per sequence and step, without it one. With `verify` the
speculative loop also runs, and gives the tokens and accepted counts of one rank (`with_loop`). The
ranks are devices of one process or of several.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from parity.folders import Folder, open_folder
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, compare, judge, not_run

RANKS = 16
K = 7
PAGE = 16  # rows of a page on one rank without context parallelism
PRESET, SEED = "tp16", 3
ROWS = 24  # tokens of a sequence whose logits are compared
STEPS = 6  # speculative steps
LONGEST = 96
GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Setting:
    """One way to spread a step."""

    tp: int
    dcp: bool
    batch: int
    verify: bool
    experts: str = "tp"
    interleave: int = 1

    @property
    def name(self) -> str:
        """For reports."""
        spread = f" dcp x{self.interleave}" if self.dcp else ""
        experts = " ep" if self.experts == "ep" else ""
        kind = f"verify 1+{K}" if self.verify else "plain"
        return f"TP{self.tp}{experts}{spread} batch {self.batch} {kind}"

    def run_settings(self, **more: Any) -> Any:
        """`RunConfig` for float32 in profile V."""
        from jax_impl.config import RunConfig

        dcp = self.tp if self.dcp else 1
        size = max(1, PAGE // dcp)
        run = RunConfig(
            compute="float32", profile="V", slots=self.batch + 2, page_size=size,
            experts=self.experts, dcp=dcp, dcp_interleave=self.interleave, **more,
        )  # type: ignore[arg-type]  # fmt: skip
        return dataclasses.replace(run, pages=run.pages_for(LONGEST) * self.batch + 3)


# context parallelism takes both interleaves and experts both cuts, over the matrix as a whole
MATRIX = tuple(
    Setting(tp, dcp, batch, verify, "ep" if tp == 8 and batch == 8 else "tp", 1 if tp == 16 else 4)
    for tp, dcp, batch, verify in itertools.product((8, 16), (False, True), (1, 8), (False, True))
)
# What the subjects are checked under. The recorded drafter is hardly ever right, so tokens are
# compared on the made pair, whose drafts are accepted in every number; the recorded one once.
FULL: dict[str, tuple[Setting, ...]] = {
    "model_tiny16": MATRIX,
    PRESET: (*MATRIX, Setting(16, True, 8, False, "ep"), Setting(8, False, 1, False, "ep")),
}
RECORDED_TOKENS = (Setting(16, True, 8, True),)
# Every process compiles for itself, and the loop is four programs beside the step of the logits:
# with several processes it runs under these only, which take every choice between them.
SEVERAL_TOKENS = (Setting(16, False, 1, True), Setting(8, True, 8, True, "ep", 4))


def emulate_devices(ranks: int = RANKS) -> None:
    """On a CPU give this process so many devices; no effect on other platforms.

    Several processes bring their own; a setting that wants others says so itself.

    Raises:
        RuntimeError: JAX runs already with fewer devices.
    """
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={ranks}".strip()
    import jax

    alone = jax.process_count() == 1
    if alone and jax.default_backend() == "cpu" and len(jax.devices()) < ranks:
        raise RuntimeError(
            f"{len(jax.devices())} device(s), expected {ranks}: JAX was started before the devices "
            f"were emulated; set XLA_FLAGS={flag}={ranks} before Python starts"
        )


@dataclass(frozen=True)
class Subject:
    """A target with its drafter, and the logits that a sequence must give.

    Attributes:
        ids: i64 [ROWS].
        logits: f64 [ROWS, vocabulary].
        limit: name of the tolerance for float32.
        eps: epsilon of the latent norms; None takes the profile's.
    """

    name: str
    target: Path
    draft: Path
    ids: np.ndarray
    logits: np.ndarray
    against: str
    limit: str
    eps: float | None


def check_sharded(
    settings: dict[str, tuple[Setting, ...]] = FULL, layers: int | None = None
) -> Iterator[Verdict]:
    """All comparisons.

    Args:
        settings: by subject, see `FULL`.
        layers: of the pair made on the spot; None: the preset's.
    """
    from jax_impl.sharding import place_ranks

    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        for name, each in settings.items():
            if not each:
                continue
            subject = made(Path(scratch), layers) if name == PRESET else recorded(name)
            for setting in each:
                where = Where("sharded", subject.name, setting.name, profile="V")
                try:
                    run = setting.run_settings(mla_norm_eps=subject.eps)
                    placement = place_ranks(setting.tp, run)
                except ValueError as error:
                    yield not_run(where, "all", str(error))
                    continue
                yield from check_logits(where, subject, setting, run, placement)
                if with_loop(name, setting):
                    yield from check_tokens(where, subject, setting, run, placement)


def with_loop(name: str, setting: Setting) -> bool:
    """Whether the speculative loop is compared with that of one rank too."""
    import jax

    if name != PRESET:
        return setting in RECORDED_TOKENS
    return setting.verify and (jax.process_count() == 1 or setting in SEVERAL_TOKENS)


def chosen(tp: int | None = None, case: str | None = None) -> dict[str, tuple[Setting, ...]]:
    """`FULL`, restricted to a number of ranks and to names that contain `case`.

    Where no setting has `tp` ranks, those of 16 are cut to it.
    """
    found = FULL
    if tp is not None:
        found = {
            name: tuple(s for s in each if s.tp == tp)
            or tuple(dataclasses.replace(s, tp=tp) for s in each if s.tp == RANKS)
            for name, each in FULL.items()
        }
    return {
        name: tuple(s for s in each if case is None or case in f"{name} {s.name}")
        for name, each in found.items()
    }


def recorded(name: str) -> Subject:
    """A recorded target with the recorded drafter."""
    from parity.golden_model import EPS

    folder: Folder = open_folder(GOLDEN / name)
    ids = np.asarray(folder.tensors["seq_ids"])[:ROWS]
    logits = np.asarray(folder.tensors["logits_f64"], np.float64)[:ROWS]
    draft = GOLDEN / "dspark_tiny16"
    return Subject(
        folder.name, folder.path, draft, ids, logits, "recorded float64", "logits", EPS
    )  # fmt: skip


def made(scratch: Path, layers: int | None = None) -> Subject:
    """A `tp16` pair made on the spot, with the logits of `torch_ref`."""
    import torch

    from jax_impl.make_tiny import make_checkpoint
    from parity.pair import reference
    from parity.torch_threads import one_thread
    from torch_ref.model import Model
    from torch_ref.numerics import Numerics

    depth = {} if layers is None else {"num_hidden_layers": layers}
    make_checkpoint(scratch / PRESET, PRESET, SEED, overrides=depth)
    target = scratch / PRESET / "target"
    with one_thread():
        model = Model.load(target, Numerics(torch.float32, "V"))
        ids = np.random.default_rng(SEED).integers(3, model.config.vocab_size, ROWS)
        logits, _ = reference(model, ids)
    draft = scratch / PRESET / "draft"
    return Subject(PRESET, target, draft, ids, logits, "torch_ref float32", "pair_logits", None)


@lru_cache(maxsize=2)
def _loaded(target: Path, placement: Any) -> Any:
    """(configuration, weights); the next setting of the same placement uses them again."""
    from jax_impl.checkpoint import Checkpoint
    from jax_impl.loader import load_weights

    checkpoint = Checkpoint.open(target)
    return checkpoint.config, load_weights(checkpoint, placement=placement)


def check_logits(
    where: Where, subject: Subject, setting: Setting, run: Any, placement: Any
) -> Iterator[Verdict]:
    """Each row of the batch ends two tokens before the last; every one is judged.

    So is the token that each step chooses for each sequence, by how far the reference's logit of it
    is below the reference's best.
    """
    from parity.driver import Driver, Session

    config, weights = _loaded(subject.target, placement)
    driver = Driver(config, weights, run, LONGEST, placement)
    session = Session(driver, seed=5)
    slots = np.random.default_rng(1).permutation(run.slots)[: setting.batch]
    sequences = [session.sequence(int(s)) for s in slots]
    ids = [subject.ids[: len(subject.ids) - 2 * i] for i in range(setting.batch)]
    width = 1 + K if setting.verify else 1
    turn, chosen = 0, []
    while any(q.position < len(i) for q, i in zip(sequences, ids, strict=True)):
        rows: list[Any] = [
            # now and then a sequence sits a step out, or brings fewer tokens than the others
            None if (turn + row) % 5 == 4 or q.position >= len(i)
            else (q, i[q.position : q.position + max(1, width - (turn + row) % 3)])
            for row, (q, i) in enumerate(zip(sequences, ids, strict=True))
        ]  # fmt: skip
        chosen += [
            (subject.logits[q.position - 1], token)
            for q, token in zip(sequences, session.step(rows, width), strict=True)
            if token is not None
        ]
        turn += 1
    at = where.at(against=subject.against)
    got = np.concatenate([q.rows() for q in sequences])
    want = np.concatenate([subject.logits[: len(i)] for i in ids])
    yield compare(at, "logits", got, want, subject.limit, logits=True)
    below = [float(row.max() - row[token]) for row, token in chosen]
    note = f"{below.count(0.0)} of {len(below)} are the best"
    limit = tolerance("pair_greedy", "float32")
    yield judge(at, "step tokens", {"margin": max(below)}, limit, note)
    here = where.at(against="itself")
    note = "; ".join(sorted(set(session.unequal))[:5])
    equal = {"exact": not session.unequal}
    yield judge(here, "replicas bit-equal", equal, tolerance("equal"), note)


def check_tokens(
    where: Where, subject: Subject, setting: Setting, run: Any, placement: Any
) -> Iterator[Verdict]:
    """Tokens and accepted counts of the speculative loop are those of one rank; runs repeat."""
    from jax_impl.sharding import ONE_DEVICE

    one = dataclasses.replace(setting, tp=1, dcp=False, experts="tp").run_settings(
        mla_norm_eps=subject.eps
    )
    pair, ids = (subject.target, subject.draft), tuple(subject.ids.tolist())
    want, _ = _speculated(pair, ids, setting.batch, one, ONE_DEVICE)
    got, first = _speculated(pair, ids, setting.batch, run, placement)
    at = where.at(against="jax, one rank")
    note = f"accepted per step {sorted({c for _, counts in got for c in counts})}"
    for quantity, index in (("emitted ids", 0), ("tokens per step", 1)):
        ours, theirs = ([x for each in side for x in each[index]] for side in (got, want))
        yield compare(at, quantity, ours, theirs, "equal", note=note)
    _, second = _speculated.__wrapped__(pair, ids, setting.batch, run, placement)
    same = {"exact": all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))}
    at = where.at(against="a second run")
    yield judge(at, "state and latent rows bit-equal", same, tolerance("equal"))


@lru_cache(maxsize=4)
def _speculated(
    pair: tuple[Path, Path], ids: tuple[int, ...], batch: int, run: Any, placement: Any
) -> tuple[list[tuple[list[int], list[int]]], list[np.ndarray]]:
    """Per sequence (ids, tokens per step), and the final caches."""
    from jax_impl.draft_weights import open_draft
    from jax_impl.loader import load_draft
    from jax_impl.speculative_engine import SpeculativeEngine
    from parity.driver import host

    config, weights = _loaded(pair[0], placement)
    draft = open_draft(pair[1])
    engine = SpeculativeEngine(
        config, run, weights, draft.config, load_draft(draft, placement=placement), drafts=K,
        chunk=1 + K, placement=placement, check_replicas=True,
    )  # fmt: skip
    # every other sequence draws, hot enough that other noise would give another token
    handles = [
        engine.add(ids[: 6 + i], temperature=i % 2 * 4.0, seed=100 + i) for i in range(batch)
    ]
    for handle in handles:
        engine.prefill(handle)
    for _ in range(STEPS):
        engine.decode(handles)
    found = [(engine.sequences[h].ids, engine.sequences[h].emitted) for h in handles]
    return found, [host(a) for a in (engine.cache.kda_state, engine.cache.kv_latent)]
