"""Figures of served requests, with a clock that the engine of the test turns."""

from types import SimpleNamespace

import pytest

from bench.decode_metrics import Group, Served, Step, decode_figures, percentile
from bench.result import noisy_names
from bench.serve import serve_group

SEEDS = 2**32


class FakeEngine:
    """Gives `length` tokens per step and request; prefill and step take fixed times."""

    def __init__(self, length=1, step=0.007126, prefill=0.1, lengths=None):
        self.now, self.length, self.step, self.prefilled = 0.0, length, step, prefill
        self.lengths, self.sequences, self.next = lengths, {}, 0

    def clock(self):
        return self.now

    def add(self, prompt, *, temperature, seed, stop=(), limit=None):
        assert 0 <= seed < SEEDS
        self.next += 1
        self.sequences[self.next] = SimpleNamespace(
            generated=0, finished=None, failed=None, emitted=[], limit=limit
        )
        return self.next

    def _take(self, seq, tokens):
        seq.generated = min(seq.generated + tokens, seq.limit)
        seq.finished = "limit" if seq.generated == seq.limit else None

    def prefill(self, handle):
        self.now += self.prefilled
        self._take(self.sequences[handle], 1)

    def decode(self, handles):
        self.now += self.step
        for row, handle in enumerate(handles):
            seq = self.sequences[handle]
            length = self.length if self.lengths is None else self.lengths[row]
            seq.emitted.append(length)
            self._take(seq, length)
        return {h: [0] for h in handles}

    def release(self, handle):
        del self.sequences[handle]


def run(engine, batch=1, tokens=1003):
    return serve_group(engine, [[1]] * batch, tokens, clock=engine.clock)


def test_six_tokens_per_round_of_7_126_ms_are_842_per_second():
    engine = FakeEngine(length=6)
    found = decode_figures([[run(engine)], [run(engine)]], running=1)  # 1 + 167 x 6 tokens
    assert found["step_ms"]["value"] == pytest.approx(7.126)
    assert round(found["decode_tokens_s"]["value"]) == 842
    assert round(found["rounds_tokens_s"]["value"]) == 842
    assert round(found["user_tokens_s.p50"]["value"]) == 842
    assert found["tpot_ms"]["value"] == pytest.approx(7.126 / 6, rel=1e-5)
    assert found["itl_ms.p50"]["value"] == pytest.approx(7.126)
    assert found["accepted_length"]["value"] == 6
    assert found["steps"]["value"] == 2 * 167
    assert found["steps_timed"]["value"] == 2 * 166


def test_an_output_that_is_cut_costs_its_last_round_whole():
    found = decode_figures([[run(FakeEngine(length=6), tokens=1000)]], running=1)
    assert found["decode_tokens_s"]["value"] == pytest.approx(999 / (167 * 0.007126), rel=1e-5)
    assert round(found["rounds_tokens_s"]["value"]) == 842


def test_prefill_is_in_latency_and_throughput_and_not_in_the_decode_rate():
    found = decode_figures([[run(FakeEngine(step=0.01, prefill=0.5), 2, 11)]], running=2)
    assert found["decode_tokens_s"]["value"] == pytest.approx(2 * 10 / 0.1)
    assert found["output_tokens_s"]["value"] == pytest.approx(2 * 11 / 1.1)
    assert found["ttft_ms.p50"]["value"] == pytest.approx(750)  # 500 and, behind it, 1000
    assert found["latency_ms.p99"]["value"] == pytest.approx(1100)
    # the first request waits for the second one's prefill before its second token
    rates = sorted([10 / 0.6, 10 / 0.1])
    assert found["user_tokens_s.p50"]["value"] == pytest.approx(sum(rates) / 2, rel=1e-5)
    assert found["user_tokens_s.p99"]["value"] < found["user_tokens_s.p50"]["value"]


def test_steps_with_fewer_requests_do_not_count():
    engine = FakeEngine(lengths=[3, 1])  # by row: when the first is done the other gets 3 at a time
    group = run(engine, 2, 10)
    assert [s.running for s in group.steps] == [2, 2, 2, 1, 1]
    assert len(group.intervals(2)) == 2
    assert len(group.intervals(1)) == 1
    with pytest.raises(ValueError, match="4 running"):
        decode_figures([[group]], running=4)


def test_seeds_of_a_group_stay_within_their_bits():
    engine = FakeEngine()
    assert serve_group(engine, [[1]] * 2, 3, seed=SEEDS - 1, clock=engine.clock).steps


def test_a_request_that_fails_ends_the_run():
    engine = FakeEngine()

    def prefill(handle):
        engine.sequences[handle].failed = "logits not finite at position 0"

    engine.prefill = prefill
    with pytest.raises(ValueError, match="not finite"):
        run(engine)


def test_percentiles_interpolate():
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([0.0, 10.0], 0.9) == pytest.approx(9.0)


def test_samples_are_one_per_run():
    groups = [
        Group(
            (Served(0.0, (0.0, t, 2 * t), 3),), (Step(t, 1, (1,)), Step(2 * t, 1, (1,))), 0.0, 0.0
        )
        for t in (0.1, 0.2)
    ]
    found = decode_figures([[g] for g in groups], running=1)
    assert found["step_ms"]["samples"] == pytest.approx([100.0, 200.0])
    assert found["step_ms"]["value"] == pytest.approx(150.0)


def test_what_is_derived_from_noisy_steps_is_noisy_too():
    runs = [[run(FakeEngine(length=2, step=step), tokens=21)] for step in (0.01, 0.01, 0.02, 0.02)]
    found = decode_figures(runs, running=1)
    noisy = noisy_names(found)
    for name in ("step_ms", "rounds_tokens_s", "user_tokens_s.p90", "itl_ms.p50", "tpot_ms"):
        assert name in noisy, name
        assert len(found[name]["samples"]) == 4
    assert "accepted_length" not in noisy
    unmarked = [n for n, f in found.items() if f["samples"] is None and f["unit"] != "count"]
    assert unmarked == []
