"""What a cache folder holds, seen from outside of a training: counting, checking, pruning, merging."""
import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Optional

from .base import Entry, Progress, Store
from .codec import CorruptEntry, decode, read_header
from .disk import DiskStore


@dataclasses.dataclass
class Group:
    """All entries of one origin: same segments, weights, settings and versions. ``about``: the origin's note, if there is one."""

    origin: bytes
    about: Optional[dict] = None
    entries: int = 0
    nbytes: int = 0
    oldest: float = 0.0  # seconds since the epoch
    newest: float = 0.0
    keys: list[bytes] = dataclasses.field(default_factory=list)

    @property
    def segments(self) -> dict[str, dict]:
        found = self.about.get('segments') if self.about else None
        return {name: about for name, about in found.items() if isinstance(about, dict)} if isinstance(found, dict) else {}

    def to_dict(self) -> dict[str, Any]:
        return {'origin': self.origin.hex(), 'segments': self.segments, 'entries': self.entries, 'bytes': self.nbytes,
                'oldest': self.oldest, 'newest': self.newest}


def survey(store: DiskStore) -> tuple[list[Group], list[bytes]]:
    """Groups, the largest first, and keys of entries whose header is damaged. Data is not read."""
    groups: dict[bytes, Group] = {}
    damaged: list[bytes] = []

    def look(key: bytes, encoded: Any, place: Any) -> None:
        try:
            header = read_header(key, encoded)
        except CorruptEntry:
            damaged.append(key)
            return
        group = groups.setdefault(header.origin, Group(header.origin, oldest=header.written))
        group.entries += 1
        group.nbytes += len(encoded)
        group.oldest, group.newest = min(group.oldest, header.written), max(group.newest, header.written)
        group.keys.append(key)
    store.scan(look)
    for group in groups.values():
        group.about = read_note(store, group.origin)
    return sorted(groups.values(), key=lambda group: -group.nbytes), damaged


def has_sample(store: DiskStore, sample: bytes) -> bool:
    """Whether an entry was made from the same inputs, whatever computed it."""
    found = False

    def look(key: bytes, encoded: Any, place: Any) -> None:
        nonlocal found
        try:
            found = found or read_header(key, encoded).sample == sample
        except CorruptEntry:
            return
    store.scan(look)
    return found


def read_note(store: Store, key: bytes) -> Optional[dict]:
    try:
        note = json.loads(store.get_note(key) or b'null')
    except ValueError:
        return None
    return note if isinstance(note, dict) else None


def differences(group: Group, format_version: int, general: Iterable[str]) -> list[str]:
    """Why no training of this environment can use the group; empty if one can. ``general``: lines such as ``torch 2.14``."""
    if group.about is None:
        return ['nothing is known about what computed it']
    reasons = [] if group.about.get('format') == format_version else [f'format {group.about.get("format")}, not {format_version}']
    now = dict(line.partition(' ')[::2] for line in general)
    for about in group.segments.values():
        for line in about.get('settings', ()):
            name, _, value = str(line).partition(' ')
            if name in now and now[name] != value:
                reasons.append(f'{name} {value}, not {now[name]}')
    return list(dict.fromkeys(reasons))


def prune(store: DiskStore, older_than: Optional[float] = None, unwanted: Callable[[Group], bool] = lambda group: False,
          to_bytes: Optional[int] = None) -> tuple[int, int]:
    """Drop damaged entries, those written more than ``older_than`` seconds ago, ``unwanted`` groups, and then what was not used for
    longest until ``to_bytes`` are left; numbers of entries and bytes that are gone. Trainings may go on meanwhile."""
    before = store.totals()
    groups, damaged = survey(store)
    store.remove(damaged)
    for group in groups:
        if unwanted(group):
            store.remove(group.keys)
    if older_than is not None:
        limit, old = time.time() - older_than, []

        def look(key: bytes, encoded: Any, place: Any) -> None:
            try:
                if read_header(key, encoded).written < limit:
                    old.append(key)
            except CorruptEntry:
                old.append(key)
        store.scan(look)
        store.remove(old)
    if to_bytes is not None and store.nbytes > to_bytes:
        store.evict(store.nbytes - to_bytes)
    after = store.totals()
    return before[0] - after[0], before[1] - after[1]


def merge(target: DiskStore, source: DiskStore, progress: Optional[Progress] = None) -> int:
    """Copy what ``source`` has and ``target`` has not, notes included; how many entries. Damaged ones are left out."""
    total, done, copied = len(source), 0, 0
    waiting: list[tuple[bytes, Entry]] = []

    def look(key: bytes, encoded: Any, place: Any) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, max(done, total))
        if target.contains(key):
            return
        try:
            waiting.append((key, decode(key, encoded)))
        except CorruptEntry:
            return
        give(final=False)

    def give(final: bool) -> None:
        nonlocal copied
        while waiting and (final or len(waiting) >= 32):
            key, entry = waiting.pop()
            while not target.put(key, entry):
                if not target.keeps or not target.flush():
                    return
            copied += 1
    source.scan(look)
    give(final=True)
    for key, note in source.notes():
        target.put_note(key, note)
    target.flush()
    return copied
