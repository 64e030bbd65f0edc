"""The persistent store: one folder, shared by all processes that are given it, bounded, and safe against kills and bit rot.

Inside (LMDB): ``entries`` key -> codec; ``places`` key -> sequence number and size; ``order`` sequence number -> key, oldest use first;
``notes`` key -> a few bytes; ``header`` layout and totals. Order is by sequence numbers, so a clock that is set back changes nothing.
"""
import atexit
import os
import shutil
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

import lmdb

from ..log import warn_once
from . import environment
from .base import Entry, Store
from .codec import CorruptEntry, UnknownDtype, decode, encode
from .environment import Unusable
from .writer import Writer

QUEUE_BYTES = 256 << 20
FREE_SHARE, FREE_MOST = 0.05, 10 << 30  # of the disk stays free when no budget is given: this share, at most so many bytes
_TOTALS = struct.Struct('<QQQQ')  # entries, their bytes, next sequence number, entries evicted so far
_PLACE = struct.Struct('<QQ')  # sequence number, bytes
_SEQUENCE = struct.Struct('>Q')  # big-endian: in the order of numbers
_STEPS = 256  # entries that one transaction evicts at most, and uses that it writes down
_CHUNK = 128  # entries that are read in one transaction, so that a writer can reuse pages meanwhile
_CLOSE_SECONDS = 60
_TROUBLES = (lmdb.Error, Unusable, OSError, MemoryError)


