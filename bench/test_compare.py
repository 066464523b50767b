"""Results side by side and as pictures."""

from types import SimpleNamespace

import pytest

from bench.__main__ import main
from bench.compare import acceptances, compare, differing, verdicts
from bench.plots import (
    Named,
    draw_kernels,
    draw_published,
    draw_rows,
    draw_steps,
    draw_throughput,
    plot,
)
from bench.result import CONDITIONS, figure, write


def made(scale=1.0, verdict="passed", **conditions):
    curve = {f"us_per_layer.rows{n}": figure(scale * v, "us", [scale * v] * 4)
             for n, v in ((1, 50.0), (8, 100.0), (64, 300.0))}  # fmt: skip
    floors = {f"floor_us_per_layer.rows{n}": figure(v, "us") for n, v in ((1, 22.0), (8, 48.0))}
    decode = {
        "user_tokens_s.p90": figure(60.0, "tokens/s"),
        "decode_tokens_s": figure(480.0, "tokens/s"),
    }
    kernels = {
        "experts.rows1.kernel_us": figure(16.0, "us"),
        "experts.rows1.floor_us": figure(4.0, "us"),
    }
    steps = {"ms_per_step.rows1": figure(9.0, "ms")}
    return {
        "schema": "k3-bench-1",
        "command": "python -m bench rank-slice",
        "conditions": dict.fromkeys(CONDITIONS, "none")
        | {"versions": {}, "noisy": []}
        | conditions,
        "figures": curve | floors | decode | kernels | steps,
        "parity": {"verdict": verdict, "why": "x"},
    }


def test_ratios_of_common_figures():
    rows = {r[0]: r for r in compare(made(), made(0.5))}
    assert rows["us_per_layer.rows8"][3] == "0.500"
    assert rows["floor_us_per_layer.rows1"][3] == "1.000"
    assert [r[0] for r in compare(made(), made(), "rows64")] == ["us_per_layer.rows64"]


def test_noise_and_agreement_are_remarked():
    noisy = made()
    noisy["figures"]["us_per_layer.rows8"]["samples"] = [90.0, 90.0, 110.0, 110.0]
    assert {r[0]: r[4] for r in compare(made(), noisy)}["us_per_layer.rows8"] == "noisy: B"
    listed = made(noisy=["us_per_layer.rows64"])
    assert {r[0]: r[4] for r in compare(listed, made())}["us_per_layer.rows64"] == "noisy: A"
    counted = [made(), made()]
    for one in counted:
        one["figures"]["distinct_experts.rows8"] = figure(115.0, "count", [100.0, 130.0])
    assert "noisy" not in {r[0]: r[4] for r in compare(*counted)}["distinct_experts.rows8"]
    wide = made()
    wide["figures"]["us_per_layer.rows8"] = figure(101.0, "us", [100.0, 100.0, 102.0, 102.0])
    assert "within" in {r[0]: r[4] for r in compare(made(), wide)}["us_per_layer.rows8"]


def test_differing_conditions_are_listed_and_passing_ones_are_not():
    a = made(
        shapes={"tp": 16, "rows": [1]}, clocks={"clocks.sm": "1980 MHz", "power.draw": "355 W"},
        routing={"rows8": "full spread: 124 experts"}, seconds={"timing": 3.0}, code="commit a",
    )["conditions"]  # fmt: skip
    b = made(
        shapes={"tp": 8, "rows": [1]}, clocks={"clocks.sm": "1200 MHz", "power.draw": "127 W"},
        routing={"rows8": "NOT full spread: 80 experts"}, seconds={"timing": 4.0}, code="commit b",
    )["conditions"]  # fmt: skip
    assert list(differing(a, b)) == [
        ("clocks.clocks.sm", "1980 MHz", "1200 MHz"),
        ("shapes.tp", "16", "8"),
        ("routing.rows8", "full spread: 124 experts", "NOT full spread: 80 experts"),
        ("code", "commit a", "commit b"),
    ]


def test_no_headline_without_both_verdicts():
    assert "no headline" not in verdicts(made(), made())
    assert "no headline" in verdicts(made(), made(verdict="failed"))


FORCED = {"label": "synthetic acceptance", "acceptance_length": 6.0, "drafts": 7}


def test_forced_acceptance_is_said_beside_a_comparison_and_in_pictures(tmp_path, capsys):
    assert acceptances(made(), made()) == ""
    said = "synthetic acceptance of length 6, 7 draft(s)"
    assert acceptances(made(), made(acceptance=FORCED)) == f"A: no drafts; B: {said}"
    names = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for name in names:
        write(name, made(acceptance=FORCED))
    assert main(["compare", *names]) == 0
    assert f"A: {said}; B: {said}" in capsys.readouterr().out
    axes = Axes()
    assert draw_throughput(axes, [Named("x", made(acceptance=FORCED))])
    assert list(axes.lines) == [f"x (none, none), {said}"]
    verified = released("v")
    verified.result["conditions"]["acceptance"] = FORCED
    assert draw_rows(axes, [verified])
    assert f"verification, v, {said}" in axes.lines  # and not the curve, which has no drafts
    assert "v (none, NVIDIA H200)" in axes.lines


