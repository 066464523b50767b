"""The form of a result file, `k3-bench-1`: what it holds, checked before it is written.

    schema      "k3-bench-1"
    command     the command line, or a list of them
    conditions  what the figures hold for; `CONDITIONS` are always there, others may be
    figures     name -> {"value": number, "unit": text, "samples": list of numbers or null}
    parity      {"verdict": "passed" | "failed" | "none", ...}, figures taken in the same run, and
                "why" where the verdict is "none"

A figure's name says what, then for which rows, drafts or case: `us_per_layer.rows8`. `samples` are
in the unit of the value, one per repeat; null means computed, counted or not sampled. Figures whose
two halves of repeats differ by more than `NOISE` at the median stand in `conditions["noisy"]`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_impl.problems import listed

SCHEMA = "k3-bench-1"
KEYS = ("schema", "command", "conditions", "figures", "parity")
CONDITIONS = (
    "device", "driver", "versions", "clocks", "seed", "shapes", "acceptance", "backend", "excluded",
)  # fmt: skip
VERDICTS = ("passed", "failed", "none")
UNITS = ("us", "ms", "s", "bytes", "GB/s", "count", "share", "ratio", "tokens/s", "tokens")
NOISE = 0.03
NOISY = "NOISY: halves differ by more than 3 %, or too few samples"
JSON_NAMES = {
    str: "text", dict: "an object", int: "a whole number", list: "a list", type(None): "null",
}  # fmt: skip
# what a condition may be; others are free
KINDS: dict[str, tuple[type, ...]] = {
    "device": (str,), "driver": (str,), "versions": (dict,), "clocks": (dict, str),
    "seed": (int, str, type(None)), "shapes": (dict, str), "acceptance": (dict, str),
    "backend": (str,), "excluded": (str,), "code": (str,), "noisy": (list,),
}  # fmt: skip


class ResultError(ValueError):
    """A result that does not have the published form; lists everything that is wrong."""


def figure(value: float, unit: str, samples: Sequence[float] | None = None) -> dict[str, Any]:
    """One entry of `figures`; floats are cut to six digits."""
    kept = None if samples is None else [_short(s) for s in samples]
    return {"value": _short(value), "unit": unit, "samples": kept}


def median_figure(samples: Sequence[float], unit: str) -> dict[str, Any]:
    """The figure whose value is the median of its samples."""
    return figure(statistics.median(samples), unit, samples)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def halves_differ(samples: Sequence[float]) -> float:
    """Difference of the medians of the first and the second half of the samples, relative.

    Of two or three samples the whole range counts; one sample says nothing: infinity.
    """
    middle = statistics.median(samples)
    if len(samples) > 1 and max(samples) == min(samples):
        return 0.0
    if len(samples) < 2 or not middle:
        return math.inf
    if len(samples) < 4:
        return (max(samples) - min(samples)) / abs(middle)
    half = len(samples) // 2
    first, second = statistics.median(samples[:half]), statistics.median(samples[-half:])
    return abs(first - second) / abs(middle)


def is_noisy(samples: Sequence[float]) -> bool:
    """Whether the two halves of the samples differ by more than `NOISE`, or cannot be told."""
    return halves_differ(samples) > NOISE


def noisy_names(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Figures whose samples are noisy; counts are not timed and never are."""
    return [
        name
        for name, found in figures.items()
        if found["samples"] and found["unit"] != "count" and is_noisy(found["samples"])
    ]


def all_noisy(result: dict[str, Any]) -> set[str]:
    """Noisy figures of a result, whether or not it lists them itself."""
    return {*result["conditions"].get("noisy", []), *noisy_names(result["figures"])}


def problems(result: Any) -> list[str]:
    """What keeps `result` from having the published form; empty if nothing does."""
    if not isinstance(result, dict) or set(result) != set(KEYS):
        found = sorted(result) if isinstance(result, dict) else type(result).__name__
        return [f"keys: found {found}, expected {list(KEYS)} and no other"]
    wrong = []
    if result["schema"] != SCHEMA:
        wrong.append(f"schema: found {result['schema']!r}, expected {SCHEMA!r}")
    if not isinstance(result["command"], str | list):
        wrong.append("command: expected a command line or a list of them")
    if not isinstance(result["conditions"], dict):
        return [*wrong, "conditions: expected an object"]
    missing = [name for name in CONDITIONS if name not in result["conditions"]]
    if missing:
        wrong.append(f"conditions: {', '.join(missing)} missing")
    wrong += _condition_problems(result["conditions"])
    if not isinstance(result["figures"], dict):
        return [*wrong, "figures: expected an object"]
    wrong += [p for name, found in result["figures"].items() for p in _figure_problems(name, found)]
    return wrong + _parity_problems(result["parity"])


