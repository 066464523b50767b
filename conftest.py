"""What all tests share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Most of the time goes into compiling, and many tests and the processes that they start compile the
# same programs. Kept in a folder, which outlives the run, each is compiled once.
COMPILED = Path(__file__).parent / "build" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


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
