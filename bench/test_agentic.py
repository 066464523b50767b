"""Traffic: the trace file, the closed loop with a clock that the test turns, and a small run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import agentic
from bench.__main__ import main
from bench.agentic import require_agentic, turn_figures, user_rates
from bench.engine_options import AgenticOptions
from bench.result import read
from bench.traffic import Turn, TurnServed, longest, read_trace, replay


class FakeEngine:
    """One token per step; a prefill takes 0.1 s per new token, a step 1 s."""

    def __init__(self):
        self.now, self.sequences, self.events = 0.0, {}, []

    def clock(self):
        return self.now

    def wait(self, moment):
        self.events.append(("wait", self.now))
        self.now = max(self.now, moment)

    def add(self, prompt, *, temperature, seed, stop=(), limit=None):
        handle = len(self.events) + 100
        self.draws = [*getattr(self, "draws", []), (temperature, seed)]
        self.sequences[handle] = SimpleNamespace(
            ids=list(prompt), processed=0, generated=0, finished=None, failed=None, limit=limit
        )
        return handle

    def extend(self, handle, ids):
        seq = self.sequences[handle]
        seq.ids += ids
        seq.generated, seq.finished = 0, None

    def _token(self, seq):
        seq.ids.append(0)
        seq.generated += 1
        seq.finished = "limit" if seq.generated == seq.limit else None

    def prefill(self, handle):
        seq = self.sequences[handle]
        self.events.append(("prefill", len(seq.ids) - seq.processed))
        self.now += 0.1 * (len(seq.ids) - seq.processed)
        seq.processed = len(seq.ids)
        self._token(seq)

    def decode(self, handles):
        self.events.append(("decode", len(handles)))
        self.now += 1.0
        for handle in handles:
            seq = self.sequences[handle]
            seq.processed = len(seq.ids)
            self._token(seq)
        return {}

    def release(self, handle):
        del self.sequences[handle]


def served(sessions, users):
    engine = FakeEngine()
    found = replay(engine, sessions, users, lambda n: [7] * n, clock=engine.clock, wait=engine.wait)
    assert engine.sequences == {}
    return engine, found


def test_a_turn_processes_only_what_is_new():
    engine, found = served([[Turn(10, 3, 0.0), Turn(5, 2, 4.0)]], users=1)
    # 10 new; then 5 new and the last answered token, which no step has read yet
    assert [e for e in engine.events if e[0] == "prefill"] == [("prefill", 10), ("prefill", 6)]
    first, second = found
    assert (first.due, first.first, first.last) == (0.0, 1.0, 3.0)
    assert second.due == pytest.approx(7.0)  # 4 s behind the end of the answer
    assert (second.reused, second.processed) == (12, 6)
    assert second.first - second.due == pytest.approx(0.6)


def test_users_share_steps_and_the_next_comes_when_one_leaves():
    sessions = [[Turn(1, 3, 0.0)], [Turn(1, 5, 0.0)], [Turn(1, 2, 0.0)]]
    engine, found = served(sessions, users=2)
    batches = [n for kind, n in engine.events if kind == "decode"]
    assert batches == [2, 2, 2, 1]
    assert [t.user for t in found] == [0, 2, 1]
    assert user_rates(found)[0] == pytest.approx(2 / 2.1)  # waits for the second one's prefill


def test_answers_are_drawn_as_asked_for():
    engine, sessions = FakeEngine(), [[Turn(1, 3, 0.0), Turn(1, 3, 0.0)], [Turn(1, 3, 0.0)]]
    given = {"clock": engine.clock, "wait": engine.wait}
    replay(engine, sessions, 2, lambda n: [7] * n, temperature=0.7, seed=2**32 - 1, **given)
    assert engine.draws == [(0.7, 2**32 - 1), (0.7, 0)]


def test_nobody_waits_while_somebody_runs():
    engine, _ = served([[Turn(1, 3, 0.0)], [Turn(1, 3, 100.0)]], users=2)
    assert [e[0] for e in engine.events] == [
        "prefill", "decode", "decode", "wait", "prefill", "decode", "decode",
    ]  # fmt: skip


def test_figures_of_turns():
    turns = [
        TurnServed(0, due=0.0, first=1.0, last=3.0, tokens=21, processed=10, reused=0),
        TurnServed(0, due=5.0, first=5.5, last=7.5, tokens=21, processed=10, reused=30),
        TurnServed(1, due=0.0, first=2.0, last=4.0, tokens=11, processed=10, reused=0),
    ]
    found = turn_figures([turns])
    assert found["user_tokens_s.p50"]["value"] == pytest.approx((10 + 5) / 2)
    assert found["user_tokens_s.p90"]["value"] == pytest.approx(5.5)  # 90 % reach it
    assert found["ttft_ms.p50"]["value"] == pytest.approx(1000)
    assert found["output_tokens_s"]["value"] == pytest.approx(53 / 7.5, rel=1e-5)
    assert found["reused_share"]["value"] == pytest.approx(0.5)


def test_a_process_with_another_clock_takes_the_turns_of_the_first():
    sessions = [[Turn(10, 5, 0.0), Turn(5, 4, 3.0)], [Turn(8, 9, 1.0), Turn(3, 4, 2.0)]]
    said, alone = [], []

    def run(clock, agree):
        engine = FakeEngine()
        replay(
            engine, sessions, 2, lambda n: [7] * n,
            clock=lambda: clock(engine.now), wait=engine.wait, agree=agree,
        )  # fmt: skip
        return [e for e in engine.events if e[0] != "wait"]

    first = run(lambda now: now, lambda n: said.append(n) or n)
    words = iter(said)
    assert run(lambda now: 5 * now + 100, lambda n: alone.append(n) or next(words)) == first
    assert alone != said  # left to its clock it would have gone another way


def test_the_included_trace_and_bad_ones(tmp_path):
    sessions = read_trace(AgenticOptions().trace)
    assert [len(turns) for turns in sessions] == [3, 2, 4]
    assert longest(sessions) == 72
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": [{"new": 0, "output": 5, "pause_s": 1}]}\n{"turn": 1}\nx\n')
    with pytest.raises(ValueError, match=r"line 1: expected(.|\n)*line 2(.|\n)*line 3"):
        read_trace(bad)
    for pause in ("Infinity", "NaN", '"1"', "true", "-1"):
        bad.write_text(f'{{"turns": [{{"new": 1, "output": 5, "pause_s": {pause}}}]}}\n')
        with pytest.raises(ValueError, match=r"line 1: expected turns(.|\n)*finite pause_s"):
            read_trace(bad)
    bad.write_text("\n")
    with pytest.raises(ValueError, match="no session"):
        read_trace(bad)


def test_bad_conditions_name_the_limit():
    sessions = [[Turn(60, 60, 0.0)]]
    with pytest.raises(ValueError, match=r"the 120 tokens(.|\n)*--users 65(.|\n)*--speed 0"):
        require_agentic(AgenticOptions(context=100, users=65, speed=0.0), sessions)
    for speed in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"--speed \w+: expected a finite number"):
            require_agentic(AgenticOptions(speed=speed), sessions)
    forced = AgenticOptions(users=33, drafts=1, backend="latency_specialized", seed=2**32)
    with pytest.raises(ValueError, match=r"--seed(.|\n)*--users 33, --drafts 1(.|\n)*at most 32"):
        require_agentic(forced, sessions)


@pytest.mark.parametrize("drafts", [0, 7])
def test_warm_up_is_no_longer_than_the_longest_conversation(monkeypatch, drafts):
    served = []
    monkeypatch.setattr(agentic, "serve_group", lambda _, *given: served.append(given))
    shortest = longest([[Turn(1, 2, 0.0)]])
    agentic._warm_up(None, replace(AgenticOptions(), users=3, drafts=drafts), shortest)
    assert [len(prompts) for prompts, _ in served] == [1, 2, 3]
    assert all(len(p) + tokens <= shortest for prompts, tokens in served for p in prompts)


def test_a_small_run(tmp_path, quick_compile):
    out = tmp_path / "agentic.json"
    command = "agentic --preset tiny --runs 1 --speed 10 --chunk 16 --kv-dtype bfloat16"
    assert main([*command.split(), "--json", str(out)]) == 0
    found = read(out)
    assert found["figures"]["turns"]["value"] == 9
    assert 0.3 < found["figures"]["reused_share"]["value"] < 0.8
    assert found["parity"]["verdict"] == "passed"
