"""The gates: which backend serves a step, and what keeps the kernels from a configuration."""

import inspect
from pathlib import Path

import pytest

from jax_impl import backend
from jax_impl.backend import AUTO, LATENCY_SPECIALIZED, BackendUnavailableError, choose_backend
from jax_impl.config import RELEASED_CONFIG, ModelConfig, RunConfig
from jax_impl.plan import Plan, StepShape, choose
from jax_impl.stages import limits, specialized, standard

GOLDEN = Path(__file__).parent / "golden"
ASKED = RunConfig(decode_backend="latency_specialized")


@pytest.mark.parametrize(
    ("shape", "name", "reason"),
    [
        (StepShape("decode", 1, 1), "latency_specialized", "decode, 1 rows"),
        (StepShape("decode", 64, 1), "latency_specialized", "decode, 64 rows"),
        (StepShape("verify", 8, 8), "latency_specialized", "verify, 64 rows"),
        (StepShape("verify", 9, 8), "auto", "72 rows, kernels take at most 64"),
        (StepShape("prefill", 1, 8), "auto", "prefill"),
        (StepShape("verify", 1, 9), "auto", "9 tokens per sequence, kernels take at most 8"),
    ],
)
def test_step_gate(shape, name, reason):
    assert choose(ASKED, shape) == Plan(name, reason)
    assert choose(RunConfig(), shape) == Plan("auto", "as configured")


def test_configuration_gate_lists_every_reason():
    config = ModelConfig.load(GOLDEN / "model_tiny3")
    run = RunConfig(decode_backend="latency_specialized", compute="float32", profile="H")
    with pytest.raises(BackendUnavailableError) as error:
        choose_backend(run, config, 1)
    text = str(error.value)
    for part in (
        "devices found: cpu; kernels need an NVIDIA GPU",
        "profile 'H' found, kernels need 'V'",
        "compute 'float32' found, kernels need 'bfloat16'",
        "kda: state of a head: found",
        "Use decode_backend 'auto', the standard path.",
    ):
        assert part in text, (part, text)
    assert choose_backend(RunConfig(), config, 1) is AUTO


@pytest.mark.parametrize("ranks", [8, 16])
def test_released_model_meets_every_limit(ranks):
    config = ModelConfig.load(RELEASED_CONFIG)
    assert limits.unmet(config, ASKED, ranks) == []


def test_both_tables_have_the_same_signatures():
    """Kernel and reference are the two functions with one name."""
    for name in backend.STAGES:
        ours = inspect.signature(getattr(specialized, name)).parameters
        theirs = inspect.signature(getattr(standard, name)).parameters
        assert list(ours) == list(theirs), name
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()], name


def test_layers_run_no_standard_stage():
    """What the specialised table takes over from the standard one stands outside the layers."""
    same = [n for n in backend.STAGES if getattr(AUTO, n) is getattr(LATENCY_SPECIALIZED, n)]
    assert same == ["embed", "draft_context", "draft_block", "draft_markov"]
