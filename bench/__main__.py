"""Benchmarks: `python -m bench roofline`; others are modules of their own, see README.

Exit status 0: done; 2: bad input.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from bench.roofline import RELEASED, RooflineOptions

DEFAULTS = RooflineOptions()


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


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        return tyro.extras.subcommand_cli_from_dict(
            {"roofline": roofline}, prog="python -m bench", description=__doc__, args=argv
        )
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
