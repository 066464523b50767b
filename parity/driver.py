"""Runs `jax_impl` on NumPy sequences: whole, in windows, token by token, in batches.

Caches start full of NaN, pages are scattered and slots are not the first ones, so that whatever is
read without having been written shows up. Compiled variants are few on purpose: per model,
dtype and profile one for the whole sequence, one for windows and one for single tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.backend import AUTO, Backend, choose_backend, planned
from jax_impl.cache import PAD, Cache, StepInputs
from jax_impl.checkpoint import Checkpoint
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.generate import load_with_progress
from jax_impl.params import Weights
from jax_impl.plan import StepShape, choose
from jax_impl.sharding import (
    ONE_DEVICE,
    Placement,
    make_spread_cache,
    place_ranks,
    require_ranks,
    unequal_replicas,
)
from jax_impl.static import Static
from jax_impl.step import Step, build_recording_step, build_step

ROWS = 2  # sequences in a batched step
WINDOW = 7  # tokens of a windowed step; no divisor of a page
PAGE = 8
SLOTS = 5

KERNEL_RUNS = (("bfloat16", "V"),)  # (dtype, profile): kernels round, and in this way only

Arrays = dict[str, np.ndarray]


@lru_cache(maxsize=4)
def load(path: Path) -> tuple[ModelConfig, Weights]:
    """Configuration and weights of a checkpoint directory, kept for the next caller."""
    checkpoint = Checkpoint.open(path)
    return checkpoint.config, load_with_progress(checkpoint)


@dataclass
class Sequence:
    """One sequence inside a session: its slot, its pages and how far it has come."""

    slot: int
    pages: np.ndarray  # i32 [pages of one sequence]
    position: int = 0
    logits: list[np.ndarray] = field(default_factory=list)  # f64 [tokens, vocabulary] per step

    def rows(self) -> np.ndarray:
        """All logits so far, [tokens, vocabulary]."""
        return np.concatenate(self.logits)


@dataclass(frozen=True)
class Driver:
    """A model under one dtype and profile; `longest` is the longest sequence it will see."""

    config: ModelConfig
    weights: Weights
    run: RunConfig
    longest: int
    placement: Placement = ONE_DEVICE
    backend: Backend = AUTO  # of single tokens; longer steps are `auto`'s

    @classmethod
    def open(
        cls,
        path: str | Path,
        compute: str,
        profile: str,
        longest: int,
        *,
        tp: int = 1,
        **settings: object,
    ) -> Driver:
        """Loads a checkpoint, over `tp` ranks; `settings` are further fields of `RunConfig`.

        Raises:
            ConfigError, CheckpointError: the directory is no usable checkpoint, or cannot be cut
                over so many ranks, or there are fewer devices.
            BackendUnavailableError: `decode_backend` in `settings` cannot run here.
        """
        pages = -(-longest // PAGE) * (ROWS + 1) + 1
        run = RunConfig(
            compute=compute, profile=profile, slots=SLOTS, pages=pages, page_size=PAGE, **settings
        )  # type: ignore[arg-type]
        if tp == 1 and run.decode_backend == "auto":
            config, weights = load(Path(path).resolve())
            return cls(config, weights, run, longest)
        checkpoint = Checkpoint.open(path)
        require_ranks(checkpoint.config, run, tp)
        backend = choose_backend(run, checkpoint.config, tp)
        placement = place_ranks(tp, run)
        weights = load_with_progress(checkpoint, run, placement)
        return cls(checkpoint.config, weights, run, longest, placement, backend)

    @property
    def static(self) -> Static:
        """The settings of every step."""
        return Static(self.config, self.run, self.placement.ranks)

    @property
    def pages(self) -> int:
        """Pages of one sequence."""
        return self.run.pages_for(self.longest)

    def with_run(self, **changes: object) -> Driver:
        """The same weights under other run settings."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, **changes))

    def poisoned(self) -> Cache:
        """A cache full of NaN (the FP8 scale stays)."""
        empty = make_spread_cache(self.config, self.run, self.placement)
        return poison(empty)

    def whole(self, ids: np.ndarray) -> tuple[np.ndarray, Session, Sequence, Arrays]:
        """All of `ids` in one recorded step: logits [T, V], session, sequence, stage outputs."""
        session = Session(self, seed=1)
        sequence = session.sequence(slot=2)
        inputs = step_inputs([(sequence, ids)], len(ids), len(sequence.pages))
        step = build_recording_step(self.static, mesh=self.placement.mesh)
        session.cache, out, _, record = step(self.weights, session.cache, inputs)
        sequence.position = len(ids)
        logits = np.asarray(out.logits[0], np.float64)
        return logits, session, sequence, {k: _f64(v) for k, v in record.items()}


