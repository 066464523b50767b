"""The launcher: starts this process's worker, watches it, and tells the hub in process 0.

A process of its own, so that it also speaks where a worker is stopped, killed or holds the
interpreter for ever. Standard library only.
"""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from jax_impl.processes import LINGER_S, WORKER_VARIABLE, Processes, ProcessOptions
from jax_impl.watch_hub import (
    BEAT_S,
    GREETING_S,
    Hub,
    Lines,
    OwnTime,
    WireError,
    encode,
    greeting,
)
from jax_impl.watch_view import ADVICE, SILENT_S, Limits, Status, View

GIVEN_UP = 3  # exit status where the watchdog ended the run
BAD_INPUT = 2
INTERRUPTED_S = 3.0  # for the others to hear of it, also where they have yet to be reached
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_supervised(
    processes: Processes, options: ProcessOptions, command: list[str] | None = None
) -> int:
    """Run `command` (None: this process's own command line) as a watched worker.

    Returns the exit status: the worker's where it ended by itself, 3 where the watchdog ended the
    run, 128 + n after signal n.
    """
    launcher = _Launcher(processes, options)
    before = {}
    for number in SIGNALS:
        # nohup stays nohup, and so does a script's background, which hands SIGINT on ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, launcher.interrupt)
    try:
        return launcher.run(command or [sys.executable, *sys.orig_argv[1:]])
    finally:
        launcher.end_worker()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Worker:
    """The child process, its pipe, and what is known of it."""

    def __init__(self, command: list[str]) -> None:
        self.pipe, theirs = os.pipe()
        os.set_blocking(self.pipe, False)
        self.child = subprocess.Popen(
            command,
            env=os.environ | {WORKER_VARIABLE: str(theirs)},
            pass_fds=(theirs,),
            start_new_session=True,  # Ctrl-C reaches the launcher only, which then ends it
        )
        os.close(theirs)
        self._lines, self._beat = Lines(), {}
        self._heard = self._changed = 0.0
        self._failing: float | None = None

    def read(self, now: float) -> bool:
        """Take in what it has sent; False at the end of the pipe."""
        with suppress(BlockingIOError):
            data = os.read(self.pipe, 1 << 16)
            for beat in self._lines.feed(data):
                if beat["serial"] != self._beat.get("serial"):
                    self._changed = now
                self._beat, self._heard = beat, now
            return bool(data)
        return True

    def status(self, now: float) -> Status:
        """Its state at time `now`."""
        code, beat = self.child.poll(), dict(self._beat)
        beat.pop("serial", None)
        said = beat.pop("status", None)
        if beat.get("error") and self._failing is None:
            self._failing = now
        if code is None and self._failing is not None:
            # it has printed its error and waits to be ended, or hangs on the way to its end
            code = 1 if said is None and now - self._failing > LINGER_S else said
        silent = 0.0 if code is not None else now - self._heard
        unchanged = now - self._changed
        return Status(
            **beat,
            status=code,
            silent=silent,
            unchanged=unchanged,
            system=self._system() if silent > 3 * BEAT_S or unchanged > SILENT_S else "",
        )

    def _system(self) -> str:
        """The kernel's word on the process, where that explains why it does nothing."""
        try:
            with open(f"/proc/{self.child.pid}/stat") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        except (OSError, IndexError):
            return ""
        return {"T": "stopped", "D": "waiting for storage or a driver"}.get(state, "")

    def end(self) -> None:
        """End it and its children, which share its process group.

        Not by a request first: JAX takes a while over one, and meanwhile prints its own alarm
        about the others over the message.
        """
        if self.child.poll() != 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(5.0)


