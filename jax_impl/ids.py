"""Token ids from the command line: a list or a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

# between two ids; two commas in a row leave an empty id, which is refused
_BETWEEN = re.compile(r"\s*,\s*|\s+", re.ASCII)


def is_plain(text: str) -> bool:
    """Whether a text is digits 0 to 9, and a minus before them at most.

    `int` would also take `1_0` and the digits of other scripts.
    """
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit()


def parse_ids(text: str) -> list[int]:
    """`FILE|LIST`: a file with ids (a JSON list, or separated by a comma or blanks), or the ids.

    Raises:
        ValueError: not ids, with what was found.
    """
    source = "the list"
    if not text.strip():
        raise ValueError("no token ids given; expected FILE or a list such as 1,2,3; give one")
    path, first = Path(text), text.strip()[0]
    there = _is_file(path)
    if there or first not in "0123456789[":
        if not there:
            raise ValueError(
                f"found {text!r}, expected an existing file or a list such as 1,2,3; check the "
                "name, or give the ids themselves"
            )
        try:
            text, source = path.read_text(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: not readable as text: {error}; expected token ids; choose another file"
            ) from None
    try:
        if text.strip().startswith("["):
            ids = json.loads(text)
        else:
            ids = [_whole(part) for part in _BETWEEN.split(text.strip()) if text.strip()]
    except ValueError as error:
        raise ValueError(
            f"{source}: not token ids: {error}; expected whole numbers such as 1,2,3; a text must "
            "be tokenized first"
        ) from None
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(
            f"{source}: found {str(ids)[:60]}, expected a non-empty flat list of non-negative "
            "integers; correct it"
        )
    return ids


def _whole(part: str) -> int:
    if not is_plain(part):
        raise ValueError(
            f"found {part[:60]!r}"
            if part
            else "found nothing where an id should be, beside a comma"
        )
    return int(part)


def _is_file(path: Path) -> bool:
    """Whether a file is there; a long list of ids is no name that one could have."""
    try:
        return path.is_file()
    except OSError:
        return False
