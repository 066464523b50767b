import dataclasses
from pathlib import Path

import jax
import pytest

from jax_impl import memory, step_memory
from jax_impl.cache import cache_shapes
from jax_impl.collectives import Ranks
from jax_impl.config import RELEASED_CONFIG, ConfigError, ModelConfig, RunConfig
from jax_impl.memory import (
    VISION_BYTES,
    VISION_TENSORS,
    DoesNotFitError,
    MemorySettings,
    checkpoint_size,
    estimate,
    largest_batch,
    largest_context,
    require_fit,
    require_room,
    weight_bytes,
)
from jax_impl.params import abstract_weights

GOLDEN = Path(__file__).parent / "golden"
GB300 = 288_000_000_000


@pytest.fixture(scope="module")
def k3():
    return ModelConfig.load(RELEASED_CONFIG)


def case15(**changes):
    """TP16, f32 state, FP8 latent, batch 32, context 32,768, no speculation."""
    base = MemorySettings(
        ranks=16, batch=32, context=32_768, kv_dtype="float8_e4m3fn", experts="ep"
    )
    return dataclasses.replace(base, **changes)


def parts(found):
    """The byte fields by name."""
    return {
        f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.name != "settings"
    }


def test_totals_equal_the_released_index(k3):
    size, tensors = checkpoint_size(k3)
    assert (size, tensors) == (1_559_965_606_912, 497_052)
    assert (size + VISION_BYTES, tensors + VISION_TENSORS) == (1_560_860_324_864, 497_220)


@pytest.mark.parametrize(
    ("router", "experts", "total"),
    [
        ("cut", "tp", "98.31"),
        ("cut", "ep", "98.31"),
        ("copied", "ep", "108.28"),
        ("copied", "padded", "138.41"),
    ],
)
def test_weights_per_rank_at_tp16(k3, router, experts, total):
    settings = MemorySettings(ranks=16, router=router, experts=experts)
    assert f"{sum(weight_bytes(k3, settings)) / 1e9:.2f}" == total


def test_pad_rows_of_the_fused_kda_product_explain_the_last_digit(k3):
    """vLLM pads the six joined KDA projections from 3206 to 3216 rows; this project does not."""
    rows = 4 * k3.kda_width // 16 + k3.kda_head_dim + k3.kda_num_heads // 16
    assert rows == 3206
    pad = 10 * k3.hidden_size * 2 * len(k3.kda_layers)
    for experts, total in (("ep", "108.29"), ("padded", "138.42")):
        settings = MemorySettings(ranks=16, router="copied", experts=experts)
        assert f"{(sum(weight_bytes(k3, settings)) + pad) / 1e9:.2f}" == total


def test_weights_per_rank_at_tp8_like_vllm(k3):
    experts, others = weight_bytes(k3, MemorySettings(ranks=8, router="copied", experts="padded"))
    assert (f"{experts / 1e9:.2f}", f"{others / 1e9:.2f}") == ("180.81", "24.25")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_cut_layout_equals_the_arrays_that_are_allocated(k3, ranks):
    leaves = jax.tree.leaves(abstract_weights(k3, ranks))
    allocated = sum(a.size * a.dtype.itemsize for a in leaves)
    assert sum(weight_bytes(k3, MemorySettings(ranks=ranks))) == allocated


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_cache_equals_the_arrays_that_are_allocated(k3, ranks, kv_dtype):
    run = RunConfig(kv_dtype=kv_dtype, kv_scale=1.0 if kv_dtype else None, slots=3, pages=5)
    leaves = jax.tree.leaves(cache_shapes(k3, run, Ranks(ranks)))
    allocated = sum(a.size * a.dtype.itemsize for a in leaves)
    assert memory.cache_bytes(k3, run, ranks) == allocated


def test_case_15_figures(k3):
    found = estimate(k3, case15())
    assert f"{found.routed_experts / 1e9:.2f}" == "90.40"
    padded = estimate(k3, case15(experts="padded"))
    assert f"{padded.routed_experts / 1e9:.2f}" == "120.54"
    assert found.kda_state == 32 * 27_131_904
    assert found.conv_windows == 32 * 15_261_696 // 16
    assert memory.latent_token_bytes(k3, "float8_e4m3fn") == 13_824
    assert found.latent_cache == 14_495_514_624
    assert found.total == sum(parts(found).values())


def test_only_24_layers_have_a_growing_cache(k3):
    assert memory.latent_token_bytes(k3, "bfloat16") == 24 * 1152


