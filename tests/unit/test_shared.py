"""Ranks of one node share a folder while they run; nothing is left behind, not even by those that are killed."""
import json
import os
import signal
import subprocess
import sys

import pytest

from swift_speedup import SpeedupConfig
from swift_speedup.store import NullStore, RamStore, choose, shared
from swift_speedup.store.disk import DiskStore
from swift_speedup.store.tiered import TieredStore

RANK = '''
import json, sys, time, torch
from pathlib import Path
from swift_speedup import SpeedupConfig
from swift_speedup.store import Entry, choose, shared
shared._base = lambda: Path(sys.argv[1])
rank = int(sys.argv[2])
store = choose.make_store(SpeedupConfig())
key = bytes(15) + bytes([rank])
store.put(key, Entry(torch.full((100,), float(rank))))
store.flush()
other, deadline = None, time.time() + 60
while other is None and time.time() < deadline:
    other = store.get(bytes(15) + bytes([1 - rank]))
print(json.dumps([type(store).__name__, str(store.folder), float(other.tensor[0])]), flush=True)
if len(sys.argv) > 3:
    time.sleep(600)
'''


def ranks(base, *more, port='1234'):
    variables = os.environ | {'LOCAL_WORLD_SIZE': '2', 'MASTER_PORT': port, 'PYTHONPATH': ':'.join(sys.path)}
    return [subprocess.Popen([sys.executable, '-c', RANK, str(base), str(rank), *more], env=variables, text=True,
                             stdout=subprocess.PIPE) for rank in range(2)]


def test_two_ranks_find_what_the_other_has_computed(tmp_path):
    (tmp_path / 'swift_speedup-0-foreign').mkdir()
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in ranks(tmp_path)]
    (kind, folder, first), (_, other, second) = answers
    assert kind == 'DiskStore' and folder == other and (first, second) == (1.0, 0.0)
    assert not os.path.exists(folder)


def test_what_killed_ranks_leave_is_removed_by_the_next_training(tmp_path):
    killed = ranks(tmp_path, 'stay')
    folder = json.loads(killed[0].stdout.readline())[1]
    alive = ranks(tmp_path, 'stay', port='99')
    other = json.loads(alive[0].stdout.readline())[1]
    assert other != folder and os.path.exists(folder) and os.path.exists(other)  # both are in use
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert os.path.exists(folder)
    finished = ranks(tmp_path, port='7')
    assert [process.wait(120) for process in finished] == [0, 0]
    assert not os.path.exists(folder) and os.path.exists(other)
    for process in alive:
        process.kill()
        process.wait()


@pytest.mark.parametrize(('options', 'size', 'kind'), [
    ({'cache': 'off'}, 1, NullStore), ({}, 1, RamStore), ({'cache': 'ram'}, 8, RamStore), ({'cache_dir': 'x'}, 8, DiskStore),
    ({'cache_dir': 'x', 'ram_gib': 1}, 1, TieredStore), ({'cache': 'disk', 'cache_dir': 'x'}, 1, DiskStore)])
def test_which_store(options, size, kind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', str(size))
    store = choose.make_store(SpeedupConfig(**options))
    assert type(store) is kind
    store.close()


def test_budgets(monkeypatch, tmp_path):
    monkeypatch.setattr(shared, '_base', lambda: tmp_path)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '4')
    monkeypatch.setattr(choose.psutil, 'virtual_memory', lambda: type('Memory', (), {'available': 1 << 33})())
    assert choose.make_store(SpeedupConfig(cache='ram')).budget == (1 << 33) // 16
    store = choose.make_store(SpeedupConfig(ram_gib=0.25))
    assert store.budget == 1 << 30  # of the node: a quarter for each of four
    store.close()
    store = choose.make_store(SpeedupConfig(cache_dir=tmp_path / 'x', disk_gib=0.5))
    assert store.budget == 1 << 29
    store.close()
