from __future__ import annotations

from pathlib import Path

import pytest


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
