"""What the subcommands do; progress goes to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from parity.folders import Folder, FolderError, open_folder
from parity.verdict import Verdict, Where, not_run

RECORDED = Path(__file__).parent / "golden"
SUITES = ("ops", "model", "mutants")


class BadInput(ValueError):
    """What the user asked for cannot be tried: found, expected, what to do."""


def execute(command: Any) -> list[Verdict]:
    """Runs a parsed command of `parity.__main__`.

    Raises:
        BadInput: see there.
    """
    kind = type(command).__name__
    if kind == "Run":
        return run(command.suite)
    if kind == "Golden":
        return golden(command.dirs)
    return compare(command.ckpt, command.prompt_ids, command.steps)


def run(suite: str) -> list[Verdict]:
    """Suites over the recorded folders of this package."""
    names = [s.strip() for s in suite.split(",") if s.strip()]
    unknown = sorted(set(names) - set(SUITES))
    if unknown or not names:
        raise BadInput(
            f"--suite: found {', '.join(unknown) or 'nothing'}; known suites are "
            f"{', '.join(SUITES)}"
        )
    found: list[Verdict] = []
    for name in dict.fromkeys(names):
        if name == "mutants":
            from parity.mutants import check_mutants

            found += _progress("mutants", check_mutants(RECORDED))
            continue
        folders = [d for d in sorted(RECORDED.iterdir()) if d.is_dir()]
        chosen = [f for f in map(open_folder, folders) if f.kind == name]
        if not chosen:
            found.append(
                not_run(Where(name, str(RECORDED), "-"), "all", "no recorded folder found")
            )
        for folder in chosen:
            found += _progress(folder.name, check_folder(folder))
        if name == "ops":
            from parity.case_check import check_cases

            found += _progress("cases", check_cases())
    return found


def golden(directories: Iterable[Path]) -> list[Verdict]:
    """Any recorded folders, judged by their kind."""
    try:
        folders = [open_folder(d) for d in directories]
    except FolderError as error:
        raise BadInput(str(error)) from None
    if not folders:
        raise BadInput("golden: no directory given; expected at least one recorded folder")
    found: list[Verdict] = []
    for folder in folders:
        try:
            found += _progress(folder.name, check_folder(folder))
        except FolderError as error:
            raise BadInput(str(error)) from None
    return found


def check_folder(folder: Folder) -> Iterator[Verdict]:
    """All comparisons for a folder of any kind.

    Raises:
        BadInput: its checkpoint cannot be loaded.
    """
    if folder.kind == "ops":
        from parity.golden_ops import check_ops

        yield from check_ops(folder)
    elif folder.kind == "model":
        from jax_impl.checkpoint import CheckpointError
        from jax_impl.config import ConfigError
        from parity.golden_layers import check_layers
        from parity.golden_model import check_model

        try:
            yield from check_model(folder)
            yield from check_layers(folder)
        except (CheckpointError, ConfigError) as error:
            raise BadInput(str(error)) from None
    else:
        where = Where(folder.kind, folder.name, "-")
        yield not_run(where, "all", f"comparison of kind {folder.kind!r} is not implemented")


def compare(checkpoint: Path, prompt_ids: str | None, steps: int) -> list[Verdict]:
    """JAX against PyTorch on one checkpoint."""
    from jax_impl.checkpoint import CheckpointError
    from jax_impl.config import ConfigError
    from parity.pair import PromptError, check_pair

    if steps < 1:
        raise BadInput(f"--steps: found {steps}, expected at least 1")
    try:
        return _progress(checkpoint.name, check_pair(checkpoint, prompt_ids, steps))
    except (CheckpointError, ConfigError, PromptError) as error:
        raise BadInput(str(error)) from None


def _progress(name: str, verdicts: Iterable[Verdict]) -> list[Verdict]:
    start, found, last = time.monotonic(), [], ""
    for v in verdicts:
        found.append(v)
        w = v.where
        stage = f"{w.ours} {w.dtype}/{w.profile} {w.case.split(' ')[0].rstrip(',')}"
        if stage != last:
            last = stage
            print(
                f"[{time.monotonic() - start:6.1f} s] {name}: {stage}", file=sys.stderr, flush=True
            )
    print(f"[{time.monotonic() - start:6.1f} s] {name}: {len(found)} verdicts", file=sys.stderr)
    return found
