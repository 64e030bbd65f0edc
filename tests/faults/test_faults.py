"""Faults, each for real: whatever happens to the folder, training goes on as without a cache, and the folder is sound afterwards."""
import os
import random
import subprocess
import threading
import time
from pathlib import Path

import lmdb
import pytest
from faults.rig import Training, content, forked, key, sound

from swift_speedup.store import Entry, codec, environment
from swift_speedup.store.disk import DiskStore
from swift_speedup.store.environment import DATA, LOCK, Unusable


@pytest.fixture(scope='module')
def training():
    return Training()


@pytest.fixture
def filled(training, tmp_path):
    """A folder that a training has filled."""
    assert training.run(tmp_path / 'cache').misses == 6
    return tmp_path / 'cache'


@pytest.mark.parametrize('share', [0.0, 0.0001, 0.1, 0.5, 0.9, 0.999])
def test_a_data_file_that_lost_its_end(training, filled, share):
    path = filled / DATA
    size = path.stat().st_size
    os.truncate(path, int(size * share))
    stats = training.run(filled)
    assert stats.misses == 6 and training.run(filled).misses == 0
    assert (filled / f'{DATA}.broken').exists() == (share > 0)


@pytest.mark.parametrize('kind', ['data', 'header'])
def test_flipped_bytes(training, filled, kind):
    path = filled / DATA
    contents = bytearray(path.read_bytes())
    starts = [place for place in range(0, len(contents), 2) if contents.startswith(b'SWSP', place)]
    assert starts
    for start in starts:  # old pages may hold copies
        contents[start + (5 if kind == 'header' else 200)] ^= 4
    path.write_bytes(contents)
    stats = training.run(filled)
    assert stats.store_errors > 0 and stats.misses > 0
    assert training.run(filled).misses == 0
    store = DiskStore(filled)
    assert store.check() == []
    store.close()


@pytest.mark.parametrize('contents', [b'', b'x', b'my thesis, do not lose it\n' * 1000, bytes(100), bytes(50_000)])
def test_a_data_file_that_is_none_of_ours(training, tmp_path, contents):
    (tmp_path / DATA).write_bytes(contents)
    (tmp_path / 'other.txt').write_text('mine')
    training.run(tmp_path)
    assert (tmp_path / 'other.txt').read_text() == 'mine'
    remains = [path.read_bytes() for path in tmp_path.glob(f'{DATA}*')]
    assert not contents or contents in remains  # nothing that may be somebody's is lost


def test_a_database_that_is_none_of_ours(training, tmp_path):
    env = lmdb.open(str(tmp_path), max_dbs=3)
    with env.begin(write=True) as txn:
        txn.put(b'precious', b'1', db=env.open_db(b'entries', txn))
    env.close()
    training.run(tmp_path)
    with pytest.raises(Unusable, match='another folder'):
        DiskStore(tmp_path)
    env = lmdb.open(str(tmp_path), max_dbs=3)
    with env.begin() as txn:
        assert txn.stat()['entries'] == 1
    env.close()


def test_a_folder_that_is_a_file(training, tmp_path):
    (tmp_path / 'file').write_text('mine')
    training.run(tmp_path / 'file')
    assert (tmp_path / 'file').read_text() == 'mine'


NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason='only root can become another user')


def opened_to_others(path):
    for place in (path, *path.parents):
        if place.stat().st_uid == os.getuid() and place != Path('/'):
            place.chmod(place.stat().st_mode | 0o055)


@needs_root
def test_a_folder_that_cannot_be_read(training, filled):
    opened_to_others(filled)
    filled.chmod(0o700)

    def work():
        assert training.run(filled).misses == 6
    assert forked(work, user=NOBODY) == 0


