"""Top-k, top-p and min-p through every way in: engines, their errors, the command line."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import AUTO
from jax_impl.cli import main
from jax_impl.config import RunConfig
from jax_impl.engine import Engine, EngineError
from jax_impl.sampling import Filters, log_probabilities, token_noise
from jax_impl.sampling_config import Sampling
from jax_impl.speculative_engine import SpeculativeEngine, build_waiting_step
from jax_impl.step import build_step, build_step_in_place
from parity.speculation import Models, load_models
from parity.test_sharded import run as in_emulated_devices

K = 3
RUN = RunConfig(compute="float32", profile="V", slots=5, pages=80, page_size=4)
PROMPTS = ([40, 41, 42, 43, 44, 45, 46, 47, 48], [60], [71, 72, 73, 74], [8, 9, 10])
GREEDY: dict[str, Any] = {}
BEST = {"temperature": 1.5, "top_k": 1, "seed": 3}
THREE = {"temperature": 14.0, "top_k": 3, "seed": 4}  # the model is sure of itself
NUCLEUS = {"temperature": 12.0, "top_p": 0.5, "seed": 5}
ALL = {"temperature": 14.0, "top_k": 60, "top_p": 0.8, "min_p": 0.02, "seed": 6}


@pytest.fixture(scope="module")
def models(pair_directory) -> Models:
    return load_models(pair_directory, RUN)


@pytest.fixture(scope="module")
def rows(pair_directory):
    """Logits that `torch_ref` gives for every generated token of a text."""
    torch = pytest.importorskip("torch")
    from parity.torch_threads import one_thread
    from torch_ref.model import Model
    from torch_ref.numerics import Numerics

    model = Model.load(pair_directory / "target", Numerics(torch.float32, "V"))

    def of(ids, prompt):
        with one_thread():
            return model.forward(ids[:-1], model.new_state())[prompt - 1 :]

    return of


def plain(models) -> Engine:
    return Engine(models.config, RUN, models.weights, chunk=8, context=64, filters=True)


def speculative(models, method) -> SpeculativeEngine:
    return SpeculativeEngine(
        models.config, RUN, models.weights, models.draft_config, models.draft_weights, method, K,
        chunk=8, context=64, filters=True,
    )  # fmt: skip


def served(engine, prompts, settings, steps):
    """Handles and texts of sequences that run together."""
    handles = [engine.add(p, **s) for p, s in zip(prompts, settings, strict=True)]
    for handle in handles:
        engine.prefill(handle)
    for _ in range(steps):
        engine.decode(handles)
    return handles, [list(engine.sequences[h].ids) for h in handles]


def allowed(logits, settings):
    """Ids that may be drawn from each of `torch_ref`'s rows."""
    from torch_ref import sampling

    given = {k: v for k, v in settings.items() if k != "seed"}
    return sampling.process(logits, sampling.Sampling(**given)).isfinite()


def test_draws_are_those_of_torch_with_the_same_noise(models, rows):
    from torch_ref import sampling

    settings = [GREEDY, THREE, NUCLEUS, ALL]
    engine = plain(models)
    handles, texts = served(engine, PROMPTS, settings, 15)
    for prompt, ids, given in zip(PROMPTS, texts, settings, strict=True):
        logits = rows(ids, len(prompt))
        drawn = ids[len(prompt) :]
        if given is GREEDY:
            assert drawn == [sampling.largest(row) for row in logits]
            continue
        import torch

        n, heat = len(drawn), given["temperature"]
        position = jnp.arange(len(prompt), len(ids))
        seeds = jnp.full(n, given["seed"], jnp.uint32)
        noise = torch.tensor(np.asarray(token_noise(seeds, position, logits.shape[-1])))
        kept = allowed(logits, given)
        want = [
            sampling.draw(row.masked_fill(~ok, float("-inf")), heat, z)
            for row, ok, z in zip(logits, kept, noise, strict=True)
        ]
        assert drawn == want
        free = [sampling.draw(row, heat, z) for row, z in zip(logits, noise, strict=True)]
        assert free != want, "nothing was filtered out"
        assert drawn != [sampling.largest(row) for row in logits], "all draws are the best token"
    # rows with and without filters are served by one program per batch size
    for handle in handles[:2]:
        engine.decode([handle])
    assert build_step(engine.static, AUTO, "last", None)._cache_size() == 1  # prefill
    assert build_step_in_place(engine.static, AUTO, "last", None)._cache_size() == 2  # 4 and 1


