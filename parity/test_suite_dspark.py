"""The suites for speculative decoding: they pass on what is right and find what is wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from parity.accept_sides import SIDES, Decided, JaxSide, Setting, TorchSide  # noqa: E402
from parity.accept_suite import (  # noqa: E402
    RANDOM,
    WHERE,
    check_enumeration,
    check_equal_decisions,
    check_examples,
    check_forced_six,
)
from parity.chi_square import METHODS, check_sampled_runs, chi_square  # noqa: E402
from parity.dspark_pair import (  # noqa: E402
    PROMPT,
    Pair,
    against_plain,
    check_drafted,
    check_dspark_pair,
)
from parity.engine_rules import Wanted, best_tokens, explained, tokens  # noqa: E402
from parity.engine_truth import Noise, Truth, measure  # noqa: E402
from parity.folders import open_folder  # noqa: E402
from parity.golden_dspark import TargetError, check_dspark, find_target  # noqa: E402
from parity.golden_vllm import check_vllm  # noqa: E402
from parity.records import Distribution, Record, Text  # noqa: E402
from parity.report import good, problems  # noqa: E402
from parity.verdict import Where  # noqa: E402

F32V = (("float32", "V"),)

# ---- recorded drafters ----


@pytest.fixture
def copied(tmp_path, golden_dir):
    """The recorded drafter with its target beside it, free to be changed."""
    for name in ("dspark_tiny16", "model_tiny16"):
        shutil.copytree(golden_dir / name, tmp_path / name)
    for file in tmp_path.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    return tmp_path / "dspark_tiny16"


def settle(folder, **changes):
    """Changes golden.json; None removes a key."""
    file = folder / "golden.json"
    meta = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in meta.items() if v is not None}))
    return open_folder(folder)


RUNS = [
    ("torch", "float32", "H"), ("torch", "float32", "V"), ("torch", "bfloat16", "H"),
    ("torch", "bfloat16", "V"), ("jax", "float32", "V"),
    pytest.param("jax", "float32", "H", marks=pytest.mark.slow),
    pytest.param("jax", "bfloat16", "H", marks=pytest.mark.slow),
    pytest.param("jax", "bfloat16", "V", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("side", "dtype", "profile"), RUNS)
def test_a_recorded_drafter_passes(golden_dir, side, dtype, profile):
    folder = open_folder(golden_dir / "dspark_tiny16")
    assert folder.kind == "dspark"
    found = list(check_dspark(folder, ((dtype, profile),), (side,)))
    assert good(found), problems(found)
    assert {v.where.case for v in found} == {"case0", "case1"}
    quantities = {v.quantity for v in found}
    assert {"draft_ids", "base_logits", "logits", "context", "final_hidden"} <= quantities
    assert sum("context_latent" in q for q in quantities) == 3


def torch_verdicts(folder):
    return list(check_dspark(folder, F32V, ("torch",)))


@pytest.mark.parametrize(
    ("name", "change"),
    [("base_logits", 1e-3), ("logits", 1e-3), ("layers.1.context_k_pe", 1e-3), ("draft_ids", 1)],
)
def test_one_wrong_number_is_found(golden_dir, name, change):
    folder = open_folder(golden_dir / "dspark_tiny16")
    key = f"case1.{name}_f64" if "logits" in name else f"case1.{name}"
    folder.tensors[key] = folder.tensors[key].copy()
    folder.tensors[key].flat[5] += change
    bad = [v for v in torch_verdicts(folder) if not v.passed]
    assert [(v.where.case, v.quantity, v.status) for v in bad] == [("case1", name, "failed")]


def test_a_quantity_that_nobody_produces_is_not_passed(golden_dir):
    folder = open_folder(golden_dir / "dspark_tiny16")
    folder.tensors["case0.mood"] = np.zeros(3)
    bad = [v for v in torch_verdicts(folder) if not v.passed]
    assert [(v.quantity, v.status) for v in bad] == [("mood", "not run")]


def test_the_target_is_found_without_being_named(copied):
    assert find_target(settle(copied, target=None)).name == "model_tiny16"


@pytest.mark.parametrize("target", ["elsewhere", None])
def test_a_missing_target_is_not_run(copied, target):
    shutil.rmtree(copied.parent / "model_tiny16")
    found = torch_verdicts(settle(copied, target=target))
    assert [v.status for v in found] == ["not run"]
    assert "target" in found[0].note and "beside" in found[0].note


def test_a_target_of_another_size_is_named_with_its_sizes(copied, golden_dir):
    shutil.copytree(golden_dir / "model_tiny3", copied.parent / "model_tiny3")
    with pytest.raises(TargetError, match="hidden_size 64 instead of 128"):
        find_target(settle(copied, target="model_tiny3"))


def test_two_fitting_targets_must_be_told_apart(copied):
    shutil.copytree(copied.parent / "model_tiny16", copied.parent / "twin")
    with pytest.raises(TargetError, match="more than one"):
        find_target(settle(copied, target=None))


def test_an_anchor_comes_from_the_targets_recording_and_else_is_missed(copied):
    assert good(torch_verdicts(settle(copied, cases=None)))
    (copied.parent / "model_tiny16" / "golden.safetensors").unlink()
    found = torch_verdicts(settle(copied, cases=None))
    assert [v.status for v in found] == ["not run"] * 2 and "anchor_id" in found[0].note


@pytest.fixture(scope="module")
def unseen(tmp_path_factory):
    """A drafter of other sizes with blocks of 7 and 3; truth is PyTorch in float64."""
    from safetensors.numpy import save_file

    from jax_impl.make_tiny import make_checkpoint
    from parity.draft_torch import Runner
    from parity.golden_dspark import EPS, DraftCase
    from torch_ref.draft import Draft
    from torch_ref.model import Model
    from torch_ref.numerics import Numerics

    where = tmp_path_factory.mktemp("unseen") / "made"
    make_checkpoint(where, "tiny", seed=11)
    nm = Numerics(torch.float64, "H", mla_norm_eps=EPS)
    target = Model.load(where / "target", nm)
    draft, tensors, cases = Draft.load(where / "draft", target, nm), {}, {}
    for name, length, k in (("case0", 13, 7), ("case3", 21, 3)):
        ids = np.random.default_rng(length).integers(4, 384, length)
        _, taps = draft.target_pass(torch.from_numpy(ids), target.new_state())
        given = {"taps": taps.float().numpy(), "draft_ids": np.zeros(k, np.int32)}
        made = Runner(draft)(DraftCase(name, 77, given))
        given |= {f"{n}_f64": made.pop(n) for n in ("base_logits", "logits")}
        tensors |= {f"{name}.{n}": np.ascontiguousarray(v) for n, v in (given | made).items()}
        cases[name] = {"anchor_id": 77}
    save_file(tensors, where / "draft" / "golden.safetensors")
    (where / "draft" / "golden.json").write_text(json.dumps({"cases": cases}))
    return where / "draft"


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_a_drafter_never_seen_before_is_judged(unseen, side):
    found = list(check_dspark(open_folder(unseen), F32V, (side,)))
    assert good(found), problems(found)
    assert {v.where.case for v in found} == {"case0", "case3"}


# ---- acceptance ----


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_worked_examples(side):
    found = list(check_examples(WHERE, SIDES[side]))
    assert good(found), problems(found)
    assert sum(v.quantity == "tokens" for v in found) == 12


@pytest.mark.parametrize("side", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_enumeration(side):
    found = list(check_enumeration(WHERE, SIDES[side]))
    assert good(found), problems(found)
    assert any(v.note == "10/9" for v in found) and any(v.note == "11/9" for v in found)


class TokenByToken(TorchSide):
    """Judges and enumerates block verification token by token."""

    def decide(self, setting, batch) -> Decided:
        return super().decide(
            setting._replace(rule=setting.rule.replace("block", "standard")), batch
        )

    def enumerate(self, rule, target, draft, k, *, point=False):
        return super().enumerate("standard", target, draft, k, point=point)


class WithTheDraftersLaw(TorchSide):
    """Samples what the drafter would."""

    def enumerate(self, rule, target, draft, k, *, point=False):
        mixed = lambda c: draft(c) if len(c) < k else target(c)  # noqa: E731
        return super().enumerate(rule, mixed, draft, k, point=point)


def test_wrong_rules_are_found():
    bad = {v.where.case for v in check_examples(WHERE, TokenByToken()) if not v.passed}
    assert bad == {"block", "block, one-hot"}
    bad = [v for v in check_enumeration(WHERE, TokenByToken()) if not v.passed]
    assert bad and {v.quantity for v in bad} == {"accepted counts", "mean accepted"}
    bad = [v for v in check_enumeration(WHERE, WithTheDraftersLaw()) if not v.passed]
    assert sum(v.quantity == "total variation" for v in bad) >= 12


@pytest.mark.parametrize("side", [JaxSide(), TorchSide()], ids=["jax", "torch"])
def test_forced_length_six(side):
    found = list(check_forced_six(WHERE, side, steps=40))
    assert good(found), problems(found)


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        (60, ((Setting("standard"), True), (Setting("block"), True))),
        pytest.param(400, RANDOM, marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_the_same_uniforms_decide_the_same(steps, settings):
    found = list(check_equal_decisions(steps, settings))
    assert good(found), problems(found)
    assert len(found) == 3 * len(settings)


def test_chi_square():
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.ones(50))
    drawn = np.bincount(rng.choice(50, 2000, p=law), minlength=50)
    assert chi_square(drawn, law)["p"] > 0.01
    assert chi_square(drawn, rng.dirichlet(np.ones(50)))["p"] < 1e-6
    fair = chi_square(np.array([60, 40]), np.array([0.5, 0.5]))
    assert fair["statistic"] == 4 and abs(fair["p"] - 0.0455) < 1e-4
    assert chi_square(np.array([9, 1]), np.array([1.0, 0.0]))["p"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.rule}-{m.drafting}")
def test_sampled_runs_follow_plain_sampling(method):
    found = list(check_sampled_runs((method,)))
    assert good(found), problems(found)


# ---- whole runs ----


def test_the_first_divergence_from_plain_text_is_named_with_its_margin():
    at = Where("dspark", "made up", "greedy")
    plain, margins = np.array([1, 2, 3, 4]), np.array([0.5, 0.4, 0.3, 0.2])
    assert against_plain(at, [1, 2, 3, 4], plain, margins).passed
    wrong = against_plain(at, [1, 2, 9, 9], plain, margins)
    assert not wrong.passed and wrong.value == 0.3
    assert "first divergence at token 2: 9 for 3, margin 0.3" in wrong.note
    assert against_plain(at, [1, 2, 9, 9], plain, margins / 1e3).passed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_pair_agrees_in_every_step():
    found = list(check_dspark_pair())
    assert good(found), problems(found)
    assert {v.quantity for v in found} == {
        "every count occurs", "accepted counts", "emitted ids", "text"
    }  # fmt: skip


@pytest.mark.slow
def test_a_given_pair_is_compared_without_wanting_every_count(tmp_path):
    from jax_impl.make_tiny import make_checkpoint

    make_checkpoint(tmp_path, "tiny", 2)
    found = list(check_drafted(Pair(tmp_path / "target", tmp_path / "draft"), PROMPT, 3))
    assert good(found), problems(found)
    assert [(v.where.dtype, v.quantity) for v in found] == [
        ("float32", "accepted counts"), ("float32", "emitted ids"), ("float32", "text"),
        ("bfloat16", "text"),
    ]  # fmt: skip
    assert "steps by accepted count" in found[-1].note


@pytest.mark.slow
def test_a_pair_that_does_not_show_every_count_is_not_passed():
    found = list(check_dspark_pair(F32V, steps=2))
    bad = [v for v in found if not v.passed]
    assert [v.quantity for v in bad] == ["every count occurs"] and "no step" in bad[0].note


# ---- the recorded engine ----


NOISE = Noise(0.25, np.array([1e-3, 4e-3]))  # deficits up to 1.06, gaps up to 2e-3 and 8e-3
CLEAR, TIE = [0.3, 9e-3], [0.3, 7e-3]


def truth_of(logits, gaps=CLEAR, **changes):
    """Exact arithmetic that agrees with bf16, with experts in layers 1 and 4."""
    logits, chosen = np.array(logits, float), np.array([[[2, 3], [0, 6]]] * len(logits))
    gaps, edges = np.array([gaps] * len(logits)), np.array([[[3, 5], [6, 7]]] * len(logits))
    bf16 = logits.copy(), gaps.copy(), chosen.copy()
    truth = Truth(logits, gaps, chosen, edges, [1, 4], *bf16, [])
    return truth._replace(**changes)


def judged(logits, ids, gaps, **changes):
    """Rows that chose `ids` after a prompt of one token."""
    text = Text("case0", "greedy", np.array([5]), np.array(ids))
    logits = np.array(logits, float)
    truth = truth_of(logits, gaps, **changes)
    return explained(Where("vllm", "made up", "-"), Wanted(0, text.ids), logits, truth, NOISE)


def test_every_differing_row_needs_a_reason():
    far, near = [0.0, 5.0, 2.0], [0.0, 5.0, 4.0]
    assert judged([near], [2], CLEAR).passed  # small deficit
    alone = judged([far], [2], TIE)  # a near-tie of which nobody knows what it can do
    assert not alone.passed
    tie = "row 0: 3, near-tie in layer 4 (experts 6 and 7, gap 7.0e-03, 1.75 of its noise)"
    assert tie in alone.note
    other = judged([far], [2], TIE, other_choice=lambda row, places: np.array([0.0, 3.0, 2.5]))
    assert other.passed
    assert "decided otherwise: the recorded token 0.5 below the best, ours 0" in other.note
    for wrong in (judged([far], [2], CLEAR), judged([near, far], [2, 2], CLEAR)):
        assert not wrong.passed and wrong.value == 3.0 / NOISE.logit
        assert "3 (UNEXPLAINED)" in wrong.note and wrong.note.count("UNEXPLAINED") == 1


def test_a_near_tie_does_not_excuse_a_nan():
    found = judged([[np.nan, 5.0, 2.0]], [2], TIE)
    assert not found.passed and "UNEXPLAINED" in found.note


def test_only_exact_arithmetic_is_held_to_nine_of_ten():
    logits = np.tile([0.0, 5.0, 4.9], (10, 1))
    text = Text("case0", "greedy", np.array([5]), np.array([1] * 8 + [2, 2]))
    where = Where("vllm", "made up", "-")
    share, reasons = tokens(where, text, logits, truth_of(logits), NOISE)
    assert not share.passed and share.value == 0.2 and share.note == "8 of 10 equal"
    assert reasons.passed
    (reasons,) = tokens(where.at(dtype="bfloat16"), text, logits, truth_of(logits), NOISE)
    assert reasons.passed and reasons.note.startswith("8 of 10 equal")
    nine = dataclasses.replace(text, ids=np.array([1] * 9 + [2]))
    assert next(iter(tokens(where, nine, logits, truth_of(logits), NOISE))).passed


def test_noise_is_that_of_rows_with_equal_experts():
    truth = truth_of(np.zeros((3, 4)))
    moved = truth.bf16 + np.array([[1.0, -1.0, 1.0, -1.0], [3.0] * 4, [90.0, 0.0, 0.0, 0.0]])
    chosen = truth.chosen.copy()
    chosen[2, 1] = [0, 7]  # another expert in layer 4: neither its logits nor its gap count
    gaps = truth.gaps + np.array([[1e-3, 2e-3], [1e-3, 2e-3], [1e-3, 5.0]])
    found = measure([truth._replace(bf16=moved, bf16_gaps=gaps, bf16_chosen=chosen)])
    assert np.isclose(found.logit, 0.5**0.5)  # the shift of the second row moves no margin
    assert np.allclose(found.gaps, [1e-3, 2e-3])


def test_equal_best_tokens_are_held_against_the_median_draw():
    rows = np.eye(4)[[0, 1, 2, 3] * 25]  # 100 rows
    text = Text("case0", "greedy", np.array([5]), np.zeros(100, int))

    def wrong(count):
        changed = rows.copy()
        changed[:count] = np.roll(changed[:count], 1, axis=1)
        return changed

    text = dataclasses.replace(text, distribution=Distribution(0, None, rows))
    record = Record({}, (text,), {("case0", "f32"): rows})
    truth = truth_of(rows, draws=[wrong(2), wrong(5), wrong(9)])
    where = Where("vllm", "made up", "-")
    for count, fine in ((8, True), (9, False)):
        (found,) = best_tokens(where, record, {text.key: wrong(count)}, {text.key: truth})
        assert found.passed is fine and f"{100 - count} of 100 equal" in found.note
        assert "98 on 1, 95 on 2, 91 on 4 thread(s)" in found.note


@pytest.mark.parametrize("checkpoint", [None, {"preset": "vast", "seed": 1}, {"preset": "tiny"}])
def test_a_recorded_engine_without_a_checkpoint_is_not_run(tmp_path, golden_dir, checkpoint):
    target = tmp_path / "engine"
    shutil.copytree(golden_dir / "vllm033_tiny", target, copy_function=shutil.copyfile)
    target.chmod(0o755)
    found = list(check_vllm(settle(target, checkpoint=checkpoint)))
    assert [v.status for v in found] == ["not run"]


def test_a_recorded_engine_is_recognised_by_its_tensors(tmp_path, golden_dir):
    shutil.copyfile(
        golden_dir / "vllm033_tiny" / "golden.safetensors", tmp_path / "golden.safetensors"
    )
    assert open_folder(tmp_path).kind == "vllm"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_recorded_engine(golden_dir):
    found = list(check_vllm(open_folder(golden_dir / "vllm033_tiny")))
    assert good(found), problems(found)
