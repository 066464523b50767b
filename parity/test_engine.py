"""The host side: admission, keeping, extending, releasing, and its errors."""

from __future__ import annotations

import jax
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


def test_steps_write_over_what_the_last_one_of_their_size_gave(model, golden_dir, monkeypatch):
    """No address moves, whatever other sizes come between; an interrupted step leaves none."""
    from jax_impl import engine as module

    want, e = recorded(golden_dir), engine(model)
    first, second = e.add(want["prompt_ids"]), e.add(want["prompt2_ids"])
    for handle in (first, second):
        e.prefill(handle)

    def places(size):
        (held,) = (v for (_, shape), v in e._held.items() if shape == (size, 1))
        return [a.unsafe_buffer_pointer() for a in jax.tree.leaves((e.cache, held))]

    e.decode([first])
    one = places(1)
    e.decode([second, first])
    two = places(2)
    e.decode([first])
    assert places(1) == one
    with monkeypatch.context() as m:
        m.setattr(module, "build_step_in_place", lambda *_: interrupted)
        with pytest.raises(KeyboardInterrupt):
            e.decode([first, second])
    assert len(e._held) == 1
    e.decode([second, first])
    e.decode([first, second])
    count = len(jax.tree.leaves(e.cache))
    assert places(2)[:count] == two[:count]
    for handle, names in (
        (first, ("prompt_ids", "greedy_ids")),
        (second, ("prompt2_ids", "prompt2_greedy_ids")),
    ):
        prompt, greedy = (want[name] for name in names)
        ids = e.sequences[handle].ids
        assert ids == (prompt + greedy)[: len(ids)] and len(ids) > len(prompt) + 3


def interrupted(*_):
    raise KeyboardInterrupt


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


def test_three_sequences_in_a_padded_batch_equal_one_at_a_time_and_touch_no_other_slot(model):
    prompts = ([7], [3, 1, 4, 1], [2, 7, 1, 8, 2, 8])  # one of a single token: history from 1 on
    run = RunConfig(compute="float32", profile="H", slots=4, pages=32, page_size=4)
    alone = []
    for prompt in prompts:
        e = engine(model, run)
        handle = e.add(prompt)
        e.prefill(handle)
        for _ in range(5):
            e.decode([handle])
        alone.append(e.sequences[handle].ids)
    e = engine(model, run)
    idle = e.add([9, 9, 9])
    e.prefill(idle)
    slot = e.sequences[idle].slot
    assert slot == 0  # where a pad row would land if its slot were not a marker
    before = np.asarray(e.cache.kda_state[:, slot]), np.asarray(e.cache.conv_window[:, slot])
    handles = [e.add(p) for p in prompts]
    for handle in handles:
        e.prefill(handle)
    for _ in range(5):
        e.decode([handles[2], handles[0], handles[1]])  # a batch of four, one row pad
    assert [e.sequences[h].ids for h in handles] == alone
    after = np.asarray(e.cache.kda_state[:, slot]), np.asarray(e.cache.conv_window[:, slot])
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_released_slots_and_pages_serve_again(model):
    e = engine(model)
    for _ in range(4):  # 4 x 12 pages of the 24, 4 x 1 slot of the 3
        handle = e.add([5] * 48)
        e.prefill(handle)
        e.release(handle)
    small = e.add([1, 2, 3])
    assert e.prefill(small) is not None


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_an_fp8_cache_generates_like_the_reference_with_the_same_cache(model, golden_dir, scale):
    torch = pytest.importorskip("torch")
    from torch_ref.model import Model, greedy
    from torch_ref.numerics import Numerics

    run = RunConfig(
        compute="float32", profile="V", kv_dtype="float8_e4m3fn", kv_scale=scale,
        mla_norm_eps=1e-6, slots=3, pages=24, page_size=4,
    )  # fmt: skip
    e = engine(model, run)
    prompt = recorded(golden_dir)["prompt_ids"]
    handle = e.add(prompt)
    e.prefill(handle)
    for _ in range(15):
        e.decode([handle])
    numerics = Numerics(torch.float32, "V", mla_norm_eps=1e-6, kv_dtype="fp8", kv_scale=scale)
    want, _ = greedy(Model.load(golden_dir / "model_tiny3", numerics), torch.tensor(prompt), 16)
    assert e.sequences[handle].ids[len(prompt) :] == want.tolist()


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
        (lambda e: [e.add([1]) for _ in range(4)], "all 3 slots are in use, expected a free one"),
        (lambda e: e.release(7), r"no sequence 7; expected one of \[\]"),
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


def test_a_finished_sequence_is_not_prefilled_again(model):
    e = engine(model)
    handle = e.add([5, 6, 7], limit=1)
    e.prefill(handle)
    before = dict(e.steps)
    for again in (lambda: e.prefill(handle), lambda: e.decode([handle])):
        with pytest.raises(EngineError, match=r"is finished \(limit\); extend or release it"):
            again()
    assert e.steps == before
    with pytest.raises(EngineError, match="ids outside"):
        e.extend(handle, [1.7])
