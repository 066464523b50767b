"""Inline PTX in numpy, for all threads of a warpgroup at once: register code without a GPU.

Only the instructions that `row_product` has. Memory, shared and global, is one array of bytes; an
address is a place in it. What no alignment allows fails, as on the GPU.
"""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import common


class Ref:
    """Elements of `size` bytes from an address on; cut along the first axis, as `ref.at` does."""

    def __init__(self, address: int, size: int, length: int) -> None:
        self.address, self.size, self.length = address, size, length
        self.at = self

    def __getitem__(self, index: Any) -> Ref:
        start, length = (index, 1) if isinstance(index, int) else (index.start, index.size)
        return Ref(self.address + start * self.size, self.size, length)

    @property
    def bytes(self) -> slice:
        """Where they are."""
        return slice(self.address, self.address + self.size * self.length)


class Lanes(common.Registers):
    """`Registers` of the threads `first`..`first` + 127; `loads` and `stores` count by word."""

    def __init__(self, memory: np.ndarray) -> None:
        self.words_held, self.first = memory.view(np.uint32), 0
        self.loads, self.stores = np.zeros((2, self.words_held.size), int)
        self.f32 = np.float32
        self.utils = SimpleNamespace(thread_idx=lambda: self.first + np.arange(128))

    def constant(self, value: int) -> int:
        """A plain integer."""
        return value

    def add(self, a: Any, b: Any) -> Any:
        """Of what is far from overflowing."""
        return a + b

    def mul(self, a: Any, b: Any) -> Any:
        """The same."""
        return a * b

    def wide_add(self, address: Any, offset: Any) -> Any:
        """Addresses have no width here."""
        return address + offset

    def as_f32(self, word: int) -> np.ndarray:
        """Of a constant."""
        return np.full(128, word, np.uint32).view(np.float32)

    def shared_address(self, ref: Ref) -> int:
        """Its place in `memory`."""
        return ref.address

    global_address = shared_address

    def ptx(self, text: str, *args: Any, results: int = 0, **_: Any) -> list[Any]:
        """The results, [128] or a number."""
        held: dict[str, Any] = {f"${results + i}": arg for i, arg in enumerate(args)}

        def value(name: str) -> Any:
            if name.startswith("["):
                return sum(map(value, name[1:-1].split("+")))
            return held[name] if name in held else int(name, 0)

        for condition, (op, *kinds), names in _statements(text):
            if op == "ld":
                *to, at = names
                into = held[condition] if condition else np.full(128, True)
                for i, name in enumerate(to):
                    words = self._word(value(at), into, len(to)) + i
                    held[name] = np.where(into, self.words_held[words], held.get(name, 0))
                    np.add.at(self.loads, words[into], 1)
            elif op == "st":
                words = self._word(value(names[0]), held[condition], 1)[held[condition]]
                self.words_held[words] = value(names[1])[held[condition]].view(np.uint32)
                np.add.at(self.stores, words, 1)
            elif op == "mma":
                values = [*map(value, names[4:])]
                held |= zip(names[:4], _mma(values[:4], values[4:6], values[6:]), strict=True)
            else:
                assert not condition, "only memory is accessed on a condition"
                held[names[0]] = _OPS[op](kinds, *map(value, names[1:]))
        return [held[f"${i}"] for i in range(results)]

    def _word(self, address: np.ndarray, where: np.ndarray, words: int) -> np.ndarray:
        assert not (address[where] % (4 * words)).any(), "not aligned"
        return np.where(where, address // 4, 0)


@cache
def _statements(text: str) -> list[tuple[str, list[str], list[str]]]:
    """(condition, parts of the instruction's name, operands), declarations left out."""
    found = re.findall(r"(?:@(\w+) )?([a-z][\w.]*) ([^;]+);", re.sub(r"\.reg [^;]*;", "", text))
    return [(c, op.split("."), re.findall(r"\[[^]]*\]|[$\w]+", rest)) for c, op, rest in found]


def _compare(kinds: list[str], a: Any, b: Any, also: Any = True) -> Any:
    assert len(kinds) == 2 or kinds[1] == "and"
    return {"eq": np.equal, "lt": np.less, "le": np.less_equal}[kinds[0]](a, b) & also


_OPS = {
    "add": lambda _, a, b: a + b,
    "and": lambda _, a, b: a & b,
    "min": lambda _, a, b: np.minimum(a, b),
    "mov": lambda _, a: a,
    "mul": lambda _, a, b: a * b,
    "selp": lambda _, a, b, first: np.where(first, a, b),
    "setp": _compare,
    "shfl": lambda _, a, distance, *rest: a[np.arange(128) ^ distance],  # within a warp
    "shr": lambda _, a, b: a >> b,
}
_WARP, _GROUP, _QUARTER = (a[:, None] for a in np.unravel_index(np.arange(128), (4, 8, 4)))


def _mma(a: list[Any], b: list[Any], c: list[Any]) -> list[np.ndarray]:
    """m16n8k16 by the tables of the PTX manual: which lane has which numbers."""
    pair = 2 * _QUARTER + np.arange(2)
    left, right = np.zeros((4, 16, 16), np.float32), np.zeros((4, 16, 8), np.float32)
    for i, word in enumerate(a):
        left[_WARP, _GROUP + i % 2 * 8, pair + i // 2 * 8] = _bf16(word)
    for i, word in enumerate(b):
        right[_WARP, pair + i * 8, _GROUP] = _bf16(word)
    product = left @ right
    return [
        product[_WARP, _GROUP + i // 2 * 8, 2 * _QUARTER + i % 2][:, 0] + sums
        for i, sums in enumerate(c)
    ]


def _bf16(word: np.ndarray) -> np.ndarray:
    return word.astype(np.uint32).view(jnp.bfloat16).reshape(128, 2).astype(np.float32)
