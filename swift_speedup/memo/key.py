"""Keys: a digest of everything a value depends on (Rule 5), xxh3-128 over length-prefixed fields."""
import enum
from collections.abc import Mapping
from typing import Any

import numpy
import torch
import xxhash

FORMAT_VERSION = 3  # raise it when the meaning of a key or an entry changes
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)


class NotKeyable(Exception):
    """An argument whose value cannot be told apart from others by its content."""


class Digest:
    """A running xxh3-128; each field goes in with its name and length, so that no two sequences of fields run together."""

    def __init__(self):
        self._hash = xxhash.xxh3_128()

    def add(self, name: str, data: Any) -> 'Digest':
        data = data.encode() if isinstance(data, str) else data
        size = data.nbytes if hasattr(data, 'nbytes') else len(data)
        self._hash.update(f'{len(name)}:{name}:{size}:'.encode())
        self._hash.update(data)
        return self

    def add_tensor(self, name: str, tensor: torch.Tensor) -> 'Digest':
        self.add(name, f'{tensor.dtype}{tuple(tensor.shape)}')
        return self.add('', _raw(tensor))

    def value(self) -> bytes:
        """16 bytes."""
        return self._hash.digest()


def _raw(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        raise NotKeyable(f'a tensor of layout {tensor.layout}')
    flat = tensor.detach().resolve_conj().resolve_neg().to('cpu').contiguous().reshape(-1)
    return numpy.from_dlpack(flat.view(torch.uint8))  # after Tensor.numpy() nobody can resize the storage any more, as FSDP does


def plain(value: Any) -> str:
    """A text that is equal for equal values only. Raises ``NotKeyable`` for anything that is not plain data."""
    if isinstance(value, _PLAIN):
        return f'{type(value).__name__}={value!r}'
    if isinstance(value, (tuple, list)):
        return f'{type(value).__name__}({",".join(plain(item) for item in value)})'
    if isinstance(value, Mapping):
        return f'map({",".join(f"{plain(name)}:{plain(item)}" for name, item in value.items())})'
    raise NotKeyable(f'an argument of type {type(value).__module__}.{type(value).__qualname__}')


def call_prefix(fingerprint: bytes, convention: str, context: str, mode: bytes, device_type: str) -> bytes:
    """What all samples of a call share: weights and settings, non-tensor arguments, train/eval mode, autocast, format version."""
    autocast = torch.is_autocast_enabled(device_type)
    return (Digest().add('format', str(FORMAT_VERSION)).add('fingerprint', fingerprint).add('convention', convention)
            .add('context', context).add('mode', mode).add('device', device_type)
            .add('autocast', str(torch.get_autocast_dtype(device_type)) if autocast else 'off').value())


def content(piece: torch.Tensor | bytes) -> bytes:
    """16 bytes: dtype, shape and bytes of a tensor; bytes stand for themselves."""
    digest = Digest()
    return (digest.add('bytes', piece) if isinstance(piece, bytes) else digest.add_tensor('tensor', piece)).value()


def sample_key(prefix: bytes, contents: Mapping[str, bytes]) -> bytes:
    """16 bytes for one sample: the call's prefix and, by name, the contents of what belongs to the sample."""
    digest = Digest().add('prefix', prefix)
    for name in sorted(contents):
        digest.add(name, contents[name])
    return digest.value()