def _condition_problems(conditions: dict[str, Any]) -> list[str]:
    wrong = []
    for name, kinds in KINDS.items():
        found = conditions.get(name)
        if name in conditions and (not isinstance(found, kinds) or isinstance(found, bool)):
            names = " or ".join(JSON_NAMES[kind] for kind in kinds)
            wrong.append(f"conditions[{name!r}]: found {found!r}, expected {names}")
    noisy = conditions.get("noisy", [])
    if isinstance(noisy, list) and not all(isinstance(name, str) for name in noisy):
        wrong.append(f"conditions['noisy']: found {noisy!r}, expected names of figures")
    return wrong


def _figure_problems(name: str, found: Any) -> list[str]:
    if not isinstance(found, dict) or set(found) != {"value", "unit", "samples"}:
        return [f"figures[{name!r}]: expected value, unit and samples"]
    wrong = []
    if not _finite(found["value"]):
        wrong.append(f"figures[{name!r}].value: found {found['value']!r}, expected a finite number")
    if found["unit"] not in UNITS:
        wrong.append(f"figures[{name!r}].unit: found {found['unit']!r}, expected one of {UNITS}")
    samples = found["samples"]
    if samples is not None and not (isinstance(samples, list) and all(map(_finite, samples))):
        wrong.append(f"figures[{name!r}].samples: expected a list of finite numbers, or null")
    return wrong


def _parity_problems(parity: Any) -> list[str]:
    if not isinstance(parity, dict) or parity.get("verdict") not in VERDICTS:
        return [f"parity: expected an object with a verdict of {VERDICTS}"]
    if parity["verdict"] == "none" and not parity.get("why"):
        return ["parity: a verdict of 'none' needs `why`"]
    return []


def _finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # `isfinite` refuses whole numbers beyond that


def require(result: Any, source: str = "result") -> dict[str, Any]:
    """The result, if it has the published form.

    Raises:
        ResultError: it has not.
    """
    wrong = problems(result)
    if wrong:
        do = "Give a file that a measuring command of `python -m bench` wrote with this version."
        raise ResultError(listed(f"{source}: not a {SCHEMA} result", wrong, do))
    return result


def read(path: str | Path) -> dict[str, Any]:
    """The result in a file.

    Raises:
        ResultError: it cannot be read, is not JSON, or has another form.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ResultError(
            f"{path}: not readable as a result: {error}; expected a JSON file that a command of "
            "`python -m bench` wrote; check the name, or measure again"
        ) from None
    return require(found, str(path))


def read_all(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The results in files.

    Raises:
        ResultError: listing every file that is none.
    """
    found, wrong = [], []
    for path in paths:
        try:
            found.append(read(path))
        except ResultError as error:
            wrong.append(str(error))
    if wrong:
        raise ResultError("\n".join(wrong))
    return found


def write(target: str, result: dict[str, Any]) -> None:
    """Write a result that has the published form; whole or not at all, `-` is standard output.

    Raises:
        ResultError: it has another form; nothing is written.
    """
    from jax_impl.output import write_json

    write_json(target, require(result))


def acceptance_words(acceptance: Any) -> str:
    """How drafts were judged, in words, from a result's conditions; empty without drafts.

    Forced acceptance is always called synthetic.
    """
    if not isinstance(acceptance, dict):
        return "" if acceptance == "none" else str(acceptance)
    forced = {"drafts", "label", "acceptance_length"} <= set(acceptance)
    if not forced and not {"drafts", "rule"} <= set(acceptance):
        return str(acceptance)
    drafts = f"{acceptance['drafts']} draft(s)"
    if forced:
        return f"{acceptance['label']} of length {acceptance['acceptance_length']:g}, {drafts}"
    return f"real acceptance ({acceptance['rule']}), {drafts}"


def headline(result: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Lines of the named figures with their conditions; none where parity has not passed."""
    verdict = result["parity"]["verdict"]
    if verdict != "passed":
        why = result["parity"].get("why", "the comparison of this run failed")
        return [f"no headline: parity verdict {verdict} ({why})"]
    conditions = result["conditions"]
    noisy = all_noisy(result)
    lines = []
    for name in names:
        found = result["figures"].get(name)
        if found is not None:
            mark = f"  {NOISY}" if name in noisy else ""
            lines.append(f"{name}  {found['value']:,g} {found['unit']}{mark}")
    what = f"{conditions['device']}, backend {conditions['backend']}"
    if judged := acceptance_words(conditions["acceptance"]):
        what += f", {judged}"
    return [*lines, f"({what}; excluded: {conditions['excluded']}; parity passed)"]
