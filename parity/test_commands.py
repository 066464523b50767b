"""What all three command lines have in common: help, examples, --json, --quiet, completion."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import pytest

from jax_impl import cli
from jax_impl.checkpoint import Checkpoint, CheckpointError
from jax_impl.make_tiny import make_checkpoint
from jax_impl.output import BAD_INPUT, CLOSED_PIPE, INTERRUPTED, run_command
from jax_impl.prepared import MARKER, changed_arrays, parse_entries
from jax_impl.progress import count_bar
from parity import __main__ as parity_command

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "k3": "jax_impl.cli", "python -m parity": "parity.__main__", "python -m bench": "bench.__main__"
}  # fmt: skip
COUNTS = {"k3": 6, "python -m parity": 4, "python -m bench": 9}
# every help text and completion of a program, from one process: parity does not import bench
TEXTS = """
import contextlib, importlib, io, json, re, sys
main = importlib.import_module(sys.argv[1]).main
sys.argv[0] = sys.argv[2]
def said(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(list(arguments))
    return out.getvalue()
top = said("--help")
found = {name: said(name, "--help") for name in re.search(r"{([a-z,-]+)}", top)[1].split(",")}
for shell in ("bash", "zsh"):
    found[f"completion {shell}"] = said("--tyro-print-completion", shell)
heavy = [m for m in ("jax", "torch", "numpy", "matplotlib") if m in sys.modules]
print(json.dumps(found | {"": top, "heavy": heavy}))
"""


@lru_cache
def texts(program: str, script: str = "") -> dict[str, str]:
    """Help texts by command ("" for the program's own), completions, and heavy imports."""
    done = subprocess.run(
        [sys.executable, "-c", TEXTS, PROGRAMS[program], script],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def commands(program: str) -> dict[str, str]:
    """Help texts by command."""
    return {k: v for k, v in texts(program).items() if re.fullmatch(r"[a-z-]+", k) and k != "heavy"}


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_light_and_complete(program):
    assert texts(program)["heavy"] == []
    assert len(commands(program)) == COUNTS[program]
    text = plain(texts(program)[""])
    assert "Exit status 0" in text and "`--version` prints versions" in text
    assert {"1", "2", "3", str(INTERRUPTED), str(CLOSED_PIPE)} <= set(re.findall(r"(\d+):", text))


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_has_an_example_and_the_same_options(program):
    for name, text in commands(program).items():
        assert f"Example: {program} {name} " in plain(text), name
        options = set(re.findall(r"--[a-z-]+", text))
        assert {"--json", "--quiet"} <= options, name
        assert not {"--out", "--ckpts", "--acceptance-length"} & options, name
        example = plain(text).partition("Example: ")[2].partition("positional")[0]
        example = example.partition(" options ")[0]
        assert set(re.findall(r"--[a-z-]+", example)) <= options, name


def test_an_option_means_the_same_wherever_it_is():
    """One word for one thing: no option is a path here and a number there."""
    kinds: dict[str, dict[str, str]] = {}
    for program in PROGRAMS:
        for name, text in commands(program).items():
            for option, kind in re.findall(r"^\s+(--[a-z-]+) ([A-Z{]\S*)", text, re.M):
                kind = kind.replace("{None}|", "").strip(",")
                if not kind.startswith(("{", "--")):
                    kinds.setdefault(option, {})[f"{program} {name}"] = kind
    apart = {option: found for option, found in kinds.items() if len(set(found.values())) > 1}
    # many numbers at once where several are measured or checked in one run; a drafter may be named
    # `released`
    assert set(apart) <= {"--rows", "--draft", "--tp"}, apart
    assert [n for n, kind in kinds["--tp"].items() if kind != "INT"] == ["k3 selftest"]


@pytest.mark.parametrize(
    ("program", "script"),
    [("k3", "k3"), ("python -m parity", "k3-parity"), ("python -m bench", "k3-bench")],
)
def test_completion_is_printed(program, script):
    found = texts(program, script)
    for shell in ("bash", "zsh"):
        text = found[f"completion {shell}"]
        assert script in text and all(name in text for name in commands(program)), shell


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands") / "tiny"
    make_checkpoint(folder, "tiny", 0)
    return folder


def run(main, *arguments):
    try:
        return main([str(a) for a in arguments])
    except SystemExit as stop:
        return stop.code


QUIET = {
    "check": ("check", "TINY/target"),
    "memory": ("memory", "TINY/target", "--tp", "2"),
    "make-tiny": ("make-tiny", "OUT"),
    "convert": ("convert", "TINY/target", "OUT"),
    "generate": ("generate", "TINY/target", "--prompt-ids", "5", "--steps", "2"),
    "golden": ("golden", "parity/golden/dspark_tiny16"),
}


def _line(name, tiny, tmp_path):
    made = {"TINY": str(tiny), "OUT": str(tmp_path / "out")}
    return [re.sub("TINY|OUT", lambda m: made[m[0]], word) for word in QUIET[name]]


@pytest.mark.parametrize("name", [n for n in QUIET if n not in ("generate", "convert", "golden")])
def test_quiet_says_nothing_but_what_json_asks_for(name, tiny, tmp_path, capsys):
    line = _line(name, tiny, tmp_path)
    assert run(cli.main, *line, "--quiet", "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) and not shown.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "convert", "golden"])
def test_quiet_commands_that_work_longer(name, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    main = parity_command.main if name == "golden" else cli.main
    line, out = _line(name, tiny, tmp_path), tmp_path / "result.json"
    assert run(main, *line, "--quiet", "--json", out) == 0
    shown = capsys.readouterr()
    assert json.loads(out.read_text()) and not shown.out and not shown.err


def test_without_quiet_bytes_and_rate_are_shown(tiny, tmp_path, capsys):
    assert run(cli.main, "convert", tiny / "target", tmp_path / "out") == 0
    shown = capsys.readouterr()
    assert "converting" in shown.err and "MB" in shown.err and "B/s" in shown.err
    assert "complete" in shown.out


@pytest.mark.parametrize("program", ["k3", "parity"])
def test_an_interrupt_has_its_own_status(program, tiny, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    if program == "k3":
        monkeypatch.setattr(Checkpoint, "open", stop)
        assert run(cli.main, "check", tiny / "target") == 130
    else:
        monkeypatch.setattr("parity.commands.execute", stop)
        assert run(parity_command.main, "golden", tiny) == 130
    assert f"{program}: interrupted after" in capsys.readouterr().err


def test_exit_statuses_are_documented():
    page = (ROOT / "docs" / "commands.md").read_text()
    statuses = re.findall(r"^\| (\d+) \|", page, re.M)
    assert statuses == ["0", "1", str(BAD_INPUT), "3", str(INTERRUPTED), str(CLOSED_PIPE)]


@pytest.mark.parametrize("module", ["jax_impl", "parity", "bench"])
def test_version_and_a_completion_that_nobody_reads_to_its_end(module):
    command = [sys.executable, "-m", module]
    said = subprocess.run([*command, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0 and not said.stderr
    assert re.fullmatch(r"(k3|parity|bench) .+ \(JAX .+, Python 3\.\d+\.\S+\)\n", said.stdout)
    reading, writing = os.pipe()
    os.close(reading)  # as if `head` had ended
    asked = [*command, "--tyro-print-completion", "zsh"]
    done = subprocess.run(asked, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == CLOSED_PIPE and not done.stderr
    whole = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    name = {"jax_impl": "k3"}.get(module, f"k3-{module}")
    assert whole.splitlines()[0] == f"#compdef {name}"


@pytest.mark.parametrize(("main", "typed", "meant"), [
    (cli.main, "chek", "check"), (cli.main, "genrate", "generate"),
    (parity_command.main, "goldn", "golden"),
])  # fmt: skip
def test_an_unknown_command_is_answered_with_one_that_is_alike(
    main, typed, meant, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run(main, typed, "x") == BAD_INPUT
    assert f"found no command {typed!r}; did you mean {meant}?" in capsys.readouterr().err
    assert run(main, "zzzz") == BAD_INPUT
    assert "did you mean" not in capsys.readouterr().err


def test_a_pipe_other_than_standard_output_is_no_reader_that_went_away(capsys):
    def refused():
        raise BrokenPipeError(32, "Broken pipe")  # a server that went away

    assert run_command("k3", refused, []) == BAD_INPUT
    assert "k3: a file: found 'Broken pipe', expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "command", "usage"),
    [
        ("k3", "convert", "CHECKPOINT OUT"),
        ("k3", "make-tiny", "DIRECTORY"),
        ("k3", "check", "CHECKPOINT"),
        ("python -m parity", "compare", "CHECKPOINT"),
        ("python -m parity", "golden", "DIR [DIR ...]"),
        ("python -m bench", "compare", " A B "),
        ("python -m bench", "ops", "[NAME ...]"),
    ],
)
def test_arguments_are_called_what_they_are(program, command, usage):
    text = plain(commands(program)[command])
    first = text.partition(" Example: ")[0]
    assert usage in first and "PATH" not in first.partition("positional")[0]
    assert "[[" not in text


def test_the_bar_of_a_text_that_ends_early_is_full(monkeypatch):
    from rich.progress import Progress

    seen = []
    monkeypatch.setattr(Progress, "update", lambda self, task, **changed: seen.append(changed))
    with count_bar("decoding", 9) as progress:
        progress(0)
        progress(4, 4)
    assert [(s["completed"], s["total"]) for s in seen] == [(0, None), (4, 4)]


# ---- Ctrl-C, for real ----


def interrupt(command: list[str], begun) -> tuple[int, str]:
    """Exit status and standard error of `k3`, interrupted as soon as `begun()` is true."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_impl", *command],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not begun():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    return process.returncode, said


@pytest.mark.slow
def test_ctrl_c_while_a_checkpoint_is_made_leaves_nothing(tmp_path, hears_sigint):
    place = tmp_path / "here"
    place.mkdir()
    command = ["make-tiny", str(place / "big"), "--preset", "big"]
    status, said = interrupt(command, lambda: any(place.rglob("*.safetensors")))
    assert status == 130 and "interrupted" in said and "Traceback" not in said
    assert not list(place.iterdir())


@pytest.mark.slow
def test_ctrl_c_while_converting_leaves_whole_items_only(tmp_path, hears_sigint):
    make_checkpoint(tmp_path / "deep", "deep", 0)
    source, out = tmp_path / "deep" / "target", tmp_path / "out"
    status, said = interrupt(
        ["convert", str(source), str(out)], lambda: (out / "layer_00002").exists()
    )
    assert status == 130 and "goes on from here" in said and "Traceback" not in said
    with pytest.raises(CheckpointError, match="did not finish"):
        Checkpoint.open(out)
    items = [p for p in out.iterdir() if p.is_dir() and not p.name.startswith(".")]
    assert 3 <= len(items) < 94
    for item in items:
        assert not list(
            changed_arrays(item, parse_entries(json.loads((item / MARKER).read_text())))
        )
    assert run(cli.main, "convert", source, out) == 0
    assert run(cli.main, "check", out, "--checksums") == 0
