"""The persistent store against plain files: reading warm and cold, keys that are not there, two readers, the cost of writing."""
import mmap
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from swift_speedup.store import Entry
from swift_speedup.store.disk import DiskStore

ENTRY_BYTES, ENTRIES = 4 << 20, 192
KEYS, LOOKUPS = 1_000_000, 20_000
ROUNDS = 7


def measure(where: Path | None) -> int:
    """Print a table; the exit status is 1 when what was read is not what was written."""
    folder = Path(tempfile.mkdtemp(prefix='swift_speedup_bench-', dir=where))
    try:
        return _measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(folder: Path) -> int:
    torch.set_num_threads(1)
    tensor = torch.randint(0, 1 << 30, (ENTRY_BYTES // 8,), dtype=torch.int64)
    store = DiskStore(folder / 'store', queue_bytes=1 << 30)
    started = time.perf_counter()
    for number in range(ENTRIES):
        store.put(_key(number), Entry(tensor + number))
    store.flush()
    written = time.perf_counter() - started
    plain = folder / 'plain'
    with open(plain, 'wb') as file:
        for number in range(ENTRIES):
            file.write((tensor + number).numpy().data)
        os.fsync(file.fileno())
    wrong = any(not store.get(_key(number)).tensor.equal(tensor + number) for number in range(0, ENTRIES, 17))

    arms = {'store': lambda: _read_store(store), 'mapped file': lambda: _read_mapped(plain)}
    warm = _interleaved(arms, prepare=lambda name: None)
    store.close()
    one, two = _processes(folder / 'store', 1), _processes(folder / 'store', 2)
    cold = _interleaved({'store': lambda: _read_new(folder / 'store'), 'file': lambda: _read_file(plain)},
                        prepare=lambda name: _forget(folder))
    missing, filled = _missing(folder / 'many')

    size = ENTRIES * ENTRY_BYTES / 1e9
    table = Table('what', 'value', 'compared with', 'ratio', 'goal', title='persistent store')
    table.add_row('read 4 MB entries, page cache warm', f'{size / warm["store"]:.2f} GB/s',
                  f'copy of a mapped file {size / warm["mapped file"]:.2f} GB/s', f'{warm["mapped file"] / warm["store"]:.2f}', '0.60')
    table.add_row('the same, cold', f'{size / cold["store"]:.2f} GB/s', f'sequential read {size / cold["file"]:.2f} GB/s',
                  f'{cold["file"] / cold["store"]:.2f}', '0.80')
    table.add_row('two processes reading', f'{2 * size / two:.2f} GB/s', f'one {size / one:.2f} GB/s', f'{2 * one / two:.2f}', '1.70')
    table.add_row(f'a key that is missing among {filled:,}', f'p99 {missing * 1e6:.1f} us', '', '', '50 us')
    table.add_row('write', f'{size / written:.2f} GB/s', '', '', '')
    Console().print(table)
    if wrong:
        print('error: what was read is not what was written', file=sys.stderr)
    return int(wrong)


def _key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def _interleaved(arms: dict[str, Callable[[], None]], prepare: Callable[[str], None]) -> dict[str, float]:
    """Median seconds of each arm; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, run in arms.items():
            prepare(name)
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _read_store(store: DiskStore) -> None:
    for number in range(ENTRIES):
        store.get(_key(number))


def _read_new(folder: Path) -> None:
    """Pages that are mapped stay in memory: the store is opened anew."""
    store = DiskStore(folder, writable=False)
    _read_store(store)
    store.close()


def _read_mapped(path: Path) -> None:
    """Copies into memory of their own, as the store makes them."""
    with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        for number in range(ENTRIES):
            target = torch.empty(ENTRY_BYTES, dtype=torch.uint8)
            target.numpy().data[:] = view[number * ENTRY_BYTES:(number + 1) * ENTRY_BYTES]


def _read_file(path: Path) -> None:
    buffer = bytearray(ENTRY_BYTES)
    with open(path, 'rb', buffering=0) as file:
        while file.readinto(buffer):
            pass


def _forget(folder: Path) -> None:
    """Drop the pages of all files from the page cache; a file system in memory keeps them."""
    for path in folder.rglob('*'):
        if path.is_file():
            with open(path, 'rb') as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _reader(folder: Path, begin, ended) -> None:
    torch.set_num_threads(1)
    store = DiskStore(folder, writable=False)
    _read_store(store)  # warm
    begin.wait()
    for _ in range(ROUNDS):
        _read_store(store)
    ended.wait()
    store.close()


def _processes(folder: Path, count: int) -> float:
    """Seconds in which each of ``count`` processes reads everything once."""
    context = multiprocessing.get_context('spawn')
    begin, ended = context.Barrier(count + 1), context.Barrier(count + 1)
    readers = [context.Process(target=_reader, args=(folder, begin, ended)) for _ in range(count)]
    for reader in readers:
        reader.start()
    begin.wait()
    started = time.perf_counter()
    ended.wait()
    seconds = time.perf_counter() - started
    for reader in readers:
        reader.join()
    return seconds / ROUNDS


def _missing(folder: Path) -> tuple[float, int]:
    """p99 seconds of a lookup without an entry, and the number of entries."""
    store = DiskStore(folder)
    entry = Entry(torch.zeros(4))
    for number in range(KEYS):
        while not store.put(number.to_bytes(16, 'big'), entry):
            store.flush()
    store.flush()
    times = []
    for number in range(LOOKUPS):
        key = _key(number)
        started = time.perf_counter()
        store.get(key)
        times.append(time.perf_counter() - started)
    count = len(store)
    store.close()
    return sorted(times)[int(0.99 * len(times))], count
