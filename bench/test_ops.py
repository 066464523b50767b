"""`bench ops`: figures of a case, what fails one, and the list. Kernels themselves need a GPU."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import ops
from bench.__main__ import main
from bench.devices import DEVICES
from bench.ops import chosen, judge, parity_of, run_case
from bench.ops_cases import cases
from bench.ops_kda import kda_case
from bench.ops_options import OpsOptions
from bench.ops_problem import Problem, f64, relative, stack_depth
from bench.ops_standard import run_standard, tiny_cases
from bench.result import read
from parity.kernel_env import needs_interpreter


def problem(error=0.0, standard=1e-3):
    want = np.arange(1.0, 9.0).reshape(2, 4)
    return Problem(
        lambda layer: jnp.asarray(want * (1 + error), jnp.float32),
        45_500_000,
        3,
        lambda layer, rows: want[rows],
        lambda layer: jnp.asarray(want * (1 + standard), jnp.float32),
        np.arange(2),
        {"distinct_experts": (16.0, "count")},
    )


def times(problem, repeats):
    calls = problem.layers * repeats
    return {"k3_a": [8.0] * calls, "k3_b": [6.0] * 2 * calls, "copy": [1.5] * calls}, calls


def test_kernels_of_a_call_are_summed_and_others_kept_apart():
    figures, parity = run_case(
        "x", problem(), OpsOptions(repeats=2, replays=3), DEVICES["H200"], times
    )
    assert figures["x.kernel_us"] == {"value": 20.0, "unit": "us", "samples": [20.0] * 6}
    assert figures["x.other_us"]["value"] == 1.5
    assert figures["x.floor_us"]["value"] == pytest.approx(10.0)
    assert figures["x.floor_share"]["value"] == pytest.approx(0.5)
    assert figures["x.gb_s"]["value"] == pytest.approx(2275)
    assert figures["x.device.k3_b"]["value"] == 12.0
    assert figures["x.distinct_experts"]["value"] == 16.0
    assert parity["passed"]
    assert parity["replays_different"] == 0


def test_a_call_may_take_its_layer_as_a_number():
    """As the cases of experts and vocabulary do."""
    fine = problem()
    case = replace(fine, call=lambda layer: fine.call([None, layer][int(layer)]))
    assert run_case("x", case, OpsOptions(repeats=1, replays=1), None, times)[1]["passed"]


@pytest.mark.parametrize(
    ("error", "standard", "passed"),
    [(1e-3, 1e-3, True), (3e-3, 1e-3, False), (1e-2, 1e-1, False), (np.nan, 1e-3, False)],
)
def test_an_error_beyond_twice_the_standard_paths_fails(error, standard, passed):
    found = run_case("x", problem(error, standard), OpsOptions(repeats=1, replays=2), None, times)
    assert found[1]["passed"] is passed
    json.dumps(found, allow_nan=False)  # a kernel that gives NaN must not cost the other cases


def test_the_floor_is_that_of_the_device_or_none():
    def run(device):
        return run_case("x", problem(), OpsOptions(repeats=1, replays=1), device, times)[0]

    there = run(DEVICES["GB300"])
    assert there["x.floor_us"]["value"] == pytest.approx(
        45.5 / DEVICES["GB300"].read_tb_s, rel=1e-5
    )
    assert not [n for n in run(None) if "floor" in n]


def test_what_is_not_complete_has_not_passed(tmp_path, monkeypatch):
    assert parity_of([{"passed": True}], 3)["verdict"] == "none"
    assert parity_of([{"passed": True}], 3)["why"] == "incomplete: 1 of 3 cases"
    assert parity_of([{"passed": False}], 3)["verdict"] == "failed"
    assert parity_of([{"passed": True}] * 3, 3)["verdict"] == "passed"

    def stopped():
        raise KeyboardInterrupt

    out = tmp_path / "ops.json"
    monkeypatch.setattr(ops, "tiny_cases", lambda: {"a": problem, "b": stopped})
    with pytest.raises(KeyboardInterrupt):
        ops.run_ops(OpsOptions(preset="tiny", replays=1), str(out))
    left = read(out)
    assert left["parity"]["verdict"] == "none"
    assert left["conditions"]["cases"] == {"measured": 1, "asked_for": 2}


def test_standard_formulas_are_timed_by_the_clock_and_compared():
    now = [0.0]

    def clock():
        now[0] += 0.003
        return now[0]

    figures, parity = run_standard("x", problem(), OpsOptions(repeats=5, replays=2), clock)
    assert figures == {
        "x.standard_us": {"value": 1000.0, "unit": "us", "samples": [pytest.approx(1000.0)] * 5}
    }
    assert parity["passed"]
    assert not run_standard("x", problem(standard=1e-2), OpsOptions(replays=1))[1]["passed"]


def test_the_small_preset_has_every_family():
    families = {name.split(".")[0] for name in cases()}
    assert families == {name.split(".")[0] for name in tiny_cases()}
    assert {"kda", "experts", "mla_attend", "mla_query", "vocab"} <= families


def test_a_wrong_standard_formula_of_kda_would_be_seen(quick_compile):
    """float64 is written apart from both paths: it agrees, and another layer does not."""
    case = kda_case(1, 2, 1, 37, layers=2)
    want = case.exact(1, case.rows)
    assert relative(f64(case.standard(1)), want) < 4e-3
    assert relative(f64(case.standard(0)), want) > 0.1


@needs_interpreter
def test_the_kernel_of_a_kda_case_is_traced_at_the_cases_shapes():
    case = kda_case(1, 2, 1, 37, layers=2)
    found = jax.eval_shape(case.call, jax.ShapeDtypeStruct((), jnp.int32))
    assert found.shape == case.standard(0).shape


def test_the_small_preset_runs_without_a_gpu(tmp_path, capsys, quick_compile):
    out = tmp_path / "ops.json"
    command = ["ops", "--preset", "tiny", "--repeats", "4", "--replays", "2"]
    assert main([*command, "--json", str(out)]) == 0
    found = read(out)
    assert found["parity"]["verdict"] == "passed"
    assert found["conditions"]["backend"] == "standard formulas"
    assert found["conditions"]["cases"] == dict.fromkeys(
        ("measured", "asked_for"), len(tiny_cases())
    )
    assert all(n.endswith(".standard_us") for n in found["figures"])
    assert "NO KERNEL RAN" in capsys.readouterr().out


def test_replays_that_differ_fail():
    fine = {"kernel": 1e-4, "standard": 1e-3, "finite": True}
    assert judge(fine, fine, 0) == (True, 1e-4)
    assert not judge(fine, fine, 1)[0]
    assert not judge(fine, fine | {"kernel": 2e-4}, 0)[0]


def test_weights_rotate_beyond_three_times_the_cache():
    for nbytes in (1 << 20, 46 << 20, 1 << 30):
        assert (stack_depth(nbytes) - 1) * nbytes >= 3 * 60 << 20
        assert stack_depth(nbytes) >= 2


def test_cases_are_listed_and_a_wrong_name_is_refused(capsys):
    assert main(["ops", "experts.tp16", "--list"]) == 0
    assert "experts.tp16.rows8" in capsys.readouterr().out.split()
    assert len(chosen(())) > 60
    assert main(["ops", "no_such_case"]) == 2
    assert "--list" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_run(capsys):
    assert main(["ops", "attn_res"]) == 2
    assert "expected an NVIDIA GPU" in capsys.readouterr().err
