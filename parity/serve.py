"""A live server against this code: its answers become a record, which is then judged as any other.

The first request finds out what the server offers; the others follow, a bounded number at a time.
What is missing and only widens the comparison (log-probabilities of the prompt, accepted counts)
is a remark; what the comparison needs (log-probabilities at all, an answer to every prompt) is not
run, and the command fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_impl.ids import is_plain
from parity.openai_client import (
    Capabilities,
    Completion,
    Server,
    ServerError,
    ask,
    read,
    request,
)
from parity.records import RecordError, fingerprint, parse, write_record
from parity.verdict import Verdict, Where, not_recorded, not_run

LENGTHS = (5, 16, 33, 64)  # of the prompts that are made where none are given
RUN = "greedy"
OPTIONAL = ("prompt_logprobs", "length", "accepted counts")

Answers = list[Completion | str]  # by prompt; a text says why there is none


class ServeError(ValueError):
    """What was asked for cannot be tried; the message lists every reason."""


@dataclass(frozen=True)
class Request:
    """What is asked of a server.

    Attributes:
        tokens: ids per text.
        logprobs: listed tokens per place.
        concurrency: requests at a time.
        keep: where to leave the record; None: nowhere.
        tp: ranks of this code.
    """

    server: Server
    prompts: list[list[int]]
    tokens: int
    logprobs: int
    concurrency: int
    target: Path
    draft: Path | None
    keep: Path | None
    tp: int = 1


def prepare(
    server: Server, *, ckpt: Path | None, draft: Path | None, prompts: Path | None, tokens: int,
    logprobs: int, concurrency: int, keep: Path | None, tp: int = 1,
) -> Request:  # fmt: skip
    """Checks everything that can be checked before the first completion.

    Raises:
        ServeError: every reason at once.
    """
    bad = [
        f"{name}: found {value}, expected at least 1; give more"
        for name, value in (
            ("--tokens", tokens), ("--logprobs", logprobs), ("--concurrency", concurrency),
            ("--tp", tp),
        )
        if value < 1
    ]  # fmt: skip
    if not server.timeout > 0:
        bad.append(f"--timeout: found {server.timeout}, expected above 0; give more seconds")
    if not server.url.startswith(("http://", "https://")):
        bad.append(
            f"--url: found {server.url!r}, expected http://HOST:PORT or https://...; give the base "
            "address"
        )
    if keep is not None and keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        bad.append(
            f"--record: {keep} exists; expected an absent or empty directory; choose another"
        )
    bad += _unreadable(ckpt, draft, prompts)
    if bad:
        raise ServeError("\n".join(bad))
    card = _card(server)
    target = ckpt or Path(str(card.get("root") or server.model))
    vocabulary = _vocabulary(target, named=ckpt is not None)
    longest = card.get("max_model_len")
    given = _prompts(prompts, vocabulary, tokens, longest if isinstance(longest, int) else None)
    return Request(server, given, tokens, logprobs, concurrency, target, draft, keep, tp)


def _unreadable(ckpt: Path | None, draft: Path | None, prompts: Path | None) -> list[str]:
    """What is wrong with files of this machine, before a server is asked anything."""
    from jax_impl.draft_weights import open_draft

    bad = []
    if ckpt is not None:
        try:
            _vocabulary(ckpt, named=True)
        except ServeError as error:
            bad.append(str(error))
    if draft is not None:
        try:
            open_draft(draft)
        except ValueError as error:
            bad.append(f"--draft: {error}")
    if prompts is not None and not prompts.is_file():
        bad.append(
            f"--prompts: found no file {prompts}, expected one with a prompt of ids per line; "
            "check the name"
        )
    return bad


def _card(server: Server) -> dict[str, Any]:
    """The server's entry for the model."""
    try:
        found = server.get("/v1/models").get("data")
    except ServerError as error:
        raise ServeError(
            f"--url: {error}. Expected an OpenAI-compatible server; start it, or correct the "
            "address"
        ) from None
    cards = [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []
    for card in cards:
        if card.get("id") == server.model:
            return card
    names = ", ".join(str(c.get("id")) for c in cards) or "no model"
    raise ServeError(
        f"--model: found {server.model!r}, expected what the server offers: {names}; choose one"
    )


def _vocabulary(target: Path, *, named: bool) -> int:
    from jax_impl.checkpoint import Checkpoint, CheckpointError
    from jax_impl.config import ConfigError

    if not named and not target.is_dir():
        raise ServeError(
            f"the server's checkpoint ({target}) is not on this machine; give its directory with "
            "--checkpoint"
        )
    try:
        return Checkpoint.open(target).config.vocab_size
    except (CheckpointError, ConfigError) as error:
        raise ServeError(f"--checkpoint: {error}") from None


def _prompts(
    path: Path | None, vocabulary: int, tokens: int, longest: int | None
) -> list[list[int]]:
    """From a file with a prompt of ids per line, else random ones."""
    if path is None:
        rng = np.random.default_rng(0)
        room = longest - tokens if longest else max(LENGTHS)
        lengths = sorted({min(n, room) for n in LENGTHS if room > 0})
        if not lengths:
            raise ServeError(f"--tokens: found {tokens}, the server takes {longest} in all")
        return [rng.integers(0, vocabulary, n).tolist() for n in lengths]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"--prompts: {error}") from None
    found, bad = [], []
    for number, line in enumerate(lines, start=1):
        words = line.replace(",", " ").strip("[] \t").split()
        wrong = [w for w in words if not (is_plain(w) and 0 <= int(w) < vocabulary)]
        if wrong:
            bad.append(
                f"--prompts: line {number}: {wrong[0]!r} is no id of a vocabulary of {vocabulary}"
            )
        elif words:
            found.append([int(w) for w in words])
            if longest and len(words) + tokens > longest:
                bad.append(
                    f"--prompts: line {number}: {len(words)} ids and {tokens} tokens, but the "
                    f"server takes {longest} in all"
                )
    if not found and not bad:
        bad.append(f"--prompts: {path} has no line with token ids")
    if bad:
        raise ServeError("\n".join(bad))
    return found


