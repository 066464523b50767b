"""The step on several ranks, on emulated devices; each group in a process that has them.

The number of devices is fixed when JAX starts, and the other tests run with one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity.sharded import FULL, MATRIX, PRESET, SEVERAL_TOKENS, Setting
from parity.test_processes import free_port

ROOT = Path(__file__).parents[1]


def run(code: str, devices: int = 16, timeout: float = 1500) -> str:
    """Output of Python code in a process with emulated devices; fails with its errors."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


CHECK = """
from parity import sharded
from parity.sharded import Setting
found = list(sharded.check_sharded({settings!r}, {layers}))
for v in found:
    print(v.where.case, v.quantity) if v.passed else print(v)
assert found and all(v.passed for v in found)
"""


def check(subject, settings, devices=16, layers=None, timeout=1500):
    """All comparisons pass; what was compared, as (setting, quantity)."""
    code = CHECK.format(settings={subject: settings}, layers=layers)
    lines = run(code, devices, timeout).splitlines()
    return {(s.name, line[len(s.name) + 1 :]) for s in settings for line in lines
            if line.startswith(f"{s.name} ")}  # fmt: skip


SHORT = (Setting(16, True, 1, True), Setting(8, False, 1, False, "ep"))


@pytest.mark.parametrize("setting", SHORT, ids=lambda s: s.name)
def test_logits_tokens_and_replicas(setting):
    found = {quantity for _, quantity in check(PRESET, (setting,))}
    assert found >= {"logits", "step tokens", "replicas bit-equal"}
    assert ("emitted ids" in found) == setting.verify


def test_two_and_four_ranks():
    """Three layers are one of each kind."""
    few = tuple(Setting(tp, False, 1, False) for tp in (2, 4))
    found = check(PRESET, few, devices=4, layers=3)
    quantities = ("logits", "step tokens", "replicas bit-equal")
    assert found == {(s.name, q) for s in few for q in quantities}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tp", [2, 4])
