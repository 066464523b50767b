"""`python -m bench plot`: pictures of results, and a page that holds them with their conditions.

A figure is drawn only with parity passed in its own run; what is left out is listed on the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.published import PUBLISHED

ROWS = re.compile(r"us_per_layer\.rows(\d+)$")
STEP = re.compile(r"ms_per_step\.rows(\d+)$")
BAR = re.compile(r"(.+)\.kernel_us$")
MOST_BARS = 40


@dataclass(frozen=True)
class Named:
    """A result with the name it is drawn under."""

    name: str
    result: dict[str, Any]

    @property
    def label(self) -> str:
        """Name, backend and device."""
        c = self.result["conditions"]
        noisy = ", noisy" if c.get("noisy") else ""
        return f"{self.name} ({c['backend']}, {c['device']}{noisy})"

    def value(self, name: str) -> float | None:
        """Of a figure; None if the result has none of this name."""
        found = self.result["figures"].get(name)
        return None if found is None else found["value"]


def _curve(named: Named, pattern: re.Pattern[str]) -> list[tuple[int, float]]:
    found = [(pattern.match(n), f) for n, f in named.result["figures"].items()]
    return sorted((int(m[1]), f["value"]) for m, f in found if m)


def draw_rows(axes: Any, results: list[Named]) -> bool:
    """Time of a layer against rows, with the floor."""
    drawn, floors = False, set()
    for named in results:
        points = _curve(named, ROWS)
        if not points:
            continue
        drawn = True
        axes.plot(*zip(*points, strict=True), marker="o", label=named.label)
        floor = [(n, named.value(f"floor_us_per_layer.rows{n}")) for n, _ in points]
        known = tuple((n, v) for n, v in floor if v is not None)
        if known and known not in floors:
            floors.add(known)
            style = {"linestyle": "--", "color": "gray", "label": f"floor, {named.name}"}
            axes.plot(*zip(*known, strict=True), **style)
    axes.set(xlabel="rows", ylabel="us per layer", title="One rank, compute only: time of a layer")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    return drawn


def draw_steps(axes: Any, results: list[Named]) -> bool:
    """Time of a whole step against rows, with what others published for 16 GPUs."""
    drawn = False
    for named in results:
        points = _curve(named, STEP)
        if points:
            drawn = True
            label = f"{named.label}, one rank, compute only"
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    rows = [(int(p.what.split()[-1]), p) for p in PUBLISHED if p.what.startswith("step, batch")]
    for column in ("specialised", "stock"):
        points = [(n, getattr(p, column)) for n, p in rows]
        label = f"published elsewhere, 16 GB300, {column}, exchanges included"
        axes.plot(*zip(*points, strict=True), linestyle=":", marker="x", label=label)
    axes.set(xlabel="rows", ylabel="ms per step", title="Step time against rows")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    return drawn


def draw_throughput(axes: Any, results: list[Named]) -> bool:
    """Total decode rate against the rate that 90 % of the users reach."""
    drawn = False
    for named in results:
        backends = named.result["conditions"]["backend"].split(",")
        for prefix in [""] if len(backends) == 1 else [f"{b}." for b in backends]:
            x = named.value(f"{prefix}user_tokens_s.p90")
            y = named.value(f"{prefix}decode_tokens_s")
            if x is not None and y is not None:
                drawn = True
                axes.plot([x], [y], marker="o", linestyle="", label=f"{prefix}{named.label}")
    title = "Throughput against interactivity (decode, prefill excluded)"
    axes.set(xlabel="tokens/s/user, reached by 90 %", ylabel="tokens/s in all", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return drawn


def draw_kernels(axes: Any, results: list[Named]) -> bool:
    """Bars of kernel times with their floors."""
    bars = []
    for named in results:
        for name, found in named.result["figures"].items():
            match = BAR.match(name)
            if match:
                floor = named.value(f"{match[1]}.floor_us")
                bars.append((match[1], found["value"], floor or 0.0))
    bars = bars[:MOST_BARS]
    if not bars:
        return False
    names, times, floors = zip(*bars, strict=True)
    places = range(len(bars))
    axes.barh(places, times, label="measured")
    axes.barh(places, floors, height=0.4, color="gray", label="floor")
    axes.set_yticks(list(places), names, fontsize=6)
    axes.invert_yaxis()
    axes.set(xlabel="us, device time", title="Kernels")
    return True


PICTURES: dict[str, Callable[[Any, list[Named]], bool]] = {
    "layer_against_rows": draw_rows,
    "step_against_rows": draw_steps,
    "throughput_against_interactivity": draw_throughput,
    "kernels": draw_kernels,
}


def plot(results: list[Named], folder: Path) -> list[str]:
    """Draw everything that the results have figures for; names of the files, the page last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    passed = [n for n in results if n.result["parity"]["verdict"] == "passed"]
    files = []
    for name, draw in PICTURES.items():
        picture = Figure(figsize=(8, 5), layout="constrained")
        axes = picture.subplots()
        if not draw(axes, passed):
            continue
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        FigureCanvasAgg(picture)
        target = folder / f"{name}.png"
        partial = folder / f".{name}.partial.png"
        picture.savefig(partial, dpi=120)
        partial.replace(target)
        files.append(target.name)
    return [*files, write_page(results, files, folder)]


def write_page(results: list[Named], pictures: list[str], folder: Path) -> str:
    """The page with pictures, figures and conditions; returns its name."""
    import jinja2

    from jax_impl.output import write_text

    source = (Path(__file__).parent / "page.html.j2").read_text()
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = template.from_string(source).render(
        results=results, pictures=pictures, published=PUBLISHED
    )
    write_text(folder / "index.html", page)
    return "index.html"
