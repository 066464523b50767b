"""The host side: admission, keeping, extending, releasing, and its errors."""

from __future__ import annotations

import numpy as np
import pytest

from jax_impl.config import ModelConfig, RunConfig
from jax_impl.engine import Engine, EngineError
from jax_impl.params import Weights
from parity.driver import load


@pytest.fixture(scope="module")
def model(golden_dir) -> tuple[ModelConfig, Weights]:
    """The recorded model `model_tiny3`."""
    return load(golden_dir / "model_tiny3")


RUN = RunConfig(compute="float32", profile="H", slots=3, pages=24, page_size=4)


def engine(model, run: RunConfig = RUN) -> Engine:
    """An engine with a small prefill chunk, so that prompts take several."""
    return Engine(model[0], run, model[1], chunk=5, context=48)


def recorded(golden_dir) -> dict[str, np.ndarray]:
    """Prompts and greedy continuations of the recording."""
    from safetensors import safe_open

    with safe_open(golden_dir / "model_tiny3" / "golden.safetensors", "numpy") as file:
        names = ("prompt_ids", "greedy_ids", "prompt2_ids", "prompt2_greedy_ids")
        return {name: file.get_tensor(name).tolist() for name in names}


def test_batched_generation_with_admission_between_steps_equals_the_recording(model, golden_dir):
    want = recorded(golden_dir)
    e = engine(model)
    first = e.add(want["prompt_ids"])
    e.prefill(first)
    for _ in range(3):
        e.decode([first])
    second = e.add(want["prompt2_ids"])
    e.prefill(second)
    for _ in range(7):
        e.decode([second, first])
    ids = e.sequences
    assert ids[first].ids == (want["prompt_ids"] + want["greedy_ids"])[: len(ids[first].ids)]
    assert len(ids[first].ids) == len(want["prompt_ids"]) + 11
    assert ids[second].ids == want["prompt2_ids"] + want["prompt2_greedy_ids"]
    chunks = -(-len(want["prompt_ids"]) // 5) + -(-len(want["prompt2_ids"]) // 5)
    assert e.steps == {("prefill", 1, 5): chunks, ("decode", 1, 1): 3, ("decode", 2, 1): 7}


def test_a_kept_sequence_is_extended_as_if_it_had_been_one_prompt(model, golden_dir):
    want = recorded(golden_dir)
    prompt, rest = want["prompt_ids"][:6], want["prompt_ids"][6:]
    e = engine(model)
    kept = e.add(prompt)
    e.prefill(kept)
    e.sequences[kept].ids.pop()  # the drawn token gives way to the user's next turn
    e.extend(kept, rest)
    token = e.prefill(kept)
    assert token == want["greedy_ids"][0]
    e.release(kept)
    again = e.add(want["prompt_ids"])
    assert e.prefill(again) == want["greedy_ids"][0]  # in the slot and pages just released


def test_a_failed_sequence_is_named_and_others_go_on(model):
    e = engine(model)
    bad, good = e.add([1, 2, 3]), e.add([4, 5, 6])
    for handle in (bad, good):
        e.prefill(handle)
    slot = e.sequences[bad].slot
    e.cache = e.cache.replace(kda_state=e.cache.kda_state.at[:, slot].set(np.nan))
    assert set(e.decode([bad, good])) == {good}
    assert e.sequences[bad].failed == "logits not finite at position 3"
    assert e.sequences[good].failed is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.add([]), "no token ids; expected at least one id"),
        (lambda e: e.add([1, 256, -1]), r"ids outside 0..255: \[256, -1\]"),
        (lambda e: e.add([1], temperature=-1.0), "temperature -1.0: expected 0"),
        (lambda e: e.add([1], temperature=float("nan")), "temperature nan"),
        (lambda e: e.add([1], seed=-1), r"seed -1: expected 0..4294967295"),
        (lambda e: [e.add([1]) for _ in range(4)], "all 3 slots are in use; release"),
        (lambda e: e.release(7), r"no sequence 7; live: \[\]"),
        (lambda e: e.decode([e.add([1, 2])]), "2 unprocessed tokens, decode takes exactly one"),
        (lambda e: e.decode([]), "0 sequences: expected 1..64 different ones"),
        (lambda e: e.prefill(e.add([1] * 49)), "49 tokens: beyond the context of 48"),
        (lambda e: Engine(e.static.config, RUN, e.weights, context=97), r"expected 1..96 tokens"),
    ],
)
def test_requests_that_cannot_be_served_say_why(model, call, message):
    with pytest.raises(EngineError, match=message):
        call(engine(model))


def test_running_out_of_pages_leaves_the_other_sequences_alone(model):
    e = engine(model)
    small, other, large = e.add([1, 2, 3]), e.add([5] * 48), e.add([7] * 48)
    first = e.prefill(small)
    e.prefill(other)
    with pytest.raises(EngineError, match="are free; release a sequence or raise pages"):
        e.prefill(large)
    e.release(large)
    assert first is not None
    assert set(e.decode([small])) == {small}
