"""`bench decode`: what is refused, ratios of two backends, and a small run with drafts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import decode, replay
from bench.__main__ import main
from bench.activities import Activity
from bench.decode import measure, prompts_of, ratios
from bench.engine_options import DecodeOptions, require_decode
from bench.engine_setup import plans_of
from bench.result import figure, read
from jax_impl.config import RunConfig
from jax_impl.plan import Plan, StepShape, bucket, choose


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 65}, "1 to 64"),
        ({"drafts": 9}, "0 to 7"),
        ({"drafts": 3, "accept_length": 4.5}, "1 to drafts . 1 = 4"),
        ({"accept_length": 2.0}, "with --drafts"),
        ({"context": 100, "isl": 50, "osl": 60}, "at least the 110 tokens"),
        ({"osl": 3}, "--osl 3: expected at least 4"),
        ({"compare": "auto,auto"}, "expected two of"),
        ({"compare": "auto"}, "expected two of"),
        ({"temperature": -1.0}, "expected 0"),
        ({"seed": -1}, "--seed -1: expected 0 to 4294967295"),
        (
            {"batch": 9, "drafts": 7, "backend": "latency_specialized"},
            "128 rows, and latency_specialized takes at most 64; expected --batch of at most 8",
        ),
        ({"batch": 16, "drafts": 4, "compare": "auto,latency_specialized"}, "at most 64"),
    ],
)
def test_bad_conditions_name_the_limit(changed, message):
    with pytest.raises(ValueError, match=message):
        require_decode(replace(DecodeOptions(), **changed))


def test_every_step_that_is_accepted_for_a_forced_backend_is_served_by_it():
    asked = replace(DecodeOptions(), backend="latency_specialized", isl=1, osl=100)
    run = RunConfig(decode_backend="latency_specialized")
    for drafts in range(8):
        for batch in range(1, 65):
            kind = "verify" if drafts else "decode"
            plan = choose(run, StepShape(kind, bucket(batch), 1 + drafts))
            try:
                require_decode(replace(asked, batch=batch, drafts=drafts))
            except ValueError:
                assert plan.backend == "auto", (batch, drafts)
            else:
                assert plan.backend == "latency_specialized", (batch, drafts)


def test_steps_on_another_backend_than_the_label_are_no_result():
    prefill, other = Plan("auto", "prefill"), Plan("auto", "128 rows, kernels take at most 64")
    mine = Plan("latency_specialized", "decode, 8 rows")
    assert plans_of(SimpleNamespace(plans={prefill: 2, mine: 5}), mine.backend) == {
        "auto: prefill": 2, "latency_specialized: decode, 8 rows": 5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="3 decode step"):
        plans_of(SimpleNamespace(plans={prefill: 2, mine: 5, other: 3}), mine.backend)
    # the standard path at weights that are laid out for the kernels
    assert plans_of(SimpleNamespace(plans={mine: 5}), "auto") == {"auto: as configured": 5}


def test_all_bad_conditions_are_listed():
    with pytest.raises(ValueError, match=r"--batch 0(.|\n)*--runs 0(.|\n)*--groups 0"):
        require_decode(replace(DecodeOptions(), batch=0, runs=0, groups=0))


def test_a_context_beyond_the_model_and_a_missing_backend_are_refused(capsys):
    assert main(["decode", "--osl", "5000"]) == 2
    assert "limit is 4096" in capsys.readouterr().err
    assert main(["decode", "--compare", "auto,latency_specialized"]) == 2
    assert "latency_specialized" in capsys.readouterr().err


def test_prompts_are_the_same_for_every_backend_and_differ_otherwise():
    o = replace(DecodeOptions(), batch=2, isl=8)
    assert prompts_of(o, 384, 1, 0) == prompts_of(o, 384, 1, 0)
    assert prompts_of(o, 384, 1, 0) != prompts_of(o, 384, 1, 1)
    assert prompts_of(o, 384, 1, 0) != prompts_of(o, 384, 2, 0)


@pytest.mark.parametrize(("drafts", "sizes"), [(0, [5]), (3, [1, 2, 4, 5])])
def test_every_batch_that_steps_may_have_is_compiled_before_measuring(monkeypatch, drafts, sizes):
    """Requests whose drafts are judged do not end together, so that smaller batches follow."""
    served = []
    monkeypatch.setattr(decode, "serve_group", lambda _, prompts, *a, **k: served.append(prompts))
    o = replace(DecodeOptions(), batch=5, drafts=drafts, runs=1, groups=1)
    measure({"auto": None}, o, 384, lambda: 0.0)
    assert [len(prompts) for prompts in served] == [*sizes, 5]


def test_a_ratio_has_the_spread_of_its_runs():
    figures = {
        "auto.step_ms": figure(12.0, "ms", [12.0, 12.3, 11.7]),
        "latency_specialized.step_ms": figure(6.0, "ms", [6.0, 6.15, 5.85]),
        "auto.decode_tokens_s": figure(100.0, "tokens/s", [100.0] * 3),
        "latency_specialized.decode_tokens_s": figure(200.0, "tokens/s", [200.0] * 3),
    }
    found = ratios(figures, ("auto", "latency_specialized"))
    steps = found["ratio.step_ms.auto_over_latency_specialized"]
    assert steps == {"value": 2.0, "unit": "ratio", "samples": [2.0, 2.0, 2.0]}
    assert ratios(figures, ("auto",)) == {}


def test_replays_are_timed_by_both_clocks(monkeypatch):
    """Four steps at most: 10 ms each by the host; two activities within 6 ms each on the device."""
    now, ran = [0.0], []

    def run(steps):
        ran.append(steps)
        now[0] += 0.010 * steps

    def trace(call):
        call()
        return [
            Activity("k", "", 6000.0 * i + begin, 1500.0, "")
            for i in range(ran[-1])
            for begin in (0.0, 4500.0)
        ]

    monkeypatch.setattr(replay, "chain", lambda engine, handles: (run, 4))
    found = replay.replay_figures(None, [], 2, lambda: now[0], trace)
    assert found["replay_ms"]["value"] == pytest.approx(10.0)
    assert found["replay_device_ms"] == {"value": 6.0, "unit": "ms", "samples": [6.0, 6.0]}
    assert found["replay_device_busy"]["value"] == 0.5
    assert ran == [4] * 6


def test_a_small_run_with_forced_acceptance(tmp_path, capsys, quick_compile):
    out = tmp_path / "decode.json"
    command = "decode --preset tiny --drafts 2 --accept-length 2 --osl 13 --batch 2 --runs 2"
    rest = "--groups 1 --replays 2 --kv-dtype bfloat16 --commit snapshots"
    assert main([*command.split(), *rest.split(), "--json", str(out)]) == 0
    found = read(out)
    figures = found["figures"]
    assert found["parity"]["verdict"] == "passed"
    assert found["conditions"]["acceptance"]["kind"] == "synthetic"
    assert found["conditions"]["acceptance"]["commit"] == "snapshots"
    assert figures["accepted_length"]["value"] == 2  # 1 of the prefill, then 2 per step
    assert figures["steps"]["value"] == 2 * 6
    assert figures["steps_timed"]["value"] == 2 * 5
    assert len(figures["step_ms"]["samples"]) == 2
    for name in ("replay_ms", "replay_device_ms", "replay_device_busy"):
        assert len(figures[name]["samples"]) == 2
    assert 0 < figures["replay_device_busy"]["value"] <= 1
    ratio = figures["step_ms"]["value"] / figures["replay_device_ms"]["value"]
    assert abs(figures["host_over_device"]["value"] / ratio - 1) < 1e-3
    assert found["conditions"]["plans"]["auto"]
    printed = capsys.readouterr().out
    assert "step_ms: wall time between the ends" in printed
    # in the table's title, and with the headline
    assert printed.count("synthetic acceptance of length 2, 2 draft(s)") == 2
