"""Fingerprint: the digest of a segment's weights, buffers, settings and library versions, watched for change (Rule 6)."""
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import torch

from ..ranks import Together, is_sharded, local_part, whole
from ..trees import version
from .key import Digest, content

BETWEEN = '\n\n'  # in the text of the settings: after what does not depend on the segment's modules
NamedTensors = Sequence[tuple[str, torch.Tensor]]


class Fingerprint:
    """``settings()`` and ``tensors()`` are asked at every lookup.

    Writes through ``.data`` leave ``_version`` alone, and peft merges adapters that way, so contents are watched too:
    on the CPU by hashing them again (about 10 GB/s, two orders below what evaluating the segment costs), on other devices by a
    position-weighted checksum there; only a change makes the full digest be taken anew.
    """

    def __init__(self, settings: Callable[[], str], tensors: Callable[[], NamedTensors]):
        self._settings = settings
        self._tensors = tensors
        self._stamp: Optional[tuple] = None
        self._sums: Optional[torch.Tensor] = None
        self._weights_digest = b''

    def current(self) -> bytes:
        """16 bytes that are equal only while weights, buffers and settings are what they were."""
        return Digest().add('settings', self._settings()).add('weights', self._weights()).value()

    def about(self) -> dict[str, Any]:
        """For people who ask why an entry is not found: digests of weights and modules, and the rest of the settings as text."""
        general, _, modules = self._settings().partition(BETWEEN)
        return {'weights': self._last().hex(), 'modules': Digest().add('modules', modules).value().hex(),
                'settings': general.splitlines()}

    def _last(self) -> bytes:
        return self._weights()

    def _weights(self) -> bytes:
        return self._watched(self._tensors())

    def _watched(self, tensors: NamedTensors) -> bytes:
        if all(tensor.device.type == 'cpu' for _, tensor in tensors):
            return _content(tensors)
        stamp = tuple((name, id(tensor), tensor.data_ptr(), version(tensor)) for name, tensor in tensors)
        sums = _checksums(tensors)
        if stamp != self._stamp or self._sums is None or not torch.equal(sums, self._sums):
            self._weights_digest = _content(tensors)
            self._stamp, self._sums = stamp, sums
        return self._weights_digest


class Stale(Exception):
    """Weights are not known, or have changed on this rank: all ranks must :meth:`SharedFingerprint.refresh`."""


class SharedFingerprint(Fingerprint):
    """Of weights that ranks hold in parts: the same on every rank, for every number of ranks, and as where they are whole.

    Each rank watches what it holds. Parameters are gathered one at a time, and each is hashed by one rank.
    """

    def __init__(self, settings: Callable[[], str], tensors: Callable[[], NamedTensors], together: Together):
        super().__init__(settings, tensors)
        self._together = together
        self._seen: dict[tuple, bytes] = {}  # which tensors are sharded at the moment -> what this rank holds of all
        self._known: Optional[bytes] = None

    def _weights(self) -> bytes:
        tensors = self._tensors()
        if self._known is None or self._seen.get(_sharded(tensors)) != self._held(tensors):
            raise Stale
        return self._known

    def _last(self) -> bytes:
        return self._known or b''

    def refresh(self) -> None:
        """A collective. Other forms of the same weights (FSDP unshards some of them in a forward) are looked at when they come."""
        tensors, together = self._tensors(), self._together
        own = {}
        for number, (name, tensor) in enumerate(tensors):
            full = whole(tensor) if is_sharded(tensor) else tensor  # by all ranks
            if number % together.size == together.rank:
                own[name] = content(full.detach())
        digests = dict(together.all_of(list(own.items())))
        known = _combined((name, digests[name]) for name, _ in tensors)
        if known != self._known:
            self._seen = {}
        self._known = known
        self._seen[_sharded(tensors)] = self._held(tensors)

    def _held(self, tensors: NamedTensors) -> bytes:
        return self._watched([(name, local_part(tensor)) for name, tensor in tensors])


def _sharded(tensors: NamedTensors) -> tuple[bool, ...]:
    return tuple(is_sharded(tensor) for _, tensor in tensors)


def _content(tensors: NamedTensors) -> bytes:
    return _combined((name, content(tensor)) for name, tensor in tensors)


def _combined(digests: Iterable[tuple[str, bytes]]) -> bytes:
    digest = Digest()
    for name, value in digests:
        digest.add(name, value)
    return digest.value()


def _checksums(tensors: NamedTensors) -> torch.Tensor:
    """One int64 per tensor, computed where the tensor lies and gathered on one device."""
    device = tensors[0][1].device
    return torch.stack([_checksum(tensor).to(device) for _, tensor in tensors])


_WIDTH = 251  # odd and prime, so that rows of usual sizes do not line up with it


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Column sums of the words, weighted by column: a plain sum would not see two words trade places."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    words = data[:data.numel() // 4 * 4].view(torch.int32)
    even = words.numel() // _WIDTH * _WIDTH
    weights = torch.arange(1, 2 * _WIDTH, 2, device=data.device)
    columns = words[:even].view(-1, _WIDTH).sum(0, dtype=torch.int64)
    columns[:words.numel() - even] += words[even:] * 3  # the row that is not full; words there must not trade places with others
    rest = data[words.numel() * 4:].to(torch.int64) * weights[:data.numel() % 4]
    return (columns * weights).sum() + rest.sum()
