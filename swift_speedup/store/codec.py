"""Entries <-> bytes: a fixed header, the shape, the raw bytes and a checksum over all of it. Nothing here can execute anything.

``header | shape | padding to 64 bytes | data``, little-endian. A file may hold anything: lengths are compared with what is there before
anything is allocated, and whatever does not fit is a ``CorruptEntry``.
"""
import dataclasses
import math
import struct
from typing import Any

import torch
import xxhash

from .base import Entry

FORMAT = 1  # raise it when the layout below changes
_MAGIC = b'SWSP'
# magic, format, dtype, dimensions, key, origin, sample, milliseconds, bytes of data, checksum
_HEADER = struct.Struct('<4sHBB16s16s16sQQQ')
_ALIGNMENT = 64
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 48  # of a tensor without any, were its empty dimensions not there: strides must fit too
_CHUNK = 1 << 18
# A dtype's code is its place: append, never reorder. Names: some are missing in some releases of torch.
_DTYPES = ('float32', 'float64', 'float16', 'bfloat16', 'uint8', 'int8', 'int16', 'int32', 'int64', 'bool', 'complex64', 'complex128',
           'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz', 'uint16', 'uint32', 'uint64')
_CODES = {getattr(torch, name): code for code, name in enumerate(_DTYPES) if hasattr(torch, name)}


class CorruptEntry(Exception):
    """Bytes that are not an entry of this format for the expected key."""


class UnknownDtype(Exception):
    """A tensor that has no code."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What an entry says about itself, checked against its length but not yet against its checksum."""

    key: bytes
    origin: bytes
    sample: bytes
    written: float  # seconds since the epoch, by the clock of the machine that wrote
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int
    data_starts: int


def encode(key: bytes, entry: Entry, now: float) -> bytearray:
    """Raises ``UnknownDtype``."""
    tensor = entry.tensor
    if tensor.dtype not in _CODES or tensor.dim() > _MAX_DIMENSIONS:
        raise UnknownDtype(f'{tensor.dtype} with {tensor.dim()} dimensions')
    data = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b'')
    shape = struct.pack(f'<{tensor.dim()}Q', *tensor.shape)
    start = _data_starts(tensor.dim())
    encoded = bytearray(start + data.nbytes)
    encoded[_HEADER.size:_HEADER.size + len(shape)] = shape
    encoded[start:] = data
    written = now if entry.written is None else entry.written
    fields = (_MAGIC, FORMAT, _CODES[tensor.dtype], tensor.dim(), key, entry.origin, entry.sample, max(0, int(written * 1000)),
              data.nbytes)
    _HEADER.pack_into(encoded, 0, *fields, 0)
    _HEADER.pack_into(encoded, 0, *fields, _checksum(encoded, start))
    return encoded


def read_header(key: bytes, encoded: Any) -> Header:
    """``encoded``: any buffer. Raises ``CorruptEntry``."""
    view = memoryview(encoded)
    if view.nbytes < _HEADER.size:
        raise CorruptEntry(f'{view.nbytes} bytes are too few')
    magic, version, code, dimensions, found_key, origin, sample, written, size, checksum = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != FORMAT:
        raise CorruptEntry(f'not an entry of format {FORMAT}: {bytes(magic)!r}, format {version}')
    if found_key != key:
        raise CorruptEntry('it belongs to another key')
    dtype = getattr(torch, _DTYPES[code], None) if code < len(_DTYPES) else None
    if dtype is None or dimensions > _MAX_DIMENSIONS:
        raise CorruptEntry(f'unknown dtype {code} or {dimensions} dimensions')
    start = _data_starts(dimensions)
    if view.nbytes != start + size:
        raise CorruptEntry(f'{view.nbytes} bytes, but the header tells of {start + size}')
    shape = struct.unpack_from(f'<{dimensions}Q', view, _HEADER.size)
    if math.prod(shape) * dtype.itemsize != size or math.prod(max(1, length) for length in shape) > _MAX_ELEMENTS:
        raise CorruptEntry(f'{dtype} {shape} does not have {size} bytes')
    return Header(found_key, origin, sample, written / 1000, dtype, shape, checksum, start)


def decode(key: bytes, encoded: Any) -> Entry:
    """The entry, in memory of its own. Raises ``CorruptEntry``."""
    header = read_header(key, encoded)
    view = memoryview(encoded)
    tensor = torch.empty(header.shape, dtype=header.dtype)
    digest = _begun(view, header.data_starts)
    if tensor.numel():
        data, target = view[header.data_starts:], tensor.view(-1).view(torch.uint8).numpy().data
        for start in range(0, data.nbytes, _CHUNK):
            part = target[start:start + _CHUNK]
            part[:] = data[start:start + _CHUNK]
            digest.update(part)  # what was just copied is in the processor's cache
    if digest.intdigest() != header.checksum:
        raise CorruptEntry('its checksum is wrong')
    return Entry(tensor, header.origin, header.sample, header.written)


def _data_starts(dimensions: int) -> int:
    return -(-(_HEADER.size + 8 * dimensions) // _ALIGNMENT) * _ALIGNMENT


def _begun(view: memoryview, start: int) -> xxhash.xxh3_64:
    """The checksum of everything before the data."""
    digest = xxhash.xxh3_64(bytes(view[:_HEADER.size - 8]))
    digest.update(view[_HEADER.size:start])
    return digest


def _checksum(encoded: bytearray, start: int) -> int:
    view = memoryview(encoded)
    digest = _begun(view, start)
    digest.update(view[start:])
    return digest.intdigest()