@pytest.mark.parametrize("attention", ["gathered", "paged"])
def test_doubling_the_context_changes_the_latent_part_only(k3, attention):
    once = parts(estimate(k3, case15(attention=attention)))
    twice = parts(estimate(k3, case15(attention=attention, context=65_536)))
    latent = {"latent_cache", "attention_buffers"} if attention == "gathered" else {"latent_cache"}
    assert {name for name in once if once[name] != twice[name]} == latent
    assert all(twice[name] == 2 * once[name] for name in latent)


def test_the_latent_cache_is_not_divided_by_the_ranks(k3):
    sizes = {estimate(k3, case15(ranks=r)).latent_cache for r in (1, 2, 4, 8, 16)}
    assert sizes == {14_495_514_624}


def test_state_is_divided_and_multiplied_by_kept_states(k3):
    one, all_drafts = estimate(k3, case15()), estimate(k3, case15(state_copies=8))
    assert all_drafts.kda_state == 8 * one.kda_state
    assert all_drafts.conv_windows == 8 * one.conv_windows
    assert estimate(k3, case15(ranks=8)).kda_state == 2 * one.kda_state


def test_draft_is_counted(k3):
    found = estimate(k3, case15(draft_weights=10**9, draft_token_bytes=100))
    assert (found.draft_weights, found.draft_cache) == (10**9, 100 * 32 * 32_768)


def test_a_million_tokens_times_64_is_refused_with_numbers(k3):
    with pytest.raises(DoesNotFitError) as error:
        require_fit(k3, case15(batch=64, context=1_048_576), GB300)
    text = str(error.value)
    total = estimate(k3, case15(batch=64, context=1_048_576)).total
    for number in (total, GB300, total - GB300, 64 * 1_048_576 * 13_824):
        assert f"{number:,} bytes" in text
    assert "Largest batch at this context: " in text and "at this batch: " in text


@pytest.mark.parametrize("context", [4096, 32_768, 1_048_576])
def test_largest_batch_is_the_last_that_fits(k3, context):
    best = largest_batch(k3, case15(context=context), GB300)
    assert best > 0
    assert require_fit(k3, case15(context=context, batch=best), GB300).total <= GB300
    with pytest.raises(DoesNotFitError):
        require_fit(k3, case15(context=context, batch=best + 1), GB300)


@pytest.mark.parametrize("batch", [16, 64])
def test_largest_context_is_the_last_that_fits(k3, batch):
    best = largest_context(k3, case15(batch=batch), GB300)
    assert 0 < best < k3.max_position_embeddings
    assert estimate(k3, case15(batch=batch, context=best)).total <= GB300
    assert estimate(k3, case15(batch=batch, context=best + 1)).total > GB300


def test_the_models_own_limit_bounds_the_context(k3):
    assert largest_context(k3, case15(batch=1), 10**15) == k3.max_position_embeddings
    with pytest.raises(ConfigError, match="1,048,576"):
        estimate(k3, case15(context=1_048_577))


def test_nothing_fits_where_the_weights_do_not(k3):
    assert largest_batch(k3, case15(ranks=4), 80 * 10**9) == 0
    with pytest.raises(DoesNotFitError, match="more ranks or larger devices"):
        require_fit(k3, case15(ranks=4), 80 * 10**9)


def test_ranks_that_do_not_divide_are_all_named(k3):
    with pytest.raises(ConfigError) as error:
        estimate(k3, case15(ranks=5, experts="tp"))
    text = str(error.value)
    assert "5 ranks" in text
    for name in ("kda_num_heads 96", "num_attention_heads 96", "w2.weight_scale", "gate.weight"):
        assert name in text


def test_a_width_that_divides_through_a_head_is_refused():
    tiny = ModelConfig.load(GOLDEN / "model_tiny3")  # 3 heads of width 24: 72 divides by 8
    with pytest.raises(ConfigError, match="num_attention_heads 3"):
        weight_bytes(tiny, MemorySettings(ranks=8))


def test_bad_settings_are_all_named():
    with pytest.raises(ConfigError) as error:
        MemorySettings(ranks=0, batch=True, kv_dtype="int4", reserve=-1, context=1.5)
    text = str(error.value)
    assert all(n in text for n in ("ranks", "batch", "kv_dtype", "reserve", "context"))


def test_table_has_every_part_and_its_total(k3):
    found = estimate(k3, case15())
    rows = found.rows()
    assert [size for _, size, _ in rows[:-1]] == list(parts(found).values())
    assert rows[-1][:2] == ("total", found.total)


def test_limit_of_copied_experts_is_that_of_the_step():
    from jax_impl.ops.experts import DECODE_PAIRS, GATHER_PAIRS

    assert step_memory.GATHER_PAIRS == GATHER_PAIRS
    assert step_memory.DECODE_PAIRS == DECODE_PAIRS


