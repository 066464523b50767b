"""PyTorch on a fixed number of threads: the same sums in the same order on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def one_thread() -> AbstractContextManager[None]:
    """For the block; small models are no slower for it, and much faster on a busy machine."""
    return threads(1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for the block; another number may cut sums differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