def test_results_without_a_common_figure_are_refused(tmp_path, capsys):
    name = str(tmp_path / "a.json")
    write(name, made())
    assert main(["compare", name, name, "--match", "nothing"]) == 2
    assert "no figure with 'nothing' in its name" in capsys.readouterr().err


def test_the_command_prints_and_refuses(tmp_path, capsys):
    for name, scale in (("a", 1.0), ("b", 2.0)):
        write(str(tmp_path / f"{name}.json"), made(scale))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "2.000" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "absent.json")]) == 2
    assert "not readable as a result" in capsys.readouterr().err


def test_pictures_and_page(tmp_path):
    files = plot([Named("first", made()), Named("<b>", made(0.8))], tmp_path)
    assert files == [
        "layer_against_rows.png", "step_against_rows.png", "throughput_against_interactivity.png",
        "kernels.png", "index.html",
    ]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(files)
    page = (tmp_path / "index.html").read_text()
    assert "&lt;b&gt;" in page
    assert "not reproduced here" in page
    assert "us_per_layer.rows64" in page


class Axes:
    """Remembers what is drawn."""

    def __init__(self):
        self.lines, self.title = {}, ""

    def plot(self, x, y, *, label, color="C0", **_):
        self.lines[label] = (list(x), list(y), color)
        return [SimpleNamespace(get_color=lambda: color)]

    def set(self, **names):
        self.title = names.get("title", self.title)

    def set_xscale(self, *args, **kw):
        """Takes anything."""

    set_yscale = set_xlim = set_ylim = invert_yaxis = set_xscale

    def barh(self, places, values, *, label, **_):
        self.bars = len(values)

    def set_yticks(self, places, names, **_):
        self.names = list(names)


def released(name, distinct=16.0):
    shapes = {"preset": "k3", "tp": 16, "context": 1024, "kv_dtype": "float8_e4m3fn"}
    result = made(shapes=shapes, device="NVIDIA H200")
    result["figures"] |= {
        "ms_per_step.verify8": figure(11.0, "ms"), "us_per_layer.verify8": figure(120.0, "us"),
        "distinct_experts.rows1": figure(distinct, "count"),
    }  # fmt: skip
    return Named(name, result)


def test_steps_stand_beside_their_floor_and_apart_from_published_ones():
    axes, beside = Axes(), Axes()
    assert draw_steps(axes, [released("a"), released("b", 15.0)])
    x, (ms,), first = axes.lines["floor of the step, a"]
    assert x == [1]
    # 92 layers of 21.8 us, the dense one, and the head
    assert 0.0218 * 92 < ms < 2.2
    _, (fewer,), second = axes.lines["floor of the step, b"]
    assert fewer < ms
    assert first != second
    assert axes.lines["verification, a"][:2] == ([8], [11.0])
    assert not [label for label in axes.lines if "ublished" in label]
    assert "COMPUTE ONLY" in axes.title
    assert draw_published(beside, [])
    assert "PUBLISHED ELSEWHERE" in beside.title
    assert beside.lines["specialised"][1][0] == 3.9


def test_layers_show_verifications_and_floors_in_other_colours():
    axes, other = Axes(), made()
    other["figures"]["floor_us_per_layer.rows8"] = figure(47.0, "us")
    noisy = made()
    noisy["figures"]["us_per_layer.rows8"]["samples"] = [90.0, 90.0, 110.0, 110.0]
    assert draw_rows(axes, [released("a"), Named("b", other), Named("c", noisy)])
    assert axes.lines["verification, a"][:2] == ([8], [120.0])
    assert axes.lines["floor, a"][2] != axes.lines["floor, b"][2]
    assert "floor, c" not in axes.lines  # that of a
    assert [label for label in axes.lines if "NOISY" in label] == ["c (none, none), NOISY"]


def test_bars_name_their_result_noise_and_what_is_left_out():
    noisy, many = made(), made()
    noisy["figures"]["experts.rows1.kernel_us"]["samples"] = [16.0, 16.0, 20.0, 20.0]
    axes = Axes()
    assert draw_kernels(axes, [Named("a", made()), Named("b", noisy)])
    assert axes.names == ["a: experts.rows1", "b: experts.rows1, NOISY"]
    assert axes.title == "Kernels"
    for i in range(49):
        many["figures"][f"x{i}.kernel_us"] = figure(1.0, "us")
    assert draw_kernels(axes, [Named("a", many)])
    assert axes.names[0] == "experts.rows1" and axes.bars == 40
    assert axes.title == "Kernels, the first 40 of 50"


def test_what_did_not_pass_is_not_drawn(tmp_path):
    assert plot([Named("bad", made(verdict="failed"))], tmp_path) == ["index.html"]
    assert "not drawn" in (tmp_path / "index.html").read_text()


def test_files_of_one_name_are_told_apart(tmp_path):
    files = [str(tmp_path / folder / "slice.json") for folder in ("before", "after")]
    for file in files:
        write(file, made())
    assert main(["plot", *files, "--report", str(tmp_path / "plots")]) == 0
    page = (tmp_path / "plots" / "index.html").read_text()
    assert "before/slice (" in page and "after/slice (" in page


@pytest.mark.parametrize("command", [["plot"], ["compare"]])
def test_missing_files_are_refused(command):
    with pytest.raises(SystemExit):
        main(command)