@needs_root
@pytest.mark.parametrize('lock', [True, False])
def test_a_folder_that_can_only_be_read(training, filled, lock):
    opened_to_others(filled)
    if not lock:
        (filled / LOCK).unlink()
    before = (filled / DATA).read_bytes()

    def work():
        stats = training.run(filled)
        assert stats.misses == 0 < stats.hits
        store = DiskStore(filled)
        assert not store.keeps and not store.put(key(1), Entry(content(1)))
        store.close()
    assert forked(work, user=NOBODY) == 0
    assert (filled / DATA).read_bytes() == before


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / 'small'
    folder.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip('no right to mount a file system')
    yield folder
    subprocess.run(['umount', '-l', str(folder)], check=True)


def fill(folder, **options):
    store = DiskStore(folder, **options)
    for number in range(2000):
        store.put(key(number), Entry(content(number)))
        if number % 20 == 0:
            store.flush()
    store.flush()
    return store


@pytest.mark.parametrize('budget', [None, 100_000_000])
def test_a_disk_that_is_full(small_disk, training, budget, caplog):
    store = fill(small_disk / 'cache', budget=budget)
    found = [number for number in range(2000) if store.get(key(number)) is not None]
    assert len(found) > 20
    assert not store.keeps
    assert sum('nothing more is kept' in record.message for record in caplog.records) <= 1
    store.close()
    (small_disk / 'rest').write_bytes(b'')
    training.run(small_disk / 'other')
    check_only(small_disk / 'cache')


def check_only(folder):
    store = DiskStore(folder, writable=False)
    assert store.check() == []
    store.close()


def test_a_file_that_may_not_grow(training, tmp_path):
    """A quota, or a limit of the process: as a full disk, where no file system can be mounted."""
    import resource

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        store = fill(tmp_path / 'cache', budget=100_000_000)
        assert not store.keeps and sum(store.contains(key(number)) for number in range(2000)) > 20
        store.close()
        training.run(tmp_path / 'other')
    assert forked(work) == 0
    sound(tmp_path / 'cache')


def test_two_trainings_and_one_that_prunes(training, tmp_path):
    folder, until = tmp_path / 'cache', time.time() + 6

    def trainer():
        while time.time() < until:
            training.run(folder, exact=False)

    def pruner():
        chance = random.Random(1)
        store = DiskStore(folder)
        while time.time() < until:
            if chance.random() < 0.2:
                store.clear()
            else:
                store.evict(chance.randrange(1, 20_000))
            time.sleep(chance.uniform(0, 0.05))
        store.close()
    children = []
    for work in (trainer, trainer, pruner):
        thread = threading.Thread(target=lambda work=work: children.append(forked(work)))
        thread.start()
        thread.join(0.2)
    deadline = time.time() + 60
    while len(children) < 3 and time.time() < deadline:
        time.sleep(0.1)
    assert children == [0, 0, 0]
    training.run(folder, exact=False)
    assert training.run(folder, exact=False).misses == 0
    store = DiskStore(folder)
    assert store.check() == []
    store.close()


def test_entries_of_another_format_are_not_read(training, tmp_path, monkeypatch):
    monkeypatch.setattr(codec, 'FORMAT', codec.FORMAT + 1)
    assert training.run(tmp_path).misses == 6
    monkeypatch.undo()
    stats = training.run(tmp_path)
    assert stats.misses == 6 and stats.store_errors > 0 and training.run(tmp_path).misses == 0


def test_a_folder_of_another_layout_is_left_alone(training, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, 'LAYOUT', b'swift_speedup 0')
    training.run(tmp_path)
    monkeypatch.undo()
    before = (tmp_path / DATA).read_bytes()
    assert training.run(tmp_path).misses == 6
    assert (tmp_path / DATA).read_bytes() == before


def test_an_entry_evicted_between_two_looks(training, filled, monkeypatch):
    """Another process prunes whenever an entry was just seen."""
    contains, gone = DiskStore.get, []

    def get(self, name):
        if not gone:
            gone.append(name)
            forked(lambda: DiskStore(filled).remove([name]))
        return contains(self, name)
    monkeypatch.setattr(DiskStore, 'get', get)
    stats = training.run(filled, exact=False)
    assert gone and stats.misses == 1
