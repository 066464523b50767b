"""What all tests share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def two_ports() -> int:
    """A port that is free together with the one above it, for several processes to meet at."""
    from parity.test_processes import free_port

    return free_port()


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Compiled programs go with the module whose tests needed them.

    Each takes several memory mappings, of which a process may have 65530: two thousand tests in one
    process come near it, and beyond it the process dies without a word.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
