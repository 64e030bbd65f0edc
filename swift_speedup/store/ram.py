"""A least-recently-used store in the memory of this process, bounded by bytes."""
import os
import threading
from collections import OrderedDict

import psutil

from .base import Entry, Store

GIB = 1 << 30
DEFAULT_SHARE = 0.25  # of the memory that is free when the store is made, for all ranks of the node together


def local_ranks() -> int:
    """Processes of this training on this node, by what launchers set."""
    try:
        return max(1, int(os.environ.get('LOCAL_WORLD_SIZE', '1')))
    except ValueError:
        return 1


def default_budget() -> int:
    """Bytes: this process's part of a quarter of the node's free memory."""
    return int(psutil.virtual_memory().available * DEFAULT_SHARE) // local_ranks()


class RamStore(Store):
    """Keeps at most ``budget`` bytes; the entry not used for longest goes first."""

    def __init__(self, budget: int):
        self.budget = budget
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._notes: dict[bytes, bytes] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key):
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key, entry):
        if entry.nbytes > self.budget:
            return False
        with self._lock:
            replaced = self._entries.pop(key, None)
            self._nbytes += entry.nbytes - (replaced.nbytes if replaced else 0)
            self._entries[key] = entry
            while self._nbytes > self.budget:
                self._drop_oldest()
        return True

    def contains(self, key):
        return key in self._entries

    def get_note(self, key):
        return self._notes.get(key)

    def put_note(self, key, note):
        self._notes[key] = note

    def evict(self, nbytes):
        freed = 0
        with self._lock:
            while freed < nbytes and self._entries:
                freed += self._drop_oldest()
        return freed

    def _drop_oldest(self) -> int:
        _, dropped = self._entries.popitem(last=False)
        self._nbytes -= dropped.nbytes
        self.evicted += 1
        return dropped.nbytes

    def check(self, progress=None):
        return []  # memory is trusted

    def clear(self):
        with self._lock:
            self._entries.clear()
            self._notes.clear()
            self._nbytes = 0

    def close(self):
        self.clear()

    def room(self):
        return f'in memory, {self.budget / GIB:.2f} GiB at most'

    def __len__(self):
        return len(self._entries)

    @property
    def nbytes(self):
        return self._nbytes
