"""Records of a serving engine: what it was asked, what it answered, under which conditions.

A record is a folder of two files. `golden.json` says what ran, `golden.safetensors` holds the
numbers. `docs/records.md` is the format's page; `parity.record_rules` says what a valid record is.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from parity.folders import FolderError, read_json, read_tensors

FORMAT = 1
META, TENSORS = "golden.json", "golden.safetensors"
SAMPLE = 1 << 20  # bytes that `fingerprint` reads at either end of a file's data

Arrays = Mapping[str, np.ndarray]


class RecordError(FolderError):
    """A folder that is no valid record; the message lists everything that is wrong."""


class Distribution(NamedTuple):
    """Log-probabilities of the engine for R consecutive places of a text, natural logarithms.

    Attributes:
        first: the place of row 0: it judges the token behind `fed[first]`.
        ids: i64 [R, k], the tokens that are listed; None if all are, in order.
        logprobs: f64 [R, k] or [R, V].
    """

    first: int
    ids: np.ndarray | None
    logprobs: np.ndarray

    def best(self) -> np.ndarray:
        """The most probable token of each row, i64 [R]; the first of equals."""
        at = self.logprobs.argmax(-1)
        return at if self.ids is None else np.take_along_axis(self.ids, at[:, None], -1)[:, 0]

    def rows(self, every: np.ndarray) -> np.ndarray:
        """The rows of [T, ...] that stand at the same places."""
        return every[self.first : self.first + len(self.logprobs)]


@dataclass(frozen=True)
class Text:
    """One recorded text: a prompt of P ids and the n ids that the engine made of it.

    Attributes:
        case: the prompt's name, `caseN`.
        kind: name of the run, such as `greedy`.
        prompt: i64 [P].
        ids: i64 [n].
        greedy: whether every id is the engine's best one.
        distribution: its log-probabilities, if recorded.
        accepted: i64 [steps], accepted drafts of each verification step behind the first id; the
            last may be cut short by the end of the text. None: not recorded.
        drafts: i64 [steps, K], what was proposed, -1 where unknown. None: not recorded.
        stages: recorded streams by name, [P - 1 + n, ...] each.
    """

    case: str
    kind: str
    prompt: np.ndarray
    ids: np.ndarray
    greedy: bool = True
    distribution: Distribution | None = None
    accepted: np.ndarray | None = None
    drafts: np.ndarray | None = None
    stages: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def fed(self) -> np.ndarray:
        """Everything that is fed, [P - 1 + n]; the last id only ends the text."""
        return np.concatenate([self.prompt, self.ids[:-1]])

    @property
    def key(self) -> tuple[str, str]:
        """What names it in a record."""
        return self.case, self.kind

    def judged(self, rows: np.ndarray) -> np.ndarray:
        """The rows that chose the recorded ids."""
        return rows[len(self.prompt) - 1 :]


@dataclass(frozen=True)
class Record:
    """A valid record.

    Attributes:
        meta: the JSON side, in the current form.
        texts: in the order of cases and kinds.
        references: log-probabilities of other programs on `fed` of a case's greedy text, by
            (case, name), f64 [T, V].
    """

    meta: dict[str, Any]
    texts: tuple[Text, ...]
    references: dict[tuple[str, str], np.ndarray]

    @property
    def engine(self) -> str:
        """Name and version."""
        return f"{self.meta['engine']['name']} {self.meta['engine']['version']}"


def read_record(path: Path) -> Record:
    """A record's folder; one in the first form (no `format`) is brought to the current one.

    Raises:
        RecordError: all problems, a line each.
    """
    return parse(read_json(path / META), read_tensors(path / TENSORS), str(path))


def parse(meta: Mapping[str, Any], tensors: Arrays, name: str) -> Record:
    """A record from its two halves; `name` is for messages.

    Raises:
        RecordError: all problems, a line each.
    """
    from parity.record_rules import problems, upgraded

    meta, tensors = upgraded(meta, tensors)
    if found := problems(meta, tensors):
        do = f"{name}: record it again, or correct it by docs/records.md"
        raise RecordError("\n".join([*(f"{name}: {line}" for line in found), do]))
    cases = sorted({n.partition(".")[0] for n in tensors}, key=_number)
    texts = [
        _text(case, kind, meta, tensors)
        for case in cases
        for kind in meta["texts"]
        if f"{case}.{kind}_ids" in tensors
    ]
    references = {
        (case, ref): np.asarray(tensors[f"{case}.reference_{ref}_logprobs"], np.float64)
        for case in cases
        for ref in ("f32", "bf16")
        if f"{case}.reference_{ref}_logprobs" in tensors
    }
    return Record(meta, tuple(texts), references)


def _number(case: str) -> int:
    return int(case.removeprefix("case"))


def _text(case: str, kind: str, meta: Mapping[str, Any], tensors: Arrays) -> Text:
    def get(name: str) -> np.ndarray | None:
        found = tensors.get(f"{case}.{kind}_{name}")
        return None if found is None else np.asarray(found, np.int64)

    prompt, ids = np.asarray(tensors[f"{case}.prompt_ids"], np.int64), get("ids")
    assert ids is not None  # the caller saw it
    start = f"{case}.{kind}_stage."
    return Text(
        case,
        kind,
        prompt,
        ids,
        meta["texts"][kind]["sampling"]["temperature"] == 0,
        _distribution(f"{case}.{kind}", len(prompt) - 1 + len(ids), tensors),
        get("accepted_counts"),
        get("drafts"),
        {n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)},
    )


def _distribution(name: str, length: int, tensors: Arrays) -> Distribution | None:
    values, ids = tensors.get(f"{name}_logprobs"), None
    if values is None and f"{name}_top_ids" in tensors:
        ids = np.asarray(tensors[f"{name}_top_ids"], np.int64)
        values = tensors[f"{name}_top_logprobs"]
    if values is None:
        return None
    return Distribution(length - len(values), ids, np.asarray(values, np.float64))


def write_record(path: Path, meta: Mapping[str, Any], tensors: Arrays) -> None:
    """Writes a folder that appears under its name only when complete and valid.

    Raises:
        RecordError: the record is not valid; nothing is written.
        FileExistsError: `path` exists and is not an empty directory.
    """
    parse(meta, tensors, str(path))
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} exists; expected an absent or empty directory; choose one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        save_file({n: np.ascontiguousarray(v) for n, v in tensors.items()}, new / TENSORS)
        (new / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        new.rename(path)


def fingerprint(checkpoint: Path) -> str:
    """What a record calls its checkpoint by: sha256 over config.json and samples of the weights.

    Of every safetensors file, in the order of names: name, size, header, and the first and last MiB
    of data. So a checkpoint of 1.5 TB takes seconds, and other values in the middle of a file are
    not noticed.

    Raises:
        RecordError: the folder has no config.json or no safetensors file.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files or not (checkpoint / "config.json").is_file():
        raise RecordError(
            f"{checkpoint}: no checkpoint; expected config.json and *.safetensors files in it; "
            "give the directory that was served"
        )
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"\n{file.name} {size}\n".encode())
        with file.open("rb") as handle:
            length = 8 + int.from_bytes(handle.read(8), "little")
            handle.seek(0)
            digest.update(handle.read(length + SAMPLE))
            handle.seek(max(length, size - SAMPLE))
            digest.update(handle.read())
    return digest.hexdigest()
