"""Faults of processes: kills, forks, growing maps, memory."""
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from faults.rig import content, forked, key, sound

from swift_speedup.store import Entry, RamStore, environment
from swift_speedup.store.disk import DiskStore


def put_forever(folder, start):
    store = DiskStore(folder, budget=4_000_000)
    for number in range(start, start + 10 ** 6):
        store.put(key(number), Entry(content(number)))
        store.put_note(key(number), b'x' * 50)
        if number % 50 == 0:
            store.flush()


def test_killed_a_hundred_times_in_the_middle_of_puts(tmp_path):
    chance, folder = random.Random(0), tmp_path / 'cache'
    kept = set()
    for number in range(100):
        status = forked(lambda start=number * 10 ** 6: put_forever(folder, start), kill_after=chance.uniform(0.01, 0.12))
        assert os.WIFSIGNALED(status), 'it ended before it was killed'
        if number % 10 == 9:
            kept |= set(sound(folder))
    assert len(kept) > 100


def test_the_map_grows_while_others_read(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, '_SMALLEST_MAP', 1 << 20)
    folder, wrong, done = tmp_path / 'cache', [], threading.Event()
    store = DiskStore(folder, map_bytes=1 << 20)
    first = [number for number in range(40) if store.put(key(number), Entry(content(number)))]
    store.flush()

    def read():
        while not done.is_set():
            for number in first:
                found = store.get(key(number))
                if found is None or not found.tensor.equal(content(number)):
                    wrong.append(number)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(100, 600):  # in this process
        store.put(key(number), Entry(content(number)))
    store.flush()

    def grow():  # and in another one
        other = DiskStore(folder, map_bytes=1 << 20)
        for number in range(1000, 3000):
            other.put(key(number), Entry(content(number)))
        other.flush()
        assert other.contains(key(2999))
        other.close()
    assert forked(grow) == 0
    assert store.get(key(2999)).tensor.equal(content(2999))
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong and store.errors == 0
    store.close()
    assert len(sound(folder)) == 2540


class Numbers(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder = folder
        self.store = None

    def __len__(self):
        return 40

    def __getitem__(self, number):
        self.store = self.store or DiskStore(self.folder)
        found = self.store.get(key(number))
        if found is None:
            self.store.put(key(number), Entry(content(number)))
            self.store.flush()
        return int(found is not None)


@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_workers_of_a_data_loader(tmp_path, method):
    own = DiskStore(tmp_path)
    own.put(key(0), Entry(content(0)))
    own.flush()
    for expected in (1, 40):
        loader = torch.utils.data.DataLoader(Numbers(tmp_path), batch_size=4, num_workers=2, multiprocessing_context=method)
        assert sum(int(batch.sum()) for batch in loader) == expected
    assert own.get(key(39)).tensor.equal(content(39))
    own.close()
    assert len(sound(tmp_path)) == 40


def anonymous_bytes():
    line = next(line for line in Path('/proc/self/status').read_text().splitlines() if line.startswith('RssAnon'))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='needs /proc')
@pytest.mark.parametrize('kind', ['ram', 'disk'])
def test_memory_is_bounded_over_ten_thousand_puts(tmp_path, kind):
    budget, size = 20_000_000, 25_000  # floats: 100 kB each, 1 GB in all
    store = RamStore(budget) if kind == 'ram' else DiskStore(tmp_path, budget, queue_bytes=budget)
    for number in range(200):
        store.put(key(number), Entry(torch.full((size,), 1.0)))
    store.flush()
    before = anonymous_bytes()
    for number in range(10_000):
        store.put(key(number), Entry(torch.full((size,), float(number))))
        if kind == 'disk' and number % 100 == 0:
            store.flush()
    store.flush()
    assert anonymous_bytes() - before < budget and store.nbytes <= budget
    store.close()
