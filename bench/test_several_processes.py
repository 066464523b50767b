"""`bench decode` and `agentic` in two processes of one emulated device: the first one speaks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.result import read

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "decode": "--osl 11 --batch 2 --drafts 2 --accept-length 2 --runs 1 --groups 1 --replays 1",
    "agentic": "--users 2 --runs 1 --speed 10 --chunk 16",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", COMMANDS)
def test_two_processes(tmp_path, two_ports, command):
    # compiled quickly: this is about who does and says what, not about how fast
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env.pop("XLA_FLAGS", None)
    typed = f"--preset tiny --tp 2 --kv-dtype bfloat16 --json {tmp_path / 'found.json'} "
    typed += f"--coordinator 127.0.0.1:{two_ports} --num-processes 2 --local-devices 1 "
    typed += f"--start-timeout 300 --stall-timeout 600 {COMMANDS[command]} --process-id"
    started = []
    for i in range(2):
        with open(tmp_path / f"out{i}", "w") as out, open(tmp_path / f"err{i}", "w") as err:
            run = [sys.executable, "-m", "bench", command, *typed.split(), str(i)]
            started.append(subprocess.Popen(run, cwd=ROOT, env=env, stdout=out, stderr=err))
    try:
        statuses = [p.wait(1500) for p in started]
    finally:
        for p in started:
            p.terminate()
    said = {f.name: f.read_text() for f in tmp_path.glob("[oe]*[01]")}
    assert statuses == [0, 0], said
    assert said["out1"] == said["err1"] == ""
    assert "passed" in said["out0"]
    found = read(tmp_path / "found.json")
    assert found["conditions"]["shapes"]["processes"] == found["conditions"]["devices"] == 2
    assert found["parity"]["verdict"] == "passed"
    if command == "decode":
        assert found["figures"]["accepted_length"]["value"] == 2
    else:
        assert found["figures"]["turns"]["value"] == 9