class Session:
    """A cache and the sequences in it."""

    def __init__(self, driver: Driver, seed: int = 0, step: Step | None = None) -> None:
        """A poisoned cache; `seed` scatters the pages, `step` replaces the built one."""
        self.driver, self.cache = driver, driver.poisoned()
        self._free = list(np.random.default_rng(seed).permutation(driver.run.pages))
        self._given = step
        self.unequal: list[str] = []  # what should have been equal on all ranks and was not

    def _built(self, rows: int, width: int) -> Step:
        driver, kind = self.driver, "decode" if width == 1 else "prefill"
        plan = choose(driver.run, StepShape(kind, rows, width))
        backend = planned(plan, driver.run, driver.backend)
        return build_step(driver.static, backend, "all", driver.placement.mesh)

    def sequence(self, slot: int) -> Sequence:
        """A new sequence in `slot`, with pages for `longest` tokens."""
        need = self.driver.pages
        taken, self._free = self._free[:need], self._free[need:]
        return Sequence(slot, np.array(taken, np.int32))

    def step(self, rows: list[tuple[Sequence, np.ndarray] | None], width: int) -> list[int | None]:
        """Feeds each row's tokens (at most `width`); appends logits, returns each row's next token.

        None stands for a pad row. `width` and the number of rows decide what is compiled.
        """
        inputs = step_inputs(rows, width, self.driver.pages)
        step = self._given or self._built(len(rows), width)
        self.cache, out, _ = step(self.driver.weights, self.cache, inputs)
        if self.driver.placement.mesh is not None:
            self.unequal += unequal_replicas((self.cache, out))
        logits, tokens = host(out.logits).astype(np.float64), np.asarray(out.token)
        found: list[int | None] = []
        for i, row in enumerate(rows):
            if row is None:
                found.append(None)
                continue
            sequence, ids = row
            sequence.position += len(ids)
            sequence.logits.append(logits[i, : len(ids)])
            found.append(int(tokens[i]))
        return found

    def caches(self, sequence: Sequence) -> Arrays:
        """A sequence's cache contents by recorded name (`layerNN.kda_state_vk`, ...).

        `conv_state_q/k/v` [channels, taps - 1] oldest first, `mla_latent` [T, R], `mla_k_pe`.
        """
        c, found = self.driver.config, {}
        for i, layer in enumerate(c.kda_layers):
            found[f"layer{layer:02d}.kda_state_vk"] = _f64(self.cache.kda_state[i, sequence.slot])
            window = _f64(self.cache.conv_window[i, sequence.slot]).T
            for name, part in zip("qkv", np.split(window, 3), strict=True):
                found[f"layer{layer:02d}.conv_state_{name}"] = part
        for i, layer in enumerate(c.mla_layers):
            rows = _f64(self.cache.kv_latent[i])[sequence.pages].reshape(-1, c.kv_row)
            rows = rows[: sequence.position]
            found[f"layer{layer:02d}.mla_latent"] = rows[:, : c.kv_lora_rank]
            found[f"layer{layer:02d}.mla_k_pe"] = rows[:, c.kv_lora_rank :]
        return found

    def untouched(self, used: list[Sequence]) -> bool:
        """Whether all slots, pages and page rows that no sequence owns still hold their NaN."""
        slots = [s for s in range(SLOTS) if s not in {q.slot for q in used}]
        state, window = _f64(self.cache.kda_state), _f64(self.cache.conv_window)
        kv = _f64(self.cache.kv_latent)
        free = np.ones(kv.shape[1:3], bool)
        for q in used:
            at = np.arange(q.position)
            free[q.pages[at // PAGE], at % PAGE] = False
        rest = (state[:, slots], window[:, slots], kv[:, free])
        return all(bool(np.isnan(x).all()) for x in rest)


def poison(cache: Cache) -> Cache:
    """A cache laid out alike and full of NaN; the FP8 scale stays."""
    laid = jax.tree.map(lambda a: a.sharding, cache)
    full = jax.jit(
        lambda c: jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), c), out_shardings=laid
    )(cache)
    return full.replace(kv_scale=cache.kv_scale)


def host(x: jax.Array) -> np.ndarray:
    """The whole array, also where its shards belong to several processes; all of them must call."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(x, tiled=True))


def step_inputs(
    rows: list[tuple[Sequence, np.ndarray] | None], width: int, pages: int
) -> StepInputs:
    """Inputs of one step; None is a pad row, and no token id stands beyond a row's count."""
    batch = len(rows)
    tokens = np.full((batch, width), -1, np.int32)  # beyond `count` nothing may be read
    count, position = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    slot, table = np.full(batch, PAD, np.int32), np.full((batch, pages), -1, np.int32)
    for i, row in enumerate(rows):
        if row is not None:
            sequence, ids = row
            tokens[i, : len(ids)], count[i] = ids, len(ids)
            position[i], slot[i] = sequence.position, sequence.slot
            table[i] = sequence.pages
    return StepInputs(
        tokens=tokens, count=count, position=position, slot=slot, page_table=table,
        temperature=np.zeros(batch, np.float32), seed=np.zeros(batch, np.uint32),
    )  # type: ignore[arg-type]  # fmt: skip


def in_windows(
    session: Session, sequence: Sequence, ids: np.ndarray, row: int, sizes: list[int]
) -> None:
    """Feeds `ids` in windows whose sizes run through `sizes`, the other rows being pad."""
    start, turn = 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        rows: list[tuple[Sequence, np.ndarray] | None] = [None] * ROWS
        rows[row] = (sequence, ids[start : start + size])
        session.step(rows, WINDOW)
        start, turn = start + size, turn + 1


def greedy(
    session: Session, sequence: Sequence, prompt: np.ndarray, steps: int, row: int
) -> np.ndarray:
    """Feeds the prompt one token at a time, then `steps` own choices; returns those [steps]."""
    chosen: list[int] = []
    for i in range(len(prompt) + steps):
        token = int(prompt[i]) if i < len(prompt) else chosen[-1]
        rows: list[tuple[Sequence, np.ndarray] | None] = [None] * ROWS
        rows[row] = (sequence, np.array([token]))
        following = session.step(rows, 1)[row]
        if i >= len(prompt) - 1 and len(chosen) < steps:
            chosen.append(int(following))  # type: ignore[arg-type]
    return np.array(chosen)


def _f64(x: jax.Array) -> np.ndarray:
    if x.dtype == jnp.float8_e4m3fn or x.dtype == jnp.bfloat16:
        x = x.astype(jnp.float32)
    x = np.asarray(x)
    return x if x.dtype.kind in "iub" else x.astype(np.float64)
