"""Entries as bytes: exact, small, and harmless whatever the bytes are."""
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_speedup.store import Entry
from swift_speedup.store.codec import CorruptEntry, UnknownDtype, decode, encode, read_header

KEY, ORIGIN, SAMPLE = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
TENSOR = torch.arange(24.0).reshape(2, 3, 4)
ENCODED = bytes(encode(KEY, Entry(TENSOR, ORIGIN, SAMPLE), 1234.5))


def test_what_the_header_tells():
    header = read_header(KEY, ENCODED)
    assert (header.key, header.origin, header.sample) == (KEY, ORIGIN, SAMPLE)
    assert (header.written, header.dtype, header.shape) == (1234.5, torch.float32, (2, 3, 4))


@pytest.mark.parametrize('size', [0, 1, 1000, 1_000_000])
def test_an_entry_is_hardly_larger_than_its_tensor(size):
    batch = torch.zeros(64, size)
    assert len(encode(KEY, Entry(batch[3]), 0.0)) <= 4 * size * 1.01 + 4096


def test_a_transposed_tensor_and_one_that_requires_grad():
    tensor = torch.randn(5, 7).t().requires_grad_()
    assert decode(KEY, encode(KEY, Entry(tensor), 0.0)).tensor.equal(tensor)


def test_a_dtype_without_a_code():
    with pytest.raises(UnknownDtype, match='qint8'):
        encode(KEY, Entry(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)), 0.0)


def test_another_key_or_version_is_none_of_ours():
    with pytest.raises(CorruptEntry, match='another key'):
        decode(ORIGIN, ENCODED)
    older = bytearray(ENCODED)
    older[4] += 1
    with pytest.raises(CorruptEntry, match='format 2'):
        decode(KEY, older)


@pytest.mark.parametrize('place', range(0, len(ENCODED), 3))
def test_one_flipped_bit(place):
    flipped = bytearray(ENCODED)
    flipped[place] ^= 1 << place % 8
    with pytest.raises(CorruptEntry):
        decode(KEY, flipped)


def test_a_huge_shape_allocates_nothing():
    crafted = bytearray(ENCODED)
    start = len(ENCODED) - TENSOR.nbytes
    for place in range(60, 84, 8):
        crafted[place:place + 8] = (1 << 40).to_bytes(8, 'little')
    crafted[7] = 3
    tracemalloc.start()
    with pytest.raises(CorruptEntry):
        decode(KEY, crafted)
    assert tracemalloc.get_traced_memory()[1] < 100_000 and start
    tracemalloc.stop()


def test_an_empty_tensor_whose_strides_overflow():
    empty = bytearray(encode(KEY, Entry(torch.zeros(0, 3, 4)), 0.0))
    for place in (header_bytes(empty) + 8, header_bytes(empty) + 16):
        empty[place:place + 8] = (1 << 40).to_bytes(8, 'little')
    with pytest.raises(CorruptEntry, match='does not have 0 bytes'):
        decode(KEY, empty)


def header_bytes(encoded):
    """Where the shape begins: its last two numbers are 3 and 4."""
    return bytes(encoded).index((3).to_bytes(8, 'little') + (4).to_bytes(8, 'little')) - 8


@settings(max_examples=3000, deadline=None)
@given(st.data())
def test_mutated_entries_are_misses(data):
    mutated = bytearray(ENCODED)
    for _ in range(data.draw(st.integers(1, 6))):
        if not mutated:
            break
        place = data.draw(st.integers(0, len(mutated) - 1))
        kind = data.draw(st.sampled_from(('set', 'cut', 'insert', 'number')))
        if kind == 'set':
            mutated[place] = data.draw(st.integers(0, 255))
        elif kind == 'cut':
            del mutated[place:place + data.draw(st.integers(1, 80))]
        elif kind == 'insert':
            mutated[place:place] = data.draw(st.binary(max_size=40))
        else:
            mutated[place:place + 8] = data.draw(st.sampled_from((0, 1, 1 << 31, 1 << 40, (1 << 64) - 1))).to_bytes(8, 'little')
    if mutated != ENCODED:
        with pytest.raises(CorruptEntry):
            decode(KEY, mutated)
