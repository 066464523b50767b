"""The step on several ranks, on emulated devices; each group in a process that has them.

The number of devices is fixed when JAX starts, and the other tests run with one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parity.sharded import FULL, MATRIX, PRESET, Setting

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
bad = [v for v in sharded.check_sharded({settings!r}) if not v.passed]
for v in bad:
    print(v)
assert not bad
"""


SHORT = {
    "model_tiny16": (Setting(16, True, 8, True),),
    PRESET: (Setting(8, False, 1, False, "ep"),),
}


@pytest.mark.parametrize("subject", SHORT)
def test_logits_tokens_and_replicas(subject):
    run(CHECK.format(settings={subject: SHORT[subject]}))


@pytest.mark.slow
@pytest.mark.parametrize("subject", FULL)
@pytest.mark.parametrize("batch", [1, 8])
def test_whole_matrix(subject, batch):
    chosen = tuple(s for s in FULL[subject] if s.batch == batch)
    assert chosen
    run(CHECK.format(settings={subject: chosen}), timeout=3000)


def test_the_matrix_covers_every_choice():
    assert len(set(MATRIX)) == 16
    for field, values in {
        "tp": {8, 16}, "dcp": {False, True}, "batch": {1, 8}, "verify": {False, True},
        "experts": {"tp", "ep"}, "interleave": {1, 4},
    }.items():  # fmt: skip
        assert {getattr(s, field) for s in MATRIX} == values


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


def test_settings_have_names_of_their_own():
    names = [s.name for s in MATRIX]
    assert len(set(names)) == len(names) and "dcp" in Setting(8, True, 1, False).name
