"""The JAX implementation against the PyTorch reference on any checkpoint directory.

Both run the same token ids: a prompt and the greedy continuation of the reference in float32. Three
comparisons per dtype and profile: logits of the whole sequence, logits of one token at a time, and
every layer on the reference's own input of that layer, so that errors do not chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jax_impl.backend import AUTO, choose_backend
from jax_impl.checkpoint import Checkpoint, CheckpointError
from jax_impl.config import ConfigError, RunConfig
from jax_impl.draft_weights import open_draft
from jax_impl.ids import parse_ids
from parity import metrics
from parity.driver import KERNEL_RUNS, ROWS, Arrays, Driver, Session
from parity.dspark_pair import Pair, check_drafted, tokens_of
from parity.layerwise import Built, build_layer, inject
from parity.op_torch import DTYPES
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, compare, judge
from torch_ref import ops
from torch_ref.model import Model, greedy
from torch_ref.numerics import Numerics

RUNS = (("float32", "H"), ("float32", "V"), ("bfloat16", "H"), ("bfloat16", "V"))
PROMPT = 24  # random ids by default
AGAINST = "torch_ref, same dtype and profile"


class PromptError(ValueError):
    """A prompt that cannot be run."""


def prompt(text: str | None, vocabulary: int | None) -> np.ndarray:
    """Token ids from a file, from the text itself, or seeded random ones.

    Without a vocabulary, ids are not held against one.

    Raises:
        PromptError: not ids, none at all, or outside the vocabulary.
    """
    if text is None:
        return np.random.default_rng(0).integers(0, vocabulary or 1, PROMPT)
    try:
        ids = np.array(parse_ids(text))
    except ValueError as error:
        raise PromptError(f"--prompt-ids: {error}") from None
    bad = ids[:0] if vocabulary is None else ids[ids >= vocabulary]
    if bad.size:
        raise PromptError(
            f"--prompt-ids: found {bad[0]}, expected ids of the vocabulary 0..{vocabulary - 1}; "
            "use this model's tokenizer"
        )
    return ids


def _require(
    checkpoint: Path, prompt_ids: str | None, steps: int, backend: str, draft: Path | None
) -> np.ndarray:
    """The prompt, if checkpoint, prompt and continuation can be run; else everything wrong."""
    problems, config = [], None
    try:
        config = Checkpoint.open(checkpoint).config  # headers only
    except (CheckpointError, ConfigError) as error:
        problems.append(str(error))
    try:
        ids = prompt(prompt_ids, config and config.vocab_size)
    except PromptError as error:
        problems, ids = [*problems, str(error)], np.zeros(0, np.int64)
    if config is None:
        if steps < 1:
            problems.append(f"--steps: found {steps}, expected at least 1; change it")
        raise PromptError("\n".join(problems))
    limit, wanted = config.max_position_embeddings, len(ids) + steps
    if draft is not None:
        try:
            small = open_draft(draft).config
            small.require_target(config)  # type: ignore[attr-defined]
            limit = min(limit, small.max_position_embeddings)
            wanted = tokens_of(len(ids), steps)
        except (CheckpointError, ConfigError) as error:
            problems.append(f"--draft: {error}")
    if steps >= 1 and wanted > limit >= len(ids) + steps:
        problems.append(
            f"--steps: found {steps}, which with drafts may write {wanted} tokens, expected at "
            f"most {limit}; ask for fewer"
        )
    elif not 1 <= steps <= limit - len(ids):
        problems.append(
            f"--steps: found {steps}, expected 1 to {limit - len(ids)} (the model takes {limit} "
            "tokens, prompt included); change it"
        )
    if problems:
        raise PromptError("\n".join(problems))
    choose_backend(RunConfig(decode_backend=backend), config)
    return ids


def check_pair(
    checkpoint: Path,
    prompt_ids: str | None,
    steps: int,
    backend: str = "auto",
    draft: Path | None = None,
) -> Iterator[Verdict]:
    """All comparisons on one checkpoint; of another `backend` those of single tokens.

    With a drafter also so many steps of speculative decoding (`dspark_pair`).

    Raises:
        PromptError: see `prompt`, or the directory is no usable checkpoint; says all.
        BackendUnavailableError: the backend cannot run here.
    """
    ids = start = _require(
        checkpoint, prompt_ids, steps, backend, draft
    )  # before anything is loaded
    kernels = backend != "auto"
    model = Model.load(checkpoint, Numerics(torch.float32, "H"))
    continuation, _ = greedy(model, torch.from_numpy(ids), steps)
    ids = np.concatenate([ids, continuation.numpy()])
    for dtype, profile in KERNEL_RUNS if kernels else RUNS:
        where = Where("compare", checkpoint.name, "-", dtype, profile, AGAINST)
        where = where.at(ours=f"jax {backend}") if kernels else where
        model = Model.load(checkpoint, Numerics(DTYPES[dtype], profile))
        driver = Driver.open(checkpoint, dtype, profile, len(ids), decode_backend=backend)
        yield from _run(where, driver, model, ids, len(ids) - steps)
    if draft is not None:
        yield from check_drafted(Pair(checkpoint, draft), start, steps, backend)


def _run(
    where: Where, driver: Driver, model: Model, ids: np.ndarray, prompt_length: int
) -> Iterator[Verdict]:
    want, record = reference(model, ids)
    whole = driver.backend is AUTO
    if whole:
        got, _, _, _ = driver.whole(ids)
        yield from check_logits(where.at(case="whole"), got, want, prompt_length)
    session = Session(driver)
    sequence = session.sequence(slot=3)
    for token in ids:
        session.step([None] * (ROWS - 1) + [(sequence, np.array([token]))], 1)
    yield from check_logits(where.at(case="stepwise"), sequence.rows(), want, prompt_length)
    if whole:
        yield from check_layers(where, driver, model, ids, record)


def check_logits(where: Where, got: np.ndarray, want: np.ndarray, start: int) -> Iterator[Verdict]:
    """Logits [T, V] of one sequence, and the choices behind its first `start` tokens."""
    rows = {
        "rows_margin": metrics.margin_rows(want).tolist(),
        "rows_error": np.abs(got - want).max(-1).tolist(),
    }
    found = metrics.logit_distance(got, want)
    yield compare(where, "logits", got, want, "pair_logits", logits=True, extra=rows)
    if not found["pattern_equal"]:
        return
    after = slice(start - 1, len(want) - 1)  # the rows that chose the continuation
    a, b = np.argmax(got[after], -1), np.argmax(want[after], -1)
    parted = metrics.first_divergence(a, b, metrics.margin_rows(want)[after])
    note = f"{parted['equal_prefix']} of {parted['length']} choices equal"
    if "margin" in parted:
        note += (
            f"; first divergence at continuation token {parted['equal_prefix']}: "
            f"{parted['got_id']} for {parted['want_id']}, margin {parted['margin']:.3g}"
        )
    limit = tolerance("pair_greedy", where.dtype)
    yield judge(where, "greedy choices (teacher-forced)", {"margin": 0.0} | parted, limit, note)


def reference(model: Model, ids: np.ndarray) -> tuple[np.ndarray, Arrays]:
    """The reference's logits [T, V] of a sequence from its start, and its streams by name."""
    found: dict[str, torch.Tensor] = {}
    state = model.new_state()
    logits = model.forward(torch.from_numpy(ids), state, record=found)
    for layer, kda_state in zip(model.config.kda_layers, state.kda_state, strict=True):
        found[f"layer{layer:02d}.kda_state_vk"] = kda_state
    return _numpy(logits), {k: _numpy(v) for k, v in found.items()}


