"""Kernels assemble for the GPUs they are for, on a host without any."""

import os
import subprocess
import sys

import pytest

from parity import kernel_aot

needs_plugin = pytest.mark.skipif(
    kernel_aot.plugin_folder() is None, reason="the CUDA plugin and ptxas (extra `aot`)"
)
# every kind of body and both matrix instructions; all cases: `python -m parity.kernel_aot`
SMALL = ("skinny.o_proj.rows8", "latent_up.narrow", "skinny.kda_in.rows64",
         "attn_res.two_deltas.rows8", "topk.shared.rows8", "experts_row.tp16.rows1",
         "vocab.markov.rows8", "experts.tp16.rows8",
         "experts.two_kernels.tp16.rows8", "kda.tp16.batch1.tokens8",
         "kda_out.tp16.batch8.tokens1", "mla_value_out.tp16.rows8.tokens1",
         "mla.tp16.rows8.tokens8.float8_e4m3fn", "mix_products.route.rows8")  # fmt: skip
BODIES = ("skinny", "attn_res", "topk", "vocab", "plan", "experts", "experts_gate_up",
          "experts_down", "experts_row", "kda", "kda_out", "mla_query", "mla_attend", "mla_value",
          "mla_value_out")  # fmt: skip


def compiled(*options):
    command = [sys.executable, "-m", "parity.kernel_aot", *options]
    # a program from the cache would leave no report of ptxas
    fresh = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_plugin
@pytest.mark.parametrize("target", sorted(kernel_aot.TARGETS))
def test_kernels_assemble(target):
    """Without spills, but where `MAY_SPILL` says."""
    printed = compiled("--target", target, "--match", *SMALL)
    bodies = (*BODIES, "mix_products") if target == "h200" else BODIES
    assert [b for b in bodies if f"k3_{b} " not in printed] == []


@needs_plugin
@pytest.mark.parametrize(("target", "hosts", "gpus"), [("gb300", 4, 4), ("h200", 1, 2)])
def test_exchanges_assemble(target, hosts, gpus):
    """For sixteen GPUs in four processes, whose memory must be symmetric, and for two in one."""
    mesh = "--hosts", str(hosts), "--gpus", str(gpus)
    printed = compiled("--target", target, *mesh, "--match", "rows8")
    assert "k3_all_reduce" in printed and "k3_all_gather" in printed


@pytest.mark.parametrize("code", ["mapa.shared::cluster.u32 a, b, c;", "barrier.cluster.wait;"])
def test_instructions_of_clusters_need_clusters(code):
    assert kernel_aot.alone_in_a_cluster(f".entry k3()\n{{ {code} }}")
    assert not kernel_aot.alone_in_a_cluster(f".entry k3() .explicitcluster\n{{ {code} }}")
    assert not kernel_aot.alone_in_a_cluster(".entry k3() { mbarrier.init.shared::cta.b64; }")


def test_every_kernel_is_listed():
    names = " ".join(kernel_aot.cases())
    for kernel in (
        "skinny",
        "route",
        "latent_up",
        "attn_res",
        "experts",
        "topk",
        "vocab",
        "kda_out",
    ):
        assert kernel in names
    assert "reduce" not in names and len(kernel_aot.exchange_cases(16)) == 12


def test_a_name_without_a_case_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_aot, "plugin_folder", lambda: tmp_path)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    assert kernel_aot.main(["--match", "nothing"]) == 2
    assert "skinny.kda_in.rows1" in capsys.readouterr().err
