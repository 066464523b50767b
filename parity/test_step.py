"""What a step must and must not do to slots, pages and other sequences' rows."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.cache import PAD, Cache, StepInputs
from jax_impl.config import ModelConfig, RunConfig
from jax_impl.make_tiny import make_checkpoint
from jax_impl.static import Static
from jax_impl.step import Turn, build_step, build_step_in_place, first_turn, with_inputs
from parity.driver import PAGE, SLOTS, Driver, Sequence, Session, step_inputs

BATCH = 4


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    """The `tiny` model in bf16, profile V."""
    directory = tmp_path_factory.mktemp("tiny") / "tiny"
    make_checkpoint(directory, "tiny", 0)
    return Driver.open(directory / "target", "bfloat16", "V", longest=4 * PAGE)


def bits(cache: Cache) -> list[np.ndarray]:
    """Every stored bit of the cache."""
    return [
        np.asarray(jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}"))
        for leaf in jax.tree.leaves(cache)
    ]


def filled(driver: Driver) -> Session:
    """A session whose cache holds a different number in every slot and page (sentinels)."""
    session = Session(driver, seed=3)
    session.cache = jax.tree.map(
        lambda a: (
            (jnp.arange(a.size, dtype=jnp.float32) % 97 - 48).reshape(a.shape).astype(a.dtype)
        ),
        session.cache,
    )
    return session


def ids_of(driver: Driver, seed: int, count: int) -> np.ndarray:
    """Seeded token ids."""
    return np.random.default_rng(seed).integers(0, driver.config.vocab_size, count)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_new_sequence_in_a_used_slot_equals_one_in_a_clean_slot(driver, length):
    ids = ids_of(driver, 1, length)
    results = []
    for session in (filled(driver), Session(driver, seed=3)):  # sentinels, NaN
        sequence = session.sequence(slot=2)
        session.step([(sequence, ids), None, None, None], 5)
        session.step([(sequence, ids[:1]), None, None, None], 5)
        results.append((sequence.rows(), session.caches(sequence)))
    (logits, caches), (clean_logits, clean_caches) = results
    assert np.array_equal(logits, clean_logits)
    assert all(np.array_equal(caches[k], clean_caches[k]) for k in clean_caches)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("width", [1, 5], ids=["decode", "window"])
def test_pad_rows_change_nothing(driver, width):
    one, two = ids_of(driver, 2, width), ids_of(driver, 3, width)
    session = filled(driver)
    before = bits(session.cache)
    first, second = session.sequence(slot=1), session.sequence(slot=2)
    session.step([None, (first, one), (second, two), None], width)
    after = bits(session.cache)
    idle = [s for s in range(SLOTS) if s not in (1, 2)]
    assert all(
        np.array_equal(b[:, idle], a[:, idle]) for b, a in zip(before[:2], after[:2], strict=True)
    )
    idle = [p for p in range(driver.run.pages) if p not in {first.pages[0], second.pages[0]}]
    assert np.array_equal(before[2][:, idle], after[2][:, idle])
    assert not np.array_equal(before[0][:, 1], after[0][:, 1])

    # the same rows elsewhere in the batch, other rows live: same results, bit for bit
    other = filled(driver)
    moved = other.sequence(slot=1), other.sequence(slot=2)
    extra = [Sequence(s, other.sequence(0).pages) for s in (0, 3)]
    rows = [(moved[1], two), (extra[0], ids_of(driver, 4, width)), (moved[0], one)]
    other.step([*rows, (extra[1], ids_of(driver, 5, width))], width)
    assert np.array_equal(moved[0].rows(), first.rows())
    assert np.array_equal(moved[1].rows(), second.rows())


def test_a_step_of_pad_rows_only_changes_nothing_and_stays_finite(driver):
    session = filled(driver)
    before = bits(session.cache)
    inputs = step_inputs([None] * BATCH, 1, 4)
    cache, out, _ = build_step(driver.static, rows="all")(driver.weights, session.cache, inputs)
    assert all(np.array_equal(b, a) for b, a in zip(before, bits(cache), strict=True))
    assert np.array_equal(np.asarray(out.logits), np.zeros_like(out.logits))
    assert (np.asarray(out.token) == driver.config.pad_token_id).all()
    assert np.asarray(out.finite).all()


def test_a_sequence_with_nan_state_is_reported_and_harms_nobody(driver):
    ids = ids_of(driver, 6, 3)
    healthy, poisoned = filled(driver), filled(driver)
    poisoned.cache = poisoned.cache.replace(
        kda_state=poisoned.cache.kda_state.at[:, 3].set(jnp.nan)
    )
    outputs = []
    for session in (healthy, poisoned):
        rows = [(Sequence(slot, session.sequence(0).pages, position=2), ids[:1]) for slot in (1, 3)]
        inputs = step_inputs([*rows, None, None], 1, 4)
        _, out, _ = build_step(driver.static, rows="all")(driver.weights, session.cache, inputs)
        outputs.append(out)
    assert np.array_equal(np.asarray(outputs[1].finite), [True, False, True, True])
    assert np.array_equal(np.asarray(outputs[0].logits[0]), np.asarray(outputs[1].logits[0]))


def test_the_cache_is_aliased_whole_and_cannot_be_used_twice(driver):
    session = Session(driver)
    inputs = step_inputs([None] * BATCH, 1, 4)
    step = build_step(driver.static, rows="all")
    compiled = step.lower(driver.weights, session.cache, inputs).compile()
    leaves = jax.tree.leaves(session.cache)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in leaves)
    text = compiled.as_text()
    header = text[: text.index("\n")]
    assert header.count("may-alias") + header.count("must-alias") == len(leaves)
    # no second buffer of a cache leaf's shape: nothing copies or rebuilds one
    for leaf in leaves:
        shape = f"{_HLO[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}]"
        made = [line for line in text.splitlines() if f"= {shape}" in line]
        assert made, f"{shape} not in the compiled step"
        assert not [line for line in made if " copy(" in line or " copy-start(" in line]
    old = session.cache
    step(driver.weights, old, inputs)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        step(driver.weights, old, inputs)


_HLO = {"float32": "f32", "bfloat16": "bf16"}


def test_a_step_compiles_once_per_shape_and_settings():
    config = ModelConfig.load(Path(__file__).parent / "golden" / "model_tiny3")
    equal = [Static(config, RunConfig(slots=SLOTS)) for _ in range(2)]
    assert build_step(equal[0]) is build_step(equal[1])
    assert build_step(equal[0]) is not build_step(equal[0], rows="all")


def test_steps_of_one_shape_share_one_compilation(driver):
    session = Session(driver)
    step = build_step(driver.static, rows="all")
    sequence = session.sequence(slot=0)
    session.step([(sequence, ids_of(driver, 1, 1)), None, None, None], 1)
    compiled = step._cache_size()
    for seed in range(3):
        session.step([None, (sequence, ids_of(driver, seed, 1)), None, None], 1)
    assert step._cache_size() == compiled


def test_next_inputs_chain_on_the_device(driver):
    prompt = ids_of(driver, 8, 4)
    step = build_step(driver.static, rows="all")
    chained, host = Session(driver), Session(driver)
    a, b = chained.sequence(slot=1), host.sequence(slot=1)
    rows: list = [(a, prompt), None, None, None]
    cache, out, following = step(driver.weights, chained.cache, step_inputs(rows, 5, 4))
    token = host.step([(b, prompt), None, None, None], 5)[0]
    for _ in range(4):
        assert int(out.token[0]) == token
        cache, out, following = step(driver.weights, cache, following)
        token = host.step([(b, np.array([token])), None, None, None], 1)[0]
    assert np.array_equal(np.asarray(following.position), [8, 0, 0, 0])
    assert np.array_equal(np.asarray(following.slot), [1, PAD, PAD, PAD])


def test_steps_in_place_are_those_with_new_results(driver):
    """The same results, each where the one before was; the turn cannot be used twice."""
    static, weights = driver.static, driver.weights
    plain, placed = Session(driver), Session(driver)
    rows: list = [(plain.sequence(slot=1), ids_of(driver, 8, 1)), None, None, None]
    other: list = [None, (plain.sequence(slot=2), ids_of(driver, 9, 1)), None, None]
    inputs, later = step_inputs(rows, 1, 4), step_inputs(other, 1, 4)
    step, turned = build_step(static, rows="all"), build_step_in_place(static, rows="all")
    turn = first_turn(static, weights, placed.cache, inputs, "all")
    cache, following = plain.cache, inputs
    for turns in range(6):
        if turns == 3:
            following, turn = later, with_inputs(turn, later)
        cache, out, following = step(weights, cache, following)
        old = turn
        places = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(turn)]
        turn = turned(weights, turn)
        assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(turn)] == places
        want = Turn(cache, following, out)
        assert jax.tree.structure(turn) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(turn), jax.tree.leaves(want), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
        with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
            turned(weights, old)
    assert turned._cache_size() == 1  # type: ignore[attr-defined]
    assert np.array_equal(np.asarray(inputs.tokens), np.asarray(step_inputs(rows, 1, 4).tokens))
    seeds = jnp.full(4, 7, jnp.uint32)
    want = jax.tree.map(np.asarray, turn.inputs.replace(seed=seeds))
    turn = turned(weights, with_inputs(turn, turn.inputs.replace(seed=seeds)))
    assert np.array_equal(np.asarray(turn.inputs.seed), want.seed)
    assert np.array_equal(np.asarray(turn.inputs.position), want.position + want.count)


def test_steps_in_place_take_one_token(driver):
    session = Session(driver)
    inputs = step_inputs([(session.sequence(slot=0), ids_of(driver, 8, 2)), None, None, None], 2, 4)
    with pytest.raises(ValueError, match=r"found 2 tokens .* takes 1.*; use build_step"):
        first_turn(driver.static, driver.weights, session.cache, inputs)


def test_sampling_depends_on_seed_and_position_alone(driver):
    step = build_step(driver.static, rows="all")

    def tokens(order: list[int]) -> dict[int, int]:
        session = Session(driver)
        rows: list = [(session.sequence(slot=s), ids_of(driver, 9, 3)) for s in range(4)]
        inputs: StepInputs = step_inputs([rows[i] for i in order], 5, 4)
        inputs = inputs.replace(
            temperature=jnp.full(4, 5.0), seed=jnp.asarray([10 + i for i in order], jnp.uint32)
        )
        _, out, _ = step(driver.weights, session.cache, inputs)
        return dict(zip(order, np.asarray(out.token).tolist(), strict=True))

    found = tokens([0, 1, 2, 3])
    assert tokens([3, 1, 0, 2]) == found
    assert len(set(found.values())) > 1  # same logits, other seeds
