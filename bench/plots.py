"""`python -m bench plot`: pictures of results, and a page that holds them with their conditions.

A figure is drawn only with parity passed in its own run; what is left out is listed on the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.devices import find
from bench.floor import Work, step_bytes
from bench.published import PUBLISHED
from bench.result import acceptance_words, all_noisy
from jax_impl.config import RELEASED_CONFIG, ModelConfig
from jax_impl.memory import MemorySettings

FLOORS = ("dimgray", "tab:brown", "darkkhaki", "black")  # of floors that differ
BAR = re.compile(r"(.+)\.kernel_us$")
MOST_BARS = 40


@dataclass(frozen=True)
class Named:
    """A result with the name it is drawn under."""

    name: str
    result: dict[str, Any]

    @property
    def place(self) -> str:
        """Name, backend and device."""
        c = self.result["conditions"]
        return f"{self.name} ({c['backend']}, {c['device']})"

    @property
    def judged(self) -> str:
        """How drafts were judged, behind a comma; empty without drafts."""
        words = acceptance_words(self.result["conditions"]["acceptance"])
        return words and f", {words}"

    @property
    def title(self) -> str:
        """Name, backend, device, and how drafts were judged."""
        return self.place + self.judged

    @property
    def noisy(self) -> set[str]:
        """Names of noisy figures."""
        return all_noisy(self.result)

    def label(self, text: str, pattern: re.Pattern[str]) -> str:
        """The text, and whether a figure that is drawn, of a matching name, is noisy."""
        noisy = any(map(pattern.match, self.noisy))
        return text + (", NOISY" if noisy else "")

    def value(self, name: str) -> float | None:
        """Of a figure; None if the result has none of this name."""
        found = self.result["figures"].get(name)
        return None if found is None else found["value"]


def _curve(named: Named, pattern: re.Pattern[str]) -> list[tuple[int, float]]:
    found = [(pattern.match(n), f) for n, f in named.result["figures"].items()]
    return sorted((int(m[1]), f["value"]) for m, f in found if m)


def _rows_axes(axes: Any, what: str) -> None:
    axes.set(xlabel="rows", ylabel=what)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


Floors = Callable[[Named, list[int]], list[tuple[int, float]]]


def _draw_curves(
    axes: Any, results: list[Named], figure: str, floor: str, floors_of: Floors, **style: Any
) -> bool:
    """A figure against rows, verifications as points of their own, and every floor once."""
    drawn, floors = False, []
    for named in results:
        points = _curve(named, re.compile(rf"{figure}\.rows(\d+)$"))
        if not points:
            continue
        drawn = True
        label = named.label(named.place, re.compile(rf"{figure}\.(rows|verify)\d+$"))
        lines = axes.plot(*zip(*points, strict=True), marker="o", label=label)
        verify = _curve(named, re.compile(rf"{figure}\.verify(\d+)$"))
        if verify:
            same = {"marker": "D", "linestyle": "", "color": lines[0].get_color()}
            axes.plot(
                *zip(*verify, strict=True),
                label=f"verification, {named.name}{named.judged}",
                **same,
            )
        known = floors_of(named, [n for n, _ in points])
        if known and known not in floors:
            color = FLOORS[len(floors) % len(FLOORS)]
            floors.append(known)
            label = f"{floor}, {named.name}"
            axes.plot(*zip(*known, strict=True), label=label, linestyle="--", color=color, **style)
    return drawn


def draw_rows(axes: Any, results: list[Named]) -> bool:
    """Time of a layer against rows."""
    axes.set(title="One rank, COMPUTE ONLY: time of a layer with experts")
    _rows_axes(axes, "us per layer")
    return _draw_curves(axes, results, "us_per_layer", "floor", layer_floors)


def draw_steps(axes: Any, results: list[Named]) -> bool:
    """Time of a whole step of one rank against rows."""
    axes.set(title="One rank, COMPUTE ONLY (exchanges looped back): whole step")
    _rows_axes(axes, "ms per step")
    label = "floor of the step"
    return _draw_curves(axes, results, "ms_per_step", label, step_floors, marker="_")


def layer_floors(named: Named, rows: list[int]) -> list[tuple[int, float]]:
    """(rows, us) of a layer's floors that the result has."""
    found = [(n, named.value(f"floor_us_per_layer.rows{n}")) for n in rows]
    return [(n, value) for n, value in found if value is not None]


