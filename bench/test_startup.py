"""Compile times and host times: what is refused, what is counted, and a small run."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench import startup
from bench.__main__ import main
from bench.result import problems, read
from bench.startup import figures_of, headline_names, parity_of, programs, start
from bench.startup_options import IN_FLIGHT, StartupOptions
from bench.startup_process import WARMUPS, Calls, Loop, cache_events, measure
from jax_impl.cache import StepInputs
from jax_impl.step import Turn

SMALL = StartupOptions(preset="tiny", tp=2, layers=(4,), context=64)


@pytest.mark.parametrize(
    ("o", "names"),
    [
        (StartupOptions(), ["moe92.rows1"]),
        (StartupOptions(rows=(1, 8), layers=(8, 93)),
         ["moe8.rows1", "moe8.rows8", "moe92.rows1", "moe92.rows8"]),
        (SMALL, ["moe4.rows1"]),
    ],
)  # fmt: skip
def test_a_program_per_depth_and_batch(o, names):
    found = programs(o)
    assert list(found) == names
    assert all(len(p.rows) == len(p.layers) == 1 for p in found.values())
    assert all((p.repeats, p.budget) == (o.calls, o.budget) for p in found.values())


def test_all_that_is_wrong_is_listed_at_once(tmp_path):
    (tmp_path / "old").touch()
    wrong = replace(
        SMALL, tp=4, rows=(65,), layers=(4, 5), context=5000, calls=0, repeats=0, budget=0.0,
        compile_cache=tmp_path,
    )  # fmt: skip
    with pytest.raises(ValueError) as refused:
        programs(wrong)
    for part in ("4 rank(s)", "--rows (65,)", "--layers 5", "--context 5000", "--calls 0",
                 "--repeats 0", "--budget 0.0", "found files in it", "startup --help"):  # fmt: skip
        assert part in str(refused.value), part
    with pytest.raises(ValueError, match="two of them are equally deep"):
        programs(StartupOptions(layers=(92, 93)))


class FakeStep:
    """A step whose calls take 2 s and whose results take 10 more."""

    def __init__(self):
        self.now, self.ends, self.seen = 0.0, 0.0, []

    def clock(self):
        return self.now

    def __call__(self, weights, turn):
        cache, inputs, _ = turn
        self.seen.append((cache, int(inputs.position[0])))
        self.now += 2.0
        self.ends = max(self.ends, self.now) + 10.0
        ends = self.ends
        token = SimpleNamespace(is_ready=lambda: self.now >= ends)
        outputs = SimpleNamespace(finite=True, token=token)
        return Turn(cache + 1, replace(inputs, position=inputs.position + 1), outputs)  # type: ignore[arg-type]

    def given(self, turn, inputs):
        self.now += 0.5
        return turn._replace(inputs=inputs)

    def kept(self, token):
        self.now += 0.25
        return token

    def wait(self):
        self.now = max(self.now, self.ends)


@pytest.fixture
def loop(monkeypatch):
    step = FakeStep()
    one = np.zeros(1, np.int32)
    inputs = StepInputs(one[None], one, one + 50, one, one[None], one, one)  # type: ignore[arg-type]
    made = Loop(
        step, None, Turn(0, None, None), inputs, step.clock,  # type: ignore[arg-type]
        given=step.given, kept=step.kept,
    )  # fmt: skip
    monkeypatch.setattr(made, "wait", step.wait)
    return made


def test_a_step_alone_begins_when_the_one_before_has_ended(loop):
    found = Calls()
    loop.alone(found)
    loop.alone(found)
    assert (found.dispatch, found.step, found.busy) == ([2.0, 2.0], [12.5, 12.5], [])
    assert found.handover == [0.5, 0.5]
    assert [cache for cache, *_ in loop.step.seen] == [0, 1]  # every call takes the last one's


def test_steps_in_a_row_are_behind_each_other(loop):
    found = Calls()
    loop.chained(found)
    assert found.dispatch == [2.0] * (IN_FLIGHT - 1) and found.busy == [True] * (IN_FLIGHT - 1)
    assert found.handover == [0.25] * (IN_FLIGHT - 1)
    assert found.step == [(2.5 + 10.0 * IN_FLIGHT) / IN_FLIGHT]
    assert [cache for cache, *_ in loop.step.seen] == list(range(IN_FLIGHT))
    places = [position for *_, position in loop.step.seen]
    assert places == list(range(51 - IN_FLIGHT, 51))  # the last one where one alone is


@pytest.mark.parametrize(
    ("calls", "budget", "rounds"), [(1, 1e9, 1), (16, 1e9, 2), (200, 1e9, 14), (200, 1.0, 1)]
)
def test_whole_rounds_within_the_budget(loop, calls, budget, rounds):
    found = measure(loop, calls, budget)
    assert len(found["alone"].dispatch) == len(found["chained"].dispatch)
    assert len(found["alone"].step) == rounds * (IN_FLIGHT - 1)
    assert len(found["chained"].step) == rounds
    assert len(loop.step.seen) == (WARMUPS + rounds) * (2 * IN_FLIGHT - 1)


def test_a_cache_event_counts_only_inside():
    import jax

    with cache_events() as found:
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        jax.monitoring.record_event("/jax/something_else")
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert found == {"hits": 1}


def made_up(cold_hits=0, cached_hits=1, finite=True, layer=True):
    times = dict(zip(startup.PARTS, (1.0, 2.0, 3.0, 6.0, 9.0), strict=True))
    common = times | {"buffers_in": 49, "buffers_out": 16, "misses": 0}
    kinds = {
        "alone": {
            "dispatch": [3e-4] * 20,
            "handover": [2e-4] * 20,
            "step": [9e-3] * 20,
            "busy": [],
        },
        "chained": {
            "dispatch": [1e-4] * 16 + [5e-4] * 4,
            "handover": [5e-5] * 20,
            "step": [8e-3] * 4,
            "busy": [True, False],
        },
    }
    comparison = {"what": "kda.y", "found": 0.1, "limit": 0.2, "passed": layer}
    return {
        "cold": [common | {"hits": cold_hits}], "cached": [common | {"hits": cached_hits}],
        "cache_bytes": [7],
        "calls": {"first_step_s": 8.0, "kinds": kinds, "finite": finite, "hits": cached_hits,
                  "parity": {"comparisons": [comparison]}},
    }  # fmt: skip


def test_figures_from_samples():
    found = figures_of("moe4.rows1", made_up())
    value = lambda name: found[f"{name}.moe4.rows1"]["value"]  # noqa: E731
    assert value("total_s.cold") == 6.0 and value("compile_s.cached") == 3.0
    assert value("dispatch_us.alone") == 300.0 and value("dispatch_us.chained") == 100.0
    assert value("handover_us.alone") == 200.0 and value("handover_us.chained") == 50.0
    assert value("dispatch_p10_us.chained") == 100.0 < value("dispatch_p90_us.chained")
    assert value("step_us.chained") == 8000.0 and value("busy") == 0.5
    assert len(found["dispatch_us.chained.moe4.rows1"]["samples"]) == 20
    less = figures_of("moe4.rows1", made_up() | {"calls": None})
    assert not [n for n in less if "_us" in n or "step" in n] and "total_s.cold.moe4.rows1" in less


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "passed"),
        ({"cold_hits": 1}, "failed"),
        ({"cached_hits": 0}, "failed"),
        ({"finite": False}, "failed"),
        ({"layer": False}, "failed"),
    ],
)
def test_the_verdict_needs_caches_as_said_and_layers_that_agree(changed, verdict):
    assert parity_of({"a": made_up(), "b": made_up(**changed)})["verdict"] == verdict


def test_without_calls_there_is_no_verdict_but_of_the_caches():
    assert parity_of({"a": made_up() | {"calls": None}})["verdict"] == "none"
    assert parity_of({"a": made_up(cold_hits=1) | {"calls": None}})["verdict"] == "failed"


def test_a_process_that_fails_is_told_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    (options,) = programs(SMALL).values()
    with pytest.raises(ValueError, match=r"process for compile ended with status 1(.|\n)*nothing"):
        start("compile", options, tmp_path, shapes_only=True)


def test_a_small_run(tmp_path, monkeypatch, capsys):
    # compiled quickly: this is about what is counted, not about how fast it is
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the command changes it
    monkeypatch.chdir(tmp_path)
    sizes = "--preset tiny --tp 2 --layers 4 --context 64 --calls 15 --compile-cache programs"
    assert main(["startup", *sizes.split(), "--json", "found.json"]) == 0
    found = read(tmp_path / "found.json")
    assert not problems(found) and found["parity"]["verdict"] == "passed"
    hit, missed = {"hits": 1, "misses": 0}, {"hits": 0, "misses": 1}
    # the program made from shapes is the one that the call on real arrays asks for
    events = found["conditions"]["cache_events"]["moe4.rows1"]
    assert events == {"cold": [missed], "cached": [hit], "first_step": hit}
    assert (tmp_path / "programs" / "moe4.rows1.0").is_dir()
    assert found["figures"]["cache_bytes.moe4.rows1"]["value"] > 1000
    assert len(found["figures"]["dispatch_us.alone.moe4.rows1"]["samples"]) == IN_FLIGHT - 1
    assert len(headline_names(found)) == 4
    conditions = found["conditions"]
    assert conditions["host"]["cpus"] and conditions["layers"] == {"moe4.rows1": "unrolled"}
    assert json.loads(json.dumps(conditions["options"]))["compile_cache"] == "programs"
    shown = capsys.readouterr()
    assert "dispatch_us.chained" in shown.out and "a new process" in shown.err