def check_layers(
    where: Where,
    driver: Driver,
    model: Model,
    ids: np.ndarray,
    record: Arrays,
    build: Callable[..., Built] = build_layer,
) -> Iterator[Verdict]:
    """Both halves of every layer on the reference's own inputs (`record` of `reference`).

    `build` makes compiled layers, see `layerwise.inject`.
    """
    c, nm = driver.config, model.numerics
    streams = [_numpy(model.weights.embed(torch.from_numpy(ids)))]
    for layer in range(c.num_hidden_layers):
        name = f"layer{layer:02d}."
        theirs = {k.removeprefix(name): v for k, v in record.items() if k.startswith(name)}
        bank = [streams[i] for i in range(layer) if c.starts_block(i)]
        wanted = _wanted(model, layer, theirs, streams[layer], nm)
        own = inject(driver, layer, streams[layer], bank, build, wanted["y"])
        yield from _layer(where.at(case=f"injected layer{layer:02d}"), own, theirs, wanted)
        streams.append(theirs["prefix_sum_out"])


def _wanted(model: Model, layer: int, theirs: Arrays, before: np.ndarray, nm: Numerics) -> Arrays:
    """What the stages return, from the reference's streams and in its own rounding."""
    c, w = model.config, model.weights.layer(layer)

    def normed(stream: str, weight: str) -> np.ndarray:
        x = torch.from_numpy(theirs[stream]).to(nm.wide_dtype)
        return _numpy(ops.rms_norm(x, w[f"{weight}.weight"], c.rms_norm_eps, nm))

    start = 0.0 if c.starts_block(layer) else before
    after = nm.round(torch.from_numpy(start + theirs["attn_out"]).to(nm.wide_dtype))
    return {
        "x": normed("attn_norm_in", "input_layernorm"),
        "prefix": _numpy(after),
        "y": normed("mlp_norm_in", "post_attention_layernorm"),
    }


def _layer(at: Where, own: Arrays, theirs: Arrays, want: Arrays) -> Iterator[Verdict]:
    yield compare(at, "x", own["x"], want["x"], "pair_mix")
    keep = np.ones(len(own["x"]), bool)
    if "ids" in own:
        found = metrics.set_flips(own["ids"], theirs["router_idx"], theirs["router_gap"])
        yield judge(at, "router_idx", found, tolerance("router_injected", at.dtype))
        keep = (np.sort(own["ids"], -1) == np.sort(theirs["router_idx"], -1)).all(-1)
    note = "" if keep.all() else f"{int((~keep).sum())} rows with another expert set left out"
    yield compare(at, "prefix after attention", own["prefix"], want["prefix"], "pair_sublayer")
    yield compare(at, "y", own["y"], want["y"], "pair_sublayer")
    yield compare(
        at, "mlp_out", own["delta"][keep], theirs["mlp_out"][keep], "pair_sublayer", note=note
    )
    got, wanted = own["out"][keep], theirs["prefix_sum_out"][keep]
    yield compare(at, "prefix_sum_out", got, wanted, "pair_sublayer", note=note)
    for name in ("kda_state_vk", "mla_latent", "mla_k_pe"):
        if name in own:
            yield compare(at, name, own[name], theirs[name], "pair_sublayer")


def _numpy(x: Any) -> np.ndarray:
    return x.numpy() if x.dtype == torch.int64 else x.double().numpy()
