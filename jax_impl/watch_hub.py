"""What the launchers tell each other, and the one place that judges it: the launcher of process 0.

JSON lines over TCP. A launcher opens with a greeting, is welcomed or refused, then sends its
worker's `Status` every second; the hub answers with a table of all, and in the end with `done` or
with the text of what went wrong. Connections that do not speak this are closed.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import fields
from typing import Any

from jax_impl.watch_view import Peer, Status, View

PROTOCOL = 1
BEAT_S = 1.0
SETTLE_S = 1.5  # from the first trouble to the verdict: a death shows before its consequences
GREETING_S = 5.0
LONGEST_LINE = 1 << 16


class WireError(ValueError):
    """Bytes that are not this protocol."""


class Lines:
    """Puts received bytes together to JSON objects, one a line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The objects that are complete with `data`.

        Raises:
            WireError: a line is too long or not a JSON object.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise WireError(f"a line of more than {LONGEST_LINE} bytes")
        found = []
        for line in whole:
            try:
                found.append(json.loads(line))
            except ValueError:
                raise WireError("a line that is not JSON") from None
            if not isinstance(found[-1], dict):
                raise WireError("a line that is not a JSON object")
        return found


class OwnTime:
    """Seconds during which this process itself ran.

    A job that was suspended and goes on must not take its peers for silent, so one look at the
    clock counts two seconds at most.
    """

    def __init__(self) -> None:
        self.now, self._last = 0.0, time.monotonic()

    def look(self) -> float:
        """Time now; call it often."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, 2.0)
        return self.now


def read_status(message: dict[str, Any]) -> Status:
    """A received `Status`.

    Raises:
        WireError: fields missing, unknown or of the wrong type.
    """
    message = dict(message)
    if isinstance(message.get("ranks"), list):
        message["ranks"] = tuple(message["ranks"])
    kinds: dict[str, Any] = {
        **{"step": int | None, "status": int | None, "finished": bool},
        **{n: int | float for n in ("unchanged", "allow", "silent")},
        **{n: str for n in ("doing", "error", "system")},
    }
    ranks = message.get("ranks")
    if (
        set(message) != {f.name for f in fields(Status)}
        or not all(isinstance(message[name], kind) for name, kind in kinds.items())
        or not (ranks is None or (isinstance(ranks, tuple) and [*map(type, ranks)] == [int] * 2))
    ):
        raise WireError("not a status")
    return Status(**message)


def encode(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode() + b"\n"


def greeting(index: int, number: int) -> dict[str, Any]:
    """A launcher's first message."""
    return {"k3": PROTOCOL, "process": index, "of": number, "host": socket.gethostname()}


class Hub(threading.Thread):
    """Takes all launchers' reports and ends the run: well, or with a verdict to everybody."""

    def __init__(self, address: tuple[str, int], view: View) -> None:
        """Listen; the thread takes it from there.

        Raises:
            OSError: the port cannot be had.
        """
        super().__init__(name="k3 hub", daemon=True)
        host, port = address
        if host in ("localhost", "127.0.0.1"):
            self._server = socket.create_server(("127.0.0.1", port))
        elif socket.has_dualstack_ipv6():
            self._server = socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._server = socket.create_server(("", port))
        self._view, self._time = view, OwnTime()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._new: dict[socket.socket, tuple[float, Lines]] = {}
        self._known: dict[socket.socket, tuple[int, Lines]] = {}
        self._trouble_since: float | None = None

    def run(self) -> None:
        """Serve until all is over."""
        sent = 0.0
        final: dict[str, Any] | None = None
        while final is None:
            for key, _ in self._selector.select(0.2):
                self._read(key.fileobj)  # type: ignore[arg-type]
            now = self._time.look()
            for sock in [s for s, (since, _) in self._new.items() if now - since > GREETING_S]:
                self._close(sock)
            final = self._judge(now)
            if final is None and now - sent > BEAT_S:
                sent = now
                self._tell({"table": self._view.table()})
        self._tell(final)
        self._part()

    def _judge(self, now: float) -> dict[str, Any] | None:
        """The last message to all, once there is one."""
        peers = self._view.peers.values()
        if len(peers) == self._view.number and all(p.status.ended_well for p in peers):
            return {"done": True}
        troubles = self._view.troubles(now)
        if not troubles:
            self._trouble_since = None
            return None
        if self._trouble_since is None:
            self._trouble_since = now
        settled = now - self._trouble_since > SETTLE_S or any(t.order == 0 for t in troubles)
        return {"end": self._view.verdict(troubles)} if settled else None

    def _read(self, sock: socket.socket) -> None:
        if sock is self._server:
            with suppress(OSError):
                new, _ = self._server.accept()
                new.settimeout(GREETING_S)
                self._new[new] = (self._time.now, Lines())
                self._selector.register(new, selectors.EVENT_READ)
            return
        lines = (self._new.get(sock) or self._known[sock])[1]
        try:
            data = sock.recv(1 << 16)
            for message in lines.feed(data):
                if sock in self._known:
                    peer = self._view.peers[self._known[sock][0]]
                    peer.status, peer.heard = read_status(message), self._time.now
                elif not self._greet(sock, message, lines):
                    return
        except (OSError, WireError):
            data = b""
        if not data:
            self._close(sock)

    def _greet(self, sock: socket.socket, message: dict[str, Any], lines: Lines) -> bool:
        """Whether the sender of this greeting is one of us; else it is closed."""
        view, index = self._view, message.get("process")
        expected = greeting(0, view.number)
        if message.get("k3") != PROTOCOL or set(message) != set(expected):
            self._close(sock)
            return False
        problem = ""
        if message["of"] != view.number:
            problem = f"found --num-processes {message['of']}, expected {view.number}"
        elif type(index) is not int or not 0 <= index < view.number:
            problem = f"found --process-id {index}, expected 0..{view.number - 1}"
        elif index in view.peers:
            problem = f"--process-id {index} is taken (by host {view.peers[index].host})"
        with suppress(OSError):
            sock.sendall(encode({"refused": problem} if problem else {"welcome": True}))
        if problem:
            self._close(sock)
            return False
        del self._new[sock]
        self._known[sock] = (index, lines)
        view.peers[index] = Peer(str(message["host"])[:100], heard=self._time.now)
        return True

    def _tell(self, message: dict[str, Any]) -> None:
        for sock in list(self._known):
            try:
                sock.sendall(encode(message))
            except OSError:
                self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        if sock in self._known:
            self._view.peers[self._known.pop(sock)[0]].lost = True
        self._new.pop(sock, None)
        with suppress(KeyError):
            self._selector.unregister(sock)
        sock.close()

    def _part(self) -> None:
        """Close so that the last message arrives: a socket with unread data would discard it."""
        for sock in self._known:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 3.0
        while self._known and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.2):
                sock = key.fileobj
                if sock is self._server or sock not in self._known:
                    continue
                try:
                    data = sock.recv(1 << 16)  # type: ignore[union-attr]
                except OSError:
                    data = b""
                if not data:
                    self._close(sock)  # type: ignore[arg-type]
        for sock in [*self._known, *self._new, self._server]:
            self._close(sock)
