"""Tables of wrong uses: how one is tried, and what its message must hold.

A message names what was found, what was expected and what to do; the exit status is 2, nothing is
on standard output, and no file has appeared or changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00003.safetensors"


class Wrong(NamedTuple):
    """One wrong use; the three texts are parts of the message.

    Attributes:
        command: the arguments, separated by blanks, in the folder that `make_workspace` fills.
        found: what was found.
        expected: what was expected.
        do: what to do.
        leaves: a folder that may be left; an unfinished conversion, which the next one continues.
    """

    command: str
    found: str
    expected: str
    do: str
    leaves: str = ""


def plain(text: str) -> str:
    """A message without frames and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"[^\x00-\x7f]|-{5,}", " ", text)).strip()


def lacking(message: str, wrong: Wrong) -> list[str]:
    """Which of the three parts a message does not hold."""
    said, parts = plain(message), ("found", "expected", "do")
    return [
        f"{part}: {text!r}"
        for part in parts
        if not (text := getattr(wrong, part)) or text not in said
    ]


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below one, with size and time of change."""
    found = {str(p.relative_to(folder)): p.lstat() for p in folder.rglob("*")}
    return {name: (s.st_size, s.st_mtime_ns) for name, s in found.items()}


def status_of(main: Callable[[list[str]], Any], command: str) -> Any:
    """Exit status of a command line, whether `main` returns or raises it."""
    try:
        return main([a.strip("'") for a in re.findall(r"'[^']*'|\S+", command)])
    except SystemExit as stop:
        return stop.code


def problems(main: Callable[[list[str]], Any], wrong: Wrong, capsys: Any, folder: Path) -> list:
    """Everything that is wrong with how a wrong use ended; the working directory is `folder`."""
    before = files(folder)
    capsys.readouterr()
    status = status_of(main, wrong.command)
    shown = capsys.readouterr()
    bad = lacking(shown.err, wrong)
    if status != 2:
        bad.append(f"exit status {status}")
    if "Traceback" in shown.err or shown.out:
        bad.append("a traceback, or something on standard output")
    changed = {k for k, _ in before.items() ^ files(folder).items()}
    changed = {k for k in changed if not wrong.leaves or k.split("/")[0] != wrong.leaves}
    if changed:
        bad.append(f"files: {sorted(changed)}")
    return [*bad, shown.err] if bad else []


# ---- what the commands are tried on ----


def make_workspace(folder: Path) -> None:
    """A small target with its drafter, and broken copies of both and of other inputs."""
    from jax_impl.make_tiny import make_checkpoint

    make_checkpoint(folder / "tiny", "tiny", 0)
    for name, change in _TARGETS.items():
        _copy(folder / "tiny" / "target", folder / name)
        change(folder / name)
    for name, change in _DRAFTS.items():
        _copy(folder / "tiny" / "draft", folder / name)
        change(folder / name)
    for name, text in _TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    save_file({"case0.prompt_ids": np.arange(3)}, folder / "record" / "golden.safetensors")


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=os.link)  # `_rewrite` makes a file its own


def _rewrite(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


def _json(name: str, change: Callable[[dict], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        _rewrite(folder / name, json.dumps(content).encode())

    return apply


def _text(**changed: Any) -> Callable[[Path], None]:
    return _json("config.json", lambda c: c["text_config"].update(changed))


def _missing(content: dict) -> None:
    text = content["text_config"]
    text |= {"num_experts_per_token": 999, "rope_theta": 1, "hidden_act": "silu"}
    del text["rms_norm_eps"]


def _tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = {k: v.copy() for k, v in load_file(folder / SHARD).items()}
        change(tensors)
        (folder / SHARD).unlink()
        save_file(tensors, folder / SHARD)

    return apply


def _named(tensors: dict[str, np.ndarray], end: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(end))


def _other_shape(tensors: dict[str, np.ndarray]) -> None:
    name = _named(tensors, "q_conv1d.weight")
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])
    name = _named(tensors, "input_layernorm.weight")
    tensors[name] = tensors[name].astype(np.float32)


def _not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors[_named(tensors, "input_layernorm.weight")].flat[3] = np.nan


def _half(folder: Path) -> None:
    file = folder / SHARD
    _rewrite(file, file.read_bytes()[: file.stat().st_size // 2])


_TARGETS: dict[str, Callable[[Path], None]] = {
    "half": _half,
    "without_shard": lambda f: (f / SHARD).unlink(),
    "without_index": lambda f: (f / INDEX).unlink(),
    "broken_index": lambda f: _rewrite(f / INDEX, b"["),
    "broken_config": lambda f: _rewrite(f / "config.json", b"{"),
    "unnamed": _json(INDEX, lambda c: c["weight_map"].pop(_named(c["weight_map"], "A_log"))),
    "other_shape": _tensors(_other_shape),
    "not_finite": _tensors(_not_finite),
    "silu": _text(hidden_act="silu"),
    "outside": _json("config.json", lambda c: c.update(tie_word_embeddings=True)),
    "three_settings": _json("config.json", _missing),
    "other_model": _json("config.json", lambda c: c.update(model_type="llama")),
}
_DRAFTS: dict[str, Callable[[Path], None]] = {
    "other_draft": _json("config.json", lambda c: c.update(target_num_hidden_layers=9)),
    "short_draft": _json("config.json", lambda c: c.update(max_position_embeddings=16)),
}
_TEXTS = {
    "full/notes": "1",
    "file": "1",
    "alone.json": '{"model_type": "kimi_linear"}',
    "nested.json": "[1, [2]]",
    "prepared/conversion.json": '{"source": "tiny/target"}',
    "old/manifest.json": '{"format": "k3-prepared/0"}',
    "old/conversion.json": "{}",
    "other.json": '{"schema": "k3-bench-0"}',
    "trace.jsonl": '{"turns": [{"new": 0, "output": 8, "pause_s": 0}]}\n{"no": 1}\n',
    "record/golden.json": json.dumps(
        {"kind": "vllm", "format": 2, "engine": {"name": "vLLM"}, "run": {"dtype": "int4"}}
    ),
    "unknown/golden.json": '{"kind": "seance"}',
}
