"""The form of results: what is refused, what is noisy, what is printed as a headline."""

import json
import math

import pytest

from bench.result import (
    CONDITIONS,
    ResultError,
    acceptance_words,
    figure,
    headline,
    is_noisy,
    problems,
    read,
    write,
)


def made(**changed):
    return {
        "schema": "k3-bench-1",
        "command": "python -m bench rank-slice",
        "conditions": dict.fromkeys(CONDITIONS, "none") | {"versions": {}, "noisy": []},
        "figures": {"us_per_layer.rows1": figure(55.5, "us", [55.0, 55.5, 56.0])},
        "parity": {"verdict": "passed"},
    } | changed


def test_a_result_is_written_whole_and_read_back(tmp_path):
    target = tmp_path / "deep" / "result.json"
    write(str(target), made())
    assert read(target) == made()
    assert [p.name for p in target.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema": "other"}, "schema: found 'other'"),
        ({"command": 3}, "command"),
        ({"conditions": {"device": "x"}}, "driver, versions"),
        ({"figures": {"a": {"value": 1, "unit": "us"}}}, "expected value, unit and samples"),
        ({"figures": {"a": figure(math.nan, "us")}}, "expected a finite number"),
        ({"figures": {"a": figure(1.0, "parsec")}}, "unit: found 'parsec'"),
        ({"figures": {"a": figure(1.0, "us", [math.inf])}}, "samples"),
        ({"figures": {"a": {"value": True, "unit": "us", "samples": None}}}, "finite number"),
        ({"figures": {"a": {"value": 10**400, "unit": "us", "samples": None}}}, "finite number"),
        ({"parity": {"verdict": "fine"}}, "parity: expected"),
        ({"parity": {"verdict": "none"}}, "needs `why`"),
        ({"more": 1}, "keys: found"),
    ],
)
def test_another_form_is_refused_and_not_written(tmp_path, changed, message):
    bad = made(**changed)
    assert any(message in p for p in problems(bad))
    with pytest.raises(ResultError, match="not a k3-bench-1 result"):
        write(str(tmp_path / "r.json"), bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("versions", "none"), ("device", None), ("clocks", 3), ("seed", 0.5), ("seed", True),
        ("shapes", []), ("acceptance", 2), ("backend", ["auto"]), ("excluded", None),
        ("noisy", "no"), ("noisy", [1]), ("code", 7),
    ],
)  # fmt: skip
def test_conditions_have_types(name, found):
    bad = made(conditions=made()["conditions"] | {name: found})
    assert [p for p in problems(bad) if f"conditions['{name}']: found {found!r}" in p]


def test_all_problems_are_listed_at_once():
    assert len(problems(made(schema="x", command=1, parity={}))) == 3


def test_unreadable_files_are_one_clear_error(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path in (broken, tmp_path / "absent.json"):
        with pytest.raises(ResultError, match="not readable as a result"):
            read(path)


def test_noise_is_a_difference_of_halves():
    assert not is_noisy([100.0, 101.0, 102.0, 103.0])
    assert is_noisy([100.0, 100.0, 104.0, 104.0])
    assert is_noisy([100.0, 101.0, 104.0])  # of three the range counts
    assert not is_noisy([100.0, 101.0, 102.0])
    assert is_noisy([100.0])  # nothing can be said
    assert not is_noisy([0.0, 0.0])
    assert is_noisy([0.0, 0.0, 1.0])


def test_how_drafts_were_judged_is_said_of_any_result_that_can_be_read():
    forced = {"label": "synthetic acceptance", "acceptance_length": 6, "drafts": 7}
    assert acceptance_words(forced) == "synthetic acceptance of length 6, 7 draft(s)"
    assert acceptance_words({"rule": "block", "drafts": 7}).startswith("real acceptance (block)")
    for other in ({}, {"drafts": 7}, {"label": "forced", "drafts": 7}):
        assert acceptance_words(other) == str(other)
    assert acceptance_words("none") == ""


def test_no_headline_without_parity():
    assert "us_per_layer.rows1  55.5 us" in headline(made(), ["us_per_layer.rows1"])[0]
    for verdict in ("failed", "none"):
        lines = headline(made(parity={"verdict": verdict, "why": "x"}), ["us_per_layer.rows1"])
        assert len(lines) == 1
        assert "55.5" not in lines[0]


def test_a_noisy_headline_says_so():
    noisy = made(conditions=made()["conditions"] | {"noisy": ["us_per_layer.rows1"]})
    assert "NOISY" in headline(noisy, ["us_per_layer.rows1"])[0]
    unlisted = made(figures={"us_per_layer.rows1": figure(50.0, "us", [45.0, 55.0])})
    assert "NOISY" in headline(unlisted, ["us_per_layer.rows1"])[0]


def test_figures_survive_json():
    text = json.dumps(figure(1 / 3, "us", [1 / 3]))
    assert json.loads(text) == {"value": 0.333333, "unit": "us", "samples": [0.333333]}
