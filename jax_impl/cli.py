"""The `k3` command: check, memory, convert, generate, make-tiny, selftest.

`python -m jax_impl` is the same. Exit status 0: done; 1: it ran, and something compared is bad;
2: bad input; 3: the watchdog ended processes; 130: interrupted; 141: the reader of its output went
away. `--version` prints versions.
"""

# Nothing heavy is imported before a command runs: `k3 --help` needs neither JAX nor NumPy.

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jax_impl.number_list import Numbers
from jax_impl.output import SHOWN, Out, run_command
from jax_impl.processes import ONE_PROCESS, ProcessOptions, is_first, launch

Positional = tyro.conf.Positional
Source = Annotated[Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
Preset = Literal["tiny", "synthetic", "tp16", "deep", "big"]


def check(checkpoint: Source, output: Out = SHOWN, *, checksums: bool = False) -> int:
    """Validate a checkpoint from its index and headers, without loading it.

    Example: k3 check /data/Kimi-K3

    Args:
        checkpoint: directory of a target or a drafter, released or prepared.
        output: where the result goes.
        checksums: also read all data of a prepared checkpoint and compare its checksums.
    """
    output.prepare()
    from jax_impl.draft_config import is_draft

    if is_draft(checkpoint):
        from jax_impl.draft_weights import open_draft as open_checkpoint
    else:
        from jax_impl.checkpoint import Checkpoint

        open_checkpoint = Checkpoint.open
    found = open_checkpoint(checkpoint)
    result = {
        "checkpoint": str(checkpoint),
        "tensors": len(found.consumed),
        "bytes": sum(s.nbytes for s in found.consumed.values()),
        "shards": len({s.file for s in found.consumed.values()}),
        "ignored_tensors": len(found.ignored),
        "ignored_bytes": sum(s.nbytes for s in found.ignored.values()),
        "files_not_in_index": list(found.unnamed_files),
    }
    if checksums:
        from jax_impl.convert import run_verify

        result["bytes_with_equal_checksums"] = run_verify(found)
    output.deliver(result, f"{checkpoint}: complete", ("", ""), _rows(result))
    return 0


@dataclass(frozen=True)
class MemoryOptions:
    """What `k3 memory` estimates for.

    Attributes:
        tp: tensor-parallel ranks.
        batch: sequences at the same time.
        context: tokens per sequence, prompt and output together.
        drafts: drafted tokens per step; a verification has one row more.
        draft: DSpark draft (config.json or its directory), or `released` for the published sizes.
        commit: how a verification keeps accepted rows only; both forms are printed.
        kv_dtype: dtype of the MLA latent cache, and of the drafter's.
        router: router and latent projections cut over the ranks, or copied to each (vLLM).
        experts: width cut (tp), whole experts per rank (ep), or vLLM's padded cut.
        dcp: ranks that share the latent cache between them: 1 (each holds all) or as many as tp.
        device_gb: memory of one device in 1e9 bytes; with it, what does not fit is refused.
    """

    tp: int = 16
    batch: int = 1
    context: int = 4096
    drafts: int = 0
    draft: str | None = None
    commit: Literal["replay", "snapshots"] = "replay"
    kv_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"] = "bfloat16"
    router: Literal["cut", "copied"] = "cut"
    experts: Literal["tp", "ep", "padded"] = "tp"
    dcp: int = 1
    device_gb: float | None = None


def memory(
    checkpoint: Source,
    options: Annotated[MemoryOptions, tyro.conf.arg(name="")] = MemoryOptions(),
    output: Out = SHOWN,
) -> int:
    """Memory per rank for weights, caches and temporaries, from config.json alone.

    Example: k3 memory /data/Kimi-K3 --tp 16 --context 131072 --batch 8 --drafts 7 --draft released

    Args:
        checkpoint: config.json, or a directory that holds it.
        options: what to estimate for.
        output: where the result goes.
    """
    from jax_impl.memory_command import run_memory

    output.prepare()
    result, rows = run_memory(checkpoint, options)
    columns = ("what", "GB (1e9)", "bytes", "how")
    output.deliver(result, f"one of {options.tp} rank(s)", columns, rows)
    return 0


@dataclass(frozen=True)
class GenerateOptions:
    """How `k3 generate` runs.

    Attributes:
        steps: tokens to generate.
        temperature: 0 is greedy.
        top_k: how many of the most probable tokens may be drawn; 0 is all.
        top_p: draw from the most probable tokens that have this probability together; 1 is all.
        min_p: share of the largest probability that a token needs to be drawn; 0 is none.
        seed: seed of the draws; a token depends on (seed, position) alone.
        ignore_eos: go on after the end-of-message token.
        profile: rounding as vLLM (V) or as the published code (H).
        compute: dtype of activations.
        kv_dtype: dtype of the MLA latent cache (default: as compute).
        kv_scale: the FP8 scale; needed with float8_e4m3fn.
        chunk: prompt tokens per prefill step.
        page_size: rows of a cache page on one rank: tokens, or with dcp every dcp-th of them.
        backend: auto is the standard XLA path; latency_specialized asks for Pallas kernels.
        tp: tensor-parallel ranks, one device each.
        experts: cut the width of every routed expert (tp), or give whole experts to ranks (ep).
        dcp: ranks that share the latent cache between them: 1 (each holds all) or as many as tp.
        dcp_interleave: consecutive tokens on one rank of the shared cache.
        check_replicas: compare what must be equal on all ranks after every step (slow).
        draft: DSpark draft checkpoint; with it, decoding is speculative.
        drafts: drafted tokens per step (a verify step has one row more).
        accept: rule that judges drafts; synthetic forces the number accepted and reports no text.
        accept_length: synthetic only: mean tokens per step, 1 to drafts + 1.
        accept_rates: synthetic only, instead of the length: for each draft the share of steps that
            accept it and all before it, such as 0.9,0.72,0.36; not rising.
        drafting: whether the drafter takes its largest logit or draws.
        commit: how a verification keeps accepted rows only: it repeats recorded updates of the KDA
            state, or copies the state behind the last accepted row.
    """

    steps: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    profile: Literal["V", "H"] = "V"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    kv_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"] | None = None
    kv_scale: float | None = None
    chunk: int = 64
    page_size: int = 16
    backend: Literal["auto", "latency_specialized"] = "auto"
    tp: int = 1
    experts: Literal["tp", "ep"] = "tp"
    dcp: int = 1
    dcp_interleave: int = 1
    check_replicas: bool = False
    draft: Path | None = None
    drafts: int = 7
    accept: Literal["standard", "block", "synthetic"] = "standard"
    accept_length: float | None = None
    accept_rates: str | None = None
    drafting: Literal["greedy", "probabilistic"] = "greedy"
    commit: Literal["replay", "snapshots"] = "replay"


def generate(
    checkpoint: Source,
    prompt_ids: str,
    options: Annotated[GenerateOptions, tyro.conf.arg(name="")] = GenerateOptions(),
    processes: Annotated[ProcessOptions, tyro.conf.arg(name="")] = ONE_PROCESS,
    output: Out = SHOWN,
) -> int:
    """Generate token ids from a prompt of token ids, in one or several processes.

    Example: k3 generate build/demo/target --prompt-ids 5,17,101 --steps 16

    Args:
        checkpoint: checkpoint directory.
        prompt_ids: FILE with ids, or a LIST such as 5,17,101.
        options: how to run.
        processes: which processes run it together.
        output: where the result goes.
    """
    output.prepare()

    def work() -> int:
        from jax_impl.acceptance_config import SYNTHETIC_LABEL
        from jax_impl.generate import run_generate

        result = run_generate(checkpoint, prompt_ids, options)
        if is_first():
            forced = result.get("acceptance") == SYNTHETIC_LABEL
            title = f"generated ({SYNTHETIC_LABEL})" if forced else "generated"
            output.deliver(result, title, ("", ""), _rows(result))
        return 0

    return launch(processes, work)


def convert(
    checkpoint: Source,
    out: Annotated[Positional[Path], tyro.conf.arg(metavar="OUT")],
    output: Out = SHOWN,
) -> int:
    """Write a prepared checkpoint that loads on any number of ranks.

    Takes a released target or drafter. Stopped anywhere, the same command goes on; until it has
    finished nothing loads from OUT.

    Example: k3 convert /data/Kimi-K3 /fast/kimi-k3

    Args:
        checkpoint: released checkpoint directory.
        out: where to write: absent, empty, or an unfinished conversion of the same checkpoint.
        output: where the result goes.
    """
    output.prepare()
    if "jax" not in sys.modules:
        # orbax starts JAX, which would claim an accelerator's memory for nothing
        os.environ["JAX_PLATFORMS"] = "cpu"
    from jax_impl.convert import run_convert

    result = run_convert(checkpoint, out)
    output.deliver(result, f"{out}: complete", ("", ""), _rows(result))
    return 0


def make_tiny(
    directory: Annotated[Positional[Path], tyro.conf.arg(metavar="DIRECTORY")],
    output: Out = SHOWN,
    *,
    preset: Preset = "tiny",
    seed: int = 0,
) -> int:
    """Write a small random checkpoint in the released layout: DIRECTORY/target and /draft.

    Example: k3 make-tiny build/demo --preset tiny --seed 0

    Args:
        directory: where to write; must not hold anything yet.
        output: where the result goes.
        preset: sizes (see the documentation of `jax_impl.tiny_presets`).
        seed: 0..2^32-1; every value is a function of (seed, tensor name).
    """
    output.prepare()
    from jax_impl.make_tiny import make_checkpoint

    made = make_checkpoint(directory, preset, seed)
    rows = [
        (part, *(f"{made[part][key]:,}" for key in ("tensors", "bytes", "shards")))
        for part in ("target", "draft")
    ]
    title = f"{directory}: preset {preset}, seed {seed}"
    output.deliver(made, title, ("", "tensors", "bytes", "shards"), rows)
    return 0


@dataclass(frozen=True)
class SelftestOptions:
    """What `k3 selftest` checks.

    Attributes:
        backend: whose stages are checked; auto against itself in float32 runs on any machine.
        tp: rank counts, one rank's share of each.
        rows: sequences of a decode step, 1 to 64.
        drafts: drafts of a verification of one sequence; 0 leaves it out.
        context: tokens of each sequence.
        kv_dtype: dtype of the MLA latent cache.
        page_size: rows of a cache page.
        preset: the released model's sizes, or those of a small one.
        seed: of weights, caches and inputs.
    """

    backend: Literal["auto", "latency_specialized"] = "latency_specialized"
    tp: Numbers = (16, 8)
    rows: Numbers = (1, 8, 64)
    drafts: int = 7
    context: int = 1024
    kv_dtype: Literal["bfloat16", "float8_e4m3fn"] = "float8_e4m3fn"
    page_size: int = 64
    preset: Literal["k3", "tiny", "tp16"] = "k3"
    seed: int = 0


def selftest(
    options: Annotated[SelftestOptions, tyro.conf.arg(name="")] = SelftestOptions(),
    output: Out = SHOWN,
) -> int:
    """Check each stage of a backend on this machine against its reference, with random weights.

    Example: k3 selftest
    Example: k3 selftest --backend auto --preset tiny --tp 1 --rows 1 --drafts 3

    Args:
        options: what to check.
        output: where the result goes.
    """
    output.prepare()
    from jax_impl.selftest import run_selftest, table

    result = run_selftest(options)
    title = f"selftest of {options.backend} on {result['conditions']['device']}"
    columns = ("what", "where it is worst", "error", "limit", "")
    output.deliver(result, title, columns, table(result))
    return 0 if result["passed"] else 1


def _rows(result: dict[str, Any], prefix: str = "") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, value in result.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, f"{value:.6g}" if isinstance(value, float) else str(value)))
    return rows


COMMANDS = {
    "check": check,
    "memory": memory,
    "convert": convert,
    "generate": generate,
    "make-tiny": make_tiny,
    "selftest": selftest,
}


def main(argv: list[str] | None = None) -> None:
    """Run a command and leave with its exit status, see `docs/commands.md`."""
    parse = partial(
        tyro.extras.subcommand_cli_from_dict, COMMANDS, prog="k3", description=__doc__, args=argv
    )
    raise SystemExit(run_command("k3", parse, argv, COMMANDS))
