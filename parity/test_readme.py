"""The README's Python runs as printed, and its first commands can be followed one by one."""

from __future__ import annotations

import re
from pathlib import Path

from parity.doc_commands import command_lines, not_run

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("[5, 17, 101, ") and printed.count(",") == 11


def test_what_follows_the_demo_begins_with_its_environment():
    """`make demo` leaves no command on the PATH: what comes next says where they are."""
    demo, then, *_ = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.S | re.M)
    assert "make demo" in demo
    lines = [re.sub(r"\s+#.*", "", line) for line in then.splitlines()]
    assert lines[0] == "source .venv/bin/activate"
    assert [bool(re.search(r"python notebooks/\w+\.py$", line)) for line in lines] == [0, 1, 0]
    assert lines[2].startswith("python -m bench ")
    # both are run by parity/test_docs_run.py
    run = {x for x in command_lines(README.read_text()) if not not_run(x)}
    assert set(lines[1:]) <= run
