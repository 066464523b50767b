"""What the subcommands do; progress goes to stderr."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax_impl.processes import report
from jax_impl.progress import note
from parity.folders import Folder, FolderError, open_folder, operations, tensor_names
from parity.verdict import Verdict, Where, not_run

RECORDED = Path(__file__).parent / "golden"
SUITES = ("ops", "model", "mutants", "dspark", "accept", "vllm", "vllm_mutants", "sharded")


class BadInput(ValueError):
    """What the user asked for cannot be tried: found, expected, what to do."""


@dataclass(frozen=True)
class Served:
    """How a served record is compared, see `golden_vllm.check_vllm`."""

    checkpoint: Path | None = None
    draft: Path | None = None
    tp: int = 1
    backend: str = "auto"


def execute(command: Any) -> list[Verdict]:
    """Runs a parsed command of `parity.__main__`.

    Raises:
        BadInput: see there.
    """
    kind = type(command).__name__
    if kind == "Run":
        return run(command.suite, command.tp, command.case)
    if kind == "Golden":
        return golden(command.dirs, command.ckpt, command.draft, command.tp, command.backend)
    if kind == "Serve":
        return serve(command)
    return compare(command.ckpt, command.prompt_ids, command.steps, command.backend, command.draft)


def run(suite: str, tp: int | None = None, case: str | None = None) -> list[Verdict]:
    """Suites over the recorded folders of this package.

    `tp` and `case` restrict suite `sharded`, see `parity.sharded.chosen`.
    """
    names = _require_suites(suite, tp, case)
    found: list[Verdict] = []
    for name in dict.fromkeys(names):
        if name == "sharded":
            from parity.sharded import check_sharded
            from parity.sharded import chosen as settings

            wanted = settings(tp, case)
            found += _progress("sharded", check_sharded(wanted))
            continue
        if name == "mutants":
            from parity.mutants import check_mutants

            found += _progress("mutants", check_mutants(RECORDED))
            continue
        if name == "vllm_mutants":
            from parity.engine_mutants import check_engine_mutants

            found += _progress(name, check_engine_mutants(RECORDED))
            continue
        if name == "accept":
            from parity.accept_suite import check_accept

            found += _progress("accept", check_accept())
            continue
        folders = [d for d in sorted(RECORDED.iterdir()) if d.is_dir()]
        chosen = [f for f in map(open_folder, folders) if f.kind == name]
        if not chosen:
            found.append(
                not_run(Where(name, str(RECORDED), "-"), "all", "no recorded folder found")
            )
        for folder in chosen:
            found += _progress(folder.name, _survived(folder))
        if name == "ops":
            from parity.case_check import check_cases

            found += _progress("cases", check_cases())
        if name == "dspark":
            from parity.dspark_pair import check_dspark_pair

            found += _progress("pair", check_dspark_pair())
    return found


def _require_suites(suite: str, tp: int | None, case: str | None) -> list[str]:
    """The names of the suites; refuses everything wrong at once."""
    names = [s.strip() for s in suite.split(",") if s.strip()]
    problems = []
    unknown = sorted(set(names) - set(SUITES))
    if unknown or not names:
        problems.append(
            f"--suite: found {', '.join(unknown) or 'nothing'}, expected some of "
            f"{', '.join(SUITES)}; separate them by commas"
        )
    if "sharded" in names:
        problems += _sharded_problems(tp, case)
    elif tp is not None or case is not None:
        problems.append(
            f"--tp, --case: found with --suite {suite}, expected --suite sharded; leave them out"
        )
    if problems:
        raise BadInput("\n".join(problems))
    if "sharded" in names:
        from parity.sharded import emulate_devices

        emulate_devices()
    return names


def _sharded_problems(tp: int | None, case: str | None) -> list[str]:
    """What suite `sharded` cannot do."""
    from parity.sharded import chosen as settings

    found = [] if tp is None else _rank_problems(tp)
    if not any(settings(None if found else tp, case).values()):
        known = ", ".join(f"'{n} {s.name}'" for n, e in settings().items() for s in e[:2])
        found.append(
            f"--case: found {case!r}, which no setting has in its name; expected a part "
            f"of a name such as {known}; choose one"
        )
    return found


def _rank_problems(tp: int) -> list[str]:
    """Why the models of suite `sharded` cannot be cut over so many ranks."""
    from jax_impl.config import ConfigError, ModelConfig, RunConfig
    from jax_impl.sharding import require_ranks
    from parity.sharded import RANKS

    config = ModelConfig.load(RECORDED / "model_tiny16")
    try:
        require_ranks(config, RunConfig(), tp)
    except ConfigError as error:
        return [f"--tp: {error}"]
    most = f"--tp: found {tp}, expected at most {RANKS} ranks; choose fewer"
    return [most] if tp > RANKS else []


def golden(
    directories: Iterable[Path],
    ckpt: Path | None = None,
    draft: Path | None = None,
    tp: int = 1,
    backend: str = "auto",
) -> list[Verdict]:
    """Any recorded folders, judged by their kind.

    All but the folders are for served records, see `golden_vllm.check_vllm`.
    """
    folders: list[Folder] = []
    problems: list[str] = []
    if tp < 1:
        problems.append(f"--tp: found {tp}, expected at least 1; change it")
    for directory in directories:
        try:
            folders.append(open_folder(directory))
            problems += _damage(folders[-1])
        except FolderError as error:
            problems.append(str(error))
    if problems:
        raise BadInput("\n".join(problems))
    if not folders:
        raise BadInput(
            "golden: found no directory, expected at least one recorded folder; give one, such as "
            f"{RECORDED / 'ops'}"
        )
    if (ckpt or draft or tp != 1) and not any(folder.kind == "vllm" for folder in folders):
        raise BadInput(
            "--checkpoint, --draft, --tp: found without a record of an engine, expected one among "
            "the folders; leave them out"
        )
    if backend != "auto" and (other := [f.name for f in folders if f.kind != "vllm"]):
        raise BadInput(
            f"--backend {backend}: found {', '.join(other)}, expected records of an engine only, "
            "for the others record what every layer gives in float32 too; leave them out, and see "
            "`parity compare --backend` and `k3 selftest`"
        )
    served = Served(ckpt, draft, tp, backend)
    found: list[Verdict] = []
    for folder in folders:
        found += _progress(folder.name, _survived(folder, served))
    return found


def _damage(folder: Folder) -> list[str]:
    """What cannot be read in a folder, as far as headers and sidecars tell."""
    found: list[str] = []
    for file in sorted(folder.path.glob("*.safetensors")):
        try:
            tensor_names(file)
        except FolderError as error:
            found.append(str(error))
    if folder.kind == "ops":
        try:
            list(operations(folder.path))
        except FolderError as error:
            found.append(str(error))
    if folder.kind == "vllm" and not found:
        from parity.records import read_record

        try:
            read_record(folder.path)
        except FolderError as error:
            found.append(str(error))
    if folder.kind == "model":
        from jax_impl.checkpoint import Checkpoint, CheckpointError
        from jax_impl.config import ConfigError

        try:
            Checkpoint.open(folder.path)
        except (CheckpointError, ConfigError) as error:
            found.append(str(error))
    return found


def _survived(folder: Folder, served: Served = Served()) -> Iterator[Verdict]:
    """`check_folder`, in which an error ends this folder only and is a verdict of its own."""
    try:
        yield from check_folder(folder, served)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        where = Where(folder.kind, folder.name, "-")
        yield not_run(
            where,
            "all the rest",
            f"{folder.path}: {type(error).__name__}: {error}. Its other comparisons did not run: "
            "check names, shapes and dtypes of what it records against parity/golden/README.md; "
            "if they agree, this is a defect of the comparison.",
        )


def check_folder(folder: Folder, served: Served) -> Iterator[Verdict]:
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
    elif folder.kind == "dspark":
        from parity.golden_dspark import check_dspark

        yield from check_dspark(folder)
    elif folder.kind == "vllm":
        from jax_impl.backend import BackendUnavailableError
        from jax_impl.checkpoint import CheckpointError
        from jax_impl.config import ConfigError
        from parity.golden_vllm import check_vllm

        try:
            yield from check_vllm(folder, **asdict(served))
        except (CheckpointError, ConfigError, BackendUnavailableError) as error:
            raise BadInput(str(error)) from None
    else:
        where = Where(folder.kind, folder.name, "-")
        yield not_run(where, "all", f"comparison of kind {folder.kind!r} is not implemented")


def compare(
    checkpoint: Path,
    prompt_ids: str | None,
    steps: int,
    backend: str = "auto",
    draft: Path | None = None,
) -> list[Verdict]:
    """JAX against PyTorch on one checkpoint, and with its drafter, if one is given."""
    from jax_impl.backend import BackendUnavailableError
    from jax_impl.checkpoint import CheckpointError
    from jax_impl.config import ConfigError
    from parity.pair import PromptError, check_pair

    try:
        return _progress(checkpoint.name, check_pair(checkpoint, prompt_ids, steps, backend, draft))
    except (CheckpointError, ConfigError, PromptError, BackendUnavailableError) as error:
        raise BadInput(str(error)) from None


def serve(command: Any) -> list[Verdict]:
    """A live server against this code; `command` is `parity.__main__.Serve`."""
    from jax_impl.checkpoint import CheckpointError
    from jax_impl.config import ConfigError
    from parity.openai_client import Server
    from parity.serve import ServeError, check_server, prepare

    key = os.environ.get(command.key_variable) or None
    server = Server(command.url, command.model, command.timeout, key)
    try:
        asked = prepare(
            server, ckpt=command.ckpt, draft=command.draft, prompts=command.prompts,
            tokens=command.tokens, logprobs=command.logprobs, concurrency=command.concurrency,
            keep=command.record, tp=command.tp,
        )  # fmt: skip
        return _progress(command.model, check_server(asked))
    except (ServeError, CheckpointError, ConfigError) as error:
        raise BadInput(str(error)) from None


def _progress(name: str, verdicts: Iterable[Verdict]) -> list[Verdict]:
    start, found, last = time.monotonic(), [], ""
    for v in verdicts:
        found.append(v)
        w = v.where
        stage = f"{w.ours} {w.dtype}/{w.profile} {w.case.split(' ')[0].rstrip(',')}"
        if stage != last:
            last = stage
            report(None, f"{name}: {stage}")
            note(f"[{time.monotonic() - start:6.1f} s] {name}: {stage}")
    note(f"[{time.monotonic() - start:6.1f} s] {name}: {len(found)} verdicts")
    return found
