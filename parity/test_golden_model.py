"""Whole recorded models. One test per folder and run, so that the workers can share them.

tiny3 is compared in everything; the larger folders in the runs that show something new, the rest is
marked slow.
"""

from __future__ import annotations

import numpy as np
import pytest

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
LAYERS_CI = {("model_tiny16", "bfloat16", "V"), ("model_realdims", "bfloat16", "H")}


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
