"""Command line: `python -m parity run | golden | compare | serve`.

Exit status 0: everything asked for ran and passed; 1: something failed or did not run; 2: bad
input; 3: the watchdog ended processes; 130: interrupted; 141: the reader of its output went away.
`--version` prints versions.

JAX and PyTorch are imported by the commands, not by this module, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jax_impl.output import SHOWN, Out, called, run_command
from jax_impl.processes import ONE_PROCESS, ProcessOptions, is_first, launch

Backend = Literal["auto", "latency_specialized"]
Named = Annotated[Path | None, tyro.conf.arg(name="checkpoint", aliases=["--ckpt"])]


@dataclass(frozen=True)
class Run:
    """Runs suites over the recorded folders that come with the package.

    Example: python -m parity run --suite ops,model --report build/parity
    """

    suite: str = "ops,model,mutants"
    """Suites, separated by commas: ops, model, mutants, dspark, accept, vllm, vllm_mutants,
    sharded."""
    tp: int | None = None
    """Suite sharded with this number of ranks only; default: its whole matrix."""
    case: str | None = None
    """Suite sharded with settings only whose name contains this, such as 'TP16 dcp'."""
    report: Path | None = None
    """Directory for index.html and parity.json."""
    output: Out = SHOWN
    """Where the verdicts go."""
    processes: Annotated[ProcessOptions, tyro.conf.arg(name="")] = ONE_PROCESS
    """Which processes run it together; the first one reports."""


@dataclass(frozen=True)
class Golden:
    """Compares any recorded folders, also ones never seen before.

    Example: python -m parity golden parity/golden/ops parity/golden/model_tiny3
    """

    dirs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DIR [DIR ...]")]
    """Folders; their kind is read from golden.json or from the files in them."""
    ckpt: Named = None
    """Target of a served record that names its checkpoint by a fingerprint only."""
    draft: Path | None = None
    """Drafter of such a record."""
    tp: int = 1
    """Ranks over which this code runs such a checkpoint, in this process."""
    backend: Backend = "auto"
    """Whose steps feed such a record's tokens; latency_specialized needs a GPU."""
    report: Path | None = None
    """Directory for index.html and parity.json."""
    output: Out = SHOWN
    """Where the verdicts go."""


@dataclass(frozen=True)
class Compare:
    """Compares the JAX implementation with the PyTorch reference on a checkpoint directory.

    Example: python -m parity compare build/demo/target --steps 16 --report build/compare
    """

    ckpt: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Checkpoint directory with config.json and safetensors files."""
    prompt_ids: str | None = None
    """A file with ids, or the ids themselves (separated by commas or blanks); default: random."""
    draft: Path | None = None
    """Its drafter: also compares speculative decoding, greedy, with 7 drafts."""
    steps: int = 16
    """Greedy tokens after the prompt; with a drafter also its steps."""
    backend: Backend = "auto"
    """latency_specialized: single tokens only, by the kernels of a GPU (layers: `k3 selftest`)."""
    report: Path | None = None
    """Directory for index.html and parity.json."""
    output: Out = SHOWN
    """Where the verdicts go."""


@dataclass(frozen=True)
class Serve:
    """Compares a live OpenAI-compatible server with this code, on greedy texts of its own.

    Example: python -m parity serve --url http://localhost:8000 --model kimi-k3 --checkpoint DIR
    """

    url: str
    """Base address, such as http://host:8000."""
    model: str
    """The name under which the server offers the model."""
    ckpt: Named = None
    """The served checkpoint; default: the directory that the server names, if it is here."""
    draft: Path | None = None
    """The drafter, if the server speculates and tells the accepted counts."""
    tp: int = 1
    """Ranks over which this code runs the checkpoint, in this process."""
    prompts: Path | None = None
    """A file with a prompt of token ids per line; default: four random prompts."""
    tokens: int = 48
    """Token ids per text."""
    logprobs: int = 20
    """Listed tokens per place (vLLM: at most --max-logprobs)."""
    concurrency: int = 4
    """Requests at a time."""
    timeout: float = 300.0
    """Seconds for one whole answer."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key that is sent, if it is set."""
    record: Path | None = None
    """Directory to keep the answers in, as a record for `golden`."""
    report: Path | None = None
    """Directory for index.html and parity.json."""
    output: Out = SHOWN
    """Where the verdicts go."""


Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Golden, tyro.conf.subcommand("golden")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
)

NAMES = ("run", "golden", "compare", "serve")


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, runs it, returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_command("parity", partial(_run, arguments), arguments, NAMES)


def _run(arguments: list[str]) -> int:
    command: Any = tyro.cli(Command, args=arguments, prog=called("parity"), description=__doc__)  # type: ignore[arg-type]
    from parity import commands, report

    command.output.prepare(*report.unwritable(command.report))

    def work() -> int:
        verdicts = commands.execute(command)
        if is_first():
            report.deliver(verdicts, ["parity", *arguments], command.output, command.report)
        return 0 if report.good(verdicts) else 1

    return launch(command.processes, work) if isinstance(command, Run) else work()


if __name__ == "__main__":
    sys.exit(main())
