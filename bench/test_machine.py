"""What a result says about the machine: which GPU is asked, the code, the clocks."""

import subprocess
from types import SimpleNamespace

import pytest

from bench import machine
from bench.devices import find
from bench.machine import QUERY, code_version, gpu_state, with_clocks_now


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, "0"), ("", "0"), ("3", "3"), ("5,2", "5"), ("GPU-ab,1", "GPU-ab")]
)
def test_the_first_visible_gpu_is_asked(visible, asked, monkeypatch):
    commands = []

    def run(command, **kw):
        commands.append(command)
        return SimpleNamespace(stdout=", ".join(f"v{i}" for i in range(len(QUERY))), returncode=0)

    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_state()["clocks.sm"] == "v1"
    assert commands[0][-1] == f"--id={asked}"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GB300", "GB300"),
        ("NVIDIA GH200 480GB", None), ("NVIDIA GB200", None), ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None), ("cpu", None),
    ],
)  # fmt: skip
def test_no_floor_is_better_than_that_of_another_memory(kind, name):
    found = find(kind)
    assert (found and found.name) == name


def test_clocks_are_those_behind_the_timing(monkeypatch):
    monkeypatch.setattr(machine, "gpu_state", lambda: {"driver_version": "1", "clocks.sm": "1980"})
    before = {"platform": "gpu", "clocks": {"clocks.sm": "345"}, "driver": "1"}
    after = with_clocks_now(before)
    assert after["clocks"] == {"clocks.sm": "1980"}
    assert after["clocks_before"] == {"clocks.sm": "345"}
    assert with_clocks_now(before | {"platform": "cpu"})["clocks"] == "not read"


def test_the_code_is_named_by_commit_or_by_version(monkeypatch, tmp_path):
    root = tmp_path / "repository"
    (root / "bench").mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(root / "bench" / "machine.py"))
    monkeypatch.setattr(machine.metadata, "version", lambda name: "0.1.0")
    assert code_version() == "kimi-k3-jax 0.1.0"
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    (root / "file").write_text("a")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    clean = code_version()
    assert len(clean) == len("commit ") + 12
    (root / "file").write_text("b")
    assert code_version() == clean + "+"
