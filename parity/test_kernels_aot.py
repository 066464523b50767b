"""Kernels assemble for the GPUs they are for, on a host without any."""

import subprocess
import sys

import pytest

from parity import kernel_aot

needs_plugin = pytest.mark.skipif(
    kernel_aot.plugin_folder() is None, reason="the CUDA plugin and ptxas (extra `aot`)"
)


@needs_plugin
@pytest.mark.parametrize("target", sorted(kernel_aot.TARGETS))
@pytest.mark.parametrize("match", ["rows8"])
def test_kernels_assemble(target, match):
    """Without spills, but where `MAY_SPILL` says. All cases: `python -m parity.kernel_aot`."""
    command = [sys.executable, "-m", "parity.kernel_aot", "--target", target, "--match", match]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "k3_experts_gate_up" in done.stdout and "k3_attn_res" in done.stdout
    assert "k3_skinny" in done.stdout


def test_every_kernel_is_listed():
    names = " ".join(kernel_aot.cases())
    for kernel in ("skinny", "route", "latent_up", "attn_res", "experts", "topk", "vocab"):
        assert kernel in names
