"""Several programs compiled at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jax_impl.progress import count_bar

Key = TypeVar("Key", bound=Hashable)


def default_workers() -> int:
    """Compilations at a time: one per CPU, up to 8, as tracing has one thread."""
    return min(8, os.cpu_count() or 1)


def compile_all(
    jobs: Sequence[tuple[Key, Callable[[], Any]]], workers: int, what: str = "compiling"
) -> dict[Key, Any]:
    """Key -> compiled program, of jobs (key, function that lowers).

    Lowered one after the other, for Python does that; compiled `workers` at a time. The bar counts
    both.
    """
    found: dict[Key, Any] = {}
    with ThreadPoolExecutor(workers) as pool, count_bar(what, 2 * len(jobs)) as progress:
        waiting = []
        for key, lower in jobs:
            waiting.append((key, pool.submit(lower().compile)))
            progress(len(waiting))
        for key, future in waiting:
            found[key] = future.result()
            progress(len(waiting) + len(found))
    return found