@pytest.mark.parametrize(
    "method",
    [Acceptance("block", "probabilistic"), pytest.param(Acceptance(), marks=pytest.mark.slow)],
    ids=["block", "standard"],
)
def test_a_restricted_target_stays_so_with_drafts(models, rows, method):
    """Top-k of 1 is the greedy text whatever the drafts; other filters bound what is emitted."""
    engine = speculative(models, method)
    prompts, settings = (PROMPTS[0], *PROMPTS[:3]), [GREEDY, BEST, THREE, NUCLEUS]
    handles, texts = served(engine, prompts, settings, 8)
    same = min(len(texts[0]), len(texts[1]))
    assert texts[0][:same] == texts[1][:same] and same > len(PROMPTS[0]) + 8
    for prompt, ids, given in zip(prompts[2:], texts[2:], settings[2:], strict=True):
        logits = rows(ids, len(prompt))
        drawn = np.array(ids[len(prompt) :])
        assert allowed(logits, given).numpy()[np.arange(len(drawn)), drawn].all()
        assert (drawn != logits.argmax(-1).numpy()).any()
    assert max(engine.sequences[handles[0]].emitted) > 1  # drafts are accepted
    assert build_waiting_step(*engine._build(AUTO))._cache_size() == 1


@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("--draft", "draft", "--drafts", "3"), marks=pytest.mark.slow)],
    ids=["plain", "draft"],
)
def test_top_k_of_one_on_the_command_line_is_the_greedy_text(pair_directory, tmp_path, more):
    more = [str(pair_directory / m) if m == "draft" else m for m in more]
    found = []
    for given in (
        [],
        ["--temperature", "1.5", "--top-k", "1", "--min-p", "0.01", "--top-p", "0.9"],
    ):
        file = tmp_path / "out.json"
        asked = ["--prompt-ids", "5,17", "--steps", "9", "--compute", "float32", "--ignore-eos"]
        with pytest.raises(SystemExit) as stop:
            target = str(pair_directory / "target")
            main(["generate", target, *asked, *more, *given, "--json", str(file)])
        assert not stop.value.code
        found.append(json.loads(file.read_text()))
    assert found[0]["output_ids"] == found[1]["output_ids"]
    names = ("temperature", "top_k", "top_p", "min_p")
    assert [[f["conditions"][n] for n in names] for f in found] == [
        [0.0, 0, 1.0, 0.0], [1.5, 1, 0.9, 0.01]
    ]  # fmt: skip


def test_everything_that_is_wrong_with_a_request_is_said_at_once(models):
    engine = plain(models)
    with pytest.raises(EngineError) as raised:
        engine.add(
            [], temperature=float("nan"), top_k=-1, top_p=0, min_p=float("nan"), seed=-1, limit=0
        )
    for part in (
        "no token ids", "temperature nan", "top_k -1", "top_p 0", "min_p nan", "seed -1", "limit 0"
    ):  # fmt: skip
        assert part in str(raised.value)
    assert not engine.sequences and len(engine._free_slots) == RUN.slots


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"temperature": 1, "top_k": 2.0}, "top_k 2.0: expected 0 (off) or how many tokens"),
        ({"temperature": 1, "top_k": True}, "top_k True: expected"),
        ({"temperature": 1, "top_k": 2**31}, "top_k 2147483648: expected"),
        ({"temperature": 1, "top_p": 1.01}, "top_p 1.01: expected more than 0, at most 1 (off)"),
        ({"temperature": 1, "top_p": "0.5"}, "top_p 0.5: expected"),
        ({"temperature": 1, "min_p": -0.1}, "min_p -0.1: expected 0 (off) to 1"),
        ({"temperature": float("inf")}, "temperature inf: expected 0 (greedy) or a finite"),
        ({"min_p": 0.1, "top_k": 3}, "top_k 3, min_p 0.1: expected temperature above 0"),
        ({"temperature": 1, "top_k": 1, "top_p": 1e-30, "min_p": 1}, None),
        ({"temperature": np.float32(0.5), "top_k": np.int64(7)}, None),
    ],
)
def test_ranges(settings, found):
    problems = Sampling(**settings).problems()
    assert len(problems) == (found is not None)
    assert found is None or problems[0].startswith(found)


def test_a_top_p_that_rounds_to_zero_keeps_the_best_token():
    limits = Filters(jnp.array([0]), jnp.float32([1e-50]), jnp.float32([0]))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)), jnp.float32)
    found = np.isfinite(np.asarray(log_probabilities(logits, jnp.ones(1), limits)))[0]
    assert found.tolist() == [i == int(logits.argmax()) for i in range(50)]


def test_draws_and_verdicts_are_the_same_over_ranks():
    in_emulated_devices("from parity.emulated import filtered_draws; filtered_draws()")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_filtered_texts_are_the_same_over_ranks():
    in_emulated_devices("from parity.emulated import filtered_texts; filtered_texts()", devices=2)
