r"""Records what vLLM answers: a script for an environment with vLLM, without this project in it.

Copy this one file there (one file for that reason; it needs vLLM 0.27 to 0.33 and what that
installs) and run

    python vllm_record.py OUT --model CKPT --prompts prompts.txt
    python vllm_record.py OUT --model CKPT --prompts prompts.txt --draft DRAFT --drafts 7 \
        --runs greedy,batched_greedy,sampled,dspark,dspark_sampled --tp 16

OUT is then a record (`docs/records.md`), which `python -m parity golden OUT` judges anywhere. Every
line of the prompt file is a prompt: token ids, separated by blanks or commas. Engines with and
without a drafter run one after the other, each in a process of its own; their log passes through,
and what it says about chosen kernels is recorded.

Accepted counts of each step come from the engine's outputs: it is driven step by step, and a step
that shows m new ids of a request has accepted m - 1 drafts. Where the version has it (0.33), vLLM's
own list of the same counts is asked for and compared; the record says which of the two is known.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

OLDEST, NEWEST = (0, 27), (0, 33)
SAMPLE = 1 << 20  # bytes of a file's data at either end that the fingerprint reads
RUNS = {  # name: (sampled, speculative, all prompts at once)
    "greedy": (False, False, False),
    "batched_greedy": (False, False, True),
    "sampled": (True, False, False),
    "dspark": (False, True, False),
    "batched_dspark": (False, True, True),
    "dspark_sampled": (True, True, False),
}
BACKENDS = ("auto", "latency_specialized")
OPTIONAL = ("per_request_spec_decode_metrics",)  # engine arguments that older versions lack
CHOSEN = re.compile(
    r"Using .*(backend|kernel|experts|attention|prefill|decode|mla|moe|kda).*", re.I
)

Tensors = dict[str, np.ndarray]


class Refused(ValueError):
    """The arguments cannot be tried; the message lists every reason."""


@dataclass(frozen=True)
class Plan:
    """What to record; see `--help`."""

    out: str
    model: str
    prompts: list[list[int]]
    runs: list[str]
    tokens: int
    logprobs: int  # -1: all
    prompt_logprobs: bool
    temperature: float
    top_p: float
    seed: int
    draft: str | None
    drafts: int
    draft_sample_method: str
    rejection_sample_method: str
    decode_backend: str
    tp: int
    eager: bool
    dtype: str
    engine: dict[str, Any]
    checkpoint: dict[str, Any]


# ---- arguments ----


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="vllm_record.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("out", help="folder to write; must be absent or empty")
    p.add_argument("--model", required=True, help="checkpoint directory of the target")
    p.add_argument("--prompts", required=True, help="file with a prompt of token ids per line")
    p.add_argument("--runs", help=f"of {', '.join(RUNS)}; default: greedy, and dspark with --draft")
    p.add_argument("--tokens", type=int, default=48, help="ids per text")
    p.add_argument("--logprobs", default="20", help="listed tokens per place, or 'all'")
    p.add_argument(
        "--no-prompt-logprobs",
        action="store_true",
        help="also of run greedy: generated places only",
    )
    p.add_argument("--temperature", type=float, default=1.0, help="of sampled runs")
    p.add_argument("--top-p", type=float, default=1.0, help="of sampled runs")
    p.add_argument("--sampling-seed", type=int, default=0, help="of sampled runs")
    p.add_argument("--draft", help="checkpoint directory of the drafter")
    p.add_argument("--drafts", type=int, default=7, help="drafts per step")
    p.add_argument("--draft-sample-method", default="greedy")
    p.add_argument("--rejection-sample-method", default="standard")
    p.add_argument("--decode-backend", default="auto", help=" or ".join(BACKENDS))
    p.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    p.add_argument("--eager", action="store_true", help="no graphs; the standard path always")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--engine", default="{}", help="further engine arguments, a JSON object")
    p.add_argument("--preset", help="the model is `k3 make-tiny --preset PRESET --seed SEED`")
    p.add_argument("--seed", type=int, help="see --preset")
    p.add_argument("--check", action="store_true", help="check arguments and names, run nothing")
    return p


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan behind a command line.

    Raises:
        Refused: every reason at once.
    """
    a, bad = arguments, []
    runs = [r.strip() for r in a.runs.split(",")] if a.runs else ["greedy"]
    if not a.runs and a.draft:
        runs.append("dspark")
    unknown = [r for r in runs if r not in RUNS]
    if unknown:
        bad.append(f"--runs: found {', '.join(unknown)}; known are {', '.join(RUNS)}")
    speculative = [r for r in runs if r in RUNS and RUNS[r][1]]
    if speculative and not a.draft:
        bad.append(f"--runs {', '.join(speculative)}: they need --draft")
    for name, path in (("--model", a.model), ("--draft", a.draft)):
        if path is not None and not (Path(path) / "config.json").is_file():
            bad.append(f"{name}: {path} has no config.json; expected a checkpoint directory")
    out = Path(a.out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        bad.append(f"{out} exists; expected an absent or empty directory")
    for name, value in (("--tokens", a.tokens), ("--drafts", a.drafts), ("--tp", a.tp)):
        if value < 1:
            bad.append(f"{name}: found {value}, expected at least 1")
    logprobs = -1 if a.logprobs == "all" else int(a.logprobs) if _is_number(a.logprobs) else 0
    if not logprobs:
        bad.append(f"--logprobs: found {a.logprobs!r}, expected a number above 0 or 'all'")
    if not a.temperature > 0 and any(RUNS[r][0] for r in runs if r in RUNS):
        bad.append(f"--temperature: found {a.temperature}, expected above 0 for sampled runs")
    if not 0 < a.top_p <= 1:
        bad.append(f"--top-p: found {a.top_p}, expected above 0 and at most 1")
    if a.decode_backend not in BACKENDS:
        bad.append(
            f"--decode-backend: found {a.decode_backend!r}, expected {' or '.join(BACKENDS)}"
        )
    elif a.decode_backend != "auto" and a.eager:
        bad.append("--eager: eager steps never take the path of --decode-backend; leave one out")
    if (a.preset is None) != (a.seed is None):
        bad.append("--preset and --seed belong together")
    prompts, wrong = read_prompts(a.prompts)
    engine, more = _object(a.engine)
    if bad := [*bad, *wrong, *more]:
        raise Refused("\n".join(bad))
    checkpoint = {"fingerprint": fingerprint(Path(a.model))}
    if a.preset is not None:
        checkpoint |= {"preset": a.preset, "seed": a.seed}
    return Plan(
        a.out, a.model, prompts, list(dict.fromkeys(runs)), a.tokens, logprobs,
        not a.no_prompt_logprobs, a.temperature, a.top_p, a.sampling_seed, a.draft, a.drafts,
        a.draft_sample_method, a.rejection_sample_method, a.decode_backend, a.tp, a.eager, a.dtype,
        engine, checkpoint,
    )  # fmt: skip


def read_prompts(path: str) -> tuple[list[list[int]], list[str]]:
    """(prompts, problems) of a file with a prompt of token ids per line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"--prompts: {path}: {error}"]
    found, bad = [], []
    for number, line in enumerate(lines, start=1):
        words = line.replace(",", " ").strip("[] \t").split()
        if not words:
            continue
        wrong = [w for w in words if not _is_number(w)]
        if wrong:
            bad.append(f"--prompts: line {number}: {wrong[0]!r} is no token id")
        found.append([int(w) for w in words if _is_number(w)])
    if not found:
        bad.append(f"--prompts: {path} has no line with token ids")
    return found, bad


def _is_number(text: str) -> bool:
    """Digits 0 to 9; `str.isdigit` alone also holds for superscripts, which are no numbers."""
    return text.isascii() and text.isdigit()


def _object(text: str) -> tuple[dict[str, Any], list[str]]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return {}, [f"--engine: not JSON: {error}"]
    if not isinstance(found, dict):
        return {}, [f"--engine: found {text}, expected a JSON object"]
    return found, []


def fingerprint(checkpoint: Path) -> str:
    """sha256 that names a checkpoint; docs/records.md says over what."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"\n{file.name} {size}\n".encode())
        with file.open("rb") as handle:
            length = 8 + int.from_bytes(handle.read(8), "little")
            handle.seek(0)
            digest.update(handle.read(length + SAMPLE))
            handle.seek(max(length, size - SAMPLE))
            digest.update(handle.read())
    return digest.hexdigest()


# ---- what vLLM is asked for ----


def engine_arguments(plan: Plan, *, speculative: bool) -> dict[str, Any]:
    """Keywords of `vllm.LLM`."""
    longest = max(map(len, plan.prompts)) + plan.tokens + 1
    found: dict[str, Any] = {
        "model": plan.model,
        "skip_tokenizer_init": True,
        "dtype": plan.dtype,
        "tensor_parallel_size": plan.tp,
        "enforce_eager": plan.eager,
        "max_model_len": longest + 2 * plan.drafts,
        "max_logprobs": -1,
        "logprobs_mode": "raw_logprobs",
        "enable_prefix_caching": False,  # a prompt that is cached gives no log-probabilities
        "seed": 0,
    }
    if plan.decode_backend != "auto":
        found["additional_config"] = {"decode_backend": plan.decode_backend}
    if speculative:
        found["speculative_config"] = speculation_arguments(plan)
        found["per_request_spec_decode_metrics"] = "detailed"
    return found | plan.engine


def speculation_arguments(plan: Plan) -> dict[str, Any]:
    """The `speculative_config`."""
    return {
        "method": "dspark",
        "model": plan.draft,
        "num_speculative_tokens": plan.drafts,
        "draft_sample_method": plan.draft_sample_method,
        "rejection_sample_method": plan.rejection_sample_method,
    }


def sampling_arguments(plan: Plan, run: str) -> dict[str, Any]:
    """Keywords of `vllm.SamplingParams`; each output then holds everything so far."""
    from vllm.sampling_params import RequestOutputKind

    sampled = RUNS[run][0]
    return {
        "temperature": plan.temperature if sampled else 0.0,
        "top_p": plan.top_p if sampled else 1.0,
        "seed": plan.seed if sampled else None,
        "max_tokens": plan.tokens,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": plan.logprobs,
        "prompt_logprobs": plan.logprobs if plan.prompt_logprobs and run == "greedy" else None,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }


def unknown_names(plan: Plan) -> list[str]:
    """What this script would ask the installed vLLM for and that has no such name there."""
    import vllm
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    bad = []
    version = tuple(int(x) for x in re.findall(r"\d+", vllm.__version__)[:2])
    if not OLDEST <= version <= NEWEST:
        bad.append(f"vLLM {vllm.__version__}: this script is for 0.27 to 0.33")
    speculative = any(RUNS[r][1] for r in plan.runs)
    asked = engine_arguments(plan, speculative=speculative)
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    bad += [f"EngineArgs has no {n}" for n in asked if n not in known and n not in OPTIONAL]
    parameters = sampling_arguments(plan, plan.runs[0])
    bad += [f"SamplingParams has no {n}" for n in parameters if n not in _fields(vllm)]
    if speculative:
        known = {f.name for f in dataclasses.fields(SpeculativeConfig)}
        bad += [
            f"SpeculativeConfig has no {n}" for n in speculation_arguments(plan) if n not in known
        ]
    for holder, names in (
        (vllm.LLMEngine, ("add_request", "step", "has_unfinished_requests")),
        (vllm.RequestOutput, ()),
    ):
        bad += [f"{holder.__name__} has no {n}" for n in names if not hasattr(holder, n)]
    return bad


def _fields(vllm: Any) -> set[str]:
    return set(getattr(vllm.SamplingParams, "__struct_fields__", ()))


# ---- from outputs to numbers ----


class Follower:
    """The outputs of one request, step by step.

    Attributes:
        lengths: how many ids there were after each step that showed new ones.
        last: the newest `vllm.RequestOutput`.
    """

    def __init__(self) -> None:
        """Before the first output."""
        self.lengths: list[int] = []
        self.last: Any = None

    def take(self, output: Any) -> None:
        """Takes the next output of the request, which holds everything so far."""
        found = len(output.outputs[0].token_ids)
        if found > (self.lengths[-1] if self.lengths else 0):
            self.lengths.append(found)
        self.last = output

    def counts(self, drafts: int) -> tuple[list[int] | None, str]:
        """Accepted drafts of each step behind the first id, and how they were obtained."""
        if self.lengths[:1] != [1]:
            return None, f"not known: the first output shows {self.lengths[:1]} ids, expected 1"
        pairs = zip(self.lengths, self.lengths[1:], strict=False)
        found = [after - before - 1 for before, after in pairs]
        if max(found, default=0) > drafts:
            return None, f"not known: an output shows {max(found) + 1} new ids, of several steps"
        how = "new ids per engine step, less one"
        own = getattr(self.last.outputs[0], "spec_decode_metrics", None)
        told = list(getattr(own, "per_step_accepted", ()) or ())
        if not told:
            return found, f"{how}; this vLLM does not tell them itself"
        if told[:-1] == found[:-1] and len(told) == len(found) and told[-1] >= found[-1]:
            return told, f"{how}, equal to vLLM's own list (per_request_spec_decode_metrics)"
        return found, f"{how}; vLLM's own list of steps with drafts is another: {told}"


def collect(name: str, run: str, plan: Plan, follower: Follower) -> tuple[Tensors, str | None]:
    """Tensors of one text, and how its accepted counts were obtained.

    Args:
        name: the case, `caseN`.
        run: the run's name.
        plan: what was asked for.
        follower: has taken all outputs.
    """
    output = follower.last
    done = output.outputs[0]
    ids, prompt = list(done.token_ids), list(output.prompt_token_ids)
    found: Tensors = {
        f"{name}.prompt_ids": np.array(prompt, np.int32),
        f"{name}.{run}_ids": np.array(ids, np.int32),
    }
    rows = [places(done.logprobs, i) for i in range(len(ids))]
    if output.prompt_logprobs is not None:
        rows = [places(output.prompt_logprobs, i) for i in range(1, len(prompt))] + rows
    found |= tabulate(f"{name}.{run}", rows, plan.logprobs)
    if not RUNS[run][1]:
        return found, None
    counts, how = follower.counts(plan.drafts)
    if counts:
        found[f"{name}.{run}_accepted_counts"] = np.array(counts, np.int32)
    return found, how


def places(logprobs: Any, i: int) -> dict[int, float]:
    """Token id to log-probability at place i, from vLLM's list of dicts or its flat form."""
    if hasattr(logprobs, "start_indices"):
        part = slice(logprobs.start_indices[i], logprobs.end_indices[i])
        return dict(zip(logprobs.token_ids[part], logprobs.logprobs[part], strict=True))
    return {token: entry.logprob for token, entry in logprobs[i].items()}


def tabulate(name: str, rows: list[dict[int, float]], k: int) -> Tensors:
    """All tokens in order where k is -1, else the k best of each place, best first."""
    if k == -1:
        table = [[row[token] for token in range(len(row))] for row in rows]
        return {f"{name}_logprobs": np.array(table, np.float32)}
    k = min(k, *(len(row) for row in rows))
    best = [sorted(row.items(), key=lambda e: (-e[1], e[0]))[:k] for row in rows]
    return {
        f"{name}_top_ids": np.array([[t for t, _ in row] for row in best], np.int32),
        f"{name}_top_logprobs": np.array([[p for _, p in row] for row in best], np.float32),
    }


def description(plan: Plan, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON side of the record; `parts` are what the engines' processes said."""
    merged: dict[str, Any] = {"accepted": {}, "kernels": []}
    for part in parts:
        merged |= {k: part[k] for k in ("version", "torch", "device") if k in part}
        merged["accepted"] |= part.get("accepted", {})
        merged["kernels"] += part.get("kernels", [])
    texts = {}
    for run in plan.runs:
        sampled, speculative, together = RUNS[run]
        sampling: dict[str, Any] = {"temperature": plan.temperature if sampled else 0.0}
        if sampled:
            sampling |= {"top_p": plan.top_p, "seed": plan.seed}
        texts[run] = {"sampling": sampling, "speculative": speculative}
        texts[run]["concurrency"] = len(plan.prompts) if together else 1
        if run in merged["accepted"]:
            texts[run]["accepted_counts"] = merged["accepted"][run]
    found = {
        "kind": "vllm",
        "format": 1,
        "engine": {"name": "vLLM", "version": merged["version"], "torch": merged["torch"]},
        "device": f"{plan.tp} x {merged['device']}",
        "run": {
            "dtype": plan.dtype, "tensor_parallel": plan.tp, "eager": plan.eager,
            "decode_backend": plan.decode_backend, "logprobs_mode": "raw_logprobs",
            "engine_arguments": plan.engine,
        },
        "kernels": {"logged": list(dict.fromkeys(merged["kernels"]))},
        "checkpoint": plan.checkpoint,
        "texts": texts,
    }  # fmt: skip
    if any(RUNS[r][1] for r in plan.runs):
        asked = speculation_arguments(plan)
        found["speculation"] = {
            "method": asked["method"], "drafts": plan.drafts,
            "draft_sample_method": plan.draft_sample_method,
            "rejection_sample_method": plan.rejection_sample_method,
        }  # fmt: skip
    return found


def write(path: Path, meta: Mapping[str, Any], tensors: Tensors) -> None:
    """Writes both files; the folder appears only when it is complete."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        save_file(tensors, new / "golden.safetensors")
        (new / "golden.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        new.rename(path)


# ---- the engine ----


def work(plan: Plan, runs: list[str], part: Path) -> None:
    """In a process of its own: one engine, its runs, their numbers in `part`."""
    import torch
    import vllm
    from safetensors.numpy import save_file
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    asked = engine_arguments(plan, speculative=RUNS[runs[0]][1])
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    asked = {n: v for n, v in asked.items() if n in known or n not in OPTIONAL}
    engine = vllm.LLM(**asked).llm_engine
    tensors: Tensors = {}
    accepted: dict[str, str] = {}
    for run in runs:
        parameters = vllm.SamplingParams(**sampling_arguments(plan, run))
        for follower, case in drive(engine, plan.prompts, parameters, together=RUNS[run][2]):
            found, how = collect(f"case{case}", run, plan, follower)
            tensors |= found
            if how is not None:
                accepted[run] = how if accepted.get(run, how) == how else "differs by case: " + how
    save_file(tensors, part / "part.safetensors")
    said = {
        "version": vllm.__version__, "torch": torch.__version__, "accepted": accepted,
        "device": current_platform.get_device_name(),
    }  # fmt: skip
    (part / "part.json").write_text(json.dumps(said))


def drive(
    engine: Any, prompts: list[list[int]], parameters: Any, *, together: bool
) -> Iterable[tuple[Follower, int]]:
    """Runs the prompts one by one or all at once, a step at a time."""
    everyone = list(range(len(prompts)))
    for group in [everyone] if together else [[i] for i in everyone]:
        followers = {str(i): Follower() for i in group}
        for i in group:
            engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, parameters)
        while engine.has_unfinished_requests():
            for output in engine.step():
                followers[output.request_id].take(output)
        for i in group:
            yield followers[str(i)], i


def record(plan: Plan) -> None:
    """One engine after the other, then the record."""
    from safetensors.numpy import load_file

    parts, tensors = [], {}
    for speculative in (False, True):
        runs = [r for r in plan.runs if RUNS[r][1] == speculative]
        if not runs:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            order = Path(scratch) / "plan.json"
            order.write_text(json.dumps({"plan": dataclasses.asdict(plan), "runs": runs}))
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", scratch]
            chosen = []
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process:
                for line in process.stdout or ():
                    sys.stderr.write(line)
                    if match := CHOSEN.search(line):
                        chosen.append(match[0].strip())
            if process.returncode:
                raise SystemExit(f"error: the engine's process ended with {process.returncode}")
            tensors |= load_file(Path(scratch) / "part.safetensors")
            said = json.loads((Path(scratch) / "part.json").read_text())
            parts.append(said | {"kernels": chosen})
    write(Path(plan.out), description(plan, parts), tensors)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 if the record was written (or, with --check, could be asked for), else 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--worker"]:
        order = json.loads((Path(arguments[1]) / "plan.json").read_text())
        work(Plan(**order["plan"]), order["runs"], Path(arguments[1]))
        return 0
    asked = parser().parse_args(arguments)
    try:
        plan = plan_of(asked)
        if bad := unknown_names(plan):
            raise Refused("\n".join(bad))
    except Refused as error:
        print("\n".join(f"error: {line}" for line in str(error).split("\n")), file=sys.stderr)
        return 2
    if asked.check:
        print("arguments and names are good; nothing was run")
        return 0
    record(plan)
    print(f"{plan.out}: {len(plan.prompts)} prompts, runs {', '.join(plan.runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
