"""A small fast store in front of a large slow one."""
from .base import Store


class TieredStore(Store):
    """What is found in ``slow`` is kept in ``fast`` too. ``slow`` has the say: what it holds is what there is."""

    def __init__(self, fast: Store, slow: Store):
        self.fast = fast
        self.slow = slow

    keeps = property(lambda self: self.fast.keeps or self.slow.keeps)
    evicted = property(lambda self: self.slow.evicted)
    dropped = property(lambda self: self.slow.dropped)
    errors = property(lambda self: self.fast.errors + self.slow.errors)

    def get(self, key):
        entry = self.fast.get(key)
        if entry is None:
            entry = self.slow.get(key)
            if entry is not None:
                self.fast.put(key, entry)
        return entry

    def put(self, key, entry):
        kept = self.fast.put(key, entry)
        return self.slow.put(key, entry) or kept

    def contains(self, key):
        return self.fast.contains(key) or self.slow.contains(key)

    def get_note(self, key):
        return self.fast.get_note(key) or self.slow.get_note(key)

    def put_note(self, key, note):
        self.fast.put_note(key, note)
        self.slow.put_note(key, note)

    def evict(self, nbytes):
        self.fast.evict(nbytes)
        return self.slow.evict(nbytes)

    def check(self, progress=None):
        return self.slow.check(progress)

    def clear(self):
        self.fast.clear()
        self.slow.clear()

    def wait_for_room(self):
        return self.slow.wait_for_room()

    def flush(self):
        return self.slow.flush()

    def close(self):
        self.fast.close()
        self.slow.close()

    def room(self):
        return f'{self.slow.room()}; copies {self.fast.room()}'

    def __len__(self):
        return max(len(self.slow), len(self.fast))

    @property
    def nbytes(self):
        return max(self.slow.nbytes, self.fast.nbytes)
