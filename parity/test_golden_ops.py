from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from parity.cases import CASES, cases
from parity.folders import open_folder, operations, read_tensors
from parity.golden_ops import check_operation, check_ops, op_name
from parity.inputs import bf16_exact, make_inputs
from parity.report import good, problems
from parity.verdict import Where

OPS = Path(__file__).parent / "golden" / "ops"
FILES = dict(operations(OPS))


def verdicts_of(stem: str, side: str) -> list:
    tensors = read_tensors(OPS / f"{stem}.safetensors")
    meta = FILES[stem]
    where = Where("ops", "ops", stem)
    return list(check_operation(where, op_name(meta["op"]), tensors, meta, (side,)))


@pytest.mark.parametrize("stem", FILES)
def test_jax_agrees_with_the_recorded_operation(stem):
    found = verdicts_of(stem, "jax")
    assert good(found), problems(found)


@pytest.mark.parametrize("stem", FILES)
def test_torch_agrees_with_the_recorded_operation(stem):
    pytest.importorskip("torch")
    found = verdicts_of(stem, "torch")
    assert good(found), problems(found)


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.id)
def test_jax_agrees_with_float64_on_a_case(case):
    pytest.importorskip("torch")
    from parity.case_check import check_cases

    found = list(check_cases([case]))
    assert good(found), problems(found)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_inputs_depend_on_the_seed_alone(case):
    first, again = make_inputs(case)[0], make_inputs(case)[0]
    other = make_inputs(dataclasses.replace(case, seed=case.seed + 1000))[0]
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
    assert any(not np.array_equal(v, other[n]) for n, v in first.items() if v.size > 8)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_activations_are_exact_in_bf16(case):
    tensors = make_inputs(case)[0]
    for name in {"x", "q", "k", "v", "gate", "up", "hidden", "blocks"} & set(tensors):
        np.testing.assert_array_equal(tensors[name], bf16_exact(tensors[name]))


def test_names_and_seeds_of_cases_are_unique():
    assert len({c.id for c in CASES}) == len(CASES) == len({c.seed for c in CASES})


def test_an_unknown_operation_is_reported_as_not_run(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "wavelet.safetensors")
    (tmp_path / "wavelet.json").write_text('{"op": "wavelet"}')
    found = list(check_ops(open_folder(tmp_path)))
    assert [v.status for v in found] == ["not run"]
    assert "wavelet" in found[0].note


def test_a_recorded_result_that_nobody_produces_is_reported(golden_dir):
    stem = "situ"
    tensors = read_tensors(golden_dir / "ops" / f"{stem}.safetensors")
    tensors["y_rotated_f64"] = tensors["y_f64"]
    where = Where("ops", "ops", stem)
    found = list(check_operation(where, stem, tensors, FILES[stem], ("jax",)))
    assert [v.quantity for v in found if v.status == "not run"] == ["y_rotated"]