class _Launcher:
    """One process's watchdog."""

    def __init__(self, processes: Processes, options: ProcessOptions) -> None:
        self.processes, self.options = processes, options
        limits = Limits(options.start_timeout, options.stall_timeout)
        self._view = View(processes.number, limits, options.local_devices)  # the hub's, in 0
        self._time, self._signal = OwnTime(), 0
        self._hub: Hub | None = None
        self._worker: _Worker | None = None
        self._selector = selectors.DefaultSelector()
        self._dialled: queue.SimpleQueue[tuple[socket.socket, Lines, list[dict[str, Any]]]]
        self._dialled = queue.SimpleQueue()
        self._link: socket.socket | None = None
        self._lines = Lines()
        self._table: list[str] = []
        self._heard = self._sent = 0.0
        self._lost = False

    def interrupt(self, number: int, _frame: Any) -> None:
        """Signal handler: the loop does the rest."""
        self._signal = self._signal or number

    def end_worker(self) -> None:
        """End the worker, whatever happened."""
        if self._worker is not None:
            self._worker.end()

    def run(self, command: list[str]) -> int:
        """Start and watch; see `run_supervised`."""
        p = self.processes
        if p.index == 0:
            try:
                self._hub = Hub(p.hub, self._view)
            except OSError as error:
                host, port = p.hub
                _say(
                    f"k3: port {port} on this host ({host}), where the watchdogs meet: "
                    f"{error.strerror}. Choose another port in --coordinator for all processes; "
                    "process 0 must run on that host."
                )
                return BAD_INPUT
            self._hub.start()
        self._worker = _Worker(command)
        self._selector.register(self._worker.pipe, selectors.EVENT_READ)
        threading.Thread(target=self._dial, name="k3 dial", daemon=True).start()
        status = self._watch()
        self.end_worker()
        if self._link is not None:
            self._link.close()
        if self._hub is not None:
            self._hub.join(5.0)
        return status

    def _watch(self) -> int:
        interrupted = 0.0
        while True:
            messages = self._receive()
            now = self._time.look()
            status = self._worker.status(now)  # type: ignore[union-attr]
            if self._signal:
                interrupted = interrupted or now
                name = signal.Signals(self._signal).name
                fields = {"status": 128 + self._signal, "system": f"interrupted by {name}"}
                status = Status(**(asdict(status) | fields))
            code = status.status if status.status is not None and status.status > 0 else GIVEN_UP
            for message in messages:
                if "refused" in message:
                    _say(f"k3: process 0 refuses this one: {message['refused']}")
                    return BAD_INPUT
                if "end" in message:
                    _say(str(message["end"]))
                    return code
                if "done" in message:
                    return status.status or 0
                if isinstance(message.get("table"), list):
                    self._table = [str(line) for line in message["table"]]
            problem = self._out_of_touch(now, status)
            if interrupted and (problem or now - interrupted > INTERRUPTED_S):
                return code
            if problem:
                _say(problem)
                return code
            self._send(now, status)

    def _receive(self) -> list[dict[str, Any]]:
        """What came from the hub; reads the worker's pipe on the way."""
        messages: list[dict[str, Any]] = []
        if self._link is None and not self._dialled.empty():
            self._link, self._lines, messages = self._dialled.get()
            self._heard = self._time.now
            self._selector.register(self._link, selectors.EVENT_READ)
        for key, _ in self._selector.select(0.2):
            if key.fileobj is not self._link:
                if not self._worker.read(self._time.look()):  # type: ignore[union-attr]
                    self._selector.unregister(key.fileobj)
                continue
            try:
                data = self._link.recv(1 << 16)
                messages += self._lines.feed(data)
            except (OSError, WireError):
                data = b""
            self._heard = self._time.now
            if not data:
                self._lost = True
                self._selector.unregister(self._link)
        return messages

    def _send(self, now: float, status: Status) -> None:
        """A report every second, and at once when the worker has ended."""
        if self._link is None or (status.status is None and now - self._sent < BEAT_S):
            return
        self._sent = now
        with suppress(OSError):  # a lost connection shows in reading
            self._link.sendall(encode(asdict(status)))

    def _out_of_touch(self, now: float, status: Status) -> str:
        """Message for the case that process 0 does not hold the run together; else empty."""
        host, port = self.processes.hub
        at = f"{host}:{port}"
        names = [line.split(": ", 1)[0] for line in self._table]
        first = names[0] if names else self._view.name(0)
        if self._lost:
            what = f"the launcher of {first} is gone (connection to {at} lost)"
        elif self._link is not None and now - self._heard > SILENT_S:
            what = f"nothing heard of {first} at {at} for {now - self._heard:.0f} s"
        elif self._link is None and now > self.options.start_timeout:
            limit = f"{self.options.start_timeout:g} s (--start-timeout)"
            what = f"{first} did not start: its launcher did not answer at {at} within {limit}"
        elif self._link is None and status.status and now > GREETING_S:
            said = f" over {status.error}" if status.error else ""
            what = f"this worker ended with status {status.status}{said}; {first} is not there"
        else:
            return ""
        p, mine = self.processes, f"{status.place()}, for {status.unchanged:.0f} s"
        lines = list(self._table) or [f"{self._view.name(p.index)}: {mine}"]
        if p.index < len(names):  # of itself it knows more than the last table
            lines[p.index] = f"{names[p.index]}: {mine}"
        known = [f"  {line}" for line in lines]
        where = "Where all were, and what they waited for, when last heard of:"
        advice = ADVICE[4 if self._link is None else 1]
        return "\n".join([f"k3 watchdog: {what}.", where, *known, advice])

    def _dial(self) -> None:
        """Thread: try to reach the hub until it answers; names may take long to resolve."""
        while True:
            sock = None
            try:
                sock = socket.create_connection(self.processes.hub, timeout=GREETING_S)
                if sock.getsockname() == sock.getpeername():  # connected to itself
                    raise WireError
                sock.sendall(encode(greeting(self.processes.index, self.processes.number)))
                lines, messages = Lines(), []
                while not messages:
                    data = sock.recv(1 << 16)
                    messages = lines.feed(data)
                    if not data:
                        raise WireError
                if {"welcome", "refused"} & set(messages[0]):
                    self._dialled.put((sock, lines, messages))
                    return
            except (OSError, WireError):
                pass
            if sock is not None:
                sock.close()
            time.sleep(0.3)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
