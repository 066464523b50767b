"""`k3 selftest`: it passes where stages are right, and names the stage that is not."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jax_impl import cli, selftest
from jax_impl import selftest_stages as stages
from jax_impl.backend import AUTO, LATENCY_SPECIALIZED, BackendUnavailableError
from jax_impl.binding import bind
from jax_impl.cache import cache_shapes
from jax_impl.cli import SelftestOptions
from jax_impl.collectives import Ranks
from jax_impl.config import ConfigError, RunConfig
from jax_impl.params import abstract_weights
from jax_impl.random_step import Case, load_config, make_inputs, random_cache, random_stream
from jax_impl.random_weights import random_weights
from jax_impl.sharding import ONE_DEVICE
from jax_impl.stages.contract import Routed
from jax_impl.static import Static
from parity.kernel_env import needs_interpreter

SMALL = SelftestOptions(
    backend="auto", tp=(1,), rows=(2,), drafts=0, context=32, page_size=16, preset="tiny"
)


def test_bad_options_are_refused_together():
    wrong = replace(SMALL, tp=(0,), rows=(1, 65), drafts=8, context=0, page_size=0, seed=-1)
    with pytest.raises(ConfigError) as refused:
        selftest.run_selftest(wrong)
    said = str(refused.value)
    for name in ("--tp", "--rows", "--drafts 8", "--context 0", "--page-size 0", "--seed -1"):
        assert name in said
    assert "k3 selftest --help" in said


def test_kernels_that_cannot_run_here_are_refused_with_every_reason():
    with pytest.raises(BackendUnavailableError) as refused:
        selftest.run_selftest(replace(SMALL, backend="latency_specialized", preset="tiny"))
    assert str(refused.value).count("\n  - ") > 1


def test_a_rank_count_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="7 ranks"):
        selftest.run_selftest(replace(SMALL, tp=(7,)))


@pytest.mark.parametrize(
    ("name", "auto", "fp8", "found"),
    [
        ("attn_in.x", 1e-3, False, 2e-3),
        ("attn_in.x", 1e-9, False, 1e-5),
        ("attn_in.x", 1.0, False, 1.2e-2),
        ("mla.kv_latent", 2e-2, True, 2**-5),
        ("mla.kv_latent", 2e-2, False, 1.2e-2),
        ("route.router_gap", 5.0, False, 1e-6),
    ],
)
def test_limits_follow_the_error_of_auto_up_to_a_bound(name, auto, fp8, found):
    assert math.isclose(stages.most(name, auto, fp8), found)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_fails_and_is_delivered(bad):
    """JSON has no such numbers, and a result that cannot be written would be no result."""
    share = selftest.Share(Static(load_config("tiny"), RunConfig()), AUTO, None, None)
    found = {"mla.heads": stages.Distance(bad, 1e-3), "attn_in.x": stages.Distance(1e-3, bad)}
    comparisons = [*selftest._judged(share, Case("rows1", 1, 1), "mla", found)]
    passed = {c["quantity"]: c["passed"] for c in comparisons}
    assert passed == {"mla.heads": False, "attn_in.x": True}
    comparisons += selftest._judged(share, Case("rows2", 2, 1), "mla", {
        "mla.heads": stages.Distance(1e-3, 1e-3)
    })  # fmt: skip
    written = json.loads(json.dumps(comparisons, allow_nan=False))
    rows = selftest.table({"runs_where": {}, "comparisons": written, "replays": []})
    shown = {row[0]: (row[1], row[-1]) for row in rows}
    assert shown == {
        "mla.heads": ("tp1 rows1 mla", "FAILED"), "attn_in.x": ("tp1 rows1 mla", "ok"),
    }  # fmt: skip


class Small:
    """The four layers of the tiny preset, and the distances of one of them by quantity."""

    def __init__(self) -> None:
        self.config = selftest.small(load_config("tiny"))
        self.run = RunConfig(slots=2, pages=4, kv_dtype="float8_e4m3fn", kv_scale=1.0)
        self.weights = random_weights(self.config, ONE_DEVICE, 0, self.run)

    def wrong(self, backend, layer, tokens=1):
        static, case = Static(self.config, self.run), Case("case", 2, tokens)
        cache = random_cache(self.config, self.run, ONE_DEVICE, 0)
        inputs, _ = make_inputs(self.config, self.run, case, 32, 1, 0)
        stream = random_stream(static, case, 0)
        if layer is None:
            found = stages.head_stages(static, backend)(self.weights, *stream)
        else:
            run = stages.layer_stages(static, backend, layer, tokens > 1)
            found = run(self.weights, cache, inputs, *stream)
        limit = {n: stages.most(n, float(d.auto), True) for n, d in found.items()}
        return {n for n, d in found.items() if not float(d.backend) <= limit[n]}


@pytest.fixture(scope="module")
def small():
    return Small()


def scaled(name, which=0):
    """A stage whose output `which` is 2 % too large."""

    def stage(*args, **settings):
        found = getattr(AUTO, name)(*args, **settings)
        if not isinstance(found, tuple):
            return (found * 1.02).astype(found.dtype)
        parts = list(found)
        parts[which] = (parts[which] * 1.02).astype(parts[which].dtype)
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)

    return AUTO._replace(**{name: stage})


def one_token_too_many(static, pending, count, inputs, state, window):
    return AUTO.kda_commit(static, pending, count + 1, inputs, state, window)


def other_expert(static, w, y):
    routed = AUTO.route(static, w, y)
    return routed._replace(ids=routed.ids.at[0, 0].set(routed.ids[0, 1]))


def choice_left_pending(static, w, y):
    routed = AUTO.route(static, w, y)
    return Routed(routed.latent, None, None, None, pending=routed)


def choice_made_late(static, w, routed):
    return AUTO.experts(static, w, routed.pending)


@pytest.mark.parametrize(
    ("backend", "layer", "tokens", "wrong"),
    [
        (AUTO, 0, 4, set()),
        (AUTO._replace(kda_commit=one_token_too_many), 0, 4, {"kda_commit.state"}),
        pytest.param(AUTO, 2, 4, set(), marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (scaled("attn_in"), 0, 1, {"attn_in.x"}),
                (scaled("attn_in", 2), 2, 1, {"attn_in.snapshots"}),
                (scaled("kda_step"), 1, 1, {"kda_step.heads"}),
                (scaled("kda_step", 1), 1, 1, {"kda_step.state"}),
                (scaled("kda"), 1, 4, {"kda.heads"}),
                (scaled("mla"), 2, 1, {"mla.heads"}),
                (scaled("attn_out"), 2, 1, {"attn_out.y"}),
                (scaled("dense"), 0, 1, {"dense.delta"}),
                (AUTO._replace(route=other_expert), 1, 1, {"route.router_gap"}),
                (scaled("route", 3), 1, 1, {"route.shared"}),
                (scaled("experts"), 1, 1, {"experts.routed"}),
                (scaled("moe_out"), 1, 1, {"moe_out.delta"}),
                (AUTO._replace(route=choice_left_pending, experts=choice_made_late), 1, 1, set()),
                (scaled("head_in"), None, 1, {"head_in.hidden"}),
                (scaled("logits"), None, 1, {"logits.values", "logits.argmax"}),
            )
        ),
    ],
)
def test_a_wrong_stage_is_named_and_no_other(small, backend, layer, tokens, wrong):
    found = small.wrong(backend, layer, tokens)
    assert wrong <= found
    assert {n.split(".")[0] for n in found} == {n.split(".")[0] for n in wrong}


@pytest.mark.slow
def test_the_command_on_the_standard_path(tmp_path, capsys):
    target = tmp_path / "selftest.json"
    line = "selftest --backend auto --preset tiny --tp 1,2 --rows 2 --drafts 3 --context 64 "
    with pytest.raises(SystemExit) as done:
        cli.main([*line.split(), "--page-size", "16", "--json", str(target)])
    assert done.value.code == 0
    found = json.loads(target.read_text())
    assert found["passed"] and {c["tp"] for c in found["comparisons"]} == {1, 2}
    assert {c["case"] for c in found["comparisons"]} == {"rows2", "verify4"}
    assert {c["layer"] for c in found["comparisons"]} == {"dense", "kda", "mla", "head"}
    assert all(r["tokens_equal"] for r in found["replays"]) and len(found["replays"]) == 2
    assert found["runs_where"]["kernels of a decode step"] == "none"


@pytest.mark.slow
def test_a_replay_that_reads_another_batch_fails(monkeypatch):
    """As a captured program does that keeps the first batch's addresses."""
    captured = selftest._captured

    def stale(static, backend):
        def run(weights, cache, every):
            slots = jnp.broadcast_to(every.slot[:1], every.slot.shape)
            return captured(static, backend)(weights, cache, every.replace(slot=slots))

        return jax.jit(run)

    monkeypatch.setattr(selftest, "_captured", stale)
    found = selftest.run_selftest(SMALL)
    assert not found["passed"] and not found["replays"][0]["passed"]
    assert all(c["passed"] for c in found["comparisons"])
    assert any("FAILED" in row for row in selftest.table(found))


@needs_interpreter
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (64, 1), (1, 8)])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_specialised_stages_have_the_shapes_of_the_standard_ones(batch, tokens, layer):
    """At the sizes of one TP16 rank, traced: nothing is compiled."""
    config, ranks = selftest.small(load_config("k3")), Ranks(16)
    run = RunConfig(
        slots=batch, pages=64, kv_dtype="float8_e4m3fn", kv_scale=1.0,
        decode_backend="latency_specialized",
    )  # fmt: skip
    static, case = Static(config, run, ranks), Case("case", batch, tokens)
    weights = jax.eval_shape(bind, abstract_weights(config, 16))
    inputs = jax.eval_shape(lambda: make_inputs(config, run, case, 16, 1, 0)[0])
    stream = jax.eval_shape(lambda: random_stream(static, case, 0))
    test = stages.layer_stages(static, LATENCY_SPECIALIZED, layer, tokens > 1)
    found = jax.eval_shape(test, weights, cache_shapes(config, run, ranks), inputs, *stream)
    assert all(d.backend.shape == d.auto.shape == () for d in found.values())
    head = stages.head_stages(static, LATENCY_SPECIALIZED)
    assert "logits.values" in jax.eval_shape(head, weights, *stream)
