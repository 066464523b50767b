"""Exchanges between ranks: phases in the interpreter, for all ranks; whole, on several GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import common, exchange
from parity.kernel_env import needs_interpreter

RANKS = 4
several_gpus = pytest.mark.skipif(
    jax.default_backend() != "gpu" or len(jax.devices()) < 2,
    reason=f"two NVIDIA GPUs of one host; found {len(jax.devices())} x {jax.default_backend()}",
)


def operand(size, dtype=jnp.float32, ranks=RANKS):
    """Numbers of very different size, so that another order of adding gives other bits."""
    rng = np.random.default_rng(size)
    x = rng.standard_normal((ranks, size)) * 10.0 ** rng.integers(-6, 6, (ranks, size))
    return jnp.asarray(x, jnp.float32).view(dtype)


def equal_bits(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32))


@needs_interpreter
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint32])
@pytest.mark.parametrize("chunks", [1, 3])
def test_gather(chunks, dtype):
    x = operand(chunks * exchange.CHUNK, dtype)
    x = x.at[1].set(x[1].at[7].set(jnp.nan)) if dtype == jnp.float32 else x
    equal_bits(exchange.all_gather(x, "x", RANKS, interpret=True), exchange.gather_reference(x))
    assert not common.races_found()


@needs_interpreter
@pytest.mark.parametrize("shots", [1, 2])
def test_reduce(shots, monkeypatch):
    """In both ways the bits of a sum in rank order, on every rank."""
    monkeypatch.setattr(exchange, "ONE_SHOT_BYTES", 0 if shots == 2 else 1 << 30)
    x = operand(2 * RANKS * exchange.CHUNK)
    assert exchange.two_shots(x.shape[1], RANKS) == (shots == 2)
    equal_bits(exchange.all_reduce(x, "x", RANKS, interpret=True), exchange.reduce_reference(x))
    assert not common.races_found()
    backwards = exchange.reduce_reference(x[::-1])
    assert (np.asarray(backwards) != np.asarray(exchange.reduce_reference(x))).any()


@pytest.mark.parametrize(
    ("size", "ranks", "two"),
    [
        (7168, 16, False),  # one row: 430 KB sent in one shot, 27 KB in two
        (8 * 7168, 16, True),
        (64 * 10752, 16, True),
        (64 * 7168, 2, False),  # two ranks send the same either way
        (8 * 7168 + 512, 16, False),  # no 16 equal pieces
    ],
)
def test_large_sums_go_in_two_shots(size, ranks, two):
    assert exchange.two_shots(size, ranks) == two


def test_limits_name_everything_at_once():
    bad = exchange.limits(jax.ShapeDtypeStruct((2, 100), jnp.bfloat16), 1)
    assert [b.split(":")[0] for b in bad] == ["rank of x", "bytes per element", "ranks", "elements"]
    wrong = "elements: found 100, expected a multiple of 512; dtype of x: found uint32, expected"
    with pytest.raises(ValueError, match=wrong):
        exchange.all_reduce(jnp.zeros((2, 100), jnp.uint32), "x", 2, interpret=True)
    with pytest.raises(ValueError, match="rank of x: found 2, expected 1"):
        exchange.all_gather(jnp.zeros((2, 512)), "x", 2)
    good = jax.ShapeDtypeStruct((512,), jnp.float32)
    several = exchange.limits(good, 16, multi_process=True)
    assert bool(several) == (jax.__version_info__ < (0, 12)) and not exchange.limits(good, 16)


@several_gpus
@pytest.mark.multigpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_on_gpus(rows):
    """A layer's exchanges on all GPUs of the host, a hundred times."""
    ranks = len(jax.devices())
    mesh = jax.make_mesh((ranks,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.PartitionSpec("x")

    def spread(call):
        inner = lambda x: call(x[0], "x", ranks)[None]  # noqa: E731
        return jax.jit(
            jax.shard_map(inner, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
        )

    x = operand(rows * 7168, ranks=ranks)
    for call, want in (
        (exchange.all_reduce, exchange.reduce_reference(x)),
        (exchange.all_gather, exchange.gather_reference(x)),
    ):
        run = spread(call)
        for _ in range(100):
            equal_bits(run(x), want)