class DiskStore(Store):
    """Entries in ``folder``, which is made if need be. ``budget``: bytes of all entries; ``None``: until little of the disk is free.

    A folder that cannot be written to is read. Raises ``Unusable`` for one that cannot be read, or that holds something else.
    """

    def __init__(self, folder: str | os.PathLike, budget: Optional[int] = None, writable: bool = True,
                 queue_bytes: int = QUEUE_BYTES, map_bytes: Optional[int] = None):
        self.folder = Path(folder)
        self.budget = budget
        self.evicted = self.dropped = self.errors = 0
        self._stopped: Optional[str] = None  # why nothing is written any more
        self._environment = _open(self.folder, writable, map_bytes)
        self._closed = False
        self._corrupt: set[bytes] = set()
        self._used: dict[bytes, None] = {}  # since the last commit
        self._queue_bytes = queue_bytes
        self._writer = Writer(self._commit, queue_bytes)
        _close_at_exit(self)

    @property
    def keeps(self) -> bool:
        return self._environment.writable and self._stopped is None and not self._closed

    def get(self, key):
        waiting = self._writer.get(key)
        if waiting is not None:
            return waiting
        try:
            entry = self._read(lambda txn, dbs: self._load(txn, dbs, key))
        except CorruptEntry as trouble:
            self._corrupt.add(key)
            self._trouble(f'an entry in {self.folder} is damaged: {trouble}')
            return None
        if entry is not None and len(self._used) < _STEPS:
            self._used[key] = None
        return entry

    def _load(self, txn: lmdb.Transaction, dbs: Mapping, key: bytes) -> Optional[Entry]:
        encoded = txn.get(key, db=dbs[b'entries'])
        return None if encoded is None else decode(key, encoded)

    def put(self, key, entry):
        if not self.keeps:
            return False
        if self._writer.put(key, entry):
            return True
        self.dropped += 1
        return False

    def contains(self, key):
        if self._writer.get(key) is not None:
            return True
        return bool(self._read(lambda txn, dbs: txn.get(key, db=dbs[b'places']) is not None))

    def get_note(self, key):
        waiting = self._writer.get_note(key)
        if waiting is not None:
            return waiting

        def work(txn: lmdb.Transaction, dbs: Mapping) -> Optional[bytes]:
            note = txn.get(key, db=dbs[b'notes'])
            return None if note is None else bytes(note)
        return self._read(work)

    def put_note(self, key, note):
        if self.keeps:
            self._writer.put_note(key, note)

    def _read(self, work: Callable[[lmdb.Transaction, Mapping], Any]) -> Any:
        """``None`` where nothing can be read. ``CorruptEntry`` passes through."""
        if self._closed:
            return None
        try:
            return self._environment.read(lambda txn: None if self._dbs()[b'entries'] is None else work(txn, self._dbs()))
        except _TROUBLES as trouble:
            self._trouble(f'{self.folder} cannot be read ({type(trouble).__name__}: {trouble})')
            return None

    def _dbs(self) -> Mapping[bytes, Any]:
        return self._environment.dbs

    def _trouble(self, text: str) -> None:
        self.errors += 1
        warn_once(f'cache: {text}; computing instead')

    def _commit(self, entries: Mapping[bytes, Entry], notes: Mapping[bytes, bytes]) -> None:
        used, self._used = self._used, {}
        encoded = {}
        for key, entry in entries.items():
            try:
                encoded[key] = encode(key, entry, time.time())
            except UnknownDtype as unknown:
                self._trouble(f'an output cannot be kept in a folder ({unknown})')
        try:
            evicted, left_out = self._environment.write(lambda txn: self._write(_Totals(txn, self._dbs()), encoded, notes, used))
            self._corrupt -= encoded.keys()
            self.evicted += evicted
            self.dropped += left_out
        except Exception as trouble:  # in a thread of its own: nobody else would hear of it
            self.errors += 1
            self._stop(f'writing failed ({type(trouble).__name__}: {trouble})')

    def _write(self, totals: '_Totals', encoded: Mapping[bytes, bytearray], notes: Mapping[bytes, bytes],
               used: Iterable[bytes]) -> tuple[int, int]:
        """Entries that were evicted, and that found no room."""
        totals.touch(used)
        new = {key: data for key, data in encoded.items() if key in self._corrupt or not totals.has(key)}
        limit = self._limit(totals.nbytes)
        evicted = totals.make_room(sum(map(len, new.values())), limit)
        left_out = 0
        for key, data in new.items():
            if totals.nbytes + len(data) <= limit:
                totals.put(key, data)
            else:
                left_out += 1
        for key, note in notes.items():
            totals.txn.put(key, note, db=totals.dbs[b'notes'])
        totals.save()
        return evicted, left_out

    def _limit(self, nbytes: int) -> int:
        if self.budget is not None:
            return self.budget
        return nbytes + free_to_use(self.folder)

    def _stop(self, reason: str) -> None:
        if self._stopped is None:
            self._stopped = reason
            warn_once(f'cache: {self.folder}: {reason}; what is there is still read, nothing more is kept')
        self._writer.discard()

    def evict(self, nbytes):
        freed = 0
        while freed < nbytes and self.keeps:
            def work(txn: lmdb.Transaction, wanted: int = nbytes - freed) -> tuple[int, int]:
                totals = _Totals(txn, self._dbs())
                before = totals.nbytes
                count = totals.make_room(wanted, before)
                totals.save()
                return count, before - totals.nbytes
            count, size = self._environment.write(work)
            if not count:
                break
            freed += size
            self.evicted += count
        return freed

    def remove(self, keys: Iterable[bytes]) -> int:
        """Drop these entries; returns their bytes."""
        keys, freed = list(keys), 0
        for start in range(0, len(keys), _STEPS):
            def work(txn: lmdb.Transaction, chunk: list[bytes] = keys[start:start + _STEPS]) -> int:
                totals = _Totals(txn, self._dbs())
                before = totals.nbytes
                for key in chunk:
                    totals.drop(key)
                totals.save()
                return before - totals.nbytes
            freed += self._environment.write(work)
        return freed

    def clear(self):
        self._writer.discard()
        self.flush()
        if not self._environment.writable or self._closed:
            return

        def work(txn: lmdb.Transaction) -> None:
            for name in (b'entries', b'order', b'places', b'notes'):
                txn.drop(self._dbs()[name], delete=False)
            txn.put(b'totals', _TOTALS.pack(0, 0, 0, 0), db=self._dbs()[b'header'])
        try:
            self._environment.write(work)
        except _TROUBLES as trouble:
            self._trouble(f'{self.folder} cannot be emptied ({trouble})')

    def scan(self, work: Callable[[bytes, Any, Optional[tuple[int, int]]], None]) -> None:
        """``work(key, encoded, place)`` for every entry that stays meanwhile; buffers are valid inside only."""
        after: Optional[bytes] = b''
        while after is not None:
            def chunk(txn: lmdb.Transaction, dbs: Mapping, start: bytes = after) -> Optional[bytes]:
                cursor = txn.cursor(db=dbs[b'entries'])
                if not cursor.set_range(start + b'\0' if start else b'\0' * 16):
                    return None
                for number, (key, encoded) in enumerate(cursor):
                    key = bytes(key)
                    place = txn.get(key, db=dbs[b'places'])
                    work(key, encoded, _PLACE.unpack(place) if place is not None and len(place) == _PLACE.size else None)
                    if number + 1 == _CHUNK:
                        return key
                return None
            after = self._read(chunk)

    def notes(self) -> list[tuple[bytes, bytes]]:
        """All of them."""
        return self._read(lambda txn, dbs: [(bytes(key), bytes(note)) for key, note in txn.cursor(db=dbs[b'notes'])]) or []

    def check(self, progress=None):
        bad, done, total = [], 0, len(self)

        def look(key: bytes, encoded: Any, place: Optional[tuple[int, int]]) -> None:
            nonlocal done
            try:
                decode(key, encoded)
                if place is None or place[1] != len(encoded):
                    raise CorruptEntry('its size is not written down')
            except CorruptEntry:
                bad.append(key)
            done += 1
            if progress is not None:
                progress(done, max(done, total))
        self.flush()
        self.scan(look)
        return bad

    def totals(self) -> tuple[int, int]:
        """Number and bytes of the entries that are written, by any process."""
        found = self._read(lambda txn, dbs: bytes(txn.get(b'totals', b'', db=dbs[b'header'])))
        return _TOTALS.unpack(found)[:2] if found and len(found) == _TOTALS.size else (0, 0)

    def __len__(self):
        return self.totals()[0] + len(self._writer)

    @property
    def nbytes(self):
        return self.totals()[1] + self._writer.nbytes

    def room(self):
        if not self.keeps:
            return f'{self.folder} is only read'
        used = self.nbytes
        return f'in {self.folder}, {self._limit(used) / 2 ** 30:.2f} GiB at most, {used / 2 ** 30:.2f} GiB of them are used'

    def wait_for_room(self):
        return self._writer.nbytes > self._queue_bytes // 2 and self._writer.flush()

    def flush(self):
        return self._writer.flush()

    def close(self):
        if self._closed:
            return
        self._writer.close(_CLOSE_SECONDS)
        self._closed = True
        environment.release(self._environment)


