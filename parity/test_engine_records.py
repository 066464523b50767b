"""How records are judged: listed tokens, router margins, accepted counts, and whole records.

The whole record here is made by `torch_ref` in bf16, so that accepted counts, drafts, listed tokens
and sampled texts are there, none of which the recorded engine has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jax_impl.config import ConfigError  # noqa: E402
from parity.engine_rules import (  # noqa: E402
    best_tokens,
    by_router_margin,
    distributions,
    kl_rows,
)
from parity.engine_steps import check_steps, comparable, draft_noise, steps_of  # noqa: E402
from parity.engine_truth import Noise, Truth  # noqa: E402
from parity.folders import open_folder  # noqa: E402
from parity.golden_vllm import check_record, check_vllm  # noqa: E402
from parity.metrics import kl_rows as full_kl  # noqa: E402
from parity.metrics import log_softmax  # noqa: E402
from parity.records import Distribution, Record, Text, fingerprint, write_record  # noqa: E402
from parity.report import good, problems  # noqa: E402
from parity.verdict import Where  # noqa: E402

WHERE = Where("vllm", "made up", "-")
V, K = 9, 3


def listed(rows, k, first=0):
    ids = np.argsort(-rows, -1)[:, :k]
    return Distribution(first, ids, np.take_along_axis(rows, ids, -1))


def test_distance_over_listed_tokens():
    rng = np.random.default_rng(1)
    want, ours = log_softmax(rng.normal(size=(5, V))), rng.normal(size=(7, V))
    whole = kl_rows(Distribution(2, None, want), ours)
    assert np.allclose(whole, full_kl(want, ours[2:]))
    assert np.allclose(kl_rows(listed(want, V, 2), ours), whole)
    parts = [kl_rows(listed(want, k, 2), ours) for k in (1, 4, V)]
    assert (parts[0] <= parts[1] + 1e-12).all() and (parts[1] <= parts[2] + 1e-12).all()
    assert np.allclose(kl_rows(listed(want, 4, 2), np.vstack([ours[:2], want])), 0, atol=1e-12)
    assert parts[1].min() > 1e-4


def test_a_token_that_the_engine_excludes_costs_nothing_but_is_no_nan():
    rows = np.array([[np.log(0.5), np.log(0.5), -np.inf]])
    found = kl_rows(Distribution(0, np.array([[0, 1, 2]]), rows), np.zeros((1, 3)))
    assert np.allclose(found, np.log(1.5))


def test_rows_are_grouped_by_their_nearest_router_choice():
    gaps = np.array([[0.1, 9.0], [9.0, 0.7], [0.7, 5.0], [9.0, 9.0]])
    truth = Truth(np.zeros((4, V)), gaps, None, None, [1, 2], None, None, None, [])
    rows = np.eye(V)[[0, 1, 2, 3]]
    engine = Distribution(0, None, np.eye(V)[[0, 5, 2, 3]])
    found = by_router_margin(np.arange(4.0), rows, engine, truth, Noise(1.0, np.ones(2)))
    assert [(g["from"], g["to"], g["rows"], g["equal"]) for g in found] == [
        (0.0, 0.5, 1, 1), (0.5, 1.0, 2, 1), (2.0, None, 1, 1),
    ]  # fmt: skip
    assert found[1]["kl_median"] == 1.5 and found[1]["kl_max"] == 2.0


def test_every_draw_of_the_yardstick_and_the_chosen_one_are_told():
    exact = np.array([[3.0, 1.0, 0.0], [0.0, 2.0, 1.9], [1.0, 0.9, 4.0]])
    moved = np.array([[0.0, 0.3, 0.0], [0.0, 0.0, 0.3], [0.0, 0.3, 0.0]])
    draws = [exact + x * moved for x in (1.0, 3.0, 0.1)]  # by 1, 2 and 4 threads
    gaps, edges = np.ones((3, 1)), np.zeros((3, 1, 2), int)
    truth = Truth(exact, gaps, None, edges, [1], draws[0], None, None, draws)
    engine = Distribution(0, None, log_softmax(exact + 0.5 * moved))
    text = Text("case0", "greedy", np.array([0]), np.array([0, 1, 2]), distribution=engine)
    record, noise = Record({}, (text,), {}), Noise(1.0, np.ones(1))
    at = dataclasses.replace(WHERE, dtype="bfloat16")
    first, _ = distributions(at, text, exact, record, truth, noise)
    told = first.metrics["yardstick_draws"]
    assert first.metrics["yardstick_threads"] == [1, 2, 4] and told[2] < told[0] < told[1]
    assert first.metrics["yardstick"] == told[0]  # the median
    words = f"{told[0]:.2e} on 1, {told[1]:.2e} on 2, {told[2]:.2e} on 4 thread(s)"
    assert f"{words}; yardstick: their median {told[0]:.2e}" in first.note
    (equal,) = best_tokens(at, record, {text.key: exact}, {text.key: truth})
    assert equal.metrics["pair_equal"] == [2, 2, 3] and equal.metrics["yardstick"] == 2
    assert "2 on 1, 2 on 2, 3 on 4 thread(s); yardstick: their median 2" in equal.note


# ---- accepted counts ----


def spoken(accepted, ids, drafts=None):
    """A text of an engine with K drafts per step, and its record."""
    text = Text("case0", "spec", np.array([3]), np.array(ids), accepted=np.array(accepted))
    if drafts is not None:
        text = dataclasses.replace(text, drafts=np.array(drafts))
    how = {
        "drafts": K,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    return Record({"speculation": how}, (text,), {}), text


def logits(steps):
    """Draft logits [steps, K, V] with the given best tokens, 1.0 ahead of all others."""
    return np.eye(V)[np.array(steps)]


IDS = [1, 2, 3, 4, 5, 6, 7]  # first id, then steps that accepted 2, 0, 1 (the last is cut short)
COUNTS = [2, 0, 1]


def test_steps_follow_from_the_counts():
    _, text = spoken(COUNTS, IDS, [[2, 3, 8], [8, 8, 8], [6, 8, 8]])
    found = [(s.anchor, s.told.tolist(), s.following, s.draft) for s in steps_of(text, K)]
    assert found == [(0, [2, 3], 4, 8), (3, [], 5, 8), (4, [6], 7, 8)]
    _, cut = spoken([2, 3], IDS[:5])
    assert [(s.told.tolist(), s.following) for s in steps_of(cut, K)] == [([2, 3], 4), ([5], None)]


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([[2, 3, 8], [8, 8, 8], [6, 8, 8]], "3 of 3 steps"),
        ([[2, 8, 8], [8, 8, 8], [6, 8, 8]], "step 0: draft 1 of 2 accepted, 1"),  # one less
        ([[2, 3, 4], [8, 8, 8], [6, 8, 8]], "step 0: draft 2 of 2 accepted, 1"),  # one more
        ([[2, 3, 8], [5, 8, 8], [6, 8, 8]], "step 1: draft 0 of 0 accepted, 1"),
    ],
)
def test_a_step_that_proposes_otherwise_needs_a_near_tie(ours, words):
    record, text = spoken(COUNTS, IDS)
    found = check_steps(WHERE, record, text, logits(ours), 0.01)
    assert words in found.note and found.passed is ("3 of 3" in words)
    near = check_steps(WHERE, record, text, logits(ours), 0.3)  # 1.0 is within 4.2 times the noise
    assert near.passed and words in near.note


def test_a_recorded_rejected_draft_is_compared():
    record, text = spoken(COUNTS, IDS, [[2, 3, 8], [8, 8, 8], [6, 8, 8]])
    other = check_steps(WHERE, record, text, logits([[2, 3, 7], [8, 8, 8], [6, 8, 8]]), 0.01)
    assert not other.passed and "step 0: draft 2" in other.note
    record, text = spoken(COUNTS, IDS, [[2, 3, -1], [8, 8, 8], [6, 8, 8]])
    unknown = check_steps(WHERE, record, text, logits([[2, 3, 7], [8, 8, 8], [6, 8, 8]]), 0.01)
    assert unknown.passed


def test_counts_that_depend_on_random_numbers_are_not_compared():
    record, text = spoken(COUNTS, IDS)
    assert comparable(record, text) is None
    assert "sampled" in comparable(record, dataclasses.replace(text, greedy=False))
    forced = record.meta["speculation"] | {"rejection_sample_method": "synthetic"}
    assert "synthetic" in comparable(Record({"speculation": forced}, (text,), {}), text)


def test_noise_of_drafts_ignores_what_moves_a_whole_row():
    a = np.zeros((2, K, V))
    assert draft_noise([a], [a + 3.0]) == 0.0
    b = a.copy()
    b[0, 0, :2] = 1.0, -1.0
    assert np.isclose(draft_noise([a], [b]), np.sqrt(2 / b.size))


# ---- a whole record, made by torch_ref ----

STEPS, DRAFTS, SEED = 12, 7, 2
PROMPTS = (np.arange(40, 56), np.array([9, 8, 7, 6, 5]))


def make_record(directory, path, **meta):
    """Greedy, sampled and speculative texts of `torch_ref` in bf16 (V), as a record."""
    from torch_ref.draft import Draft
    from torch_ref.model import Model, greedy
    from torch_ref.numerics import Numerics
    from torch_ref.speculation import Rule, generate

    nm = Numerics(torch.bfloat16, "V")
    target = Model.load(directory / "target", nm)
    draft = Draft.load(directory / "draft", target, nm)
    tensors = {}

    def rows(prompt, ids):
        fed = np.concatenate([prompt, ids[:-1]])
        return log_softmax(target.forward(fed, target.new_state()).double().numpy())

    for i, prompt in enumerate(PROMPTS):
        ids = greedy(target, prompt, STEPS)[0].numpy()
        sampled = np.random.default_rng(i).integers(0, target.config.vocab_size, STEPS)
        told = generate(target, draft, prompt.tolist(), STEPS, DRAFTS, Rule("standard"))
        best = listed(rows(prompt, sampled)[len(prompt) - 1 :], 20)
        tensors |= {
            f"case{i}.prompt_ids": prompt,
            f"case{i}.greedy_ids": ids,
            f"case{i}.greedy_logprobs": rows(prompt, ids),
            f"case{i}.warm_ids": sampled,
            f"case{i}.warm_top_ids": best.ids,
            f"case{i}.warm_top_logprobs": best.logprobs,
            f"case{i}.dspark_ids": np.array(told.ids),
            f"case{i}.dspark_accepted_counts": np.array(told.accepted),
        }
    runs = {"greedy": (0.0, False), "warm": (1.0, False), "dspark": (0.0, True)}
    content = {
        "kind": "vllm",
        "format": 1,
        "engine": {"name": "torch_ref", "version": "bf16 V"},
        "device": "a CPU",
        "run": {"dtype": "bfloat16", "tensor_parallel": 1},
        "kernels": {},
        "checkpoint": {"preset": "tiny", "seed": SEED},
        "speculation": {
            "method": "dspark",
            "drafts": DRAFTS,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
        },
        "texts": {
            name: {"sampling": {"temperature": t}, "speculative": s}
            for name, (t, s) in runs.items()
        },
    }
    write_record(path, content | meta, tensors)
    return open_folder(path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from jax_impl.make_tiny import make_checkpoint

    directory = tmp_path_factory.mktemp("records") / "pair"
    make_checkpoint(directory, "tiny", SEED)
    return directory


@pytest.fixture(scope="module")
def recorded(pair, tmp_path_factory):
    return make_record(pair, tmp_path_factory.mktemp("records") / "own").path


def judged(folder, **more):
    return list(check_vllm(folder, (("bfloat16", "V"),), **more))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_record_with_everything_passes(recorded):
    found = judged(open_folder(recorded))
    assert good(found), problems(found)
    assert {v.quantity for v in found} == {
        "best token", "differing rows", "median KL", "equal best tokens", "drafts of each step",
    }  # fmt: skip
    sampled = [v for v in found if "warm" in v.where.case]
    assert {v.quantity for v in sampled} == {"median KL", "differing rows"}
    assert {v.metrics["listed"] for v in sampled if v.quantity == "median KL"} == {20}
    steps = [v for v in found if v.quantity == "drafts of each step"]
    assert sum(v.metrics["steps"] for v in steps) == 2 * 2 * STEPS
    assert sum(np.array(v.metrics["histogram"])[1:].sum() for v in steps) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wrong_count_a_wrong_text_and_a_wrong_distribution_fail(recorded):
    folder = open_folder(recorded)
    counts = folder.tensors["case0.dspark_accepted_counts"].copy()
    at = int(np.flatnonzero((counts[:-1] > 0) & (np.diff(counts) != 0))[0])
    counts[[at, at + 1]] = counts[[at + 1, at]]  # the same sum
    folder.tensors["case0.dspark_accepted_counts"] = counts
    ids = folder.tensors["case1.greedy_ids"].copy()
    ids[3::4] = (ids[3::4] + 1) % 128  # more than the tenth of its rows that may differ
    folder.tensors["case1.greedy_ids"] = ids
    rows = folder.tensors["case1.warm_top_logprobs"].copy()
    rows[:, :2] = np.log(0.5)  # this model is nearly certain of each token
    folder.tensors["case1.warm_top_logprobs"] = rows
    bad = {(v.where.case, v.quantity) for v in judged(folder) if v.status == "failed"}
    assert ("case0 dspark, accepted counts", "drafts of each step") in bad
    assert ("case1 greedy, teacher-forced", "best token") in bad
    assert ("case1 warm, log-probabilities", "median KL") in bad
    assert not any(case.startswith("case0 greedy") for case, _ in bad)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_named_by_its_fingerprint_has_to_be_given(pair, tmp_path):
    named = {"fingerprint": fingerprint(pair / "target")}
    folder = make_record(pair, tmp_path / "hashed", checkpoint=named)
    (missing,) = judged(folder)
    assert missing.status == "not run" and "--checkpoint" in missing.note
    other = shutil.copytree(pair / "target", tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    (wrong,) = judged(folder, checkpoint=other)
    assert wrong.status == "not run" and "not the checkpoint that was served" in wrong.note
    alone = judged(folder, checkpoint=pair / "target")
    assert [v.note for v in alone if v.status == "not run"] == [
        "no drafter; give its directory with --draft"
    ] * 2
    found = judged(folder, checkpoint=pair / "target", draft=pair / "draft")
    assert good(found), problems(found)


@pytest.mark.parametrize(
    ("tp", "words"), [(3, "3 rank.s. do not fit this model"), (2, "expected one device per rank")]
)
def test_ranks_that_do_not_fit_are_refused_before_anything_is_computed(
    pair, monkeypatch, tp, words
):
    monkeypatch.setattr("parity.golden_vllm.torch_truths", None)
    record, text = spoken(COUNTS, IDS)
    assert text.accepted is not None
    with pytest.raises(ConfigError, match=words):
        list(check_record(WHERE, record, pair / "target", pair / "draft", tp=tp))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_over_ranks(recorded, tmp_path):
    """Two emulated devices, in a process of its own, as this one has started JAX with one."""
    flags = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "parity", "golden", str(recorded), "--tp", "2", "--json", "-"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["verdicts"]
    assert {v["quantity"] for v in found if v["ours"] == "jax"} >= {"median KL", "differing rows"}
    steps = [v for v in found if v["quantity"] == "drafts of each step"]
    assert {(v["ours"], v["dtype"]) for v in steps} == {
        ("jax", "float32"), ("jax", "bfloat16"), ("torch", "float32"),
    }  # fmt: skip
    assert len(steps) == 3 * len(PROMPTS)  # nothing is left out that one rank compares
    told = {v["ours"]: [] for v in steps}
    for v in steps:
        if v["dtype"] == "float32":
            told[v["ours"]].append((v["case"], v["metrics"]))
    for (case, mine), (same, theirs) in zip(told["jax"], told["torch"], strict=True):
        assert case == same and mine["equal"] == theirs["equal"]
        assert np.allclose(mine["deficits"], theirs["deficits"], atol=1e-3)
