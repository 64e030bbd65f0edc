"""The store's contract: opaque 16-byte keys to entries."""
import abc
import dataclasses
from typing import Optional

import torch

from ..trees import Structure


@dataclasses.dataclass(frozen=True)
class Entry:
    """One sample's outputs. ``leaves`` own their storage, lie on the CPU and are never written to after ``put``."""

    structure: Structure
    leaves: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)


class Store(abc.ABC):
    """A store may forget any entry at any time; it never answers with another one than was put under the key."""

    evicted = 0  # entries dropped to stay inside the budget

    @abc.abstractmethod
    def get(self, key: bytes) -> Optional[Entry]:
        """The entry put under ``key``, or ``None``."""

    @abc.abstractmethod
    def put(self, key: bytes, entry: Entry) -> bool:
        """Keep ``entry``; ``False`` when there is no room for it."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of entries."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of all entries."""


class NullStore(Store):
    """Keeps nothing: ``cache="off"``."""

    def get(self, key: bytes) -> Optional[Entry]:
        return None

    def put(self, key: bytes, entry: Entry) -> bool:
        return False

    def clear(self) -> None:
        pass

    def __len__(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return 0
