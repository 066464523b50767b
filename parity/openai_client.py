"""A client for the completions endpoint of an OpenAI-compatible server: token ids in and out.

Only the standard library is needed: one JSON request at a time and thread, with a deadline for the
whole answer, not only for each piece of it.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LIMIT = 1 << 30  # bytes of an answer: 1000 rows of 160 000 listed tokens fit
PIECE = 1 << 16
EXTENSIONS = ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "ignore_eos")
_ID = "token_id:"

Json = dict[str, Any]


class ServerError(Exception):
    """A request without a usable answer; the message says what was asked and what came."""


class Refusal(ServerError):
    """The server refused the request as it stands (status 400 or 422)."""


@dataclass(frozen=True)
class Server:
    """Where a server is and how long it may take.

    Attributes:
        url: base address, with or without `/v1`.
        model: the name that requests carry.
        timeout: seconds for one whole answer.
        key: sent as a bearer token, if any.
    """

    url: str
    model: str
    timeout: float
    key: str | None = None

    def address(self, path: str) -> str:
        """Of an endpoint, `path` as in `/v1/models`."""
        return self.url.rstrip("/").removesuffix("/v1") + path

    def get(self, path: str) -> Json:
        """A JSON object.

        Raises:
            ServerError: there is none.
        """
        return self._ask(path, None)

    def post(self, path: str, body: Json) -> Json:
        """The answer to a JSON object.

        Raises:
            Refusal: status 400 or 422.
            ServerError: anything else that is not a JSON object.
        """
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None) -> Json:
        address, end = self.address(path), time.monotonic() + self.timeout
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(address, body, headers)
        try:
            with _opener(address).open(request, timeout=self.timeout) as answer:
                raw = _read(answer, end)
        except urllib.error.HTTPError as error:
            kind = Refusal if error.code in (400, 422) else ServerError
            raise kind(f"{address}: status {error.code}: {_said(error)}") from None
        except TimeoutError:
            raise ServerError(
                f"{address}: no whole answer within {self.timeout:g} s; is the server busy? "
                "See --timeout and --concurrency"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                cause = f"no connection within {self.timeout:g} s"
            raise ServerError(f"{address}: {type(error).__name__}: {cause}") from None
        return _object(address, raw)


def _opener(address: str) -> urllib.request.OpenerDirector:
    """Without a proxy for this machine's own addresses."""
    host = urllib.parse.urlsplit(address).hostname or ""
    own = host == "localhost" or host.startswith("127.") or host == "::1"
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if own else []))


def _read(answer: Any, end: float) -> bytes:
    """The whole body; a server that sends a byte now and then does not hold us for ever."""
    found = bytearray()
    while piece := answer.read1(PIECE):
        found += piece
        if time.monotonic() > end:
            raise TimeoutError
        if len(found) > LIMIT:
            raise http.client.HTTPException(f"more than {LIMIT} bytes")
    missing = answer.length  # what a server announced and did not send
    if missing:
        raise http.client.IncompleteRead(bytes(found), missing)
    return bytes(found)


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(2000).decode("utf-8", "replace").strip() or error.reason
    except (OSError, http.client.HTTPException):
        return str(error.reason)


def _object(address: str, raw: bytes) -> Json:
    try:
        found = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ServerError(f"{address}: not JSON ({error}): {raw[:200]!r}") from None
    if not isinstance(found, dict):
        raise ServerError(f"{address}: expected a JSON object, found {raw[:200]!r}")
    return found


