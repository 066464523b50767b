from __future__ import annotations

import signal
from pathlib import Path

import pytest


@pytest.fixture
def hears_sigint():
    """Programs that the test starts hear SIGINT, as in a terminal.

    A suite that a shell script runs in its background ignores it, and would hand that on.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def pair_directory(tmp_path_factory) -> Path:
    """A KDA layer, an MLA layer that is tapped, and a drafter of two layers; to be read only."""
    from jax_impl.make_tiny import make_checkpoint

    directory = tmp_path_factory.mktemp("pair") / "tiny"
    make_checkpoint(directory, "tiny", 0, overrides={"num_hidden_layers": 2})
    return directory


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A small target with its drafter, see `parity.speculation`."""
    from parity.speculation import make_models

    return make_models(tmp_path_factory.mktemp("speculation") / "tiny")


@pytest.fixture(scope="session")
def plain(models):
    """Plain decoding of it."""
    from parity.speculation import decode_plainly

    return decode_plainly(models)
