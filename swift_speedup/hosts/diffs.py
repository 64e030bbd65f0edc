"""Unified diffs, applied strictly: each hunk at the line it names, each line as it says, or not at all."""
import dataclasses
import io
import re
from collections.abc import Iterable, Sequence

_HUNK = re.compile(rb'@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@')
_NOWHERE = b'/dev/null'


class DiffError(ValueError):
    """The text is no unified diff, or the content is not what the diff expects."""


@dataclasses.dataclass(frozen=True)
class Hunk:
    """``old`` lines, the first of them at ``start`` (counted from 0), become ``new`` ones. Context lines are in both."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


def parse(diff: bytes) -> dict[str, list[Hunk]]:
    """The hunks for each file that the diff changes; files that it creates or deletes are left out. Raises ``DiffError``."""
    changes: dict[str, list[Hunk]] = {}
    lines = iter(io.BytesIO(diff))
    before = file = None
    for line in lines:
        if line.startswith(b'--- '):
            before, file = line[4:].strip(), None
        elif line.startswith(b'+++ ') and before is not None:
            after = line[4:].strip()
            if _NOWHERE not in (before, after):
                file = after.partition(b'/')[2].decode()  # without git's b/
        elif line.startswith(b'@@ '):
            hunk = _hunk(line, lines)
            if file is not None:
                changes.setdefault(file, []).append(hunk)
        elif line[:1] in (b' ', b'+', b'-', b'\\'):
            raise DiffError(f'{line!r} belongs to no hunk')
    return changes


def _hunk(header: bytes, lines: Iterable[bytes]) -> Hunk:
    found = _HUNK.match(header)
    if found is None:
        raise DiffError(f'{header!r} is no hunk header')
    old_left, new_left = (1 if found[group] is None else int(found[group]) for group in (2, 4))
    old, new = [], []
    while old_left > 0 or new_left > 0:
        line = next(iter(lines), b'')
        kind, text = line[:1], line[1:]
        if kind not in (b' ', b'-', b'+') or not text.endswith(b'\n'):
            raise DiffError(f'{line!r} cannot be in the hunk {header!r}')
        if kind != b'+':
            old.append(text)
            old_left -= 1
        if kind != b'-':
            new.append(text)
            new_left -= 1
    if old_left or new_left:
        raise DiffError(f'the hunk {header!r} has other numbers of lines than it says')
    return Hunk(max(int(found[1]) - 1, 0), tuple(old), tuple(new))


def apply(content: bytes, hunks: Sequence[Hunk]) -> bytes:
    """What becomes of ``content``; the hunks may be of several diffs, all made for this content. Raises ``DiffError``."""
    lines = list(io.BytesIO(content))
    done: list[bytes] = []
    position = 0
    for hunk in sorted(hunks, key=lambda hunk: hunk.start):
        if hunk.start < position:
            raise DiffError(f'two hunks want to change line {hunk.start + 1}')
        end = hunk.start + len(hunk.old)
        if tuple(lines[hunk.start:end]) != hunk.old:
            raise DiffError(f'lines {hunk.start + 1} to {end} are not what the diff expects')
        done += [*lines[position:hunk.start], *hunk.new]
        position = end
    return b''.join([*done, *lines[position:]])


def reverse(hunks: Sequence[Hunk]) -> list[Hunk]:
    """Hunks that take back what ``hunks``, applied together, have done."""
    taken_back, shift = [], 0
    for hunk in sorted(hunks, key=lambda hunk: hunk.start):
        taken_back.append(Hunk(hunk.start + shift, hunk.new, hunk.old))
        shift += len(hunk.new) - len(hunk.old)
    return taken_back