def step_floors(named: Named, rows: list[int]) -> list[tuple[int, float]]:
    """(rows, ms) of the whole step's floor at a slice's shapes and its device's bandwidth.

    None without a known device, or where the slice is not of the released model.
    """
    conditions = named.result["conditions"]
    device, shapes = find(conditions["device"]), conditions["shapes"]
    if device is None or not isinstance(shapes, dict) or shapes.get("preset") != "k3":
        return []
    config = ModelConfig.load(RELEASED_CONFIG)
    settings = MemorySettings(ranks=shapes["tp"], kv_dtype=shapes["kv_dtype"])
    found = []
    for n in rows:
        distinct = named.value(f"distinct_experts.rows{n}")
        size = step_bytes(config, settings, Work(n, 1, shapes["context"], distinct))
        found.append((n, sum(size.values()) / device.read_tb_s / 1e9))
    return found


def draw_published(axes: Any, _: list[Named]) -> bool:
    """Steps that others published; a panel of their own, never on the axes of ours."""
    rows = [(int(p.what.split()[-1]), p) for p in PUBLISHED if p.what.startswith("step, batch")]
    for column in ("specialised", "stock"):
        points = [(n, getattr(p, column)) for n, p in rows]
        axes.plot(*zip(*points, strict=True), linestyle=":", marker="x", label=column)
    axes.set(title="PUBLISHED ELSEWHERE, not ours: vLLM,\n16 GB300, exchanges included")
    _rows_axes(axes, "ms per step")
    return True


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
                drawn_names = re.compile(
                    re.escape(prefix) + r"(user_tokens_s\.p90|decode_tokens_s)$"
                )
                label = f"{prefix}{named.label(named.title, drawn_names)}"
                axes.plot([x], [y], marker="o", linestyle="", label=label)
    title = "Throughput (decode, prefill excluded) against interactivity"
    axes.set(xlabel="tokens/s/user, reached by 90 %", ylabel="tokens/s in all", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return drawn


def draw_kernels(axes: Any, results: list[Named]) -> bool:
    """Bars of kernel times with their floors, of each result's own name where there are several."""
    bars, sources = [], set()
    for named in results:
        for name, found in named.result["figures"].items():
            match = BAR.match(name)
            if match:
                floor = named.value(f"{match[1]}.floor_us")
                label = match[1] + (", NOISY" if name in named.noisy else "")
                bars.append((named.name, label, found["value"], floor or 0.0))
                sources.add(named.name)
    if not bars:
        return False
    title = "Kernels" + (f", the first {MOST_BARS} of {len(bars)}" if len(bars) > MOST_BARS else "")
    bars = [
        (f"{source}: {label}" if len(sources) > 1 else label, *values)
        for source, label, *values in bars[:MOST_BARS]
    ]
    names, times, floors = zip(*bars, strict=True)
    places = range(len(bars))
    axes.barh(places, times, label="measured")
    axes.barh(places, floors, height=0.4, color="gray", label="floor")
    axes.set_yticks(list(places), names, fontsize=6)
    axes.invert_yaxis()
    axes.set(xlabel="us, device time", title=title)
    return True


PICTURES: dict[str, Callable[[Any, list[Named]], bool]] = {
    "layer_against_rows": draw_rows,
    "step_against_rows": draw_steps,
    "throughput_against_interactivity": draw_throughput,
    "kernels": draw_kernels,
}


# a panel beside the picture, with axes of its own
BESIDE: dict[str, Callable[[Any, list[Named]], bool]] = {"step_against_rows": draw_published}


def plot(results: list[Named], folder: Path) -> list[str]:
    """Draw everything that the results have figures for; names of the files, the page last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    passed = [n for n in results if n.result["parity"]["verdict"] == "passed"]
    files = []
    for name, draw in PICTURES.items():
        beside = BESIDE.get(name)
        wide = 12 if beside else 8
        picture = Figure(figsize=(wide, 5), layout="constrained")
        ratios = [2, 1] if beside else [1]
        panels = picture.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
        if not draw(panels[0], passed):
            continue
        if beside:
            beside(panels[1], passed)
        for axes in panels:
            axes.grid(alpha=0.3)
            # below, where no curve is; looking for the best place takes time and may warn of it
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12))
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
