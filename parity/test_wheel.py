"""What the wheel holds: every file that a command needs outside a checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = (
    "bench/page.html.j2",
    "bench/traces/small.jsonl",
    "jax_impl/k3_config.json",
    "parity/golden/model_tiny3/golden.safetensors",
    "torch_ref/vllm_record.py",
)


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Paths in the wheel, from the build backend's own list; nothing is compressed."""
    from hatchling.builders.wheel import WheelBuilder

    return {f.distribution_path for f in WheelBuilder(str(ROOT)).recurse_included_files()}


def test_the_wheel_holds_what_commands_read(files):
    assert not set(NEEDED) - files


def test_the_wheel_holds_every_file_of_the_packages_that_git_has(files):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    packages = ("jax_impl", "pallas_kernels", "torch_ref", "parity", "bench")
    listed = subprocess.run(
        ["git", "ls-files", "-z", *packages], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    assert "jax_impl/cli.py" in tracked
    assert not tracked - files


def test_nothing_but_the_packages_is_in_it(files):
    assert {f.split("/")[0] for f in files} == {
        *("jax_impl", "pallas_kernels", "torch_ref", "parity", "bench")
    }
    assert not [f for f in files if "__pycache__" in f]


def test_the_commands_of_the_project_exist():
    assert list(PROJECT["scripts"]) == ["k3", "k3-parity", "k3-bench"]
    for place in PROJECT["scripts"].values():
        module, name = place.split(":")
        code = f"import {module} as m; assert callable(m.{name})"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_version_and_licence_are_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    for key in ("version", "license"):
        (found,) = re.findall(rf"^{key}: (.*)$", citation, re.M)
        assert found == PROJECT[key]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()
