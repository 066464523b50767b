"""`python -m bench compare A B`: two results side by side, and how their conditions differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.result import acceptance_words, all_noisy, halves_differ

# conditions that say when and how long, not what was measured
PASSING = ("clocks_before", "seconds", "noisy", "definitions", "memory", "plans")
PASSING_CLOCKS = ("clocks.power.draw", "clocks.temperature.gpu")  # other ones at every moment


def differing(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(condition, in A, in B) of every leaf that differs."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            here = f"{path}.{key}" if path else key
            if here not in PASSING + PASSING_CLOCKS:
                yield from differing(a.get(key), b.get(key), here)
    elif a != b:
        yield path, str(a), str(b)


def compare(a: dict[str, Any], b: dict[str, Any], match: str = "") -> list[tuple[str, ...]]:
    """(figure, A, B, B over A, remark) of every figure that both have in the same unit."""
    rows, sides = [], (("A", all_noisy(a)), ("B", all_noisy(b)))
    for name, x in a["figures"].items():
        y = b["figures"].get(name)
        if y is None or y["unit"] != x["unit"] or match not in name:
            continue
        ratio = f"{y['value'] / x['value']:.3f}" if x["value"] else ""
        noisy = [label for label, names in sides if name in names]
        remark = f"noisy: {' and '.join(noisy)}" if noisy else _agreement(x, y)
        rows.append((name, _shown(x), _shown(y), ratio, remark))
    return rows


def _shown(found: dict[str, Any]) -> str:
    return f"{found['value']:,.6g} {found['unit']}"


def _agreement(x: dict[str, Any], y: dict[str, Any]) -> str:
    """Whether a difference stands out of what each figure differs from itself."""
    if not x["samples"] or not y["samples"] or not x["value"]:
        return ""
    own = max(halves_differ(x["samples"]), halves_differ(y["samples"]))
    apart = abs(y["value"] / x["value"] - 1)
    return "" if apart > own else "within the spread of halves"


def verdicts(a: dict[str, Any], b: dict[str, Any]) -> str:
    """One line about parity; the ratios are no headline unless both passed."""
    found = [r["parity"]["verdict"] for r in (a, b)]
    line = f"parity: A {found[0]}, B {found[1]}"
    if found == ["passed", "passed"]:
        return line
    return f"{line}: no headline can be taken from this comparison"


def acceptances(a: dict[str, Any], b: dict[str, Any]) -> str:
    """One line about how drafts were judged in both; empty where there were none."""
    words = [acceptance_words(r["conditions"]["acceptance"]) for r in (a, b)]
    if not any(words):
        return ""
    return "; ".join(f"{side}: {w or 'no drafts'}" for side, w in zip("AB", words, strict=True))
