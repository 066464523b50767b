"""Every notebook runs from top to bottom, as a script without a display, and draws something.

A notebook is a percent script, so running the file executes every cell in order. The claims of a
notebook are asserts in its cells: a wrong one fails here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import common

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
# These run in every test run, the others are slow. `where_the_time_goes` compiles nothing, and the
# files that it reads change with every measurement.
QUICK = ("inside_one_step", "where_the_time_goes", "write_a_kernel")
INTERPRETER = ("write_a_kernel",)
# runs a script as `python FILE` does, then looks at what it has drawn
RUN = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
import matplotlib.pyplot as plt
shown = [plt.figure(n) for n in plt.get_fignums()]
empty = [f.number for f in shown if not any(a.has_data() for a in f.axes)]
assert shown and not empty, f"{len(shown)} figures, without data: {empty}"
for f in shown:
    f.canvas.draw()
print("figures:", len(shown))
"""


def marks(name: str) -> list[pytest.MarkDecorator]:
    found = [] if name in QUICK else [pytest.mark.slow]
    if name in INTERPRETER:
        wanted = ".".join(map(str, common.MINIMUM_JAX))
        found.append(
            pytest.mark.skipif(
                jax.__version_info__ < common.MINIMUM_JAX,
                reason=f"JAX {jax.__version__} found; the Mosaic GPU interpreter needs {wanted}",
            )
        )
    else:
        without = importlib.util.find_spec("torch") is None
        found.append(pytest.mark.skipif(without, reason="compares with torch, which is not here"))
    return found


@pytest.mark.parametrize(
    "notebook", [pytest.param(p, marks=marks(p.stem), id=p.stem) for p in NOTEBOOKS]
)
def test_every_cell_runs(notebook, tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    environment = os.environ | {
        "MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(notebook)],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^figures: [1-9]", done.stdout, re.M)
    assert not (set(os.listdir(tmp_path)) - {"build"}), "written outside build/"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_paired_as_percent_scripts(notebook):
    text = notebook.read_text()
    assert "#     formats: ipynb,py:percent\n" in text and text.count("# %%") > 8
    cells = re.split(r"^# %%.*$", text, flags=re.M)[1:]
    assert cells[0].lstrip("\n").startswith("# # "), "begins with a title"
    assert all(cell.strip() for cell in cells)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_is_imported_is_there(notebook):
    """In every run of the tests, as most notebooks run in the slow ones only."""
    if notebook.stem not in INTERPRETER:
        pytest.importorskip("torch")
    for node in ast.walk(ast.parse(notebook.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):  # a module of a package, or nothing
                    importlib.import_module(f"{node.module}.{name.name}")


def test_all_are_listed_where_readers_look():
    assert {p.stem for p in NOTEBOOKS} >= {*QUICK, "change_the_model", "speculation"}
    for page in (ROOT / "README.md", ROOT / "docs" / "notebooks.md"):
        named = set(re.findall(r"notebooks/(\w+)\.py", page.read_text()))
        assert named == {p.stem for p in NOTEBOOKS}, page
