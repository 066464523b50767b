"""Links, anchors, included files and named paths of README and docs exist. No network."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [
    *TOP,
    ROOT / "parity" / "golden" / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts),
]
FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.S | re.M)
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
INCLUDE = re.compile(r"^```\{include\} (\S+)", re.M)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.S | re.M)
# a path in code style that starts in one of our folders: `docs/bench.md`, `parity/golden`
NAMED = re.compile(
    r"`((?:docs|jax_impl|pallas_kernels|torch_ref|parity|bench|constraints)/[\w./*-]*)`"
)
MADE = ("build/", "docs/_build")  # what commands write


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """Anchors of all headings, made as GitHub makes them; those of included files too."""
    found: dict[str, int] = {}
    out = set()
    for heading in re.findall(r"^#{1,6} (.+?)\s*$", FENCE.sub("", text), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        out.add(f"{slug}-{count}" if count else slug)
    return out


def contents(page: Path) -> str:
    """The page's text with what it includes."""
    text = page.read_text()
    return text + "".join(
        "\n" + (page.parent / name).read_text()
        for name in INCLUDE.findall(text)
        if (page.parent / name).is_file()
    )


def broken(page: Path) -> list[str]:
    """Every link, include, table of contents entry and named path of a page that leads nowhere."""
    text = page.read_text()
    bad = [f"include {name}" for name in INCLUDE.findall(text) if not _there(page, name)]
    for block in TOCTREE.findall(text):
        entries = [e for e in block.split("\n") if e.strip() and not e.startswith(":")]
        bad += [f"toctree {e}" for e in entries if not _there(page, f"{e.strip()}.md")]
    prose = FENCE.sub("", text)
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page if not name else page.parent / name
        if not file.exists():
            bad.append(target)
        elif anchor and anchor not in anchors(contents(file)):
            bad.append(f"{target}: no such heading")
    for name in NAMED.findall(prose):
        if not name.startswith(MADE) and not any(_matches(name)):
            bad.append(f"`{name}`")
    return bad


def _there(page: Path, name: str) -> bool:
    return (page.parent / name).is_file()


def _matches(name: str) -> list[Path]:
    return list(ROOT.glob(name.rstrip("/")))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert not broken(page)


def test_every_page_is_in_the_table_of_contents():
    index = ROOT / "docs" / "index.md"
    listed = set(" ".join(TOCTREE.findall(index.read_text())).split())
    pages = {p.relative_to(index.parent).with_suffix("").as_posix() for p in PAGES[len(TOP) + 1 :]}
    assert pages - {"index"} <= listed


def test_reference_names_modules_that_exist():
    text = "".join(p.read_text() for p in (ROOT / "docs" / "reference").glob("*.md"))
    modules = re.findall(r"automodule:: (\S+)", text)
    assert len(modules) == len(set(modules)) > 50
    for module in modules:
        base = ROOT / module.replace(".", "/")
        assert base.with_suffix(".py").exists() or (base / "__init__.py").exists(), module


def test_the_table_of_stages_is_complete():
    """Against the fields of `Backend`, read without importing JAX."""
    tree = ast.parse((ROOT / "jax_impl" / "backend.py").read_text())
    (backend,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Backend")
    stages = {n.target.id for n in backend.body if isinstance(n, ast.AnnAssign)}
    page = (ROOT / "docs" / "explain_stages.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.M)
    apart = {"kda_step", "draft_context", "draft_block", "draft_markov"}  # named in the text
    assert len(rows) == 12 and set(rows) == stages - apart - {"whole_stacks"}
    assert all(f"`{name}`" in page for name in apart)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](missing.md)", ["missing.md"]),
        ("# Head\n[a](#nowhere) [b](#head)", ["#nowhere: no such heading"]),
        ("[a](b.md#one-two) [a](b.md#two)", ["b.md#two: no such heading"]),
        ("`parity/nothing.py` and `parity/cases.py`", ["`parity/nothing.py`"]),
        ("```{include} c.md\n```", ["include c.md"]),
        ("```{toctree}\n:maxdepth: 1\n\nb\nd\n```", ["toctree d"]),
        ("[a](https://example.org/x)\n```\n[a](missing.md)\n```", []),
    ],
)
def test_what_is_broken_is_found(tmp_path, text, found):
    (tmp_path / "b.md").write_text("# One, two!\n")
    (tmp_path / "a.md").write_text(text)
    assert broken(tmp_path / "a.md") == found


def test_anchors_are_those_of_github():
    text = "# A `b_c` d\n## A b\n```sh\n# no heading\n```\n## A b\n"
    assert anchors(text) == {"a-b_c-d", "a-b", "a-b-1"}
