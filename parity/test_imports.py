"""Who may import whom, and that importing a package does nothing."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("jax_impl", "pallas_kernels", "torch_ref", "parity", "bench")
ALLOWED = {
    "jax_impl": {
        *("jax", "numpy", "flax", "safetensors", "ml_dtypes", "jaxtyping", "rich", "tyro", "orbax"),
        *("pallas_kernels", "jax_impl"),
    },
    "pallas_kernels": {"jax", "numpy", "pallas_kernels"},
    "torch_ref": {"torch", "numpy", "safetensors", "torch_ref"},
    "bench": {
        *(
            "jax",
            "jaxlib",
            "numpy",
            "safetensors",
            "rich",
            "tyro",
            "matplotlib",
            "jinja2",
            "pytest",
        ),
        *("jax_impl", "pallas_kernels", "parity", "bench"),
    },
}
ALONE = ROOT / "torch_ref" / "vllm_record.py"  # copied into an environment without this project
# what bench may take from parity
SHARED = {
    *("cases", "inputs", "metrics", "mla_inputs", "tolerances"),
    *("wrong_uses", "doc_commands", "kernel_env"),
}
WITHOUT_JAX = (
    *("config", "weights", "memory", "checkpoint", "make_tiny"),
    *("processes", "watchdog"),
)
FILES = [f for package in OURS for f in sorted((ROOT / package).rglob("*.py"))]


def imports(file):
    """Absolute dotted names that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(file):
    return str(file.relative_to(ROOT))


def test_modules_are_as_small_as_the_house_rules_say():
    """CONTRIBUTING has the same numbers."""
    rules = (ROOT / "CONTRIBUTING.md").read_text()
    assert "at most 400 lines" in rules and "650" in rules and "one file, 600" in rules
    most = {ALONE: 600} | {f: 650 for f in FILES if f.parent.name == "pallas_kernels"}
    lines = {f: len(f.read_text().splitlines()) for f in FILES if not f.name.startswith("test_")}
    assert not {name_of(f): n for f, n in lines.items() if n > most.get(f, 400)}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_import_table(file):
    package = file.relative_to(ROOT).parts[0]
    for name in imports(file):
        top = name.split(".")[0]
        assert top != "bench" or package == "bench", f"{name}: only bench imports bench"
        assert top != "parity" or package in ("parity", "bench"), f"{name}: parity is for bench"
        if name.startswith("jax._src"):
            assert file == ROOT / "pallas_kernels" / "common.py", f"{name}: private JAX module"
        if file == ALONE:
            assert top in sys.stdlib_module_names | {"numpy", "safetensors", "torch", "vllm"}, name
        elif package in ALLOWED and top not in sys.stdlib_module_names:
            assert top in ALLOWED[package], f"{name}: {package} may not import {top}"
        if package == "bench" and top == "parity":
            assert name.split(".")[1] in SHARED, f"{name}: bench may take {sorted(SHARED)} only"


def test_every_import_is_declared():
    """What the packages import is a dependency or an extra, not one that something else brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for extra in extras for line in extra)]
    declared = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in wanted}
    names = {"_pytest": "pytest", "orbax": "orbax-checkpoint"}  # orbax: a namespace of several
    tops = {name.split(".")[0] for file in FILES for name in imports(file)}
    found = {names.get(t, t) for t in tops - sys.stdlib_module_names - {*OURS}}
    assert not sorted(t for t in found if t.lower().replace("_", "-") not in declared)


def run_python(code):
    """(what the program imported, what it printed)."""
    code += "\nimport sys\nsys.stderr.write('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.split("\n")), done.stdout


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_modules_that_do_without_jax(module):
    loaded, printed = run_python(f"import jax_impl.{module}")
    assert not loaded & {"jax", "jaxlib", "flax", "torch"}
    assert printed == ""


def test_importing_the_packages_does_nothing():
    loaded, printed = run_python("import " + ", ".join(OURS))
    assert printed == "" and set(OURS) <= loaded
    # nothing printed to standard error either: every line is a module's name
    assert all(line.replace(".", "").isidentifier() for line in loaded)
    assert not loaded & {"jax", "jaxlib", "flax", "torch", "numpy"}


def test_the_walk_sees_what_it_should(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("import a.b, c\ndef f():\n    from d import e\n")
    assert list(imports(file)) == ["a.b", "c", "d.e"]