def check_server(asked: Request) -> Iterator[Verdict]:
    """Asks, makes a record of the answers, and judges it."""
    from parity.golden_vllm import check_record

    where = Where("serve", asked.server.model, "-", against=asked.server.url)
    capabilities = Capabilities()
    answers = collect(asked, capabilities)
    for i, answer in enumerate(answers):
        if isinstance(answer, str):
            yield not_run(where.at(case=f"case{i}"), "answer", answer)
    for name, refusal in capabilities.dropped.items():
        yield not_recorded(where, name, f"the server refuses it: {refusal}")
    for name, words in capabilities.lacking.items():
        say = not_recorded if name in OPTIONAL else not_run
        yield say(where, name, words)
    good = {i: a for i, a in enumerate(answers) if isinstance(a, Completion)}
    if not good:
        return
    if why := dropped_counts(good):
        yield not_recorded(where, "accepted counts", why)
    meta, tensors = as_record(asked, good, _version(asked.server))
    try:
        record = parse(meta, tensors, asked.server.url)
        if asked.keep is not None:
            write_record(asked.keep, meta, tensors)
    except (RecordError, FileExistsError) as error:
        yield not_run(where, "all", f"the answers make no valid record: {error}")
        return
    yield from check_record(where, record, asked.target, asked.draft, tp=asked.tp)


def collect(asked: Request, capabilities: Capabilities) -> Answers:
    """The first prompt alone, then the others, `concurrency` at a time."""

    def one(prompt: list[int]) -> Completion | str:
        body = request(asked.server, prompt, asked.tokens, asked.logprobs)
        try:
            answer = ask(asked.server, body, capabilities)
            return read(answer, prompt, asked.tokens, capabilities)
        except ServerError as error:
            return str(error)

    first, *rest = asked.prompts
    found: Answers = [one(first)]
    with ThreadPoolExecutor(asked.concurrency) as pool:
        found += pool.map(one, rest)
    return found


