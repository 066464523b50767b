"""Run by the Python of an environment with vLLM: what `vllm_record.py` makes of real outputs.

    python vllm_probe.py SCRIPT MODEL PROMPTS OUT

No engine runs, as that needs a GPU: the objects that an engine hands out are built here from the
classes of the installed vLLM, with known content, and go through the script's own functions. Prints
a JSON document for `test_vllm_record.py`, which holds the other end.
"""

import dataclasses
import importlib.util
import json
import sys
import typing
from pathlib import Path

import numpy as np

VOCABULARY, STEPS, DRAFTS = 16, (2, 0, 3), 3
PROMPT = [3, 1, 4]


def load(path: str):
    """The script as a module, as it is after being copied anywhere."""
    spec = importlib.util.spec_from_file_location("vllm_record", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_record"] = module
    spec.loader.exec_module(module)
    return module


def table(rng, token, k):
    """One place as vLLM tells it: the chosen token, then the k best ones."""
    from vllm.logprobs import Logprob

    logits = rng.normal(size=VOCABULARY)
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs)[: VOCABULARY if k == -1 else k].tolist()
    return {t: Logprob(float(logprobs[t]), 1 + i) for i, t in enumerate([token, *best])}


def flat(rows):
    """The same places in vLLM's flat form."""
    from vllm.logprobs import FlatLogprobs

    found = FlatLogprobs()
    for row in rows:
        found.append(row)
    return found


def outputs(rng, k, *, speculative, prompt_rows, as_flat):
    """Outputs of one request after each engine step; the last one is finished."""
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    counts = STEPS if speculative else (0,) * 7
    total = (
        1 + sum(c + 1 for c in counts) - (1 if speculative else 0)
    )  # the text cuts the last step
    ids = rng.integers(0, VOCABULARY, total).tolist()
    rows = [table(rng, t, k) for t in ids]
    before = [None] + [table(rng, t, k) for t in PROMPT[1:]] if prompt_rows else None
    own = RequestSpecDecodeMetrics.new(DRAFTS)
    for count in counts:
        own.observe(DRAFTS, count, detailed=True)
    ends = [min(total, int(e)) for e in 1 + np.cumsum([0, *(c + 1 for c in counts)])]
    for end in [0, *ends]:  # a step may show nothing new
        done = end == total
        finished = {"finish_reason": "length"} if done else {}
        if done and speculative:
            finished["spec_decode_metrics"] = own
        told = flat(rows[:end]) if as_flat else rows[:end]
        completion = CompletionOutput(0, "", ids[:end], None, told, **finished)
        yield RequestOutput("0", None, PROMPT, before, [completion], done)


def main(script: str, model: str, prompts: str, out: str) -> dict:
    """Writes the record OUT and returns what was found."""
    import vllm
    from vllm.config.speculative import DraftSampleMethod, RejectionSampleMethod, SpeculativeMethod
    from vllm.engine.arg_utils import EngineArgs

    module = load(script)
    arguments = ["--model", model, "--prompts", prompts, "--draft", model, "--drafts", str(DRAFTS)]
    arguments += ["--runs", "greedy,sampled,dspark", "--logprobs", "5", "--preset", "tiny"]
    plan = module.plan_of(module.parser().parse_args([out, *arguments, "--seed", "4"]))
    rng, tensors, how = np.random.default_rng(0), {}, {}
    for run, as_flat in (("greedy", False), ("sampled", True), ("dspark", True)):
        follower = module.Follower()
        wanted = module.RUNS[run][1]
        for output in outputs(
            rng, 5, speculative=wanted, prompt_rows=run == "greedy", as_flat=as_flat
        ):
            follower.take(output)
        found, told = module.collect("case0", run, plan, follower)
        tensors |= found
        how[run] = told
    every = module.Follower()
    whole = dataclasses.replace(plan, logprobs=-1)
    for output in outputs(rng, -1, speculative=False, prompt_rows=True, as_flat=True):
        every.take(output)
    full, _ = module.collect("case1", "greedy", whole, every)
    tensors |= full
    said = {"version": vllm.__version__, "torch": "x", "device": "no device", "kernels": []}
    meta = module.description(plan, [said | {"accepted": {"dspark": how["dspark"]}}])
    module.write(Path(out), meta, tensors)
    EngineArgs(**module.engine_arguments(plan, speculative=True))
    parameters = [vllm.SamplingParams(**module.sampling_arguments(plan, r)) for r in module.RUNS]
    return {
        "version": vllm.__version__,
        "unknown": module.unknown_names(plan),
        "lacking": [n for n in module.OPTIONAL if not hasattr(EngineArgs, n)],
        "how": how["dspark"],
        "temperatures": [p.temperature for p in parameters],
        "methods": _values(SpeculativeMethod),
        "draft_methods": _values(DraftSampleMethod),
        "rules": _values(RejectionSampleMethod),
    }


def _values(literal) -> list[str]:
    found = []
    for value in typing.get_args(literal):
        found += [value] if isinstance(value, str) else _values(value)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
