"""`python -m parity serve` against a real HTTP server that serves `torch_ref`."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

pytest.importorskip("torch")

from parity.__main__ import main
from parity.openai_client import Capabilities, Completion, Server, ServerError
from parity.records import fingerprint, parse, read_record
from parity.serve import (
    Request,
    ServeError,
    as_record,
    check_server,
    collect,
    dropped_counts,
    prepare,
)
from parity.served import ALL, Engine, Manners, serving

NAME, TOKENS, LISTED = "tiny-k3", 6, 5
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from jax_impl.make_tiny import make_checkpoint

    directory = tmp_path_factory.mktemp("served") / "pair"
    make_checkpoint(directory, "tiny", 2)
    return directory


@pytest.fixture(scope="module")
def engine(pair):
    return Engine(pair / "target")


@pytest.fixture
def ask(engine, pair):
    """Serves with the given manners; returns (answers, capabilities) of `collect`."""

    def run(manners=Manners(), *, timeout=60.0, prompts=PROMPTS, concurrency=2, key=None):  # noqa: B008
        with serving(engine, NAME, pair / "target", manners) as url:
            server = Server(url, NAME, timeout, key)
            asked = Request(
                server, prompts, TOKENS, LISTED, concurrency, pair / "target", None, None
            )
            capabilities = Capabilities()
            return asked, collect(asked, capabilities), capabilities

    return run


def spoilt(change):
    """An answer in which something is not as it should be."""

    def spoil(handler, answer):
        change(answer)
        handler.send(200, answer)

    return Manners(spoil=spoil)


def test_a_whole_answer_is_a_record(ask, engine, pair):
    asked, answers, capabilities = ask()
    assert not capabilities.dropped and not capabilities.lacking
    meta, tensors = as_record(asked, dict(enumerate(answers)), "1.2")
    record = parse(meta, tensors, "here")
    assert record.meta["checkpoint"] == {"fingerprint": fingerprint(pair / "target")}
    for text, prompt in zip(record.texts, PROMPTS, strict=True):
        ids, rows, _ = engine.answer(prompt, TOKENS)
        assert text.prompt.tolist() == prompt and text.ids.tolist() == ids
        assert text.distribution.first == 0 and text.distribution.ids.shape == (len(rows), LISTED)
        want = np.take_along_axis(rows, text.distribution.ids, -1)
        assert np.allclose(text.distribution.logprobs, want, atol=1e-6)
        assert np.array_equal(text.distribution.best(), rows.argmax(-1))


@pytest.mark.parametrize("missing", ALL)
def test_a_server_without_an_extension_is_asked_again_without_it(ask, missing):
    known = tuple(e for e in ALL if e != missing)
    _, answers, capabilities = ask(Manners(extensions=known))
    assert list(capabilities.dropped) == [missing] and missing in capabilities.dropped[missing]
    assert not any(isinstance(a, str) for a in answers)
    lacking = {
        "prompt_logprobs": {"prompt_logprobs"},
        "return_tokens_as_token_ids": {"logprobs"},
    }.get(missing, set())
    assert set(capabilities.lacking) == lacking
    firsts = [a.first for a in answers]
    assert firsts == ([len(p) - 1 for p in PROMPTS] if lacking else [0] * 4)
    assert all((a.rows is None) == (lacking == {"logprobs"}) for a in answers)


def test_without_ids_in_the_answer_nothing_can_be_compared(ask):
    _, answers, _ = ask(Manners(extensions=("prompt_logprobs", "ignore_eos")))
    assert all("names its tokens by text only" in a for a in answers)


def test_a_server_that_takes_no_ids_is_named(ask):
    _, answers, _ = ask(Manners(ids_as_prompt=False))
    assert all("a string is required" in a and "cannot be compared" in a for a in answers)


SPOILT = {
    "other prompt": (lambda a: a["choices"][0].update(prompt_token_ids=[9]), "another prompt"),
    "added token": (lambda a: a["usage"].update(prompt_tokens=99), "counts 99 prompt tokens"),
    "no choices": (lambda a: a.pop("choices"), "no choices in the answer"),
    "text": (lambda a: a.update(choices=["hello"]), "no choices in the answer"),
    "too many": (lambda a: a["choices"][0]["token_ids"].append(1), "asked for 6 tokens, found 7"),
    "rows": (
        lambda a: a["choices"][0]["logprobs"]["top_logprobs"].pop(), "5 rows of top_logprobs for 6",
    ),
    "words": (
        lambda a: a["choices"][0]["logprobs"]["top_logprobs"][2].update({"token_id:3": "low"}),
        "a log-probability is 'low'",
    ),
    "nan": (
        lambda a: a["choices"][0]["logprobs"]["top_logprobs"][2].update({"token_id:3": np.nan}),
        "a log-probability is nan",
    ),
    "prompt rows": (lambda a: a["choices"][0]["prompt_logprobs"].append({}), "of prompt_logprobs"),
    "prompt entry": (
        lambda a: a["choices"][0]["prompt_logprobs"][1].update({"x": {"logprob": -1.0}}),
        "prompt_logprobs: ValueError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_an_answer_that_is_none_is_said(ask, name):
    change, words = SPOILT[name]
    _, (found,), _ = ask(spoilt(change), prompts=PROMPTS[:1])
    assert isinstance(found, str) and words in found, found


def _raw(content, *, length=None):
    def spoil(handler, _answer):
        handler.send_response(200)
        handler.send_header("Content-Length", str(length or len(content)))
        handler.end_headers()
        handler.wfile.write(content)
        handler.close_connection = True

    return Manners(spoil=spoil)


@pytest.mark.parametrize(
    ("manners", "words"),
    [
        (_raw(b'{"choices": [{"tex'), "not JSON"),
        (_raw(b"[1, 2]"), "expected a JSON object"),
        (_raw(b"\xff\xfe\x00"), "not JSON"),
        (_raw(b'{"choices"', length=500), "IncompleteRead"),
    ],
)
def test_a_body_that_is_no_answer_is_said(ask, manners, words):
    _, (found,), _ = ask(manners, prompts=PROMPTS[:1])
    assert words in found, found


def test_a_status_is_said_with_the_words_of_the_server(ask):
    def spoil(handler, _answer):
        handler.send(503, {"error": {"message": "the engine is gone"}})

    _, (found,), _ = ask(Manners(spoil=spoil), prompts=PROMPTS[:1])
    assert "status 503" in found and "the engine is gone" in found


def test_one_failing_answer_leaves_the_others(ask):
    turn = iter(range(9))

    def spoil(handler, answer):
        handler.send(500, b"oops") if next(turn) == 1 else handler.send(200, answer)

    asked, answers, _ = ask(Manners(spoil=spoil), concurrency=1)
    assert [isinstance(a, str) for a in answers] == [False, True, False, False]
    good = {i: a for i, a in enumerate(answers) if not isinstance(a, str)}
    record = parse(*as_record(asked, good, "1"), "here")
    assert [t.case for t in record.texts] == ["case0", "case2", "case3"]


def test_a_server_that_is_silent_is_given_up(ask):
    held = threading.Event()
    try:
        _, (found,), _ = ask(Manners(gate=held.wait), timeout=0.3, prompts=PROMPTS[:1])
    finally:
        held.set()
    assert "no whole answer within 0.3 s" in found and "--timeout" in found


def test_a_server_that_trickles_is_given_up(ask):
    stopped = threading.Event()

    def spoil(handler, _answer):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not stopped.wait(0.05):  # no single read ever waits for long
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    try:
        _, (found,), _ = ask(Manners(spoil=spoil), timeout=0.5, prompts=PROMPTS[:1])
    finally:
        stopped.set()
    assert "no whole answer within 0.5 s" in found


def test_a_slow_server_is_waited_for(ask):
    _, answers, _ = ask(Manners(gate=lambda: time.sleep(0.2)), timeout=60)
    assert not any(isinstance(a, str) for a in answers)


def test_requests_are_bounded_and_not_one_by_one(ask):
    lock, now, seen = threading.Lock(), [0], []
    two = threading.Barrier(2)

    def gate():
        with lock:
            now[0] += 1
            seen.append(now[0])
            first = len(seen) == 1
        if not first:  # the first request comes alone, then two at a time have to meet here
            two.wait(timeout=60)
        with lock:
            now[0] -= 1

    _, answers, _ = ask(Manners(gate=gate), prompts=[*PROMPTS, [7]], concurrency=2)
    assert not any(isinstance(a, str) for a in answers)
    assert seen[0] == 1 and max(seen) == 2 and len(seen) == 5


def test_a_key_is_sent(ask):
    _, answers, _ = ask(Manners(key="secret"), prompts=PROMPTS[:1], key="secret")
    assert not isinstance(answers[0], str)
    _, answers, _ = ask(Manners(key="secret"), prompts=PROMPTS[:1])
    assert "status 401" in answers[0] and "wrong key" in answers[0]


# ---- the command ----


def test_all_reasons_of_a_refusal_come_at_once(tmp_path, capsys):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("")
    line = ["serve", "--url", "ftp://x", "--model", "m", "--tokens", "0", "--concurrency", "-1"]
    assert main([*line, "--record", str(tmp_path / "kept"), "--timeout", "0"]) == 2
    shown = capsys.readouterr().err
    for word in ("--url", "--tokens", "--concurrency", "--record", "--timeout"):
        assert word in shown


def test_a_server_that_is_not_there_is_an_error(capsys):
    assert main(["serve", "--url", "http://127.0.0.1:9", "--model", "m"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_model_that_is_not_offered_is_an_error(engine, pair, capsys):
    with serving(engine, NAME, pair / "target", Manners()) as url:
        assert main(["serve", "--url", url, "--model", "other"]) == 2
    assert f"the server offers: {NAME}" in capsys.readouterr().err


def prepared(url, **changes):
    settings = {
        "ckpt": None, "draft": None, "prompts": None, "tokens": 4, "logprobs": 3, "concurrency": 1,
        "keep": None,
    }  # fmt: skip
    return prepare(Server(f"{url}/v1", NAME, 60.0), **settings | changes)


def test_the_checkpoint_is_the_server_s_own_or_has_to_be_given(engine, pair, tmp_path):
    with serving(engine, NAME, pair / "target", Manners()) as url:
        assert prepared(url).target == pair / "target"
        with pytest.raises(ServeError, match="--checkpoint"):
            prepared(url, ckpt=tmp_path)
    with serving(engine, NAME, tmp_path / "far" / "away", Manners()) as url:
        with pytest.raises(ServeError, match="not on this machine"):
            prepared(url)
        assert prepared(url, ckpt=pair / "target").target == pair / "target"


def test_prompts_are_checked(engine, pair, tmp_path):
    file = tmp_path / "prompts"
    with serving(engine, NAME, pair / "target", Manners()) as url:
        assert [len(p) for p in prepared(url).prompts] == [5, 16, 33, 64]
        file.write_text("1 2 3\n[4, 5]\n")
        assert prepared(url, prompts=file).prompts == [[1, 2, 3], [4, 5]]
        file.write_text("1 x\n999999\n" + "7 " * 510)
        with pytest.raises(ServeError) as error:
            prepared(url, prompts=file)
        for word in ("line 1: 'x'", "line 2: '999999'", "line 3: 510 ids and 4 tokens"):
            assert word in str(error.value)
        file.write_text("1 \u00b2\n\u0661\n", encoding="utf-8")  # digits, and no ids
        with pytest.raises(ServeError, match=r"(?s)line 1: .*line 2: "):
            prepared(url, prompts=file)
        file.write_text("\n")
        with pytest.raises(ServeError, match="no line"):
            prepared(url, prompts=file)


def test_answers_without_log_probabilities_are_not_passed(engine, pair, monkeypatch):
    known = tuple(e for e in ALL if e != "return_tokens_as_token_ids")
    judged = []
    monkeypatch.setattr(
        "parity.golden_vllm.check_record",
        lambda _, record, *a, **k: judged.append(record) or iter(()),
    )
    with serving(engine, NAME, pair / "target", Manners(extensions=known)) as url:
        found = list(check_server(prepared(url)))
    assert [(v.quantity, v.status) for v in found if v.status == "not run"] == [
        ("logprobs", "not run")
    ]
    assert len(judged) == 1 and judged[0].texts[0].distribution is None


def test_a_server_error_has_an_address():
    with pytest.raises(ServerError, match="v1/models"):
        Server("http://127.0.0.1:9/v1", "m", 5.0).get("/v1/models")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_of_the_same_model_passes_and_another_fails(engine, pair, tmp_path):
    from jax_impl.make_tiny import make_checkpoint

    out = tmp_path / "verdicts.json"
    spoken = Engine(pair / "target", pair / "draft")
    line = ["--model", NAME, "--tokens", "16", "--json", str(out)]
    with serving(spoken, NAME, pair / "target", Manners()) as url:
        more = ["--draft", str(pair / "draft"), "--record", str(tmp_path / "kept")]
        assert main(["serve", "--url", url, *line, *more]) == 0
    quantities = {v["quantity"] for v in json.loads(out.read_text())["verdicts"]}
    assert {"median KL", "equal best tokens", "differing rows", "drafts of each step"} <= quantities
    kept = read_record(tmp_path / "kept")
    assert kept.meta["texts"]["greedy"]["speculative"] and kept.engine == "server torch_ref"
    make_checkpoint(tmp_path / "other", "tiny", 3)
    with serving(engine, NAME, pair / "target", Manners()) as url:
        other = ["--checkpoint", str(tmp_path / "other" / "target")]
        assert main(["serve", "--url", url, *line, *other]) == 1
    found = json.loads(out.read_text())["verdicts"]
    assert {v["quantity"] for v in found if v["status"] == "failed"} >= {"median KL", "best token"}


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (([1, 0], [3]), None),
        ((None, None), None),
        (([1, 0], None), "1 of 2 answers tell them, but case4: no counts"),
        (([1, 0], [9]), "2 of 2 answers tell them, but case4: they do not add up"),
    ],
)
def test_counts_that_are_not_compared_are_named(counts, words):
    ids = ([5, 6, 7, 8], [5, 6, 7])
    answers = {n: Completion(i, None, 0, c, 3) for n, i, c in zip((2, 4), ids, counts, strict=True)}
    if counts[1] == [9]:
        answers[4] = Completion(ids[1], None, 0, [1, 9], 9)  # the first step is past the end
    found = dropped_counts(answers)
    assert found is None if words is None else found.startswith(words)