def test_two_and_four_ranks_in_every_other_way(tp):
    """Also the loop: tokens and accepted counts are those of one rank."""
    chosen = (Setting(tp, False, 1, True), Setting(tp, True, 8, True, "ep", 4))
    found = check(PRESET, chosen, devices=tp, timeout=3000)
    looped = ("emitted ids", "tokens per step", "state and latent rows bit-equal")
    assert found >= {(s.name, q) for s in chosen for q in ("logits", "step tokens", *looped)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", FULL)
@pytest.mark.parametrize("batch", [1, 8])
def test_whole_matrix(subject, batch):
    chosen = tuple(s for s in FULL[subject] if s.batch == batch)
    assert chosen
    found = check(subject, chosen, timeout=3000)
    assert {s for s, q in found if q == "step tokens"} == {s.name for s in chosen}


def in_four_processes(tmp_path, case, timeout, ranks=16):
    """Four processes that share the ranks, a device each."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    port, logs = free_port(), [tmp_path / f"log{i}" for i in range(4)]
    started = []
    for i, log in enumerate(logs):
        with open(log, "w") as out:
            options = {
                "suite": "sharded", "case": case, "json": tmp_path / "verdicts.json",
                "coordinator": f"127.0.0.1:{port}", "num-processes": 4, "process-id": i,
                "local-devices": ranks // 4, "stall-timeout": timeout, "start-timeout": 120,
            }  # fmt: skip
            given = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
            command = [sys.executable, "-m", "parity", "run", *given]
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out))
    try:
        codes = [p.wait(timeout) for p in started]
    finally:
        for p in started:
            p.terminate()
    assert codes == [0] * 4, "\n".join(log.read_text()[-1500:] for log in logs)
    found = json.loads((tmp_path / "verdicts.json").read_text())
    assert found["passed"] and found["verdicts"]
    return found["verdicts"]


@pytest.mark.timeout(1000)
def test_four_processes(tmp_path):
    case = f"{PRESET} TP16 dcp x1 batch 8 verify"
    quantities = {v["quantity"] for v in in_four_processes(tmp_path, case, 900)}
    assert quantities == {"logits", "step tokens", "replicas bit-equal"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tp", [8, 16])
def test_whole_matrix_in_four_processes(tmp_path, tp):
    found = in_four_processes(tmp_path, f"{PRESET} TP{tp}", 3000, tp)
    cases = {v["case"] for v in found}
    assert len(cases) >= 8
    assert {v["case"] for v in found if v["quantity"] == "step tokens"} == cases
    looped = {v["case"] for v in found if v["quantity"] == "emitted ids"}
    assert looped == {s.name for s in SEVERAL_TOKENS if s.tp == tp}


def test_the_matrix_covers_every_choice():
    assert len(set(MATRIX)) == 16
    for field, values in {
        "tp": {8, 16}, "dcp": {False, True}, "batch": {1, 8}, "verify": {False, True},
        "experts": {"tp", "ep"}, "interleave": {1, 4},
    }.items():  # fmt: skip
        assert {getattr(s, field) for s in MATRIX} == values
    assert set(SEVERAL_TOKENS) <= {s for s in MATRIX if s.verify}


@pytest.mark.parametrize("dcp", [1, 16])
def test_exchanges_per_layer_and_a_cache_in_place(dcp):
    """o_proj, one packed gather, one packed reduce, the output gather; two more in MLA with dcp.

    One program runs on all ranks, and every exchange spans all of them.
    """
    run(f"from parity.emulated import exchanges; exchanges({dcp})")


def test_one_replica_that_differs_in_the_last_bit_is_found():
    run("from parity.emulated import tampered_replica; tampered_replica()")


def test_one_device_computes_one_ranks_share():
    run("from parity.emulated import looped_back; looped_back()", devices=1)


@pytest.mark.slow
def test_steps_in_place():
    run("from parity.emulated import in_place; in_place()")


def test_settings_have_names_of_their_own():
    names = [s.name for s in MATRIX]
    assert len(set(names)) == len(names) and "dcp" in Setting(8, True, 1, False).name


def test_sizes_that_do_not_divide_are_named_before_anything_is_loaded(tmp_path):
    from jax_impl.config import ConfigError, RunConfig
    from jax_impl.draft_config import DraftConfig
    from jax_impl.make_tiny import make_checkpoint
    from jax_impl.sharding import require_ranks

    make_checkpoint(tmp_path / "pair", "tp16", 0)
    from jax_impl.config import ModelConfig

    config = ModelConfig.load(tmp_path / "pair" / "target")
    draft = DraftConfig.load(tmp_path / "pair" / "draft")
    for ranks in (1, 2, 4, 8, 16):
        require_ranks(config, RunConfig(dcp=ranks), ranks, draft)
        require_ranks(config, RunConfig(experts="ep"), ranks, draft)
    with pytest.raises(ConfigError) as caught:
        require_ranks(config, RunConfig(dcp=2), 3, draft)
    for part in (
        "3 rank(s) do not fit", "lm_head.weight: 4096 does not divide by 3 ranks",
        "drafter: ", "dcp 2: expected 1 or the number of ranks, 3",
    ):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"  - --dcp 2: expected 1"):
        require_ranks(config, RunConfig(dcp=2), 4, draft, "--{}".format)
    with pytest.raises(ConfigError, match=r"^--tp 0: expected a whole number"):
        require_ranks(config, RunConfig(), 0, called="--{}".format)
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    wrong = subprocess.run(
        [sys.executable, "-m", "jax_impl", "generate", str(tmp_path / "pair" / "target"),
         "--prompt-ids", "5", "--tp", "32"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert wrong.returncode == 2 and "kda_num_heads 48 does not divide by 32" in wrong.stderr
    assert "Traceback" not in wrong.stderr and "loading" not in wrong.stderr
