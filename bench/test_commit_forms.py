from __future__ import annotations

import json

import pytest

from bench.commit_forms import Shapes, main

SMALL = [
    *("--layers", "2", "--heads", "1", "--width", "8", "--rows", "3", "--batches", "2"),
    *("--samples", "2", "--steps-per-sample", "4", "--slots", "4"),
]


@pytest.mark.parametrize("layout", ["together", "layers"])
def test_both_forms_end_in_the_same_state(tmp_path, layout):
    file = tmp_path / "found.json"
    assert main([*SMALL, "--layout", layout, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {"platform", "device", "jax", "jaxlib"} <= report["conditions"].keys()
    (result,) = report["results"]
    assert result["states_relative_l2"] < 1e-6
    assert result["shapes"]["slots"] == 4 and result["state_bytes"] == 2 * 2 * 8 * 8 * 4
    for found in result["forms"].values():
        assert found["samples"] == 2 and 0 < found["min_s"] <= found["median_s"]


def test_traffic_of_the_released_shapes():
    shapes = Shapes(layers=69, heads=6, width=128, rows=8, batch=1, slots=16, layout="together")
    assert shapes.state_bytes == 27_131_904 and shapes.record_bytes == 5_087_232
    assert shapes.traffic_bytes("replay") == 91_570_176
    assert shapes.traffic_bytes("snapshots") == 298_450_944


def test_sizes_below_one_are_refused_together(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--layers", "0", "--samples", "1"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "layers 0: expected at least 1" in message and "samples 1" in message
