"""Every command line of README and docs runs, on a stand-in where `parity.doc_commands` says so."""

from __future__ import annotations

import glob
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_impl import cli
from parity import __main__ as parity_command
from parity import doc_commands as docs
from parity.doc_commands import ROOT, STAND_INS, fresh, make_place, not_run, pages, quick, stand_in

MAINS = {"k3": cli.main, "k3-parity": parity_command.main, "python -m parity": parity_command.main}
PAGES = pages()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    make_place(folder, ROOT / "bench" / "results")
    return folder


def test_every_line_is_run_or_listed_with_its_reason():
    lines = [line for found in PAGES.values() for line in found]
    assert len(lines) > 80
    ours = re.compile(rf"{docs.PROGRAM}\b|kill ")
    unknown = [x for x in lines if not not_run(x) and not ours.match(stand_in(x))]
    assert not unknown
    run = [stand_in(line) for line in lines if not not_run(line)]
    left = [s for s in run if re.search(r"\b(CKPT|DIR|/data|/fast|gpunode)", s)]
    assert not left


def test_no_substitution_is_without_use_and_reason():
    lines = {line for found in PAGES.values() for line in found}
    for what, instead, why in STAND_INS:
        changed = {re.sub(what, instead, line) for line in lines}
        assert changed != lines and why, what
        lines = changed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```sh\nk3 check A \\\n  --json x   # why\n\n# no\n```", ["k3 check A --json x"]),
        ("```sh\ncat > f <<'EOF'\nk3 no\nEOF\nssh h\n```", ["cat > f", "ssh h"]),
        ("say `k3 convert` or `k3 convert A B`", ["k3 convert A B"]),
        ("`python -m bench.x`\n\n    k3-bench ops a", ["k3-bench ops a", "python -m bench.x"]),
        ("```\nk3 watchdog: x\n```\n```python\nk3 no\n```", []),
    ],
)  # fmt: skip
def test_lines_are_found(text, found):
    assert sorted(docs.command_lines(text)) == sorted(found)


def words(line: str) -> list[str]:
    """Arguments, with files for patterns."""
    found = []
    for word in shlex.split(line):
        found += sorted(glob.glob(word)) if "*" in word else [word]
    return found


@pytest.mark.parametrize(("page", "lines"), list(quick(r"k3( |-parity)|python -m parity")))
def test_quick_lines(page, lines, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    fresh(place)
    for line in lines:
        program = next(p for p in MAINS if line.startswith(f"{p} "))
        try:
            status = MAINS[program](words(line.removeprefix(program)))
        except SystemExit as stop:
            status = stop.code
        assert not status, f"{line}\n{capsys.readouterr().err}"


# ---- all of a page, as a user would, one line after the other ----


class Shell:
    """Runs lines in a folder; a line that ends with `&` runs until `kill`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.behind = folder, []
        flags = "--xla_force_host_platform_device_count=2"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}

    def command(self, line: str) -> list[str]:
        for script, module in (("k3-parity", "parity"), ("k3-bench", "bench"), ("k3", "jax_impl")):
            line = re.sub(rf"^{script}(?= )", f"python -m {module}", line)
        os.chdir(self.folder)
        return [sys.executable, *words(line.replace("PORT", str(self.port)))[1:]]

    def run(self, line: str) -> str | None:
        """What went wrong."""
        if line.startswith("kill"):
            return self.kill()
        command = self.command(line.removesuffix("&"))
        if line.endswith("&"):
            self.behind.append(subprocess.Popen(command, env=self.env, stderr=subprocess.DEVNULL))
            return self.wait()
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        return None if done.returncode == 0 else f"{line}\n{done.stdout}\n{done.stderr}"

    def wait(self) -> str | None:
        """Until the server answers, or has ended."""
        while self.behind[-1].poll() is None:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", self.port)) == 0:
                    return None
            time.sleep(0.1)
        return "the server ended"

    def kill(self) -> None:
        """End what runs behind."""
        for process in self.behind:
            process.terminate()
            process.wait()
        self.behind.clear()


@pytest.mark.slow
@pytest.mark.timeout(7200)  # thirty programs, each of which compiles
@pytest.mark.parametrize("page", PAGES)
def test_all_lines_of_a_page(page, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path, ROOT / "bench" / "results")
    shell = Shell(tmp_path)
    made = [stand_in(line) for line in PAGES[page] if not not_run(line)]
    try:
        if any("PORT" in m for m in made) and not any(m.endswith("&") for m in made):
            # counts that a server tells are compared with its drafter, or reported as not run
            drafts = any("--draft" in m for m in made if "PORT" in m)
            draft = "--draft tiny/draft " if drafts else ""
            shell.run(f"python -m parity.served tiny/target {draft}--port PORT &")
        wrong = [bad for m in made if (bad := shell.run(m))]
    finally:
        shell.kill()
    assert not wrong, "\n\n".join(wrong)
