"""The store's contract: opaque 16-byte keys to entries."""
import abc
import dataclasses
from typing import Optional

import torch


@dataclasses.dataclass(frozen=True)
class Entry:
    """One sample's part of one output. ``tensor`` owns its storage, lies on the CPU and is never written to after ``put``."""

    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


class Store(abc.ABC):
    """A store may forget any entry at any time; it never answers with another one than was put under the key."""

    keeps = True  # False: putting is of no use
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

    keeps = False

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
