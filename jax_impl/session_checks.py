"""What notebooks give to a session: kinds of arguments, token ids, outputs of replaced stages."""

# pyright: reportUnknownMemberType=false
# JAX types some of its own functions in part.
from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import jax
from numpy.typing import NDArray

from jax_impl.problems import is_whole
from jax_impl.stages import standard


class SessionError(ValueError):
    """A call that cannot be done; says what was found, what was expected and what to do."""


def token_ids(ids: object, what: str = "ids") -> tuple[int, ...]:
    """Token ids as Python numbers.

    Raises:
        SessionError: something that is no sequence of whole numbers; 1.5 is not cut to 1.
    """
    do = "expected a list of whole numbers such as [5, 17]; a text must be tokenized first"
    if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
        raise SessionError(f"{what}: found {ids!r:.60}, {do}")
    given = list(cast("Any", ids))
    if wrong := [x for x in given if not is_whole(x)]:
        raise SessionError(f"{what}: found {wrong[:5]!r}, {do}")
    return tuple(int(x) for x in given)


def require_whole(name: str, value: object, least: int, why: str = "") -> None:
    """Refuse anything but a whole number of at least `least`.

    Raises:
        SessionError: something else.
    """
    if not is_whole(value) or cast("int", value) < least:
        raise SessionError(f"{name} {value!r}: expected {why}a whole number, at least {least}")


def require_kind(name: str, value: object, kind: type[Any], hint: str = "") -> None:
    """Refuse an argument of another type.

    Raises:
        SessionError: it is one.
    """
    if not isinstance(value, kind):
        raise SessionError(
            f"{name}: found {type(value).__name__}, expected {kind.__name__}; {hint or 'give one'}"
        )


def require_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Refuse a name that is none of `known`.

    Raises:
        SessionError: it is none.
    """
    if value not in (names := tuple(known)):
        raise SessionError(f"{name}: found {value!r}, expected one of {names}; give one of these")


def require_path(name: str, value: object) -> None:
    """Refuse what names no folder.

    Raises:
        SessionError: neither text nor a path.
    """
    if not isinstance(value, str | Path):
        found = type(value).__name__
        raise SessionError(f"{name}: found {found}, expected a folder; give its name or a Path")


class Outputs(dict[str, NDArray[Any]]):
    """Outputs of stages by name; a name that is not there is answered with those that are."""

    def __missing__(self, name: object) -> NDArray[Any]:
        """Refuse a name.

        Raises:
            SessionError: always; proposes the name that was meant, where one is alike.
        """
        if not self:
            raise SessionError(
                f"stages[{name!r}]: found none, nothing was recorded; run the pass with record=True"
            )
        known = sorted({re.sub(r"^layer\d+", "layerNN", key) for key in self})
        close = get_close_matches(str(name), self, 1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise SessionError(f"stages[{name!r}]: expected one of {', '.join(known)}{meant}")


@dataclass(frozen=True)
class Checked:
    """A replaced stage whose outputs are held against those of the standard one, while tracing."""

    name: str
    stage: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The outputs of the stage.

        Raises:
            SessionError: other shapes, dtypes or structure than the standard stage's.
        """
        found = self.stage(*arguments, **named)
        usual = getattr(standard, self.name)
        expected = jax.eval_shape(lambda: usual(*arguments, **named))
        if (gave := _form(found)) != (wanted := _form(expected)):
            raise SessionError(
                f"stage {self.name}: found outputs {gave}, expected {wanted} as of the standard "
                f"stage; return these from the function given to replace_stages({self.name}=...)"
            )
        return found


def _form(tree: Any) -> str:
    """Structure, shapes and dtypes of a stage's outputs, to print and to compare."""

    def leaf(x: Any) -> str:
        return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__

    return str(jax.tree.map(leaf, tree)).replace("'", "")
