"""Recorded multi-turn traffic: the trace file, and its replay in a closed loop.

A trace is a text file of one JSON object per line, each one session of one user:

    {"turns": [{"new": 24, "output": 8, "pause_s": 0.0}, ...]}

`new` tokens are added to the conversation, `pause_s` seconds after the user's last answer was
complete (for a first turn: after the user came), and `output` tokens are answered; the end of text
is ignored. The content is synthetic: random ids. A conversation is kept between its turns, so that
a turn processes nothing but its new tokens.

C users are served at a time. When a session is over its user leaves and the next one in the file
comes. A due turn is prefilled before the next decode step, which all others wait for. Several
processes must take the same turn next, and their clocks differ: the first one's word counts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serve import LIMIT, Serving
from bench.timing import Clock
from jax_impl.problems import listed

NOBODY = -1  # is due


@dataclass(frozen=True)
class Turn:
    """One request of a session: tokens added, tokens answered, pause before it in seconds."""

    new: int
    output: int
    pause_s: float


@dataclass(frozen=True)
class TurnServed:
    """How a turn went. Times in seconds; `reused` tokens were in the cache already."""

    user: int
    due: float
    first: float
    last: float
    tokens: int
    processed: int
    reused: int


@dataclass
class _User:
    number: int
    turns: list[Turn]
    due: float
    handle: int | None = None
    served: list[TurnServed] = field(default_factory=list)
    first: float = 0.0
    processed: int = 0
    reused: int = 0


def read_trace(path: str | Path) -> list[list[Turn]]:
    """The sessions of a trace file.

    Raises:
        ValueError: listing every line that is not a session.
    """
    sessions, problems = [], []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not readable as a trace: {error}; expected a text file with a session per "
            "line; check the name"
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            sessions.append([Turn(**turn) for turn in json.loads(line)["turns"]])
        except (ValueError, TypeError, KeyError) as error:
            problems.append(f"line {number}: found {error!r}, expected an object with turns")
            continue
        turns = sessions[-1]
        sound = turns and all(
            type(t.new) is type(t.output) is int and t.new >= 1 and t.output >= 2
            and type(t.pause_s) in (int, float) and 0 <= t.pause_s < math.inf
            for t in turns
        )  # fmt: skip
        if not sound:
            problems.append(
                f"line {number}: expected turns with whole numbers new >= 1 and output >= 2, and a "
                "finite pause_s >= 0"
            )
    if not sessions and not problems:
        problems.append("no session in it")
    if problems:
        do = "Correct these lines; `bench/traffic.py` describes the form, `bench/traces` has one."
        raise ValueError(listed(f"{path}: not a trace", problems, do))
    return sessions


def longest(sessions: Sequence[Sequence[Turn]]) -> int:
    """Tokens of the longest conversation."""
    return max(sum(t.new + t.output for t in turns) for turns in sessions)


def wait_until(moment: float) -> None:
    """Sleep until a moment of `time.perf_counter`."""
    time.sleep(max(0.0, moment - time.perf_counter()))


def replay(
    engine: Serving,
    sessions: Sequence[Sequence[Turn]],
    users: int,
    content: Callable[[int], list[int]],
    *,
    clock: Clock = time.perf_counter,
    wait: Callable[[float], None] = wait_until,
    agree: Callable[[int], int] = int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[TurnServed]:
    """Serve all sessions, `users` at a time; every turn in the order of its end.

    `agree` returns the first process's number in all of them; they call it at the same places.
    Draws of user i have `seed` + i.

    Raises:
        ValueError: a sequence stopped for another reason than its output limit.
    """
    waiting = [_User(i, list(turns), 0.0) for i, turns in enumerate(sessions)]
    idle: list[_User] = []  # present, between turns
    running: list[_User] = []
    served: list[TurnServed] = []
    while waiting or idle or running:
        while waiting and len(idle) + len(running) < users:
            came = waiting.pop(0)
            came.due = clock() + came.turns[0].pause_s
            idle.append(came)
        number = agree(_most_due(idle, clock())) if idle else NOBODY
        if number != NOBODY:
            user = next(u for u in idle if u.number == number)
            idle.remove(user)
            draws = {"temperature": temperature, "seed": (seed + user.number) % 2**32}
            _begin(engine, user, content, clock, draws)
            running.append(user)
            continue
        if not running:
            wait(min(u.due for u in idle))
            continue
        engine.decode([u.handle for u in running])
        end = clock()
        for user in list(running):
            if _over(engine, user):
                running.remove(user)
                served.append(_finish(engine, user, end))
                if user.turns:
                    user.due = end + user.turns[0].pause_s
                    idle.append(user)
                else:
                    engine.release(user.handle)  # type: ignore[arg-type]
    return served


def _most_due(idle: Sequence[_User], now: float) -> int:
    """Number of the user whose turn has been due for longest."""
    due = [u for u in idle if u.due <= now]
    return min(due, key=lambda u: u.due).number if due else NOBODY


def _begin(
    engine: Any,
    user: _User,
    content: Callable[[int], list[int]],
    clock: Clock,
    draws: dict[str, Any],
) -> None:
    """Add the due turn's tokens and prefill them."""
    turn = user.turns[0]
    ids = content(turn.new)
    if user.handle is None:
        user.handle = engine.add(ids, limit=turn.output, **draws)
    else:
        engine.extend(user.handle, ids)
        engine.sequences[user.handle].limit = turn.output
    seq = engine.sequences[user.handle]
    user.reused = seq.processed
    user.processed = len(seq.ids) - seq.processed
    engine.prefill(user.handle)
    user.first = clock()


def _over(engine: Any, user: _User) -> bool:
    seq = engine.sequences[user.handle]
    if seq.failed is not None:
        raise ValueError(f"user {user.number}: {seq.failed}; check the weights")
    if seq.finished not in (None, LIMIT):
        raise ValueError(f"user {user.number}: ended early: {seq.finished}")
    return seq.finished == LIMIT


def _finish(engine: Any, user: _User, end: float) -> TurnServed:
    turn = user.turns.pop(0)
    return TurnServed(
        user.number, user.due, user.first, end, turn.output, user.processed, user.reused
    )
