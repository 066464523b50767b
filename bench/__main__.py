"""Benchmarks: each figure with its definition, its conditions and the physical limit beside it.

Exit status 0: done and parity passed; 1: a comparison of the run failed; 2: bad input; 3: the
watchdog ended processes; 130: interrupted; 141: the reader of its output went away. `--version`
prints versions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.engine_options import AgenticOptions, DecodeOptions
from bench.layers_options import LayersOptions
from bench.ops_options import OpsOptions
from bench.rank_slice_options import SliceOptions
from bench.roofline import RooflineOptions
from bench.startup_options import StartupOptions
from jax_impl.config import RELEASED_CONFIG
from jax_impl.output import (
    SHOWN,
    Out,
    Output,
    called,
    print_table,
    run_command,
    unwritable,
    write_json,
)
from jax_impl.processes import ONE_PROCESS, ProcessOptions, is_first, launch

DEFAULTS = RooflineOptions()
SLICE = SliceOptions()
DECODE = DecodeOptions()
AGENTIC = AgenticOptions()
LAYERS = LayersOptions()
OPS = OpsOptions()
STARTUP = StartupOptions()


def roofline(
    config: Path = RELEASED_CONFIG,
    options: Annotated[RooflineOptions, tyro.conf.arg(name="")] = DEFAULTS,
    output: Out = SHOWN,
    *,
    project: Path | None = None,
) -> int:
    """Bytes and floor per layer kind and step, for any GPU, ranks, rows and context.

    Example: python -m bench roofline --device H200 --tp 16 --rows 1,8,64

    Args:
        config: config.json, or a directory that holds it; default: the released model.
        options: what for.
        output: where the result goes.
        project: a measured rank slice; the step on all ranks is projected from it.
    """
    output.prepare()
    from bench.result import read, require
    from bench.roofline import roofline as compute
    from bench.roofline import tables
    from jax_impl.config import ModelConfig

    measured = None if project is None else read(project)
    result = require(compute(ModelConfig.load(config), options, measured))
    if output.talks:
        for title, columns, rows in tables(result):
            print_table(title, columns, rows)
    if output.json is not None:
        write_json(output.json, result)
    return 0


def rank_slice(
    options: Annotated[SliceOptions, tyro.conf.arg(name="")] = SLICE,
    output: Out = SHOWN,
) -> int:
    """One rank's decode step at the real shapes on one device: COMPUTE ONLY, exchanges looped back.

    Example: python -m bench rank-slice --tp 16 --rows 1,8,64 --drafts 7 --layers 8,20

    Args:
        options: what to run.
        output: where the result goes.
    """
    output.prepare()
    from bench.machine import set_memory_fraction

    set_memory_fraction(options.memory_fraction)
    from bench.rank_slice import run_rank_slice
    from bench.rank_slice_report import headline_names, rows_to_print

    result = run_rank_slice(options)
    title = f"one rank of {options.tp}, COMPUTE ONLY (exchanges looped back), {options.backend}"
    return conclude(result, output, title, rows_to_print(result), headline_names(result))


def layers(
    options: Annotated[LayersOptions, tyro.conf.arg(name="")] = LAYERS,
    output: Out = SHOWN,
) -> int:
    """Device activities of one KDA and one MLA layer, from the profiler: COMPUTE ONLY.

    Example: python -m bench layers --rows 8 --backends auto,latency_specialized --json layers.json

    Args:
        options: what to run.
        output: where the result goes.
    """
    folder = None if options.perfetto is None else options.perfetto / "a trace"
    output.prepare(*unwritable("--picture", options.picture), *unwritable("--perfetto", folder))
    from bench.machine import set_memory_fraction

    set_memory_fraction(options.memory_fraction)
    from bench.layers import disable_command_buffers, rows_to_print, run_layers

    disable_command_buffers()
    result, timelines = run_layers(options)
    title = f"one layer, one rank of {options.tp}, COMPUTE ONLY, {options.backends}"
    columns = ["", "us", "MB", "GB/s", "floor share"]
    names = [n for n in result["figures"] if n.endswith(".layer.busy_us")]
    status = conclude(result, output, title, rows_to_print(result), names, columns)
    if options.picture is not None:  # behind the result: a picture that fails must not cost it
        from bench.timeline import draw_timeline
        from jax_impl.progress import note

        if status == 0:
            draw_timeline(timelines, options.picture)
        else:
            note(f"layers: {options.picture} is not drawn, for parity has not passed")
    return status


def ops(
    options: Annotated[OpsOptions, tyro.conf.arg(name="")] = OPS,
    output: Out = SHOWN,
) -> int:
    """Device time and error of every kernel over its cases, L2 cold, with the floor.

    Example: python -m bench ops experts.tp16 attn_res --json ops.json

    Args:
        options: what to run.
        output: where the result goes; to a file after every case.
    """
    output.prepare()
    from bench.ops import chosen, run_ops
    from bench.rank_slice_report import rows_to_print

    if options.list:
        names = list(chosen(options.match, options.preset))
        output.deliver({"cases": names}, "cases", ("",), [(name,) for name in names])
        return 0
    result = run_ops(options, output.json)
    names = [n for n in result["figures"] if n.endswith((".kernel_us", ".standard_us"))]
    title = "kernels" if options.preset == "k3" else "standard formulas, NO KERNEL RAN"
    return conclude(result, output, title, rows_to_print(result), names)


def startup(
    options: Annotated[StartupOptions, tyro.conf.arg(name="")] = STARTUP,
    output: Out = SHOWN,
) -> int:
    """Compile time of the whole step, cold and from the cache, and the host's time per call.

    Example: python -m bench startup --backend latency_specialized --json startup.json

    Args:
        options: what to compile and call.
        output: where the result goes.
    """
    output.prepare()
    from bench.machine import set_memory_fraction

    set_memory_fraction(options.memory_fraction)
    from bench.rank_slice_report import rows_to_print
    from bench.startup import headline_names, run_startup

    result = run_startup(options)
    title = f"start-up, one rank of {options.tp}, exchanges looped back, {options.backend}"
    return conclude(result, output, title, rows_to_print(result), headline_names(result))


def decode(
    options: Annotated[DecodeOptions, tyro.conf.arg(name="")] = DECODE,
    processes: Annotated[ProcessOptions, tyro.conf.arg(name="")] = ONE_PROCESS,
    output: Out = SHOWN,
) -> int:
    """Decode steps through the engine: step time, rates and latencies, decode apart from prefill.

    Example: python -m bench decode --preset tiny --drafts 3 --accept-length 2.5 --osl 40

    Args:
        options: what to run.
        processes: which processes run it together.
        output: where the result goes.
    """
    output.prepare()
    from bench.machine import set_memory_fraction

    set_memory_fraction(options.memory_fraction)

    def work() -> int:
        from bench.decode import headline_names, run_decode

        result = run_decode(options)
        title = f"decode, {','.join(options.backends)}"
        return conclude_served(result, output, title, headline_names(result))

    return launch(processes, work)


def agentic(
    options: Annotated[AgenticOptions, tyro.conf.arg(name="")] = AGENTIC,
    processes: Annotated[ProcessOptions, tyro.conf.arg(name="")] = ONE_PROCESS,
    output: Out = SHOWN,
) -> int:
    """Multi-turn traffic with growing context and pauses: what each user sees.

    Example: python -m bench agentic --preset tiny --users 2 --runs 1

    Args:
        options: what to run.
        processes: which processes run it together.
        output: where the result goes.
    """
    output.prepare()
    from bench.machine import set_memory_fraction

    set_memory_fraction(options.memory_fraction)

    def work() -> int:
        from bench.agentic import run_agentic

        result = run_agentic(options)
        names = ["user_tokens_s.p90", "ttft_ms.p90", "output_tokens_s"]
        title = f"traffic of {options.users} user(s), {options.backend}"
        return conclude_served(result, output, title, names)

    return launch(processes, work)


def conclude_served(result: dict[str, Any], output: Output, title: str, names: list[str]) -> int:
    """`conclude`, and what the figures mean; in the first process only."""
    from bench.rank_slice_report import rows_to_print

    if not is_first():
        return 0
    status = conclude(result, output, title, rows_to_print(result), names)
    if output.talks:
        for name, text in result["conditions"]["definitions"].items():
            print(f"  {name}: {text}")
    return status


def conclude(
    result: dict[str, Any],
    output: Output,
    title: str,
    rows: Sequence[Sequence[str]],
    names: Sequence[str],
    columns: Sequence[str] = ("figure", "median", "samples", ""),
) -> int:
    """Write and print a measured result; the exit status."""
    from bench.result import acceptance_words, headline, require

    if judged := acceptance_words(require(result)["conditions"]["acceptance"]):
        title += f", {judged}"
    output.deliver(result, title, columns, rows)
    if output.talks:
        print("\n".join(headline(result, names)))
    return 1 if result["parity"]["verdict"] == "failed" else 0


def compare(
    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")],
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")],
    output: Out = SHOWN,
    *,
    match: str = "",
) -> int:
    """Two results side by side: figures, B over A, and what differs in their conditions.

    Example: python -m bench compare before.json after.json --match us_per_layer

    Args:
        a: a result.
        b: another.
        output: where the comparison goes.
        match: only figures whose names hold this.
    """
    from bench.compare import acceptances, differing, verdicts
    from bench.compare import compare as rows_of
    from bench.result import read_all

    output.prepare()
    first, second = read_all([a, b])
    changed = list(differing(first["conditions"], second["conditions"]))
    rows = rows_of(first, second, match)
    if not rows:
        raise ValueError(
            f"{a}, {b}: found no figure{f' with {match!r} in its name' if match else ''} that both "
            "have in the same unit, expected some; compare results of one command, or change "
            "--match"
        )
    names, parity = (str(a), str(b)), verdicts(first, second)
    judged = acceptances(first, second)
    columns = ("name", "a", "b", "b_over_a", "remark")
    result = {
        "a": names[0],
        "b": names[1],
        "conditions_that_differ": [dict(zip(columns[:3], row, strict=True)) for row in changed],
        "figures": [dict(zip(columns, row, strict=True)) for row in rows],
        "parity": parity,
        "acceptance": judged,
    }
    if output.talks:
        print_table("conditions that differ", ("", *names), changed)
    output.deliver(result, "figures of both", ("", *names, "B over A", ""), rows)
    if output.talks:
        print("\n".join(filter(None, (parity, judged))))
    return 0


def plot(
    results: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE [FILE ...]")
    ],
    output: Out = SHOWN,
    *,
    report: Path,
) -> int:
    """Pictures (PNG) of results and a page (HTML) with their conditions.

    Example: python -m bench plot bench/results/rank_slice_*.json --report build/plots

    Args:
        results: result files.
        output: where the names of the files go.
        report: folder for index.html and the pictures.
    """
    from bench.plots import Named
    from bench.plots import plot as draw
    from bench.result import read_all

    output.prepare(*unwritable("--report", report / "index.html"))
    if not results:
        raise ValueError("plot: found no result files, expected at least one; give their names")
    stems = [p.stem for p in results]  # whole paths where two of them are alike
    names = stems if len(set(stems)) == len(stems) else [str(p.with_suffix("")) for p in results]
    named = [Named(n, r) for n, r in zip(names, read_all(results), strict=True)]
    made = [str(report / name) for name in draw(named, report)]
    output.deliver({"files": made}, "written", ("",), [(name,) for name in made])
    return 0


COMMANDS = {
    "decode": decode,
    "rank-slice": rank_slice,
    "layers": layers,
    "ops": ops,
    "startup": startup,
    "roofline": roofline,
    "agentic": agentic,
    "compare": compare,
    "plot": plot,
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parse = partial(
        tyro.extras.subcommand_cli_from_dict,
        COMMANDS, prog=called("bench"), description=__doc__, args=argv,
    )  # fmt: skip
    return run_command("bench", parse, argv, COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
