"""Guards see what is written over them, and say whether they stood where they should."""

import ctypes

import jax
import jax.numpy as jnp
import pytest

from bench.guards import Guards, guarded


def test_a_byte_written_over_a_guard_is_seen():
    guards = Guards([1 << 20, 4096])
    assert len(guards.arrays) == 4 and guards.changed() == 0
    last = guards.arrays[-1]
    ctypes.memset(last.unsafe_buffer_pointer() + last.nbytes - 1, 0, 1)
    assert guards.changed() == 1


def test_a_call_that_keeps_to_its_outputs_changes_nothing():
    found = guarded(lambda: (jnp.ones((3, 5)), jnp.zeros(7, jnp.bfloat16)))
    assert found["outputs"] == 2 and found["bytes_changed_outside"] == 0
    assert 0 <= found["outputs_between_guards"] <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1000, 1 << 20, 33 << 20])
def test_outputs_lie_between_guards(size):
    """The allocator of GPU arrays takes the smallest piece that fits."""
    make = jax.jit(lambda: jnp.full(size, 1, jnp.uint8))
    make()
    assert guarded(make)["outputs_between_guards"] == 1
