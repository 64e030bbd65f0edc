"""The store's contract: opaque 16-byte keys to entries."""
import abc
import dataclasses
from collections.abc import Callable
from typing import Optional

import torch

UNNAMED = bytes(16)
Progress = Callable[[int, int], None]  # done, of how many


@dataclasses.dataclass(frozen=True)
class Entry:
    """One sample's part of one output. ``tensor`` owns its storage, lies on the CPU and is never written to after ``put``.

    For people who ask why something is not found: ``origin`` names what computed it, ``sample`` what of the sample's own went in, 16
    bytes each; ``written`` is in seconds since the epoch, ``None`` for now. No lookup depends on them.
    """

    tensor: torch.Tensor
    origin: bytes = UNNAMED
    sample: bytes = UNNAMED
    written: Optional[float] = None

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Store(abc.ABC):
    """A store may forget any entry at any time; it never answers with another one than was put under the key.

    Safe to use from several threads. No method raises because of the medium: whatever goes wrong there is a miss (Rule 7), counted in
    ``errors`` and told once.
    """

    keeps = True  # False: putting is of no use
    evicted = 0  # entries dropped to stay inside the budget
    dropped = 0  # puts that were given up because the writer could not keep pace
    errors = 0  # troubles that became misses or lost puts

    @abc.abstractmethod
    def get(self, key: bytes) -> Optional[Entry]:
        """The entry put under ``key``, or ``None``. Its tensor must not be written to."""

    @abc.abstractmethod
    def put(self, key: bytes, entry: Entry) -> bool:
        """Keep ``entry``; ``False`` when there is no room for it."""

    @abc.abstractmethod
    def contains(self, key: bytes) -> bool:
        """Whether an entry lies under ``key``; it may still prove unreadable."""

    @abc.abstractmethod
    def get_note(self, key: bytes) -> Optional[bytes]:
        """What was put as a note under ``key``."""

    @abc.abstractmethod
    def put_note(self, key: bytes, note: bytes) -> None:
        """Keep a few bytes beside the entries, for as long as the store is not cleared: what was learned about them."""

    @abc.abstractmethod
    def evict(self, nbytes: int) -> int:
        """Drop the entries not used for longest until ``nbytes`` are free or nothing is left; returns the bytes that became free."""

    @abc.abstractmethod
    def check(self, progress: Optional[Progress] = None) -> list[bytes]:
        """Read everything; keys of entries that are not what they should be."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the store holds; entries of a persistent store stay. Every method may still be called: nothing is found."""

    def wait_for_room(self) -> bool:
        """Wait until a put of usual size would not be dropped; ``False`` if there is no need to."""
        return False

    def flush(self) -> bool:
        """Wait until everything that was put is kept; ``False`` if that is not so."""
        return True

    @abc.abstractmethod
    def room(self) -> str:
        """Where entries lie and how much room there is, for people."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of entries."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of all entries."""


class NullStore(Store):
    """Keeps nothing: ``cache="off"``."""

    keeps = False

    def get(self, key):
        return None

    def put(self, key, entry):
        return False

    def contains(self, key):
        return False

    def get_note(self, key):
        return None

    def put_note(self, key, note):
        pass

    def evict(self, nbytes):
        return 0

    def check(self, progress=None):
        return []

    def clear(self):
        pass

    def close(self):
        pass

    def room(self):
        return 'nothing is kept'

    def __len__(self):
        return 0

    @property
    def nbytes(self):
        return 0
