"""What a valid record is, and how one in the first form becomes one in the current form.

All problems are collected; nothing here raises on bad content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from parity.records import FORMAT

ROW_SUM = 1e-2  # how far the logarithm of a full row's sum may be from 0: float32 over V terms
NAME = re.compile(
    r"(?P<case>case\d+)\.(?:(?P<prompt>prompt_ids)|reference_(?P<reference>f32|bf16)_logprobs|"
    r"(?P<kind>[a-z0-9_]+?)_(?P<part>ids|logprobs|top_ids|top_logprobs|accepted_counts|drafts|"
    r"stage\.[\w.]+))"
)
KIND = re.compile(r"[a-z][a-z0-9_]*")
DTYPES = ("bfloat16", "float16", "float32", "unknown")
RULES = ("standard", "block", "synthetic", "fly")

Meta = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]


class Field(NamedTuple):
    """One entry of the JSON side: a dotted name, a test, and the test in words."""

    name: str
    good: Callable[[Any], bool]
    words: str
    needed: bool = True


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, kinds) and (bool in kinds or not isinstance(v, bool))


def _positive(v: Any) -> bool:
    return _is(int)(v) and v > 0


def _not_negative(v: Any) -> bool:
    return _is(int, float)(v) and v >= 0


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda v: v in values


def _text(v: Any) -> bool:
    return isinstance(v, str) and bool(v)


FIELDS = (
    Field("kind", _one_of("vllm"), "'vllm'"),
    Field("format", _one_of(FORMAT), f"{FORMAT}"),
    Field("engine", _is(dict), "an object"),
    Field("engine.name", _text, "a name such as 'vLLM'"),
    Field("engine.version", _text, "a version such as '0.33.0'"),
    Field("device", _text, "words such as 'one NVIDIA H200'"),
    Field("run", _is(dict), "an object"),
    Field("run.dtype", _one_of(*DTYPES), f"one of {', '.join(DTYPES)}"),
    Field("run.tensor_parallel", _positive, "a whole number above 0", needed=False),
    Field("run.decode_backend", _text, "'auto' or 'latency_specialized'", needed=False),
    Field(
        "run.logprobs_mode", _one_of("raw_logprobs"),
        "'raw_logprobs': before temperature, top-k and penalties", needed=False,
    ),
    Field("kernels", _is(dict), "an object: what is known of the kernels, {} if nothing"),
    Field("checkpoint", _is(dict), "an object with preset and seed, or with a fingerprint"),
    Field("checkpoint.preset", _text, "a preset of `k3 make-tiny`", needed=False),
    Field("checkpoint.seed", _is(int), "a whole number", needed=False),
    Field(
        "checkpoint.fingerprint", lambda v: bool(re.fullmatch(r"[0-9a-f]{64}", str(v))),
        "64 hexadecimal digits, see docs/records.md", needed=False,
    ),
    Field("speculation", _is(dict), "an object, or no such entry", needed=False),
    Field("texts", lambda v: _is(dict)(v) and bool(v), "an object with at least one run"),
)  # fmt: skip
SPECULATION = (
    Field("method", _text, "a name such as 'dspark'"),
    Field("drafts", _positive, "a whole number above 0"),
    Field("draft_sample_method", _one_of("greedy", "probabilistic"), "greedy or probabilistic"),
    Field("rejection_sample_method", _one_of(*RULES), f"one of {', '.join(RULES)}"),
)
TEXT = (
    Field("sampling", _is(dict), "an object"),
    Field("sampling.temperature", _not_negative, "a number, 0 for greedy"),
    Field("speculative", _is(bool), "true or false"),
    Field("concurrency", _positive, "a whole number above 0", needed=False),
    Field("accepted_counts", _text, "words: how the counts were obtained", needed=False),
)


def problems(meta: Meta, tensors: Arrays) -> list[str]:
    """Everything that is wrong with a record in the current form; empty if nothing is."""
    found = list(_meta(meta))
    names = {name: match for name in tensors if (match := NAME.fullmatch(name))}
    kinds = meta.get("texts") if isinstance(meta.get("texts"), dict) else {}
    for name in sorted(set(tensors) - set(names)):
        found.append(f"tensor {name}: no name of this format; see docs/records.md")
    for name, match in sorted(names.items()):
        if (kind := match["kind"]) and kind not in kinds:
            found.append(f"tensor {name}: {META_OF} names no run {kind!r} under texts")
    vocabularies: dict[str, int] = {}
    for case in sorted({m["case"] for m in names.values()}):
        own = {m["kind"] for m in names.values() if m["case"] == case and m["kind"] in kinds}
        found += _case(case, sorted(own), meta, tensors, vocabularies)
    if len(set(vocabularies.values())) > 1:
        found.append(f"different vocabularies: {vocabularies}")
    if not any(m["part"] == "ids" for m in names.values()):
        found.append("no text: expected caseN.prompt_ids with caseN.RUN_ids")
    return found


META_OF = "golden.json"


def _meta(meta: Meta) -> Iterator[str]:
    yield from _fields(meta, FIELDS, "")
    if isinstance(meta.get("speculation"), dict):
        yield from _fields(meta["speculation"], SPECULATION, "speculation.")
    if isinstance(meta.get("texts"), dict):
        for kind, text in meta["texts"].items():
            if not KIND.fullmatch(kind) or kind == "prompt":
                yield f"texts: {kind!r} is no name of a run; expected lower case, such as 'greedy'"
            if not isinstance(text, dict):
                yield f"texts.{kind}: found {text!r}, expected an object"
                continue
            yield from _fields(text, TEXT, f"texts.{kind}.")
            if text.get("speculative") is True and not isinstance(meta.get("speculation"), dict):
                yield f"texts.{kind} is speculative, and there is no entry 'speculation'"
    checkpoint = meta.get("checkpoint")
    if isinstance(checkpoint, dict) and "fingerprint" not in checkpoint:
        missing = [n for n in ("preset", "seed") if n not in checkpoint]
        if missing:
            yield (
                f"checkpoint: no {' and no '.join(missing)}, and no fingerprint; expected preset "
                "and seed, or a fingerprint"
            )


def _fields(meta: Meta, fields: tuple[Field, ...], prefix: str) -> Iterator[str]:
    for f in fields:
        *parents, last = f.name.split(".")
        holder: Any = meta
        for name in parents:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(holder, Mapping):
            continue  # said of the parent
        if last not in holder or (holder[last] is None and not f.needed):
            if f.needed:
                yield f"{prefix}{f.name}: missing, expected {f.words}"
        elif not f.good(holder[last]):
            yield f"{prefix}{f.name}: found {holder[last]!r}, expected {f.words}"


def _case(
    case: str, kinds: list[str], meta: Meta, tensors: Arrays, vocabularies: dict[str, int]
) -> Iterator[str]:
    prompt = tensors.get(f"{case}.prompt_ids")
    if prompt is None:
        yield f"{case}: no {case}.prompt_ids"
        return
    bad = [*_ids(f"{case}.prompt_ids", prompt)]
    yield from bad
    lengths: dict[str, int] = {}
    for kind in kinds:
        name = f"{case}.{kind}"
        ids = tensors.get(f"{name}_ids")
        if ids is None:
            yield f"{name}: other tensors but no {name}_ids"
            continue
        wrong = [*_ids(f"{name}_ids", ids)]
        yield from wrong
        if wrong or bad:
            continue
        lengths[kind] = len(prompt) - 1 + len(ids)
        yield from _probabilities(name, lengths[kind], len(ids), tensors, vocabularies)
        yield from _steps(name, ids, meta, meta["texts"][kind], tensors)
        for stage in (n for n in tensors if n.startswith(f"{name}_stage.")):
            shape = tensors[stage].shape
            if not shape or shape[0] != lengths[kind]:
                yield f"{stage}: shape {list(shape)}, expected [{lengths[kind]}, ...]"
    for ref in ("f32", "bf16"):
        name = f"{case}.reference_{ref}_logprobs"
        if name in tensors and "greedy" not in lengths:
            yield f"{name}: it belongs to {case}.greedy_ids, which is absent or damaged"
        elif name in tensors:
            yield from _full(name, tensors[name], (lengths["greedy"],), vocabularies)
    limit = min(vocabularies.values(), default=None)
    if limit is not None:
        for kind in ("prompt", *lengths):
            largest = int(np.max(tensors[f"{case}.{kind}_ids"], initial=0))
            if largest >= limit:
                yield f"{case}.{kind}_ids: id {largest}, but the vocabulary has {limit} tokens"


def _ids(name: str, ids: np.ndarray) -> Iterator[str]:
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        yield f"{name}: {ids.dtype} {list(ids.shape)}, expected one row of whole numbers"
    elif ids.min() < 0:
        yield f"{name}: id {ids.min()}, expected 0 or more"


def _probabilities(
    name: str, length: int, generated: int, tensors: Arrays, vocabularies: dict[str, int]
) -> Iterator[str]:
    full, ids, top = (tensors.get(f"{name}_{n}") for n in ("logprobs", "top_ids", "top_logprobs"))
    allowed = (length, generated)
    if full is not None:
        yield from _full(f"{name}_logprobs", full, allowed, vocabularies)
        if ids is not None or top is not None:
            yield f"{name}: both full and listed log-probabilities; expected one form"
        return
    if ids is None and top is None:
        return
    if ids is None or top is None:
        yield f"{name}: top_ids and top_logprobs belong together; one is absent"
        return
    if ids.shape != top.shape or ids.ndim != 2 or not ids.size or len(ids) not in allowed:
        yield (
            f"{name}_top_ids {list(ids.shape)}, {name}_top_logprobs {list(top.shape)}: expected "
            f"[{_either(allowed)}, k] both"
        )
        return
    if ids.dtype.kind not in "iu" or ids.min() < 0:
        yield f"{name}_top_ids: expected whole numbers, 0 or more"
    elif (np.diff(np.sort(ids, -1), axis=-1) == 0).any():
        yield f"{name}_top_ids: a row lists one token twice"
    yield from _sums(f"{name}_top_logprobs", top, listed=True)


def _full(
    name: str, rows: np.ndarray, allowed: tuple[int, ...], vocabularies: dict[str, int]
) -> Iterator[str]:
    if rows.ndim != 2 or not rows.size or len(rows) not in allowed:
        yield f"{name}: shape {list(rows.shape)}, expected [{_either(allowed)}, vocabulary]"
        return
    vocabularies[name] = rows.shape[1]
    yield from _sums(name, rows, listed=False)


def _sums(name: str, rows: np.ndarray, *, listed: bool) -> Iterator[str]:
    rows = np.asarray(rows, np.float64)
    if np.isnan(rows).any() or (rows == np.inf).any():
        yield f"{name}: NaN or +infinity in it, expected log-probabilities"
        return
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(rows).sum(-1))
    off = total if listed else np.abs(total)
    if off.max() > ROW_SUM:
        at = int(off.argmax())
        yield (
            f"{name}: row {at} sums to {np.exp(total[at]):.4g}, expected "
            f"{'at most 1' if listed else '1'}; are these natural log-probabilities?"
        )


def _steps(name: str, ids: np.ndarray, meta: Meta, text: Any, tensors: Arrays) -> Iterator[str]:
    counts, drafts = tensors.get(f"{name}_accepted_counts"), tensors.get(f"{name}_drafts")
    if counts is None and drafts is None:
        return
    speculation = meta.get("speculation")
    k = speculation.get("drafts") if isinstance(speculation, dict) else None
    if not _positive(k) or not (isinstance(text, dict) and text.get("speculative") is True):
        yield f"{name}: accepted counts or drafts of a run that is not speculative"
        return
    if counts is None:
        yield f"{name}_drafts: without {name}_accepted_counts their places are unknown"
        return
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or not counts.size:
        yield f"{name}_accepted_counts: expected one row of whole numbers"
        return
    if counts.min() < 0 or counts.max() > k:
        yield f"{name}_accepted_counts: from {counts.min()} to {counts.max()}, expected 0 to {k}"
        return
    emitted = 1 + np.cumsum(counts.astype(np.int64) + 1)
    if emitted[-1] < len(ids) or (len(emitted) > 1 and emitted[-2] >= len(ids)):
        yield (
            f"{name}_accepted_counts: {len(counts)} steps emit {emitted[-1]} ids with the first "
            f"one, but {name}_ids has {len(ids)}; only the last step may be cut short"
        )
        return
    if drafts is not None:
        yield from _drafts(name, ids, counts, drafts, int(k))


def _drafts(
    name: str, ids: np.ndarray, counts: np.ndarray, drafts: np.ndarray, k: int
) -> Iterator[str]:
    if drafts.shape != (len(counts), k) or drafts.dtype.kind not in "iu":
        yield f"{name}_drafts: shape {list(drafts.shape)}, expected [{len(counts)}, {k}]"
        return
    start = 1
    for step, count in enumerate(counts.tolist()):
        told = ids[start : start + count]
        proposed = drafts[step, : len(told)]
        if ((proposed != told) & (proposed >= 0)).any():
            yield (
                f"{name}_drafts: step {step} accepted {count}, but its drafts {proposed.tolist()} "
                f"are not the text's {told.tolist()}"
            )
            return
        start += count + 1


def _either(counts: tuple[int, ...]) -> str:
    return " or ".join(str(c) for c in dict.fromkeys(counts))


# ---- the first form ----


def upgraded(meta: Meta, tensors: Arrays) -> tuple[dict[str, Any], Arrays]:
    """The same record in the current form; the arguments stay as they are.

    The first form has no `format`, calls the log-probabilities of the greedy text
    `caseN.vllm_logprobs`, and says nothing about each run. The name is understood in both.
    """
    tensors = {re.sub(r"\.vllm_logprobs$", ".greedy_logprobs", n): v for n, v in tensors.items()}
    if "format" in meta:
        return dict(meta), tensors
    made = {k: v for k, v in meta.items() if k not in ("cases", "tensors", "dspark", "sampling")}
    name, _, version = str(meta.get("engine", "")).rpartition(" ")
    made |= {"format": FORMAT, "kind": "vllm", "device": meta.get("device") or "not recorded"}
    made["engine"] = {"name": name or "unknown", "version": version or "unknown"}
    made["run"] = {"dtype": meta.get("dtype", "bfloat16"), "tensor_parallel": 1}
    made["kernels"] = meta.get("kernels") or {}
    dspark = meta.get("dspark")
    if isinstance(dspark, dict):
        made["speculation"] = {
            "method": "dspark",
            "drafts": dspark.get("num_speculative_tokens"),
            "draft_sample_method": dspark.get("draft_sample_method", "greedy"),
            "rejection_sample_method": dspark.get("rejection_sample_method", "standard"),
        }
        counts = dspark.get("per_step_accepted_counts")
        for case, own in counts.items() if isinstance(counts, dict) else ():
            tensors[f"{case}.dspark_accepted_counts"] = np.asarray(own)
    temperature = (meta.get("sampling") or {}).get("temperature", 0.0)
    kinds = {m["kind"] for n in tensors if (m := NAME.fullmatch(n)) and m["part"] == "ids"}
    made["texts"] = {
        kind: {"sampling": {"temperature": temperature}, "speculative": "dspark" in kind}
        for kind in sorted(kinds)
    }
    known = {n: v for n, v in tensors.items() if NAME.fullmatch(n)}
    return made, known
