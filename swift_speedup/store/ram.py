"""A least-recently-used store in the memory of this process, bounded by bytes."""
import os
import threading
from collections import OrderedDict
from typing import Optional

import psutil

from .base import Entry, Store

GIB = 1 << 30
DEFAULT_SHARE = 0.25  # of the memory that is free when the store is made, for all ranks of the node together


def default_budget() -> int:
    """Bytes: this process's part of a quarter of the node's free memory."""
    ranks = max(1, int(os.environ.get('LOCAL_WORLD_SIZE', '1')))
    return int(psutil.virtual_memory().available * DEFAULT_SHARE) // ranks


class RamStore(Store):
    """Keeps at most ``budget`` bytes; the entry not used for longest goes first. Safe to use from several threads."""

    def __init__(self, budget: int):
        self.budget = budget
        self.evicted = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Optional[Entry]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key: bytes, entry: Entry) -> bool:
        if entry.nbytes > self.budget:
            return False
        with self._lock:
            replaced = self._entries.pop(key, None)
            self._nbytes += entry.nbytes - (replaced.nbytes if replaced else 0)
            self._entries[key] = entry
            while self._nbytes > self.budget:
                _, dropped = self._entries.popitem(last=False)
                self._nbytes -= dropped.nbytes
                self.evicted += 1
        return True

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return self._nbytes
