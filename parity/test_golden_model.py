"""Whole recorded models. One test per folder and run, so that the workers can share them.

tiny3 is compared in everything; the larger folders in the runs that show something new, the rest is
marked slow.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from parity.folders import open_folder
from parity.golden_layers import check_layers
from parity.golden_model import RUNS, check_model
from parity.report import good, problems

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
    bad = [v for v in found if not v.passed]
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
