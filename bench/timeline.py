"""A picture of device activities along time."""

from __future__ import annotations

from pathlib import Path

from bench.activities import Activity


def draw_timeline(timelines: dict[str, list[Activity]], target: Path) -> None:
    """One row of bars per layer, coloured by stage, to a PNG file (whole or not at all)."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = list(dict.fromkeys(a.stage for line in timelines.values() for a in line))
    colour = {stage: colormaps["tab20"](i % 20) for i, stage in enumerate(stages)}
    picture = Figure(figsize=(11, 1.2 + 0.8 * len(timelines)), layout="constrained")
    axes = picture.subplots()
    for row, line in enumerate(timelines.values()):
        bars = [(a.start, a.duration) for a in line]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=[colour[a.stage] for a in line])
    axes.set_yticks(range(len(timelines)), list(timelines))
    axes.invert_yaxis()
    axes.set(xlabel="us from the first activity's start", title="Device activities of one layer")
    handles = [Patch(color=colour[s], label=s or "no stage") for s in stages]
    axes.legend(
        handles=handles, fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.3)
    )
    FigureCanvasAgg(picture)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.stem}.partial.png")
    picture.savefig(partial, dpi=130)
    partial.replace(target)
