"""An HTTP server that serves `torch_ref` through OpenAI's completions endpoint, as vLLM does.

For tests and for trying `python -m parity serve` without a GPU:

    k3 make-tiny build/served --preset tiny --seed 2
    python -m parity.served build/served/target --port 8000

It decodes greedily, one request at a time, in bf16 and profile V, and knows vLLM's extensions. A
test can take some of them away, or have an answer spoilt.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from parity.metrics import log_softmax

ALL = ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "ignore_eos")
Spoil = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]
Json = dict[str, Any]


@dataclass
class Manners:
    """How the server behaves.

    Attributes:
        extensions: what it knows beside OpenAI's own fields; others are refused with 400.
        ids_as_prompt: False refuses a prompt of ids.
        spoil: writes the answer to a completion in place of the server.
        gate: called by every completion request before it is answered.
        key: what a bearer token must be.
    """

    extensions: tuple[str, ...] = ALL
    ids_as_prompt: bool = True
    spoil: Spoil | None = None
    gate: Callable[[], None] | None = None
    key: str | None = None


class Engine:
    """Greedy texts of a checkpoint, kept by prompt and length."""

    def __init__(self, target: Path, draft: Path | None = None, drafts: int = 7) -> None:
        """Loads the checkpoint; with a drafter it speculates and tells the accepted counts."""
        import torch

        from torch_ref.draft import Draft
        from torch_ref.model import Model
        from torch_ref.numerics import Numerics

        nm = Numerics(torch.bfloat16, "V")
        self.target, self.drafts = Model.load(target, nm), drafts
        self.draft = None if draft is None else Draft.load(draft, self.target, nm)
        self._lock, self._known = threading.Lock(), {}

    def answer(self, prompt: list[int], tokens: int) -> tuple[list[int], np.ndarray, list[int]]:
        """Ids [n], log-probabilities [P - 1 + n, V], accepted counts (empty: not speculative)."""
        key = (tuple(prompt), tokens)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._decode(prompt, tokens)
            return self._known[key]

    def _decode(self, prompt: list[int], tokens: int) -> tuple[list[int], np.ndarray, list[int]]:
        from parity.torch_threads import one_thread
        from torch_ref.model import greedy
        from torch_ref.speculation import Rule, generate

        with one_thread():
            counts: list[int] = []
            if self.draft is None:
                ids = greedy(self.target, prompt, tokens)[0].tolist()
            else:
                made = generate(
                    self.target, self.draft, prompt, tokens, self.drafts, Rule("standard")
                )
                ids, emitted = made.ids[:tokens], 1
                for count in made.accepted:
                    if emitted >= tokens:
                        break
                    counts.append(count)
                    emitted += count + 1
            rows = self.target.forward([*prompt, *ids[:-1]], self.target.new_state())
        return ids, log_softmax(rows.double().numpy()), counts


def _listed(row: np.ndarray, chosen: int, k: int) -> dict[int, float]:
    best = np.argsort(-row, kind="stable")[:k].tolist()
    return {t: float(row[t]) for t in dict.fromkeys([chosen, *best])}


def complete(engine: Engine, body: Json, manners: Manners) -> Json:
    """The answer to a completion request that is well formed."""
    prompt, tokens = body["prompt"], body["max_tokens"]
    ids, rows, counts = engine.answer(prompt, tokens)
    ids = list(ids)  # what is kept stays as it is, whatever becomes of the answer
    name = "token_id:{}" if body.get("return_tokens_as_token_ids") else " word{}"
    after, k = rows[len(prompt) - 1 :], body.get("logprobs") or 0
    listed = [_listed(row, chosen, k) for row, chosen in zip(after, ids, strict=True)]
    choice: Json = {
        "index": 0, "text": " ".join(f"word{i}" for i in ids), "finish_reason": "length",
        "logprobs": None if not k else {
            "tokens": [name.format(i) for i in ids],
            "token_logprobs": [row[i] for row, i in zip(listed, ids, strict=True)],
            "top_logprobs": [{name.format(t): p for t, p in row.items()} for row in listed],
        },
    }  # fmt: skip
    if body.get("return_token_ids"):
        choice |= {"token_ids": ids, "prompt_token_ids": prompt}
    if body.get("prompt_logprobs"):
        pairs = zip(rows, prompt[1:], strict=False)
        told = [_listed(row, token, body["prompt_logprobs"]) for row, token in pairs]
        choice["prompt_logprobs"] = [None] + [
            {str(t): {"logprob": p, "rank": None} for t, p in row.items()} for row in told
        ]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    answer: Json = {"object": "text_completion", "choices": [choice], "usage": usage}
    if counts:
        told = {"num_spec_tokens": engine.drafts, "per_step_accepted": counts}
        answer["metrics"] = {"speculative_decoding": told}
    return answer


def handler(engine: Engine, name: str, root: str, manners: Manners) -> type[BaseHTTPRequestHandler]:
    """The request handler for one model."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def send(self, status: int, content: Json | bytes) -> None:
            """A whole answer."""
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def allowed(self) -> bool:
            """Whether the key is right; answers if not."""
            given = self.headers.get("Authorization")
            if manners.key is None or given == f"Bearer {manners.key}":
                return True
            self.send(401, {"error": {"message": "wrong key"}})
            return False

        def do_GET(self) -> None:
            """Models and version."""
            card = {"id": name, "object": "model", "root": root, "max_model_len": 512}
            known = {"/v1/models": {"data": [card]}, "/version": {"version": "torch_ref"}}
            if self.allowed():
                found = known.get(self.path)
                self.send(200 if found else 404, found or {"error": {"message": self.path}})

        def do_POST(self) -> None:
            """Completions."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            if manners.gate is not None:
                manners.gate()
            if problem := self.refusal(body):
                self.send(400, {"error": {"message": problem}})
            elif manners.spoil is not None:
                manners.spoil(self, complete(engine, body, manners))
            else:
                self.send(200, complete(engine, body, manners))

        def refusal(self, body: Json) -> str | None:
            """Why a request is not answered."""
            if self.path != "/v1/completions" or body.get("model") != name:
                return f"no {self.path} for model {body.get('model')}"
            for extension in ALL:
                if extension in body and extension not in manners.extensions:
                    return f"extra fields not permitted: {extension}"
            if not manners.ids_as_prompt and not isinstance(body["prompt"], str):
                return "prompt: a string is required"
            return None

    return Handler


@contextmanager
def serving(engine: Engine, name: str, root: Path, manners: Manners, port: int = 0):
    """The address of a running server, until the block ends."""
    made = handler(engine, name, str(root), manners)
    with ThreadingHTTPServer(("127.0.0.1", port), made) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def main(
    target: tyro.conf.Positional[Path],
    draft: Path | None = None,
    port: Annotated[int, tyro.conf.arg(help="0 takes a free one")] = 8000,
) -> None:
    """Serves a checkpoint until interrupted."""
    with serving(Engine(target, draft), target.name, target, Manners(), port) as address:
        print(f"{address}: model {target.name}; end with Ctrl-C", file=sys.stderr, flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    tyro.cli(main)
