"""Benchmarks: each figure with its definition, its conditions and the physical limit beside it.

Exit status 0: done and parity passed; 1: a comparison of the run failed; 2: bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.rank_slice_options import SliceOptions
from bench.roofline import RELEASED, RooflineOptions

DEFAULTS = RooflineOptions()
SLICE = SliceOptions()


def roofline(
    config: Path = RELEASED,
    options: Annotated[RooflineOptions, tyro.conf.arg(name="")] = DEFAULTS,
    *,
    json: str | None = None,
) -> int:
    """Bytes and floor per layer kind and step, for any GPU, ranks, rows and context.

    Example: python -m bench roofline --device H200 --tp 16 --rows 1 8 64

    Args:
        config: config.json, or a directory that holds it; default: the released model.
        options: what for.
        json: write the result to this file ('-' for standard output).
    """
    from bench.roofline import roofline as compute
    from bench.roofline import tables
    from jax_impl.config import ModelConfig
    from jax_impl.output import print_table, write_json

    result = compute(ModelConfig.load(config), options)
    if json != "-":
        for title, columns, rows in tables(result):
            print_table(title, columns, rows)
    if json is not None:
        write_json(json, result)
    return 0


def rank_slice(
    options: Annotated[SliceOptions, tyro.conf.arg(name="")] = SLICE,
    *,
    out: str | None = None,
) -> int:
    """One rank's decode step at the real shapes on one device: COMPUTE ONLY, exchanges looped back.

    Example: python -m bench rank-slice --tp 16 --rows 1,8,64 --drafts 7 --layers 8,20

    Args:
        options: what to run.
        out: write the result to this file ('-' for standard output).
    """
    from bench.machine import set_memory_fraction

    set_memory_fraction(options.memory_fraction)
    from bench.rank_slice import run_rank_slice
    from bench.rank_slice_report import headline_names, rows_to_print

    result = run_rank_slice(options)
    title = f"one rank of {options.tp}, COMPUTE ONLY (exchanges looped back), {options.backend}"
    return conclude(result, out, title, rows_to_print(result), headline_names(result))


def conclude(
    result: dict[str, Any],
    out: str | None,
    title: str,
    rows: Sequence[Sequence[str]],
    names: Sequence[str],
) -> int:
    """Write and print a measured result; the exit status."""
    from bench.result import headline, write
    from jax_impl.output import print_table

    if out is not None:
        write(out, result)
    if out != "-":
        print_table(title, ["figure", "median", "samples", ""], rows)
        print("\n".join(headline(result, names)))
    return 1 if result["parity"]["verdict"] == "failed" else 0


COMMANDS = {"roofline": roofline, "rank-slice": rank_slice}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="python -m bench", description=__doc__, args=argv
        )
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
