"""Sphinx configuration; `make docs` builds with warnings as errors."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "kimi-k3-jax"
author = "the kimi-k3-jax contributors"
project_copyright = author
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Kimi K3 decode step in JAX {release}"
myst_heading_anchors = 3  # `page.md#heading`, as GitHub makes them

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")
INLINE_SECTION = re.compile(r"(Args|Raises|Returns|Yields|Example): ")


def escaped(line: str) -> str:
    """Single backticks become code; elsewhere the signs that RST would interpret stay signs."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(
        f"`{part}`" if i % 2 else re.sub(r"([*|]|(?<=\w)_(?!\w)|`)", r"\\\1", part)
        for i, part in enumerate(parts)
    )


def to_restructured(lines: list[str]) -> list[str]:
    """Docstrings here are plain text: indented blocks are literal, backticks are code."""
    out: list[str] = []
    section = literal = False
    for line in lines:
        indented, before = line.startswith("    "), out[-1] if out else ""
        if line and not indented:
            section, literal = bool(SECTION.match(line)), False
            if INLINE_SECTION.match(line) and before:
                out.append("")
        elif indented and not section and not literal and not before:
            out += ["::", ""]
            literal = True
        out.append(line if literal else escaped(line))
    return out


def process(app, what, name, obj, options, lines) -> None:
    """Handler of autodoc-process-docstring; changes `lines` in place."""
    lines[:] = to_restructured(lines)


def setup(app) -> None:
    """Rewrite docstrings before napoleon reads them."""
    app.connect("autodoc-process-docstring", process, priority=100)