# ---- completions ----


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        ids: what was generated.
        rows: listed tokens and their log-probabilities behind each place, from place `first` on;
            None if the server gave none that can be used.
        first: 0 with the prompt's rows, else the place behind which the first id was chosen.
        accepted: accepted drafts of each step, if told.
        drafts: K, if told.
    """

    ids: list[int]
    rows: list[dict[int, float]] | None
    first: int
    accepted: list[int] | None = None
    drafts: int | None = None


@dataclass
class Capabilities:
    """What a server does not offer, found on the first request: name to what that means."""

    dropped: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)

    def lack(self, name: str, words: str) -> None:
        """Notes it once."""
        self.lacking.setdefault(name, words)


def request(server: Server, prompt: list[int], tokens: int, logprobs: int) -> Json:
    """The body of a greedy request, with every extension."""
    return {
        "model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "logprobs": logprobs, "prompt_logprobs": logprobs, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "ignore_eos": True, "stream": False,
    }  # fmt: skip


def ask(server: Server, body: Json, capabilities: Capabilities) -> Json:
    """Posts without what the server is known to refuse; finds that out where it refuses.

    Raises:
        ServerError: no answer, or the plain request is refused too.
    """
    body = {k: v for k, v in body.items() if k not in capabilities.dropped}
    while True:
        try:
            return server.post("/v1/completions", body)
        except Refusal as error:
            left = [n for n in EXTENSIONS if n in body]
            named = [n for n in left if n in str(error)] or left[:1]
            if not named:
                raise ServerError(
                    f"{error}. The request holds token ids as its prompt, max_tokens, temperature "
                    "and logprobs only; a server that cannot take these cannot be compared"
                ) from None
            for name in named:
                capabilities.dropped[name] = str(error)
                del body[name]


def read(answer: Json, prompt: list[int], tokens: int, capabilities: Capabilities) -> Completion:
    """What an answer says, and what it lacks.

    Raises:
        ServerError: it is no answer to this request, or ids cannot be told from it.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError(f"no choices in the answer: {str(answer)[:200]}")
    choice = choices[0]
    _check_prompt(answer, choice, prompt)
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    ids = choice.get("token_ids")
    if not _ids(ids):
        ids = [_token(t) for t in logprobs.get("tokens") or ()]
        if not ids or None in ids:
            raise ServerError(
                "the answer names its tokens by text only; the comparison needs ids: "
                "return_token_ids or return_tokens_as_token_ids (vLLM has both)"
            )
    if len(ids) != tokens:
        why = f"finish_reason {choice.get('finish_reason')!r}"
        if "ignore_eos" in capabilities.dropped:
            why += "; this server has no ignore_eos, so its text ends where the model ends it"
        if not ids or len(ids) > tokens:
            raise ServerError(f"asked for {tokens} tokens, found {len(ids)}; {why}")
        capabilities.lack("length", f"a text has {len(ids)} of {tokens} tokens; {why}")
    rows = _rows(logprobs.get("top_logprobs"), len(ids), capabilities)
    first = len(prompt) - 1
    if rows is not None:
        before = _prompt_rows(choice.get("prompt_logprobs"), len(prompt), capabilities)
        rows, first = (before + rows, 0) if before is not None else (rows, first)
    return Completion(ids, rows, first, *_counts(answer, capabilities))


def _check_prompt(answer: Json, choice: Json, prompt: list[int]) -> None:
    seen = choice.get("prompt_token_ids")
    if seen is not None and seen != prompt:
        raise ServerError(
            f"the server read another prompt than it was sent: {str(seen)[:120]} for "
            f"{str(prompt)[:120]}; a prompt of ids must be taken as it is"
        )
    usage = answer.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if count is not None and count != len(prompt):
        raise ServerError(
            f"the server counts {count} prompt tokens, {len(prompt)} were sent; it adds tokens or "
            "takes the ids for text"
        )


def _ids(found: Any) -> bool:
    return (
        isinstance(found, list)
        and all(isinstance(x, int) and x >= 0 for x in found)
        and found != []
    )


def _token(text: Any) -> int | None:
    digits = text.removeprefix(_ID) if isinstance(text, str) and text.startswith(_ID) else ""
    return int(digits) if digits.isascii() and digits.isdigit() else None


def _rows(found: Any, count: int, capabilities: Capabilities) -> list[dict[int, float]] | None:
    if not isinstance(found, list) or not found:
        capabilities.lack("logprobs", "the answers hold no top_logprobs; vLLM: --max-logprobs")
        return None
    if len(found) != count or not all(isinstance(r, dict) and r for r in found):
        raise ServerError(f"{len(found)} rows of top_logprobs for {count} tokens, or empty ones")
    rows = []
    for row in found:
        ids = [_token(t) for t in row]
        if None in ids:
            capabilities.lack(
                "logprobs",
                "top_logprobs name tokens by text, which cannot be told apart; needed: "
                "return_tokens_as_token_ids (vLLM: in the request, or as an option of the server)",
            )
            return None
        rows.append(dict(zip(ids, map(_number, row.values()), strict=True)))
    return rows


def _prompt_rows(
    found: Any, count: int, capabilities: Capabilities
) -> list[dict[int, float]] | None:
    """Rows of the places before the prompt's last token; vLLM's first entry is null."""
    if not isinstance(found, list):
        why = capabilities.dropped.get("prompt_logprobs", "the answers hold none")
        capabilities.lack("prompt_logprobs", f"rows of the prompt are not compared: {why}")
        return None
    if len(found) != count or not all(isinstance(r, dict) and r for r in found[1:]):
        raise ServerError(f"{len(found)} entries of prompt_logprobs for {count} prompt tokens")
    try:
        return [
            {int(token): _number(entry["logprob"]) for token, entry in row.items()}
            for row in found[1:]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"prompt_logprobs: {type(error).__name__}: {error}") from None


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or np.isnan(value):
        raise ServerError(f"a log-probability is {value!r}, expected a number")
    return float(value)


def _counts(answer: Json, capabilities: Capabilities) -> tuple[list[int] | None, int | None]:
    metrics: Mapping[str, Any] = answer.get("metrics") or {}
    told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(told, dict):
        return None, None
    counts, k = told.get("per_step_accepted"), told.get("num_spec_tokens")
    if not isinstance(counts, list) or not all(isinstance(c, int) for c in counts) or not counts:
        capabilities.lack(
            "accepted counts",
            "the server speculates and does not tell the count of each step (vLLM 0.33: "
            "--per-request-spec-decode-metrics detailed)",
        )
        return None, None
    return counts, k if isinstance(k, int) else max(counts)
