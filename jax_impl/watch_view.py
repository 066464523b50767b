"""Judging several processes by what their launchers say of them: pure functions of a `View`."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass, field

SILENT_S = 20.0  # a worker or launcher not heard of for so long is given up
STOPPED_S = 5.0  # the same for one that the system says is stopped
NO_STEP_S = 1800.0  # standstill allowed outside decode steps (loading, comparing)
ABORTED = -signal.SIGABRT  # how JAX ends a process over another's death


@dataclass(frozen=True)
class Status:
    """What a launcher knows of its worker.

    Attributes:
        ranks: first and last rank; None before it has joined.
        step: decode step; None outside one.
        doing: what it does or waits for.
        unchanged: seconds since it last said something new.
        allow: seconds that this may take; 0: the default.
        silent: seconds since its last heartbeat.
        finished: its work is done.
        error: the error that ends it.
        status: its exit status, negative for a signal; None while it runs.
        system: what the system says of the process, such as "stopped".
    """

    ranks: tuple[int, int] | None = None
    step: int | None = None
    doing: str = "starting"
    unchanged: float = 0.0
    allow: float = 0.0
    silent: float = 0.0
    finished: bool = False
    error: str = ""
    status: int | None = None
    system: str = ""

    @property
    def ended_well(self) -> bool:
        """Finished, also with a result that is bad (status 1 of a comparison that ran)."""
        return self.status == 0 or (self.finished and self.status is not None and self.status > 0)

    def place(self) -> str:
        """Step, and what was waited for."""
        step = "before the first step" if self.step is None else f"step {self.step}"
        return f"{step}: {self.doing}"


@dataclass
class Peer:
    """A process as the hub sees it."""

    host: str
    status: Status = Status()
    heard: float = 0.0
    lost: bool = False


@dataclass(frozen=True)
class Trouble:
    """Something wrong with process `index`; of several, the least `order` counts as the cause."""

    order: int
    index: int
    what: str


@dataclass(frozen=True)
class Limits:
    """How long is too long, in seconds."""

    start: float
    stall: float
    silent: float = SILENT_S


@dataclass
class View:
    """All that a verdict depends on; `peers` by process, for those that came."""

    number: int
    limits: Limits
    local_devices: int | None = None
    peers: dict[int, Peer] = field(default_factory=dict)

    def name(self, index: int) -> str:
        """Process, ranks and host, as far as known."""
        peer, local = self.peers.get(index), self.local_devices
        ranks = None if peer is None else peer.status.ranks
        if ranks is None and local is not None:
            ranks = (index * local, (index + 1) * local - 1)
        known = [] if ranks is None else [f"rank{'s' * (ranks[0] != ranks[1])} {_span(ranks)}"]
        known += [] if peer is None else [f"host {peer.host}"]
        return f"process {index} of {self.number}" + (f" ({', '.join(known)})" if known else "")

    def table(self) -> list[str]:
        """A line per process: where it is and what it waits for."""
        return [f"{self.name(i)}: {self._line(self.peers.get(i))}" for i in range(self.number)]

    def _line(self, peer: Peer | None) -> str:
        if peer is None:
            return "never came"
        s = peer.status
        if s.ended_well:
            return "finished"
        ended = "" if s.status is None else f" [{_ending(s)}]"
        return f"{s.place()}, for {s.unchanged:.0f} s{ended}"

    def troubles(self, now: float) -> list[Trouble]:
        """Everything wrong at time `now`."""
        found = [t for i in self.peers if (t := self._of_one(i, now)) is not None]
        if found:
            # what errors out may do so over one that is silent, but not yet for long enough
            found += [
                Trouble(2, i, self._silence(i, p.status))
                for i, p in self.peers.items()
                if p.status.status is None and p.status.silent > STOPPED_S
            ]
        if len(self.peers) < self.number:
            if now > self.limits.start:
                missing = [i for i in range(self.number) if i not in self.peers]
                what = f"did not start within {self.limits.start:g} s (--start-timeout)"
                found += [Trouble(4, i, f"{self.name(i)} {what}") for i in missing]
        elif not found:
            found = self._standstill()
        return found

    def _of_one(self, index: int, now: float) -> Trouble | None:
        peer, name = self.peers[index], self.name(index)
        s = peer.status
        last = f"last seen {s.place()}"
        if s.ended_well:
            return None
        if s.status is not None:
            order = 0 if s.system else 3 if s.status > 0 or s.status == ABORTED else 1
            return Trouble(order, index, f"{name} {_ending(s)}; {last}")
        if peer.lost:
            return Trouble(1, index, f"the launcher of {name} is gone (connection lost); {last}")
        if now - peer.heard > self.limits.silent:
            silent = f"{now - peer.heard:.0f} s"
            return Trouble(
                1, index, f"nothing heard of {name}, launcher and worker, for {silent}; {last}"
            )
        if s.silent > (STOPPED_S if s.system == "stopped" else self.limits.silent):
            return Trouble(2, index, self._silence(index, s))
        return None

    def _silence(self, index: int, s: Status) -> str:
        system = f" (the system says: {s.system})" if s.system else ""
        return (
            f"{self.name(index)} has sent no heartbeat for {s.silent:.0f} s{system}; "
            f"last seen {s.place()}"
        )

    def _standstill(self) -> list[Trouble]:
        """Those behind all others, when every one of them has stood still for too long."""
        active = {
            i: p.status
            for i, p in self.peers.items()
            if p.status.status is None and not p.status.finished
        }
        lowest = min((-1 if s.step is None else s.step for s in active.values()), default=0)
        behind = {i: s for i, s in active.items() if (-1 if s.step is None else s.step) == lowest}
        if any(
            s.unchanged <= (s.allow or (NO_STEP_S if s.step is None else self.limits.stall))
            for s in behind.values()
        ):
            return []
        return [
            Trouble(
                5,
                i,
                f"{self.name(i)} has not moved for {s.unchanged:.0f} s in {s.place()}"
                f"{' (the system says: ' + s.system + ')' if s.system else ''}",
            )
            for i, s in behind.items()
        ]

    def verdict(self, troubles: list[Trouble]) -> str:
        """The message of what went wrong: cause, state of all, what to do."""
        order = min(t.order for t in troubles)
        causes = list(dict.fromkeys(t.what for t in troubles if t.order == order))
        shown = causes[:4] + [f"and {len(causes) - 4} more"] * (len(causes) > 4)
        return "\n".join(
            [
                f"k3 watchdog: {'; '.join(shown)}.",
                "Where all were and what they waited for:",
                *(f"  {line}" for line in self.table()),
                ADVICE[order],
            ]
        )


ADVICE = {
    0: "All processes are ended.",
    1: "All processes are ended. Look at that host: its kernel log (out of memory?), its driver "
    "and its network; then start all processes again.",
    2: "All processes are ended. Something holds that process (a stop signal, storage or a driver "
    "that does not answer); find out on its host, then start all processes again.",
    3: "All processes are ended. The error is on standard error of that process; correct it, then "
    "start all processes again.",
    4: "All processes are ended. Start the missing ones with the same --coordinator and "
    "--num-processes and their own --process-id (--start-timeout gives them longer), and check "
    "that they reach the coordinator's port and the one above it.",
    5: "All processes are ended. They wait for each other: look for a process that does another "
    "step than the rest, or a network that drops data; --stall-timeout allows longer steps.",
}


def _span(ranks: tuple[int, int]) -> str:
    return str(ranks[0]) if ranks[0] == ranks[1] else f"{ranks[0]}-{ranks[1]}"


def _ending(s: Status) -> str:
    if s.system:
        return f"was ended: {s.system}"
    if s.status is not None and s.status < 0:
        with suppress(ValueError):
            return f"died: killed by {signal.Signals(-s.status).name}"
        return f"died: killed by signal {-s.status}"
    said = f" over {s.error}" if s.error else ""
    return f"ended with status {s.status}{said}"
