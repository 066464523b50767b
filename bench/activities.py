"""Device activities of one call, from the trace that `jax.profiler` writes.

On a GPU an activity is a kernel or a copy on a stream; on a CPU it is what XLA's runtime executes
for an instruction. An activity knows its instruction, and the compiled text says which stage of the
layer that belongs to.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

INSTRUCTION = re.compile(r"%?([\w.\-]+) = .*?metadata=\{[^}]*?op_name=\"([^\"]*)\"")


SCOPE = "stage_"


@dataclass(frozen=True)
class Activity:
    """One device activity; times in us from the first one's start.

    Attributes:
        name: of the kernel, or of the instruction.
        operation: the instruction, empty if the trace does not say.
        start: us.
        duration: us.
        stage: of the layer, empty if unknown.
    """

    name: str
    operation: str
    start: float
    duration: float
    stage: str = ""

    @property
    def end(self) -> float:
        """In us."""
        return self.start + self.duration


def record(call: Callable[[], Any], folder: Path | None = None) -> list[Activity]:
    """Activities of one call, traced to its end; with `folder` a Perfetto trace is left there.

    Raises:
        RuntimeError: the profiler saw none.
    """
    with tempfile.TemporaryDirectory(prefix="k3_trace_") as name:
        place = Path(name) if folder is None else folder
        before = set(place.rglob("*.xplane.pb"))
        with jax.profiler.trace(str(place), create_perfetto_trace=folder is not None):
            jax.block_until_ready(call())
        found = sorted(set(place.rglob("*.xplane.pb")) - before)
        if not found:
            raise RuntimeError(f"{place}: the profiler wrote no trace; give an empty folder")
        return read(found[-1])


def read(file: Path) -> list[Activity]:
    """The device activities in a trace, by start.

    Raises:
        RuntimeError: there are none.
    """
    from jax.profiler import ProfileData

    planes = list(ProfileData.from_file(str(file)).planes)
    gpu = [p for p in planes if p.name.startswith("/device:GPU")]
    found = []
    for plane in gpu or [p for p in planes if p.name == "/host:CPU"]:
        for line in plane.lines:
            if gpu and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                operation = _statistics(event).get("hlo_op", "")
                if gpu or operation:
                    found.append((event.name, str(operation), event.start_ns, event.duration_ns))
    if not found:
        raise RuntimeError(f"{file}: the profiler saw no device activity")
    first = min(start for _, _, start, _ in found)
    made = [Activity(n, o, (s - first) / 1e3, d / 1e3) for n, o, s, d in found]
    return sorted(made, key=lambda a: a.start)


def _statistics(event: Any) -> dict[str, Any]:
    # jaxlib makes a type here that Python 3.12 warns of; as an error that would end the process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return dict(event.stats)


def stages_of(compiled_text: str, names: Iterable[str]) -> dict[str, str]:
    """Instruction -> the outermost of the stages `names` in which it was traced.

    A stage is known by its scope (`SCOPE` and its name) or as a jitted function of its name.
    """
    scopes = {text: name for name in names for text in (SCOPE + name, f"jit({name})")}
    found = {}
    for match in INSTRUCTION.finditer(compiled_text):
        inside = [scopes[part] for part in match[2].split("/") if part in scopes]
        if inside:
            found[match[1]] = inside[0]
    return found


def leaves(activities: list[Activity]) -> list[Activity]:
    """Without those that contain the next one (a loop and its body): each moment counts once."""
    ordered = sorted(activities, key=lambda a: (a.start, -a.duration))
    return [
        a
        for a, after in zip(ordered, [*ordered[1:], None], strict=True)
        if after is None or not (after.start < a.end and after.end <= a.end)
    ]


def span_us(activities: list[Activity]) -> float:
    """From the first one's start to the last one's end, gaps included."""
    return max(a.end for a in activities) - min(a.start for a in activities)


def busy_us(activities: list[Activity]) -> float:
    """Time in which at least one activity runs."""
    total, end = 0.0, float("-inf")
    for a in sorted(activities, key=lambda a: a.start):
        total += max(0.0, a.end - max(a.start, end))
        end = max(end, a.end)
    return total
