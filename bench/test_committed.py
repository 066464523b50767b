"""Committed results: all have the form that they claim, headlines are not noisy, and the tables of
docs/kernels.md hold their numbers.
"""

import json
from pathlib import Path

import pytest

from bench.rank_slice_report import headline_names
from bench.result import SCHEMA, halves_differ, is_noisy, noisy_names, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
KERNELS = (ROOT / "docs" / "kernels.md").read_text()
CLAIMING = [
    p for p in sorted(RESULTS.glob("*.json")) if json.loads(p.read_text())["schema"] == SCHEMA
]
SLICES = [p for p in CLAIMING if p.name.startswith("rank_slice")]
CASES = ("rows1", "rows8", "rows64", "verify8")


def table(first_cell: str) -> dict[str, list[str]]:
    """Rows of the table in docs/kernels.md whose head begins so: first cell -> the others."""
    lines = KERNELS.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    found = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split("|"))
        found[first] = others
    return found


def figures(name: str) -> dict[str, float]:
    return {k: f["value"] for k, f in read(RESULTS / name)["figures"].items()}


def row(rows: dict[str, list[str]], start: str) -> list[str]:
    return next(cells for first, cells in rows.items() if first.startswith(start))


def test_there_are_results_of_every_kind():
    names = [p.name for p in CLAIMING]
    assert len(SLICES) == 4
    assert {n.split("_")[0] for n in names} == {"layers", "ops", "rank", "startup"}


@pytest.mark.parametrize("path", CLAIMING, ids=lambda p: p.name)
def test_what_claims_the_schema_has_it_and_passed(path):
    assert read(path)["parity"]["verdict"] == "passed"


@pytest.mark.parametrize("path", CLAIMING, ids=lambda p: p.name)
def test_what_is_noisy_is_listed(path):
    result = read(path)
    assert result["conditions"]["noisy"] == noisy_names(result["figures"])


@pytest.mark.parametrize("path", SLICES, ids=lambda p: p.name)
def test_headlines_are_not_noisy(path):
    result = read(path)
    names = headline_names(result)
    assert names
    for name in names:
        samples = result["figures"][name]["samples"]
        assert not is_noisy(samples), f"{name}: halves differ by {halves_differ(samples):.3f}"
        assert name not in result["conditions"]["noisy"]


@pytest.mark.parametrize("backend", ["latency_specialized", "auto"])
def test_tables_of_layers_hold_the_files_numbers(backend):
    short = "specialized" if backend == "latency_specialized" else "auto"
    found, rows = figures(f"rank_slice_{short}_h200.json"), table(f"`{backend}`")
    for label, name, digits in (
        ("us per layer with experts", "us_per_layer", 1),
        ("floor, us", "floor_us_per_layer", 1),
        ("distinct experts", "distinct_experts", 1),
    ):
        want = [f"{found[f'{name}.{case}']:.{digits}f}" for case in CASES]
        assert row(rows, label) == want


def test_ratios_are_those_of_the_files():
    fast, slow = (figures(f"rank_slice_{n}_h200.json") for n in ("specialized", "auto"))
    name = "us_per_layer."
    want = [f"{slow[name + case] / fast[name + case]:.1f}" for case in CASES]
    assert row(table("`auto`"), "`latency_specialized` is faster by") == want


def test_whole_steps_are_those_of_the_files():
    rows = table("whole step, 1 row")
    for label, file in (
        ("`latency_specialized`, layers 2..85 as one loop", "specialized_93"),
        ("`auto`", "auto_93"),
    ):
        result = read(RESULTS / f"rank_slice_{file}_h200.json")
        found = {k: f["value"] for k, f in result["figures"].items()}
        each = found.get("ms_per_step_dispatched.rows1")
        compiled = result["conditions"]["seconds"]["compilation"]
        assert row(rows, label) == [
            f"{found['ms_per_step.rows1']:.2f}",
            "not measured" if each is None else f"{each:.2f}",
            f"{compiled:.0f}",
        ]


def test_tables_of_startup_hold_the_files_numbers():
    found = {k.removesuffix(".moe92.rows1"): v for k, v in figures("startup_h200.json").items()}
    rows = table("whole step, host")
    for label, part in (("trace", "trace_s"), ("lower", "lower_s"), ("compile", "compile_s"),
                        ("together", "total_s")):  # fmt: skip
        assert row(rows, label) == [f"{found[f'{part}.{s}']:.1f}" for s in ("cold", "cached")]
    rows = table("a call of the step in place")
    for label, *names in (
        ("call, median", "dispatch_us"), ("call, tenth", "dispatch_p10_us", "dispatch_p90_us"),
        ("what goes before it", "handover_us"), ("step", "step_us"),
    ):  # fmt: skip
        want = [[f"{found[f'{n}.{way}']:.0f}" for n in names] for way in ("chained", "alone")]
        assert row(rows, label) == [", ".join(each) for each in want]


@pytest.mark.parametrize("rows", [1, 8])
def test_busy_times_are_those_of_the_files(rows):
    found = figures(f"layers_rows{rows}_h200.json")
    cells = row(table("`latency_specialized`, profiler"), f"{rows} row")
    want = [
        f"{found[f'latency_specialized.{kind}.layer.{name}']:.{digits}f}"
        for kind in ("kda", "mla")
        for name, digits in (("busy_us", 1), ("activities", 0))
    ]
    assert cells == want
    noisy = read(RESULTS / f"layers_rows{rows}_h200.json")["conditions"]["noisy"]
    assert not [n for n in noisy if n.endswith(".layer.busy_us")]


def test_the_table_of_kernels_holds_the_files_numbers():
    found, rows = figures("ops_h200.json"), table("case")
    parity = {c["what"]: c for c in read(RESULTS / "ops_h200.json")["parity"]["comparisons"]}
    assert set(rows) == set(parity)
    for name, cells in rows.items():
        of = {n: found[f"{name}.{n}"] for n in ("kernel_us", "floor_us", "gb_s", "other_us")}
        worst = max(parity[name]["rel_l2_before"], parity[name]["rel_l2_after"])
        assert cells == [
            f"{of['kernel_us']:.1f}", f"{of['floor_us']:.1f}", f"{of['gb_s']:.0f}",
            f"{of['other_us']:.1f}", f"{worst:.1e}", f"{parity[name]['rel_l2_standard']:.1e}",
        ]  # fmt: skip