class _Totals:
    """One write transaction's view: entries, places and order change together."""

    def __init__(self, txn: lmdb.Transaction, dbs: Mapping[bytes, Any]):
        self.txn, self.dbs = txn, dbs
        found = txn.get(b'totals', db=dbs[b'header'])
        self.count, self.nbytes, self._next, self._evicted = _TOTALS.unpack(found) if found else (0, 0, 0, 0)

    def has(self, key: bytes) -> bool:
        return self.txn.get(key, db=self.dbs[b'places']) is not None

    def put(self, key: bytes, data: bytearray) -> None:
        self.drop(key)
        self.txn.put(key, data, db=self.dbs[b'entries'])
        self._place(key, len(data))
        self.count += 1
        self.nbytes += len(data)

    def _place(self, key: bytes, size: int) -> None:
        self.txn.put(key, _PLACE.pack(self._next, size), db=self.dbs[b'places'])
        self.txn.put(_SEQUENCE.pack(self._next), key, db=self.dbs[b'order'], append=True)
        self._next += 1

    def drop(self, key: bytes) -> None:
        place = self.txn.pop(key, db=self.dbs[b'places'])
        self.txn.delete(key, db=self.dbs[b'entries'])
        if place is not None:
            sequence, size = _PLACE.unpack(place)
            self.txn.delete(_SEQUENCE.pack(sequence), db=self.dbs[b'order'])
            self.count -= 1
            self.nbytes -= size

    def make_room(self, wanted: int, limit: int) -> int:
        """Evict until ``wanted`` more bytes fit under ``limit``, or a bounded number of entries is gone; how many."""
        evicted = 0
        while self.nbytes and self.nbytes + wanted > limit and evicted < _STEPS:
            with self.txn.cursor(db=self.dbs[b'order']) as cursor:
                if not cursor.first():
                    break
                sequence, key = cursor.item()
            place = self.txn.get(key, db=self.dbs[b'places'])
            if place is not None and _SEQUENCE.pack(_PLACE.unpack(place)[0]) == sequence:
                self.drop(key)
                evicted += 1
            else:
                self.txn.delete(sequence, db=self.dbs[b'order'])
        self._evicted += evicted
        return evicted

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used: those of the older half go to the end."""
        for key in keys:
            place = self.txn.get(key, db=self.dbs[b'places'])
            if place is None:
                continue
            sequence, size = _PLACE.unpack(place)
            if self._next - sequence > self.count // 2:
                self.txn.delete(_SEQUENCE.pack(sequence), db=self.dbs[b'order'])
                self._place(key, size)

    def save(self) -> None:
        self.txn.put(b'totals', _TOTALS.pack(self.count, self.nbytes, self._next, self._evicted), db=self.dbs[b'header'])


def free_to_use(folder: Path) -> int:
    """Bytes that may still be written where no budget is given."""
    usage = shutil.disk_usage(folder)
    return max(0, usage.free - min(int(usage.total * FREE_SHARE), FREE_MOST))


def _open(folder: Path, writable: bool, map_bytes: Optional[int]) -> environment.Environment:
    if writable and folder.exists() and not os.access(folder, os.W_OK):
        writable = False
    if not writable and not (folder / environment.DATA).exists():
        raise Unusable(f'{folder} holds no cache and cannot be written to' if folder.exists() else f'{folder} does not exist')
    return environment.acquire(folder, writable, map_bytes)


def _close_at_exit(store: DiskStore) -> None:
    reference = weakref.ref(store)

    def close() -> None:
        alive = reference()
        if alive is not None and not alive._closed:
            alive.close()
    atexit.register(close)
    weakref.finalize(store, atexit.unregister, close)
