"""Commands and options that README and docs name are those that `--help` lists. Nothing is run."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache

import pytest

from parity.test_docs import PAGES, ROOT, name_of

COMMAND = re.compile(r"(?<![\w./-])(k3|python -m (?:parity|bench)) ([a-z][a-z-]+)\b(?!:)([^`\n|]*)")
MODULE = re.compile(r"python -m ((?:parity|bench|jax_impl)(?:\.\w+)*)")


@lru_cache
def usage(program: str, command: str) -> str:
    """What `PROGRAM COMMAND --help` prints; empty where there is no such command."""
    module = "jax_impl" if program == "k3" else program.split()[-1]
    done = subprocess.run(  # a process of its own: parity does not import bench
        [sys.executable, "-m", module, command, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    # for an unknown command this is the help of all commands
    return done.stdout if done.stdout.startswith(f"usage: {program} {command} ") else ""


def unknown(text: str) -> list[str]:
    """Commands, options and modules of a page that do not exist."""
    bad = []
    for program, command, rest in COMMAND.findall(text.replace("\\\n", " ")):
        found = usage(program, command)
        if not found:
            bad.append(f"{program} {command}")
        # a name must stand alone: --draft is no option because --drafts is one
        bad += [
            f"{program} {command} {option}"
            for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest.partition(" #")[0])
            if found and not re.search(rf"(?<![\w-]){option}(?![\w-])", found)
        ]
    for module in MODULE.findall(text):
        base = ROOT / module.replace(".", "/")
        if not base.with_suffix(".py").exists() and not (base / "__main__.py").exists():
            bad.append(f"python -m {module}")
    return bad


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    assert not unknown(page.read_text())


def test_the_tutorial_names_commands_of_all_three():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    programs = {program for program, *_ in COMMAND.findall(text)}
    assert programs == {"k3", "python -m parity", "python -m bench"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("    k3 chek DIR", ["k3 chek"]),
        ("`k3 check DIR --checksum`", ["k3 check --checksum"]),
        ("k3 generate DIR \\\n  --nothing 1", ["k3 generate --nothing"]),
        ("python -m bench roofline --device H200 --tq 1", ["python -m bench roofline --tq"]),
        ("python -m bench.nothing", ["python -m bench.nothing"]),
        ("python -m parity golden DIR --report x", []),
    ],
)
def test_what_does_not_exist_is_found(text, found):
    assert unknown(text) == found
