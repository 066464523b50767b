from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from parity.cases import CASES, cases
from parity.folders import open_folder, operations, read_tensors
from parity.golden_ops import _gaps, check_operation, check_ops, op_name
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


def changed(stem: str, change, sides: tuple[str, ...] = ("jax",)) -> list:
    """Verdicts of a recorded file after `change(tensors, meta)`."""
    tensors = {k: v.copy() for k, v in read_tensors(OPS / f"{stem}.safetensors").items()}
    meta = dict(FILES[stem])
    change(tensors, meta)
    return list(
        check_operation(Where("ops", "ops", stem), op_name(meta["op"]), tensors, meta, sides)
    )


def drop(*words: str):
    """A change that removes the tensors and sidecar entries whose name holds one of `words`."""

    def change(tensors, meta):
        for named in (tensors, meta):
            for name in [n for n in named if any(w in n for w in words)]:
                del named[name]

    return change


def test_only_a_bf16_recording_is_judged_by_the_bf16_limit():
    found = changed("situ", drop("_f64", "_f32"))
    assert good(found), problems(found)
    assert {v.where.against for v in found} == {"recorded bfloat16"}
    assert {v.limit for v in found} == {1e-2}


def test_a_float32_recording_is_preferred_to_a_bf16_one():
    found = [v for v in changed("situ", drop("_f64")) if v.where.dtype == "float32"]
    assert good(found), problems(found)
    assert {v.where.against for v in found} == {"recorded float32"}
    assert max(v.limit for v in found) < 1e-5


@pytest.mark.parametrize("stem", ["situ", "short_conv", "rmsnorm"])
def test_a_file_without_recorded_results_is_not_run(stem):
    found = changed(stem, drop("y_", "state_", "checks"))
    assert [v.status for v in found] == ["not run"] and "no result" in found[0].note


@pytest.mark.parametrize(("stem", "name"), [("situ", "y_f64"), ("rmsnorm", "y_eps1e5_f64")])
def test_one_small_wrong_element_fails(stem, name):
    def change(tensors, meta):
        value = tensors[name]
        small = np.argmin(np.abs(np.abs(value) - 1e-4 * np.abs(value).max()))
        value.flat[small] *= 1.001

    bad = [v for v in changed(stem, change) if not v.passed]
    assert bad and all("each element" in v.quantity and v.status == "failed" for v in bad)


@pytest.mark.parametrize(
    ("stem", "words"),
    [
        ("mxfp4", ("quant_input",)),
        ("short_conv", ("step",)),
        ("router_scaled", ("num_expert_group", "topk_group")),
        ("router_ties", ("gap", "checks")),
        ("router_ties", ("gap", "checks", "scores")),
        ("router_nearties", ("topk_weight",)),
    ],
)
def test_a_file_with_less_in_it_is_judged_by_the_rest(stem, words):
    found = changed(stem, drop(*words))
    assert good(found), problems(found)


def test_gaps_follow_from_the_recorded_inputs():
    for stem in ("router_k3", "router_scaled", "router_ties", "router_nearties"):
        tensors = read_tensors(OPS / f"{stem}.safetensors")
        recorded = tensors.pop("gap_f64")
        np.testing.assert_allclose(_gaps(tensors, FILES[stem]), recorded, atol=1e-12)
        del tensors["scores_f64"]
        np.testing.assert_allclose(_gaps(tensors, FILES[stem]), recorded, atol=1e-12)


def test_a_wrong_expert_fails_without_recorded_gaps():
    def change(tensors, meta):
        drop("gap", "checks", "scores")(tensors, meta)
        row = tensors["idx_f64"][1]
        row[0] = next(e for e in range(64) if e not in row)

    assert any(
        v.quantity == "idx" and v.status == "failed" for v in changed("router_scaled", change)
    )
