"""Every command line of README and docs: found, and turned into what a test can run.

`STAND_INS` is the one table of substitutions: a line that names a GPU, several hosts, a server, or
a checkpoint that is not here runs on something small in its place, and says why. `NOT_RUN` lists
what no test runs, with the reason. A line of a shell block that is in neither and starts no program
of ours is an error of the page.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from parity.wrong_uses import make_workspace

ROOT = Path(__file__).parents[1]
PROGRAM = (
    r"(?:k3|k3-parity|k3-bench|python -m (?:parity|bench|pytest)(?:\.\w+)?|"
    r"python notebooks/\w+\.py)"
)
_SHELL = re.compile(r"^```sh\n(.*?)^```", re.S | re.M)
_FENCE = re.compile(r"^```.*?^```", re.S | re.M)
_HEREDOC = re.compile(r"<<'(\w+)'\n.*?^\1$", re.S | re.M)
# `k3 convert` is a name; with an argument, or as a module of its own, it is a command line
_INLINE = re.compile(
    rf"(?:\.venv/bin/)?{PROGRAM} (?!watchdog)[a-z][\w-]* \S.*|"
    r"\.venv/bin/python -m pytest .*|python -m (?:parity|bench)\.\w+(?: .*)?"
)

HERE = "no such file here: the small checkpoint stands in"
GPUS = "as many ranks as this test emulates; parity/test_sharded.py has 16"
SMALL = "released sizes need a GPU: a small preset, few steps"
KERNELS = "kernels need a GPU: the standard path, or the list of cases"
RECORD = "a record needs vLLM on a GPU: the recorded run, whose checkpoint is made from its preset"
LONG = "an hour on two cores: the quickest suite; each has slow tests of its own"
SERVER = "no server of the model: torch_ref behind the same HTTP interface"
HOSTS = "one host: parity/test_processes.py runs four processes"
SLICE = "--preset tiny --tp 1 --rows 1,8 --layers 4,8 --steps 2 --repeats 4 --no-dispatched"

# (what the line holds, what stands in, why), applied in this order
STAND_INS = (
    (r"^\.venv/bin/", "", "the Python of this test"),
    (r"^MPLBACKEND=Agg ", "", "set for every line of this test"),
    (r"^XLA_FLAGS=\S+ ", "", "set for every line of this test"),
    (r"^srun( --\S+)+ ", "", HOSTS),
    (r" --coordinator \S+ --num-processes 4 --process-id I", "", HOSTS),
    (r"k3 generate \.\.\.", "k3 generate CKPT --prompt-ids 5,17,101 --steps 2", "shortened there"),
    (r"^k3 selftest( .*)?$", "k3 selftest --backend auto --preset tiny --tp 1 --rows 1 --drafts 0 "
     "--context 32 --page-size 16", "kernels need a GPU; so do the released sizes"),
    (r"k3 generate --check", "k3 generate CKPT --prompt-ids 5 --tp 16 --check", "shortened there"),
    (r"k3 memory (CKPT|/data/Kimi-K3)", "k3 memory jax_impl/k3_config.json",
     "sizes come from config.json alone, and the released one is here"),
    (r"/data/Kimi-K3-DSpark|\bDRAFT\b", "tiny/draft", HERE),
    (r"(?<!\S)(/data/Kimi-K3|CKPT)(?!\S)", "tiny/target", HERE),
    (r"make-tiny DIR", "make-tiny build/dir", "a name"),
    (r"golden (DIR\.\.\.|FOLDER)", "golden parity/golden/dspark_tiny16", "a name"),
    (r"--perfetto DIR", "--perfetto build/trace", "a name"),
    (r"(?<!\S)OUT(?!\S)|/fast/kimi-k3", "build/prepared", "a name"),
    (r"compare A B", "compare auto.json specialized.json", "names"),
    (r"results/FILE\.json", "results/rank_slice_specialized_h200.json", "a name"),
    (r"rank-slice (?!--preset)(--backend \S+|.*?)(?= --json|$)", f"rank-slice {SLICE}", SMALL),
    (r"--match us_per_layer", "--match us_per_step", "it has one depth of 3 KDA : 1 MLA only"),
    (r"bench layers .*?(?= --json|$)", "bench layers --preset tiny --tp 1 --rows 2 --repeats 1",
     SMALL),
    (r"bench startup .*?(?= --json|$)", "bench startup --preset tiny --tp 1 --rows 2 --layers 4 "
     "--calls 15", SMALL),
    (r"bench ops (?!--list)", "bench ops --list ", KERNELS),
    (r" --compare auto,latency_specialized", "", KERNELS),
    (r"(parity .*) --backend latency_specialized", r"\1", KERNELS),
    (r"(bench decode .*)--osl 1000", r"\1--osl 40", "a short run"),
    (r"(bench decode --checkpoint(?!.*--osl).*)", r"\1 --osl 40", "a short run"),
    (r"(bench decode (?!.*--runs).*)", r"\1 --runs 1 --groups 1 --replays 1", "a short run"),
    (r"golden k3-record --checkpoint \S+ --draft \S+ --tp 16", "golden parity/golden/vllm033_tiny",
     RECORD),
    (r"^vllm serve .*", "python -m parity.served tiny/target --draft tiny/draft --port 8000 &",
     SERVER),
    (r"--url (URL|http://gpunode:8000)", "--url http://localhost:8000", SERVER),
    (r"--model (k3|NAME)", "--model target", SERVER),
    (r"--record k3-record", "--record build/record", "a name"),
    (r"localhost:8000|--port 8000", lambda m: m[0].replace("8000", "PORT"), "a free port"),
    (r"--suite (ops,model\S*|sharded.*)", "--suite ops", LONG),
    (r"(?<!memory )(.*)--tp 16 --dcp 16", r"\1--tp 2 --dcp 2", GPUS),
    (r"^(?!k3 memory|python -m bench roofline)(.*)--tp 16( --local-devices 16)?", r"\1--tp 2",
     GPUS),
    (r"bench\.commit_forms$", "bench.commit_forms --layers 2 --heads 1 --samples 2 --batches 1",
     SMALL),
    (r"bench\.loader_memory$", "bench.loader_memory tiny/target --limit 1000", "2.6 GB otherwise"),
)  # fmt: skip
NOT_RUN = (
    (r"make( [\w-]+)?", "builds an environment; .ci/run does, and `make demo` is run line by line"),
    (r"source .*", "the test has its environment"),
    (r"(scp|ssh) .*", "another host"),
    (r"cat > \S+", "writes the input of the next line; the workspace has that file"),
    (r"python vllm_record\.py .*", "needs vLLM: `make test-vllm` tests its arguments and names"),
    (r"python -m parity\.kernel_aot.*", "needs the extra `aot`: parity/test_kernels_aot.py"),
    (r"python -m bench\.loader_ranks", "writes 12 GB: parity/test_prepared.py counts its reads"),
    (r"pip install .*", "changes the environment; .ci/run installs"),
    (
        r".*\.venv312/bin/python notebooks/\w+\.py",
        "parity/test_notebooks.py runs it there",
    ),
    (r"\.venv/bin/jupyter lab", "a server that stays; `make notebooks` runs what it opens"),
)
# quick enough for every run of the tests, in one process
QUICK = re.compile(
    r"k3 (check|memory|make-tiny|convert) .*|k3\S* .*--(help|version|tyro-print-completion).*|"
    r"python -m (parity|bench) \S+ --help|python -m bench (roofline|compare|plot|ops --list).*"
)


def pages() -> dict[str, list[str]]:
    """Command lines by page, in the order of the page; `make demo` is one more."""
    files = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "parity/golden/README.md")]
    files += [p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts]
    found = {str(f.relative_to(ROOT)): command_lines(f.read_text()) for f in files}
    recipe = re.search(r"^demo: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    lines = recipe[1].replace("\t", "").replace("$(BIN)/", "").splitlines() if recipe else []
    found["make demo"] = [x for x in lines if re.match(PROGRAM, x)]
    return {page: lines for page, lines in found.items() if lines}


def command_lines(text: str) -> list[str]:
    """Every command line of a page: shell blocks, indented blocks, code within a line."""
    text = text.replace("\\\n", " ")
    found: list[tuple[int, str]] = []
    for block in _SHELL.finditer(text):
        body = _HEREDOC.sub("", block[1])
        found += [(block.start(), line) for line in body.splitlines()]
    rest = _FENCE.sub(lambda m: "\n" * m[0].count("\n"), text)
    kept = {m.start(): m for m in re.finditer(rf"^    ({PROGRAM} .*)$", rest, re.M)}
    found += [(at, m[1]) for at, m in kept.items()]
    found += [
        (m.start(), m[1])
        for m in re.finditer(r"`([^`\n]+)`", rest)
        if _INLINE.fullmatch(m[1].partition(" #")[0].strip())
    ]
    tidy = (re.sub(r"\s+", " ", line.partition(" #")[0]).strip() for _, line in found)
    return list(dict.fromkeys(line for line in tidy if line and not line.startswith("#")))


def not_run(line: str) -> str | None:
    """Why no test runs a line; None: one does."""
    return next((why for what, why in NOT_RUN if re.fullmatch(what, line)), None)


def stand_in(line: str) -> str:
    """What runs in a line's place."""
    for what, instead, _ in STAND_INS:
        line = re.sub(what, instead, line)
    return re.sub(r"\s+", " ", line).strip()


def quick(program: str) -> Iterator[tuple[str, list[str]]]:
    """(page, stand-ins of the quick lines of a program) in the order of the pages."""
    for page, lines in pages().items():
        made = [stand_in(line) for line in lines if not not_run(line)]
        mine = [m for m in made if re.match(program, m) and QUICK.fullmatch(m)]
        if mine:
            yield page, mine


def fresh(folder: Path) -> None:
    """Remove what the lines of another page wrote."""
    shutil.rmtree(folder / "build", ignore_errors=True)
    (folder / "build").mkdir()


def make_place(folder: Path, results: Path) -> None:
    """What the lines refer to: this repository's folders, small checkpoints, results of `bench`."""
    make_workspace(folder)
    for name in ("jax_impl", "parity", "bench", "torch_ref", "notebooks"):
        (folder / name).symlink_to(ROOT / name)
    fresh(folder)
    (folder / "prompts.txt").write_text("5 17 101 9 44 12 300 3\n1 4 9 16 25 36 49 64 81 100\n")
    for name in ("auto.json", "specialized.json"):
        shutil.copy(results / "rank_slice_specialized_h200.json", folder / name)
