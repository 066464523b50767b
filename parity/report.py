"""Verdicts as a table, as JSON and as one HTML file that needs nothing beside it."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from jax_impl.output import Output, write_json, write_text
from parity.verdict import Verdict

SCHEMA = 1
_STYLE = {
    "passed": "green",
    "failed": "bold red",
    "not run": "bold yellow",
    "not recorded": "cyan",
}
_FINE = ("passed", "not recorded")


def summary(verdicts: list[Verdict]) -> dict[str, int]:
    """How many verdicts have which status."""
    return {s: sum(v.status == s for v in verdicts) for s in _STYLE}


def good(verdicts: list[Verdict]) -> bool:
    """Whether something was compared and everything asked for ran and passed."""
    return any(v.passed for v in verdicts) and all(v.status in _FINE for v in verdicts)


def unfinished(verdicts: list[Verdict]) -> list[Verdict]:
    """Those that failed or did not run."""
    return [v for v in verdicts if v.status not in _FINE]


def problems(verdicts: list[Verdict]) -> str:
    """Everything that did not pass, a line each; what a test says when it fails."""
    lines = [explain(v).replace(r"\[", "[") for v in unfinished(verdicts)]
    return "\n".join(lines) if verdicts else "nothing was compared"


def document(verdicts: list[Verdict], command: list[str]) -> dict[str, Any]:
    """The JSON document: provenance, counts, then every verdict with all its metrics."""
    packages = ("jax", "jaxlib", "torch", "numpy", "safetensors", "flax")
    return _clean(
        {
            "schema": SCHEMA,
            "utc": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "command": command,
            "device": _device(),
            "software": {"python": sys.version.split()[0]} | {p: _version(p) for p in packages},
            "passed": good(verdicts),
            "counts": summary(verdicts),
            "verdicts": [v.as_dict() for v in verdicts],
        }
    )


def _device() -> str | None:
    """Where our side ran: the kind of JAX's first device."""
    jax = sys.modules.get("jax")
    return None if jax is None else jax.devices()[0].device_kind


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _clean(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: they become their names."""
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def unwritable(report: Path | None) -> list[str]:
    """What keeps `deliver` from writing a report there; found before the work, not after it."""
    from jax_impl import output

    files = [] if report is None else [report / "parity.json", report / "index.html"]
    found = [p for file in files for p in output.unwritable("--report", file)]
    return list(dict.fromkeys(found))


def deliver(
    verdicts: list[Verdict], command: list[str], output: Output, report: Path | None
) -> None:
    """Table on stdout (on stderr if stdout carries the JSON), JSON and HTML where asked for."""
    made = document(verdicts, command)
    if not output.quiet:
        print_table(verdicts, to_stderr=output.json == "-")
    if output.json is not None:
        write_json(output.json, made)
    if report is not None:
        from parity.html import render

        write_text(report / "parity.json", json.dumps(made, indent=1) + "\n")
        judged = [v for v in verdicts if v.status != "not recorded"]
        write_text(report / "index.html", render(judged, made))


def print_table(verdicts: list[Verdict], *, to_stderr: bool = False) -> None:
    """The worst verdict of each group in a line, then failures in full."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(stderr=to_stderr, width=None if sys.stdout.isatty() else 160)
    columns = (
        "folder",
        "ours",
        "run",
        "case",
        "quantity",
        "judged",
        "worst",
        "limit",
        "n",
        "status",
    )
    table = Table(*columns, title="worst verdict of each group", title_justify="left")
    for group in grouped(verdicts):
        w = worst(group)
        state = next(
            (s for s in ("failed", "not run", "passed") if any(v.status == s for v in group)),
            "not recorded",
        )
        table.add_row(
            escape(w.where.folder), w.where.ours, f"{w.where.dtype}/{w.where.profile}",
            escape(w.where.case), escape(_short(w.quantity)), w.judged, shown(w),
            number(w.limit), str(len(group)), f"[{_STYLE[state]}]{state}[/]",
        )  # fmt: skip
    console.print(table)
    for v in verdicts:
        if not v.passed:
            console.print(f"[{_STYLE[v.status]}]{v.status.upper()}[/] {explain(v)}", soft_wrap=True)
    counts = ", ".join(f"{n} {name}" for name, n in summary(verdicts).items())
    console.print(f"{counts}: {'everything asked for passed' if good(verdicts) else 'NOT good'}")


def explain(v: Verdict) -> str:
    """A verdict in one line."""
    w = v.where
    numbers = f"{v.judged} {shown(v)} (limit {number(v.limit)})" if v.judged != "-" else ""
    place = f"{w.suite} {w.folder} [{w.case}] {v.quantity}, {w.ours} {w.dtype}/{w.profile}"
    against = f" against {w.against}"
    return f"{place}{against}: {numbers}{' - ' if numbers and v.note else ''}{v.note}".replace(
        "[", r"\["
    )


def grouped(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """Verdicts that differ only in layer, in order of first appearance."""
    groups: dict[tuple, list[Verdict]] = {}
    for v in verdicts:
        w = v.where
        case = re.sub(r"[, ]+layer\d\d$", "", w.case)
        key = (w.suite, w.folder, w.ours, w.dtype, w.profile, case, _short(v.quantity), w.against)
        groups.setdefault(key, []).append(v)
    return list(groups.values())


def worst(group: list[Verdict]) -> Verdict:
    """The verdict nearest to (or furthest beyond) its limit; one that failed comes first."""

    def nearness(v: Verdict) -> tuple:
        ratio = (v.value or 0.0) / v.limit if v.limit else (v.value or 0.0)
        return (not v.passed, ratio)

    return max(group, key=nearness)


def _short(quantity: str) -> str:
    return quantity.split(".", 1)[1] if quantity.startswith("layer") else quantity


def shown(v: Verdict) -> str:
    """The judged number; NaN where non-finite values stand at other places than expected."""
    return "NaN" if v.metrics.get("pattern_equal") is False else number(v.value)


def number(value: Any) -> str:
    """Three digits, `-` for None."""
    return "-" if value is None else f"{value:.3g}"
