"""What the tests of the benchmarks share."""

import jax
import pytest


@pytest.fixture
def quick_compile():
    """Small runs are about what is counted and written, not about how fast it is."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
