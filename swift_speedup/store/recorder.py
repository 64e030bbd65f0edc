"""A store that answers as another one does, keeps nothing, and remembers what was asked: for ``swift-speedup cache why``."""
from .base import Entry, Store


class Recorder(Store):
    """``found`` and ``missing`` have entries by key: those that the store behind it had, and those that it would have been given."""

    def __init__(self, behind: Store):
        self._behind = behind
        self.found: dict[bytes, Entry] = {}
        self.missing: dict[bytes, Entry] = {}
        self._notes: dict[bytes, bytes] = {}

    def get(self, key):
        entry = self._behind.get(key)
        if entry is not None:
            self.found[key] = entry
        return entry

    def put(self, key, entry):
        if key not in self.found and not self._behind.contains(key):
            self.missing[key] = entry
        return True

    def contains(self, key):
        return self._behind.contains(key)

    def get_note(self, key):
        return self._notes.get(key) or self._behind.get_note(key)

    def put_note(self, key, note):
        self._notes[key] = note

    def evict(self, nbytes):
        return 0

    def check(self, progress=None):
        return self._behind.check(progress)

    def clear(self):
        pass

    def close(self):
        self._behind.close()

    def room(self):
        return self._behind.room()

    def __len__(self):
        return len(self._behind)

    @property
    def nbytes(self):
        return self._behind.nbytes
