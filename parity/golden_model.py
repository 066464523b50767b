"""Recorded folders of kind `model_*`: whole tiny checkpoints with everything they computed.

Four runs per folder (float32 and bf16, profiles H and V, the latent epsilon of the published file).
Numbers judged: logits, greedy ids, router choices, per-layer streams, caches after the prompt and
at the end, and the agreement of whole, windowed, stepwise and batched processing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from parity import metrics
from parity.driver import ROWS, WINDOW, Arrays, Driver, Sequence, Session, greedy, in_windows
from parity.folders import Folder
from parity.golden_limits import Whole, greedy_verdict, router_choice, stream_limit
from parity.tolerances import tolerance
from parity.verdict import Verdict, Where, compare, failed, judge, not_recorded, not_run

RUNS = (("float32", "H"), ("float32", "V"), ("bfloat16", "H"), ("bfloat16", "V"))
EPS = 1e-6  # latent norms of the published file
PARTS = ("whole", "stepwise", "windows")
_NEEDED = ("prompt_ids", "greedy_ids", "seq_ids", "logits_f64")
# What a folder may record beside: a name for reports, and what the tensors are called.
_OPTIONAL = {
    "margins (greedy_top2_margin_f64)": r"greedy_top2_margin_f64",
    "bf16_greedy_ids": r"bf16_greedy_ids",
    "layer streams (seq.layerNN.prefix_sum_out)": r"seq\.layer\d\d\.prefix_sum_out",
    "final_norm_out": r"seq\.final_norm_out",
    "router choices (seq.layerNN.router_idx)": r"seq\.layer\d\d\.router_idx",
    "router weights (seq.layerNN.router_weight)": r"seq\.layer\d\d\.router_weight",
    "router gaps (seq.layerNN.router_gap)": r"seq\.layer\d\d\.router_gap",
    "caches after the prompt": r"prompt\.layer\d\d\.(kda_state_vk|conv_state_[qkv]|mla_\w+)",
    "caches at the end": r"seq\.layer\d\d\.(kda_state_vk|conv_state_[qkv]|mla_\w+)",
    "a second prompt (prompt2_ids)": r"prompt2_ids",
    "prompt2_logits_f64": r"prompt2_logits_f64",
    "prompt2_greedy_ids": r"prompt2_greedy_ids",
}
_STREAMS = ("attn_norm_in", "mlp_norm_in", "attn_out", "mlp_out", "prefix_sum_out")


def check_model(
    folder: Folder,
    runs: tuple[tuple[str, str], ...] = RUNS,
    parts: tuple[str, ...] = PARTS,
) -> Iterator[Verdict]:
    """Compares a folder under the given (dtype, profile) runs; `parts` as in `PARTS`."""
    where = Where("model", folder.name, "-")
    wrong = inconsistencies(folder.tensors)
    for cause in wrong:
        yield not_run(where, "all", f"golden.safetensors: {cause}")
    if wrong:
        return
    absent = [
        n for n, p in _OPTIONAL.items() if not any(re.fullmatch(p, k) for k in folder.tensors)
    ]
    if absent:
        yield not_recorded(where, "optional data", ", ".join(absent))
    for dtype, profile in runs:
        yield from ModelCheck(folder, dtype, profile).verdicts(parts)


def inconsistencies(g: Arrays) -> list[str]:
    """Everything that keeps recorded tensors from being compared: absent, misshapen, at odds."""
    missing = [n for n in _NEEDED if n not in g]
    if missing:
        return [f"lacks {', '.join(missing)}"]
    found: list[str] = []

    def shaped(name: str, *want: int | str) -> bool:
        """Whether `name` is recorded and has the shape `want`, where a word is any length."""
        if name not in g:
            return False
        shape = g[name].shape
        good = len(shape) == len(want) and all(
            n > 0 if isinstance(w, str) else n == w for n, w in zip(shape, want, strict=True)
        )
        if not good:
            asked = ", ".join(map(str, want))
            found.append(f"{name} has shape {tuple(shape)}, expected ({asked}), none of them 0")
        return good

    ids = ("prompt_ids", "greedy_ids", "seq_ids", "bf16_greedy_ids", "prompt2_ids")
    ids += ("prompt2_greedy_ids",)
    good = {n for n in ids if shaped(n, "tokens")}
    if not {*_NEEDED[:3]} <= good or not shaped("logits_f64", len(g["seq_ids"]), "vocabulary"):
        return found
    (total,), size = g["seq_ids"].shape, g["logits_f64"].shape[1]
    for n in sorted(good):
        if g[n].dtype.kind not in "iu":
            found.append(f"{n} has dtype {g[n].dtype}, expected integers")
        elif g[n].min() < 0 or g[n].max() >= size:
            found.append(f"{n} has ids outside 0..{size - 1}, the vocabulary of logits_f64")
    fed = np.concatenate([g["prompt_ids"], g["greedy_ids"]])
    n = min(len(fed), total)
    differ = np.flatnonzero(fed[:n] != g["seq_ids"][:n])
    if differ.size or total < len(g["prompt_ids"]):
        at = f", they part at {differ[0]}" if differ.size else ""
        found.append(f"seq_ids is not prompt_ids followed by greedy_ids{at}")
    shaped("greedy_top2_margin_f64", len(g["greedy_ids"]))
    for name in ("logits_f32", "logits_bf16"):
        shaped(name, total, size)
    if "prompt2_ids" in good:
        shaped("prompt2_logits_f64", len(g["prompt2_ids"]), size)
        if "prompt2_greedy_ids" in good:
            shaped("prompt2_greedy_top2_margin_f64", len(g["prompt2_greedy_ids"]))
    elif "prompt2_ids" not in g and (lost := sorted(k for k in g if k.startswith("prompt2_"))):
        found.append(f"{', '.join(lost)} cannot be compared without prompt2_ids")
    for name in sorted(g):
        match = re.fullmatch(r"(seq|prompt)\.(?:layer\d\d\.)?(\w+)", name)
        rows = total if match and match[1] == "seq" else len(g["prompt_ids"])
        if not match:
            continue
        if match[2] == "router_weight" and name.replace("_weight", "_idx") in g:
            shaped(name, *g[name.replace("_weight", "_idx")].shape)
        elif match[2] == "router_gap":
            shaped(name, rows)
        elif match[2] in ("mla_latent", "mla_k_pe", "router_idx", "final_norm_out", *_STREAMS):
            shaped(name, rows, "width")
        elif match[2].startswith("conv_state_"):
            shaped(name, "channels", "taps")
        elif match[2] == "kda_state_vk":
            shaped(name, "heads", "values", "keys")
    return found


class ModelCheck:
    """One folder under one dtype and profile."""

    def __init__(self, folder: Folder, dtype: str, profile: str) -> None:
        """Loads the checkpoint."""
        self.folder, self.g = folder, folder.tensors
        self.ids = np.asarray(self.g["seq_ids"])
        self.prompt = np.asarray(self.g["prompt_ids"])
        self.where = Where("model", folder.name, "-", dtype, profile)
        fed = [len(self.g.get(f"{p}_ids", ())) + len(self.g.get(f"{q}greedy_ids", ()))
               for p, q in (("prompt", ""), ("prompt2", "prompt2_"))]  # fmt: skip
        longest = max(len(self.ids), *fed)
        self.driver = Driver.open(folder.path, dtype, profile, longest, mla_norm_eps=EPS)
        self.f32 = dtype == "float32"
        self.limit = stream_limit(folder, dtype)
        self._kept: Whole | None = None

    def verdicts(self, parts: tuple[str, ...]) -> Iterator[Verdict]:
        """All comparisons of the parts asked for."""
        logits = None
        if "whole" in parts:
            logits, session, sequence, record = self.driver.whole(self.ids)
            self._kept = logits, record
            yield from self.whole(logits, session, sequence, record)
        if "stepwise" in parts:
            yield from self.stepwise(logits)
        if "windows" in parts and self.f32:
            yield from self.windows(logits)
            if "prompt2_ids" in self.g:
                yield from self.batch()

    # ---- parts ----
    def whole(
        self, logits: np.ndarray, session: Session, sequence: Sequence, record: Arrays
    ) -> Iterator[Verdict]:
        """The whole sequence in one step, with everything it recorded."""
        at = self.where.at(case="whole")
        yield self._logits(at, "logits", logits, self.g["logits_f64"])
        yield from self.streams(at, record)
        yield from self._caches(at, "seq", session.caches(sequence))
        yield self._untouched(at, session, [sequence])

    def stepwise(self, whole: np.ndarray | None) -> Iterator[Verdict]:
        """Prompt one token at a time, then greedy choices fed back."""
        at, session = self.where.at(case="stepwise"), Session(self.driver, seed=2)
        sequence, prompt = session.sequence(slot=3), self.prompt
        want = np.asarray(self.g["greedy_ids"])
        for token in prompt[:-1]:
            session.step([None, (sequence, np.array([token]))], 1)
        ids = greedy(session, sequence, prompt[-1:], len(want), row=1)
        rows = sequence.rows()
        verdict, equal = self._greedy(at, "greedy_ids", ids, want, self.g)
        yield verdict
        own = np.argmax(rows[len(prompt) - 1 :], -1)[: len(ids)]
        yield compare(at, "token is argmax", ids, own, "equal")
        fed = len(prompt) + equal  # later rows saw other tokens
        fed = min(fed, len(rows), len(self.ids))
        yield self._logits(at, "logits", rows[:fed], self.g["logits_f64"][:fed])
        if whole is not None and self.f32:
            note = "against our own whole-sequence step"
            yield compare(
                at.at(against="jax, whole"),
                "logits",
                rows[:fed],
                whole[:fed],
                "agreement",
                note=note,
            )
        if self.f32 and equal == len(want) and len(rows) == len(self.ids):
            yield from self._caches(at, "seq", session.caches(sequence))
        yield self._untouched(at, session, [sequence])
        yield from self._second_prompt(at)

    def _second_prompt(self, at: Where) -> Iterator[Verdict]:
        if "prompt2_greedy_ids" not in self.g or "prompt2_ids" not in self.g:
            return
        session = Session(self.driver, seed=3)
        sequence, want = session.sequence(slot=0), np.asarray(self.g["prompt2_greedy_ids"])
        ids = greedy(session, sequence, self.g["prompt2_ids"], len(want), row=0)
        yield self._greedy(at, "prompt2_greedy_ids", ids, want, {})[0]  # no bf16 run of it
        n = len(self.g["prompt2_ids"])
        if (recorded := self.g.get("prompt2_logits_f64")) is not None:
            rows = sequence.rows()[:n]
            yield self._logits(at, "prompt2_logits", rows, recorded, "logits_short")

    def _margins(self, prefix: str, want: np.ndarray) -> np.ndarray:
        """Recorded margins of greedy ids, else those of the recorded logits that chose them.

        Where neither is known, a float32 run has to choose the recorded id, whatever the margin;
        in bf16, where another choice may be right, such an id is left to the float32 runs.
        """
        recorded = self.g.get(f"{prefix}greedy_top2_margin_f64")
        if recorded is not None:
            return np.asarray(recorded, np.float64)
        found = np.full(len(want), np.inf if self.f32 else 0.0)
        logits = self.g.get(f"{prefix}logits_f64")
        if logits is not None:  # the row of the last prompt token chooses the first id
            start = len(self.g[f"{prefix or 'prompt_'}ids"]) - 1
            rows = metrics.margin_rows(logits[start : start + len(want)])
            found[: len(rows)] = rows
        return found

    def windows(self, whole: np.ndarray | None) -> Iterator[Verdict]:
        """The sequence in windows of many sizes; caches after the prompt and at the end."""
        at, session = self.where.at(case="windows"), Session(self.driver, seed=4)
        sequence, split = session.sequence(slot=1), len(self.prompt)
        in_windows(session, sequence, self.ids[:split], 0, [3, WINDOW, 1, WINDOW - 1])
        yield from self._caches(at, "prompt", session.caches(sequence))
        in_windows(session, sequence, self.ids[split:], 1, [2, 1, WINDOW, 5])
        rows = sequence.rows()
        yield self._logits(at, "logits", rows, self.g["logits_f64"])
        if whole is not None:
            yield compare(at.at(against="jax, whole"), "logits", rows, whole, "agreement")
        yield from self._caches(at, "seq", session.caches(sequence))
        yield self._untouched(at, session, [sequence])

    def batch(self) -> Iterator[Verdict]:
        """Both prompts in one batch, windows of unequal size, against each of them alone."""
        at, session = self.where.at(case="batch"), Session(self.driver, seed=5)
        first, second = session.sequence(slot=4), session.sequence(slot=0)
        ids, other, turn = self.prompt, np.asarray(self.g["prompt2_ids"]), 0
        while first.position < len(ids) or second.position < len(other):
            a, b = (WINDOW, 2) if turn % 2 else (4, 3)
            parts = [(second, other, b), (first, ids, a)]
            rows = [
                (q, x[q.position : q.position + n]) if q.position < len(x) else None
                for q, x, n in parts
            ]
            session.step(rows, WINDOW)
            turn += 1
        for name, sequence, tokens, want in (
            ("prompt", first, ids, self.g["logits_f64"][: len(ids)]),
            ("prompt2", second, other, self.g.get("prompt2_logits_f64")),
        ):
            alone = Session(self.driver, seed=6)
            single = alone.sequence(slot=2)
            in_windows(alone, single, tokens, 0, [WINDOW])
            if want is not None:
                yield self._logits(at, f"{name} logits", sequence.rows(), want)
            yield compare(
                at.at(against="jax, alone"),
                f"{name} logits",
                sequence.rows(),
                single.rows(),
                "agreement",
            )
        yield from self._caches(at, "prompt", session.caches(first))
        yield self._untouched(at, session, [first, second])

    # ---- quantities ----
    def _logits(
        self, at: Where, quantity: str, got: np.ndarray, want: np.ndarray, key: str = "logits"
    ) -> Verdict:
        extra: metrics.Metrics = {}
        if at.case == "whole" and got.shape == want.shape:  # for the plot
            extra["rows_margin"] = metrics.margin_rows(want).tolist()
            extra["rows_error"] = np.abs(got - want).max(-1).tolist()
        for kind in ("f32", "bf16"):
            published = self.g.get(f"logits_{kind}")
            if published is not None and got.shape == want.shape == published.shape:
                found = metrics.distance(published, np.asarray(want))
                extra |= {f"published_{kind}_{m}": found[m] for m in ("max_abs", "rms")}
        want = np.asarray(want, np.float64)
        return compare(at, quantity, got, want, key, logits=True, extra=extra)

    def _greedy(
        self, at: Where, quantity: str, ids: np.ndarray, want: np.ndarray, g: Arrays
    ) -> tuple[Verdict, int]:
        """Verdict on greedy ids, and how many of them are the recorded ones."""
        margins = self._margins(quantity.removesuffix("greedy_ids"), want)
        found = metrics.first_divergence(ids, want, margins)
        verdict = greedy_verdict(at, quantity, ids, want, found, g, self._whole_run)
        return verdict, found["equal_prefix"]

    def _whole_run(self) -> Whole:
        """Logits and stage outputs of the whole sequence in one step; kept."""
        if self._kept is None:
            logits, _, _, record = self.driver.whole(self.ids)
            self._kept = logits, record
        return self._kept

    def streams(self, at: Where, record: Arrays) -> Iterator[Verdict]:
        """Every recorded stream of every layer, and the router's choices."""
        for layer in range(self.driver.config.num_hidden_layers):
            name = f"layer{layer:02d}"
            own = {k.split(".", 1)[1]: v for k, v in record.items() if k.startswith(name)}
            for quantity, got, want in self._layer_streams(layer, own, record):
                where = at.at(case=f"whole {name}")
                yield compare(where, quantity, got, want, "stream", limit=self.limit)
            if f"seq.{name}.router_idx" in self.g and "ids" in own:
                yield from self._router(at.at(case=f"whole {name}"), name, own)
        if "seq.final_norm_out" in self.g:
            want = np.asarray(self.g["seq.final_norm_out"], np.float64)
            got = record["hidden"]
            yield compare(at, "final_norm_out", got, want, "stream", limit=self.limit)

    def _layer_streams(self, layer: int, own: Arrays, record: Arrays) -> Iterator[tuple]:
        c, w = self.driver.config, self.driver.weights.layer
        eps = c.rms_norm_eps

        def recorded(name: str, at: int = layer) -> np.ndarray | None:
            found = self.g.get(f"seq.layer{at:02d}.{name}")
            return None if found is None else np.asarray(found, np.float64)

        mixed, between = recorded("attn_norm_in"), recorded("mlp_norm_in")
        if mixed is not None:
            yield "x (normed attn_norm_in)", own["x"], rmsnorm(mixed, w.input_layernorm[layer], eps)
        if between is not None:
            normed = rmsnorm(between, w.post_attention_layernorm[layer], eps)
            yield "y (normed mlp_norm_in)", own["y"], normed
        attn = recorded("attn_out")
        before = recorded("prefix_sum_out", layer - 1) if layer else None
        if attn is not None and c.starts_block(layer):
            yield "prefix after attention", own["prefix"], attn
        elif attn is not None and before is not None:
            yield "prefix after attention", own["prefix"], before + attn
        if (out := recorded("mlp_out")) is not None:
            yield "mlp_out", own["delta"], out
        if (after := recorded("prefix_sum_out")) is not None:
            following = record.get(f"layer{layer + 1:02d}.prefix_in")
            got = own["prefix"] + own["delta"] if following is None else following
            yield "prefix_sum_out", got, after

    def _router(self, at: Where, name: str, own: Arrays) -> Iterator[Verdict]:
        idx = np.asarray(self.g[f"seq.{name}.router_idx"])
        weight, gap = (self.g.get(f"seq.{name}.router_{k}") for k in ("weight", "gap"))
        yield router_choice(at, own["ids"], idx, gap, "router_chained")
        if self.f32 and weight is not None and own["ids"].shape == idx.shape:
            order, want = np.argsort(own["ids"], -1), np.argsort(idx, -1)
            same = np.flatnonzero((np.sort(own["ids"], -1) == np.sort(idx, -1)).all(-1))
            got = np.take_along_axis(own["weights"], order, -1)[same]
            wanted = np.take_along_axis(np.asarray(weight), want, -1)[same]
            yield compare(at, "router_weight", got, wanted, "stream")

    def _caches(self, at: Where, prefix: str, caches: Arrays) -> Iterator[Verdict]:
        if not self.f32:
            return  # judged on injected inputs: a chained bf16 cache holds all earlier flips
        for name, got in sorted(caches.items()):
            want = self.g.get(f"{prefix}.{name}")
            if want is None:
                continue
            want = np.asarray(want, np.float64)
            if "conv_state" in name:
                want = want[:, want.shape[1] - got.shape[1] :]  # the oldest column is never read
            where = at.at(
                case=f"{at.case}, caches after {'prompt' if prefix == 'prompt' else 'all'}"
            )
            yield compare(where, name, got, want, "cache")

    def _untouched(self, at: Where, session: Session, used: list[Sequence]) -> Verdict:
        if session.untouched(used):
            return judge(at, "unused slots and pages", {"exact": True}, tolerance("equal"))
        return failed(at, "unused slots and pages", "something wrote outside its slot or pages")


def rmsnorm(x: np.ndarray, weight: object, eps: float) -> np.ndarray:
    """The published norm in float64, to get from a recorded mix to what the stages return."""
    w = np.asarray(weight, np.float32).astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


assert ROWS == 2  # the rows of the batched parts above are written out
