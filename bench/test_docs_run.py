"""The quick command lines of `python -m bench` in README and docs run as printed."""

import glob
import shlex

import pytest

from bench.__main__ import main
from parity.doc_commands import ROOT, fresh, make_place, quick

PROGRAM = "k3-bench |python -m bench "


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    make_place(folder, ROOT / "bench" / "results")
    return folder


@pytest.mark.parametrize(("page", "lines"), list(quick(PROGRAM)))
def test_quick_lines(page, lines, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    fresh(place)
    for line in lines:
        words = shlex.split(line.removeprefix("k3-bench").removeprefix("python -m bench"))
        expanded = [n for w in words for n in (sorted(glob.glob(w)) if "*" in w else [w])]
        try:
            status = main(expanded)
        except SystemExit as stop:
            status = stop.code
        assert not status, f"{line}\n{capsys.readouterr().err}"
