"""Puts without waiting: a bounded queue and one thread that commits what lies in it, in batches."""
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Optional

from .base import Entry

_BATCH_BYTES, _BATCH_ITEMS = 64 << 20, 4096
_MOST = 1 << 16  # entries that wait
_LINGER = 0.05  # seconds that a batch waits for more

Commit = Callable[[Mapping[bytes, Entry], Mapping[bytes, bytes]], None]  # entries and notes


class Writer:
    """``commit`` runs in the writer's thread, with at most some 64 MB at a time. It must not raise.

    What waits can be looked up. After a fork the child begins with an empty queue: the parent writes what it had.
    """

    def __init__(self, commit: Commit, limit_bytes: int):
        self._commit = commit
        self._limit = limit_bytes
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # a dict that loses its first items is slow to begin with
        self._notes: dict[bytes, bytes] = {}
        self._taken: tuple[dict, dict] = ({}, {})  # being committed
        self._nbytes = 0
        self._hurry = self._closed = False
        self._thread: Optional[threading.Thread] = None

    def _here(self) -> threading.Condition:
        if self._pid != os.getpid():
            self._begin()
        return self._changed

    def put(self, key: bytes, entry: Entry) -> bool:
        """``False``: the queue is full. An entry of any size fits into an empty one."""
        with self._here():
            if self._closed or len(self._entries) >= _MOST or (self._nbytes and self._nbytes + entry.nbytes > self._limit):
                return False
            self._nbytes += entry.nbytes - (self._entries[key].nbytes if key in self._entries else 0)
            self._entries[key] = entry
            self._wake()
            return True

    def put_note(self, key: bytes, note: bytes) -> None:
        with self._here():
            if not self._closed:
                self._notes[key] = note
                self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name='swift_speedup store', daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def get(self, key: bytes) -> Optional[Entry]:
        with self._here():
            return self._entries.get(key) or self._taken[0].get(key)

    def get_note(self, key: bytes) -> Optional[bytes]:
        with self._here():
            return self._notes.get(key, self._taken[1].get(key))

    def __len__(self) -> int:
        return len(self._entries) + len(self._taken[0])

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def _work(self) -> None:
        changed = self._changed
        while True:
            with changed:
                while not (self._entries or self._notes or self._closed):
                    changed.wait()
                if not (self._entries or self._notes):
                    return
                if not self._hurry and self._nbytes < _BATCH_BYTES:
                    changed.wait(_LINGER)
                self._taken = entries, notes = self._take()
            self._commit(entries, notes)
            with changed:
                self._nbytes -= sum(entry.nbytes for entry in entries.values())
                self._taken = ({}, {})
                self._hurry = self._hurry and bool(self._entries or self._notes)
                changed.notify_all()

    def _take(self) -> tuple[dict[bytes, Entry], dict[bytes, bytes]]:
        entries: dict[bytes, Entry] = {}
        nbytes = 0
        while self._entries and nbytes < _BATCH_BYTES and len(entries) < _BATCH_ITEMS:
            key, entry = self._entries.popitem(last=False)
            entries[key] = entry
            nbytes += entry.nbytes
        notes, self._notes = self._notes, {}
        return entries, notes

    def discard(self) -> None:
        """Forget what waits and is not being committed."""
        with self._here():
            self._nbytes -= sum(entry.nbytes for entry in self._entries.values())
            self._entries, self._notes = OrderedDict(), {}
            self._changed.notify_all()

    def flush(self, timeout: Optional[float] = None) -> bool:
        """Wait until everything is committed; ``False`` after ``timeout`` seconds."""
        with self._here():
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not any((self._entries, self._notes, *self._taken)), timeout)

    def close(self, timeout: Optional[float] = None) -> None:
        """Commit what waits, for ``timeout`` seconds at most; nothing can be put afterwards."""
        self.flush(timeout)
        with self._here():
            self._closed = True
            thread: Any = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