def test_room_is_asked_for_weights_and_cache():
    tiny, run = ModelConfig.load(GOLDEN / "model_tiny3"), RunConfig()
    need = require_room(tiny, 10**9, run)
    assert need == sum(weight_bytes(tiny, MemorySettings())) + memory.cache_bytes(tiny, run)
    assert require_room(tiny, need, run) == need
    with pytest.raises(DoesNotFitError, match=r"\(1 bytes\) short"):
        require_room(tiny, need - 1, run)
    assert require_room(tiny, need - 1) < need


# ---- the drafter, and both forms of commit ----


def test_the_released_drafter_at_tp16(k3):
    from jax_impl.draft_memory import RELEASED, draft_config, draft_weight_bytes, with_draft
    from jax_impl.draft_weights import abstract_draft_weights
    from parity.test_draft_config import RELEASED as published

    assert RELEASED.items() <= published.items()
    draft = draft_config("released")
    assert draft_weight_bytes(draft, 1) == 4_775_815_682
    for ranks in (1, 2, 16):
        arrays = jax.tree.leaves(abstract_draft_weights(draft, ranks))
        assert draft_weight_bytes(draft, ranks) == sum(a.size * a.dtype.itemsize for a in arrays)
    found = estimate(k3, with_draft(k3, case15(context=1024, batch=1), "released"))
    assert found.draft_cache == 1024 * 2880
    bf16 = with_draft(k3, case15(kv_dtype="bfloat16"), "released")
    assert bf16.draft_token_bytes == 5760
    assert with_draft(k3, case15(), None) == case15()
    with pytest.raises(ConfigError, match="7168 does not divide by 3 ranks"):
        draft_weight_bytes(draft, 3)


def test_a_drafter_of_another_target_is_refused(k3):
    from jax_impl.draft_memory import with_draft

    with pytest.raises(ConfigError, match="hidden_size: draft 128, expected the target's 7168"):
        with_draft(k3, case15(), str(GOLDEN / "dspark_tiny16"))


def test_what_both_forms_of_commit_keep_and_move(k3):
    """69 layers, 6 heads of 96, state 128 x 128 in f32, eight rows."""
    from jax_impl.draft_memory import commit_forms

    found = commit_forms(k3, MemorySettings(ranks=16, tokens=8))
    state, raw = 69 * 6 * 128 * 128 * 4, 69 * 8 * 3 * 6 * 128 * 2
    records = 69 * 8 * 6 * 3 * 128 * 4
    assert state == 27_131_904 and records == 5_087_232
    assert found["replay"] == {"memory": records + raw, "traffic": 3 * state + 2 * records}
    assert found["snapshots"] == {"memory": 8 * state + raw, "traffic": 11 * state}
    batch = commit_forms(k3, MemorySettings(ranks=16, tokens=8, batch=8))
    assert batch["snapshots"]["memory"] == 8 * found["snapshots"]["memory"]
    none = estimate(k3, MemorySettings(ranks=16))
    assert none.commit_buffers == 0
    kept = estimate(k3, MemorySettings(ranks=16, tokens=8, commit="snapshots"))
    assert kept.commit_buffers == found["snapshots"]["memory"]
    with pytest.raises(ConfigError, match="commit: found 'ring', expected one of"):
        MemorySettings(commit="ring")


@pytest.mark.parametrize("commit", ["replay", "snapshots"])
def test_commit_buffers_are_what_a_verification_returns(models, commit):
    """Shapes of the pending commits of a traced forward pass."""
    from jax_impl.backend import AUTO
    from jax_impl.model import forward
    from jax_impl.static import Static
    from parity.speculation import B, K, inputs_of

    run = dataclasses.replace(models.run, commit=commit)
    inputs = inputs_of([[0] * (K + 1)] * B, [K + 1] * B, [0] * B)
    made = jax.eval_shape(
        lambda w, c, i: forward(Static(models.config, run), AUTO, w, c, i, commit=False).pending,
        models.weights, models.cache(), inputs,
    )  # fmt: skip
    kept = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(made))
    settings = MemorySettings(batch=B, tokens=K + 1, commit=commit, compute=run.compute)
    assert estimate(models.config, settings).commit_buffers == kept


def test_context_parallelism_divides_the_latent_cache(k3):
    whole, spread = (
        memory.estimate(k3, memory.MemorySettings(ranks=16, context=131072, dcp=dcp))
        for dcp in (1, 16)
    )
    assert whole.latent_cache == 16 * spread.latent_cache
    assert whole.weights == spread.weights and whole.kda_state == spread.kda_state
    # 24 layers x 576 bf16 numbers x 131,072 tokens / 16
    assert spread.latent_cache == 24 * 576 * 2 * 131072 // 16
    with pytest.raises(ConfigError, match="dcp: found 4, expected 1 or the ranks, 16"):
        memory.MemorySettings(ranks=16, dcp=4)