def _version(server: Server) -> str:
    try:
        return str(server.get("/version").get("version", "unknown"))
    except ServerError:
        return "unknown"


def as_record(
    asked: Request, answers: dict[int, Completion], version: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Both sides of a record of the answers, by the number of the prompt."""
    tensors: dict[str, np.ndarray] = {}
    counted = _consistent(answers)
    for i, answer in answers.items():
        name = f"case{i}.{RUN}"
        tensors[f"case{i}.prompt_ids"] = np.array(asked.prompts[i], np.int32)
        tensors[f"{name}_ids"] = np.array(answer.ids, np.int32)
        if answer.rows is not None:
            tensors |= tabulate(name, answer.rows)
        if counted:
            tensors[f"{name}_accepted_counts"] = np.array(answer.accepted, np.int32)
    meta: dict[str, Any] = {
        "kind": "vllm",
        "format": 1,
        "engine": {"name": "server", "version": version, "model": asked.server.model},
        "device": "not told by a server",
        "run": {"dtype": "unknown"},
        "kernels": {},
        "checkpoint": {"fingerprint": fingerprint(asked.target)},
        "texts": {
            RUN: {
                "sampling": {"temperature": 0.0},
                "speculative": counted is not None,
                "concurrency": asked.concurrency,
            }
        },
    }
    if counted:
        meta["texts"][RUN]["accepted_counts"] = "metrics.speculative_decoding of the answers"
        meta["speculation"] = {
            "method": "unknown", "drafts": counted,
            "draft_sample_method": "greedy", "rejection_sample_method": "standard",
        }  # fmt: skip
    return meta, tensors


def _consistent(answers: dict[int, Completion]) -> int | None:
    """K, if every answer tells its counts and they add up to its text."""
    if not all(_adds_up(a) for a in answers.values()):
        return None
    return max(a.drafts or 0 for a in answers.values())


def _adds_up(answer: Completion) -> bool:
    if answer.accepted is None:
        return False
    emitted = 1 + np.cumsum(np.array(answer.accepted) + 1)
    # otherwise there were steps without drafts, which are not among vLLM's counts
    return emitted[-1] >= len(answer.ids) and (len(emitted) < 2 or emitted[-2] < len(answer.ids))


def dropped_counts(answers: dict[int, Completion]) -> str | None:
    """Why counts that were told are in no record; None if there are none, or all are."""
    told = [i for i, a in answers.items() if a.accepted is not None]
    silent = [i for i in answers if i not in told]
    odd = [i for i in told if not _adds_up(answers[i])]
    if not told or not (silent or odd):
        return None
    parts = ((silent, "no counts"), (odd, "they do not add up to the text (steps without drafts)"))
    found = [f"{_cases(which)}: {words}" for which, words in parts if which]
    return f"{len(told)} of {len(answers)} answers tell them, but {'; '.join(found)}"


def _cases(numbers: list[int]) -> str:
    return ", ".join(f"case{i}" for i in numbers)


def tabulate(name: str, rows: list[dict[int, float]]) -> dict[str, np.ndarray]:
    """The k best tokens of each place, best first; k is what every place has."""
    k = min(len(row) for row in rows)
    best: list[list[tuple[int, float]]] = [
        sorted(row.items(), key=lambda e: (-e[1], e[0]))[:k] for row in rows
    ]

    def column(pick: Callable[[tuple[int, float]], float]) -> list[list[float]]:
        return [[pick(e) for e in row] for row in best]

    return {
        f"{name}_top_ids": np.array(column(lambda e: e[0]), np.int32),
        f"{name}_top_logprobs": np.array(column(lambda e: e[1]), np.float32),
    }
