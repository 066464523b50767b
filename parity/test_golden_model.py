"""Whole recorded models. One test per folder and run, so that the workers can share them.

tiny3 is compared in everything; the larger folders in the runs that show something new, the rest is
marked slow.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from parity import metrics
from parity.folders import open_folder
from parity.golden_layers import check_layers
from parity.golden_limits import (
    STREAM_STAT,
    explanation,
    greedy_verdict,
    logit_noise,
    router_choice,
    stream_limit,
)
from parity.golden_model import RUNS, ModelCheck, check_model, inconsistencies
from parity.report import good, problems
from parity.tolerances import tolerance
from parity.verdict import Where

CI = {
    ("model_tiny16", "float32", "V", "whole"),
    ("model_tiny16", "float32", "V", "stepwise"),
    ("model_tiny16", "bfloat16", "V", "stepwise"),
    ("model_realdims", "float32", "V", "windows"),
    ("model_realdims", "float32", "H", "whole"),
    ("model_realdims", "bfloat16", "H", "whole"),
}
LAYERS_CI = {("model_tiny16", "bfloat16", "V")}


def _parts():
    for folder in ("model_tiny3", "model_tiny16", "model_realdims"):
        for dtype, profile in RUNS:
            for part in ("whole", "stepwise", "windows"):
                if part == "windows" and dtype == "bfloat16":
                    continue
                case = (folder, dtype, profile, part)
                slow = folder != "model_tiny3" and case not in CI
                yield pytest.param(*case, marks=[pytest.mark.slow] if slow else [])


def _layer_runs():
    for folder in ("model_tiny3", "model_tiny16", "model_realdims"):
        for run in RUNS:
            case = (folder, *run)
            slow = folder != "model_tiny3" and case not in LAYERS_CI
            yield pytest.param(*case, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("folder", "dtype", "profile", "part"), list(_parts()))
def test_model_agrees_with_the_recording(golden_dir, folder, dtype, profile, part):
    found = list(check_model(open_folder(golden_dir / folder), ((dtype, profile),), (part,)))
    assert good(found), problems(found)


@pytest.mark.parametrize(("folder", "dtype", "profile"), list(_layer_runs()))
def test_layers_agree_on_recorded_inputs(golden_dir, folder, dtype, profile):
    found = list(check_layers(open_folder(golden_dir / folder), ((dtype, profile),)))
    assert good(found), problems(found)


@pytest.fixture(scope="module")
def unseen(tmp_path_factory):
    """A folder of other sizes, layer pattern and router groups; truth is PyTorch in float64."""
    torch = pytest.importorskip("torch")
    from jax_impl.make_tiny import make_checkpoint
    from torch_ref.model import Model, greedy
    from torch_ref.numerics import Numerics

    path = tmp_path_factory.mktemp("unseen") / "made"
    groups = {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
    make_checkpoint(path, "tiny", seed=3, overrides=groups)
    model = Model.load(path / "target", Numerics(torch.float64, "H"))
    prompt = torch.from_numpy(np.random.default_rng(1).integers(0, model.config.vocab_size, 13))
    ids, rows = greedy(model, prompt, 6)
    best = rows.topk(2, dim=-1).values
    record, state = {}, model.new_state()
    sequence = torch.cat([prompt, ids])
    tensors = {"logits_f64": model.forward(sequence, state, record=record)}
    tensors |= {f"seq.{name}": value for name, value in record.items()}
    for layer, kda in zip(model.config.kda_layers, state.kda_state, strict=True):
        tensors[f"seq.layer{layer:02d}.kda_state_vk"] = kda
    tensors |= {"prompt_ids": prompt, "greedy_ids": ids, "seq_ids": sequence}
    tensors["greedy_top2_margin_f64"] = best[:, 0] - best[:, 1]
    arrays = {name: value.contiguous().numpy() for name, value in tensors.items()}
    save_file(arrays, path / "target" / "golden.safetensors")
    return path / "target"


@pytest.mark.parametrize("part", ["whole", "stepwise"])
def test_a_folder_never_seen_before_is_judged(unseen, part):
    found = list(check_model(open_folder(unseen), (("float32", "V"),), (part,)))
    assert good(found), problems(found)
    assert {v.quantity for v in found} >= {"logits"}


def test_a_wrong_number_in_an_unseen_folder_is_found(unseen, tmp_path):
    target = tmp_path / "changed"
    shutil.copytree(unseen, target)
    folder = open_folder(target)
    name = "seq.layer05.mlp_out"
    folder.tensors[name] = folder.tensors[name].copy()
    folder.tensors[name][4, 7] += 1e-3
    found = list(check_model(folder, (("float32", "V"),), ("whole",)))
    bad = [v for v in found if v.status == "failed"]
    assert [(v.where.case, v.quantity, v.metrics["worst"]) for v in bad] == [
        ("whole layer05", "mlp_out", [4, 7])
    ]


def test_a_folder_without_logits_is_not_passed(golden_dir):
    folder = open_folder(golden_dir / "model_tiny3")
    folder.tensors.pop("logits_f64")
    found = list(check_model(folder))
    assert [v.status for v in found] == ["not run"] and "logits_f64" in found[0].note


def test_all_of_float32_is_equal_in_all_greedy_ids(golden_dir):
    # the recorded margins are so far above the float32 error that no other choice can be right
    for name in ("model_tiny3", "model_tiny16", "model_realdims"):
        margins = open_folder(golden_dir / name).tensors["greedy_top2_margin_f64"]
        assert np.min(margins) > 0.03


def test_all_that_is_at_odds_is_listed_at_once(golden_dir):
    g = dict(open_folder(golden_dir / "model_tiny3").tensors)
    assert inconsistencies(g) == []
    g["logits_f64"] = g["logits_f64"][:-1]
    assert len(inconsistencies(g)) == 1
    g["logits_f64"] = open_folder(golden_dir / "model_tiny3").tensors["logits_f64"]
    g["seq.layer02.router_gap"] = g["seq.layer02.router_gap"][:-1]
    g["prompt2_logits_f64"] = g["prompt2_logits_f64"][:1]
    g["greedy_ids"] = g["greedy_ids"].copy()
    g["greedy_ids"][4] += 1
    found = inconsistencies(g)
    assert len(found) == 3
    for word in ("router_gap", "prompt2_logits_f64", "part at 15"):
        assert any(word in line for line in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_margins_that_are_not_recorded_follow_from_the_logits(golden_dir, dtype):
    folder = open_folder(golden_dir / "model_tiny3")
    check = ModelCheck(folder, dtype, "V")
    for prefix, known in (("", 32), ("prompt2_", 1)):
        recorded = folder.tensors.pop(f"{prefix}greedy_top2_margin_f64")
        ids = folder.tensors[f"{prefix}greedy_ids"]
        margins = check._margins(prefix, ids)
        np.testing.assert_allclose(margins[:known], recorded[:known])
        assert (margins[known:] == (np.inf if dtype == "float32" else 0.0)).all()


def test_a_wrong_greedy_id_fails_without_recorded_margins(golden_dir):
    folder = open_folder(golden_dir / "model_tiny3")
    ids = folder.tensors["prompt2_greedy_ids"].copy()
    ids[2] = (ids[2] + 1) % 256
    folder.tensors["prompt2_greedy_ids"] = ids
    del folder.tensors["prompt2_greedy_top2_margin_f64"]
    found = ModelCheck(folder, "float32", "V")._second_prompt(Where("model", "m", "stepwise"))
    bad = [v for v in found if not v.passed]
    assert [(v.quantity, v.status) for v in bad] == [("prompt2_greedy_ids", "failed")]


def test_without_gaps_float32_must_choose_the_same_experts():
    want = np.array([[0, 1], [2, 3], [1, 4], [0, 2], [1, 3]])
    got = want.copy()
    got[1, 0] = 0
    f32, bf16 = (Where("model", "m", "-", dtype) for dtype in ("float32", "bfloat16"))
    assert router_choice(f32, want, want, None, "router_injected").passed
    assert router_choice(f32, got, want, None, "router_injected").status == "failed"
    assert router_choice(bf16, got, want, None, "router_injected").passed
    assert router_choice(bf16, (want + 1) % 5, want, None, "router_injected").status == "failed"


def test_a_folder_with_needed_tensors_only_passes(golden_dir):
    folder = open_folder(golden_dir / "model_tiny3")
    needed = ("prompt_ids", "greedy_ids", "seq_ids", "logits_f64")
    for name in set(folder.tensors) - set(needed):
        del folder.tensors[name]
    found = list(check_model(folder, (("float32", "V"),), ("whole",))) + list(check_layers(folder))
    assert good(found), problems(found)
    notes = " ".join(v.note for v in found if v.status == "not recorded")
    assert "prompt2_ids" in notes and "layer streams" in notes


# ---- bf16 runs, held against the recorded one ----
BF16 = Where("model", "m", "stepwise", "bfloat16", "V")


def judged(g, ids, whole=None):
    """The verdict on `ids`; `whole` stands for our run of the whole sequence."""
    want = np.asarray(g["greedy_ids"])
    found = metrics.first_divergence(ids, want, np.asarray(g["greedy_top2_margin_f64"]))
    same = np.asarray(g["logits_f64"]), {}
    return greedy_verdict(BF16, "greedy_ids", ids, want, found, g, lambda: whole or same)


def other_choice(g, place, layer="layer03"):
    """Ids that part at `place`, and a whole run in which another expert of `layer` explains it."""
    row = len(g["prompt_ids"]) - 1 + place
    logits = np.asarray(g["logits_f64"]).copy()
    ids = np.asarray(g["greedy_ids"]).copy()
    ids[place] = np.argsort(logits[row])[-2]
    logits[row, ids[place]] = logits[row].max() + 1
    names = [k.split(".")[1] for k in g if k.endswith("router_idx")]
    record = {f"{n}.ids": np.asarray(g[f"seq.{n}.router_idx"], np.float64).copy() for n in names}
    chosen = record[f"{layer}.ids"]
    chosen[row, 0] = next(i for i in range(6) if i not in chosen[row])
    return ids, (logits, record), row


def test_a_wrong_bf16_id_within_the_recorded_reach_fails(golden_dir):
    """Mutants at every place: only an id within the noise of the best one may be right."""
    g = open_folder(golden_dir / "model_tiny3").tensors
    margins, noise = np.asarray(g["greedy_top2_margin_f64"]), logit_noise(g)
    assert noise == pytest.approx(0.0642, abs=1e-4)
    assert (margins < 1.0).sum() > 15  # the margin alone let so many pass
    second, any_id = [], []
    for place in range(32):
        ids, _, _ = other_choice(g, place)
        second.append(judged(g, ids).passed)
        ids[place] = (g["greedy_ids"][place] + 1) % 256
        any_id.append(judged(g, ids).passed)
    assert second == (margins <= 3 * 2**0.5 * noise).tolist() and sum(second) == 7
    assert not any(any_id)
    assert judged(g, np.asarray(g["greedy_ids"])).passed


def test_behind_the_recorded_reach_another_id_has_to_be_near_too(golden_dir):
    g = open_folder(golden_dir / "model_tiny16").tensors
    margins, logits = np.asarray(g["greedy_top2_margin_f64"]), np.asarray(g["logits_f64"])
    reach = int(np.flatnonzero(g["bf16_greedy_ids"] != g["greedy_ids"])[0])
    assert reach == 17 and judged(g, np.asarray(g["bf16_greedy_ids"])).passed
    near = []
    for place in range(reach, len(margins)):
        ids, _, row = other_choice(g, place)
        near.append(judged(g, ids).passed)
        for far in np.argsort(logits[row])[[0, -20]]:  # the margin itself may be small there
            ids[place] = far
            assert not judged(g, ids).passed
    assert near == (margins[reach:] <= 1.0).tolist() and 0 < sum(near) < len(near)


def test_a_run_that_stops_early_fails(golden_dir):
    g = dict(open_folder(golden_dir / "model_tiny3").tensors)
    early = np.asarray(g["greedy_ids"])[:9]
    verdict = judged(g, early)
    assert verdict.status == "failed" and "nothing recorded explains" in verdict.note
    del g["bf16_greedy_ids"]  # then, as in float32, the margin alone would decide
    verdict = judged(g, early)
    assert verdict.status == "failed" and "found no further id" in verdict.note


def test_a_place_without_recorded_logits_is_judged_by_the_margin(golden_dir):
    g = dict(open_folder(golden_dir / "model_tiny16").tensors)
    place = 17 + int(np.argmax(np.asarray(g["greedy_top2_margin_f64"])[17:]))
    ids = other_choice(g, place)[0]
    g["logits_f64"] = np.asarray(g["logits_f64"])[: len(g["prompt_ids"]) + 17]
    assert not judged(g, ids).passed  # 2.06
    early = other_choice(dict(open_folder(golden_dir / "model_tiny16").tensors), 3)[0]
    g["logits_f64"] = g["logits_f64"][: len(g["prompt_ids"])]
    assert explanation(g, {"equal_prefix": 3, "got_id": int(early[3]), "want_id": 0}, None) == ""  # type: ignore[arg-type]


def test_another_expert_explains_another_id_only_on_a_near_tie(golden_dir):
    g = dict(open_folder(golden_dir / "model_tiny3").tensors)
    margins = np.asarray(g["greedy_top2_margin_f64"])
    place = int(np.flatnonzero((margins > 0.5) & (margins < 1.0))[0])
    ids, whole, row = other_choice(g, place)
    gaps = np.asarray(g["seq.layer03.router_gap"]).copy()
    g["seq.layer03.router_gap"] = gaps
    gaps[row] = 1e-2
    verdict = judged(g, ids, whole)
    assert verdict.passed and "another expert in layer03" in verdict.note
    gaps[row] = 3e-2
    assert not judged(g, ids, whole).passed
    gaps[row] = 1e-2
    # the whole sequence in one step chooses the recorded id, or no expert differs
    assert not judged(g, ids, (np.asarray(g["logits_f64"]), whole[1])).passed
    same = {f"{k[4:11]}.ids": g[k] for k in g if k.endswith("router_idx")}
    assert not judged(g, ids, (whole[0], same)).passed
    # experts parted in an earlier layer already, where it was no near-tie
    earlier = other_choice(g, place, "layer01")[1][1]["layer01.ids"]
    g["seq.layer01.router_gap"] = np.full_like(gaps, 0.1)
    assert not judged(g, ids, (whole[0], whole[1] | {"layer01.ids": earlier})).passed
    # a margin above 1.0 is not explained by anything
    far = int(np.flatnonzero(margins > 1.0)[0])
    ids, whole, row = other_choice(g, far)
    gaps[row] = 1e-3
    assert not judged(g, ids, whole).passed


def test_float32_and_unrecorded_bf16_are_judged_by_the_margin(golden_dir):
    g = dict(open_folder(golden_dir / "model_tiny3").tensors)
    place = int(np.argmin(g["greedy_top2_margin_f64"]))
    ids = other_choice(g, place)[0]
    assert explanation(g, {"equal_prefix": 3}, lambda: None) == ""  # type: ignore[arg-type, return-value]
    del g["bf16_greedy_ids"]
    assert judged(g, ids).metrics["margin"] == pytest.approx(0.0707, abs=1e-4)


@pytest.mark.parametrize(
    ("folder", "limit"), [("model_tiny3", 0.2), ("model_tiny16", 0.54), ("model_realdims", 0.18)]
)
def test_bf16_streams_are_held_against_what_the_folder_recorded(golden_dir, folder, limit):
    made = open_folder(golden_dir / folder)
    found = stream_limit(made, "bfloat16")
    assert found.limit == pytest.approx(limit) and found.metric == "rms"
    assert stream_limit(made, "float32") == tolerance("stream", "float32")


@pytest.mark.parametrize("stat", [None, True, "0.1", -0.1, 0, 0.4, float("nan"), float("inf")])
def test_no_recorded_number_loosens_the_limit_of_streams(golden_dir, stat):
    made = open_folder(golden_dir / "model_tiny3")
    made.meta["stats"] = {STREAM_STAT: stat}
    assert stream_limit(made, "bfloat16") == tolerance("stream", "bfloat16")


def test_a_bf16_stream_beyond_twice_the_recorded_distance_fails(golden_dir):
    """rms 0.3 passed under the limit of the deepest model."""
    folder = open_folder(golden_dir / "model_tiny3")
    name = "seq.layer03.prefix_sum_out"
    noise = np.random.default_rng(0).normal(0, 0.3, folder.tensors[name].shape)
    folder.tensors[name] = (folder.tensors[name] + noise).astype(np.float32)
    found = list(check_model(folder, (("bfloat16", "V"),), ("whole",)))
    bad = {(v.where.case, v.quantity) for v in found if v.status == "failed"}
    assert ("whole layer03", "prefix_sum_out") in bad
    assert all("layer03" in case or "layer04" in case for case, _ in bad)
