"""What every store must do, whatever it is made of."""
import os
import threading

import pytest
import torch

from swift_speedup.store import Entry, NullStore, RamStore
from swift_speedup.store.disk import DiskStore
from swift_speedup.store.tiered import TieredStore

BUDGET = 200_000
ORIGIN = bytes(range(16))
KINDS = {
    'ram': lambda folder, budget: RamStore(budget),
    'disk': lambda folder, budget: DiskStore(folder, budget),
    'tiered': lambda folder, budget: TieredStore(RamStore(budget // 8), DiskStore(folder, budget)),
    'null': lambda folder, budget: NullStore(),
}
KEEPING = [kind for kind in KINDS if kind != 'null']
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.uint8, torch.bool,
          torch.complex64]


def key(number):
    return number.to_bytes(16, 'big')


def entry(number, size=100):
    return Entry(torch.full((size,), float(number)), ORIGIN)


@pytest.fixture
def make(tmp_path):
    stores = []

    def make(kind, budget=BUDGET):
        stores.append(KINDS[kind](tmp_path / 'cache', budget))
        return stores[-1]
    yield make
    for store in stores:
        store.close()


@pytest.mark.parametrize('flushed', [False, True])
@pytest.mark.parametrize('kind', KEEPING)
def test_what_was_put_is_found(make, kind, flushed):
    store = make(kind)
    tensors = {key(number): Entry(_some(dtype, shape), ORIGIN)
               for number, (dtype, shape) in enumerate((dtype, shape) for dtype in DTYPES for shape in [(), (0, 3), (3, 5), (2, 1, 4)])}
    assert all(store.put(name, put) for name, put in tensors.items())
    assert not flushed or store.flush()
    for name, put in tensors.items():
        found = store.get(name)
        assert found.tensor.dtype == put.tensor.dtype and found.tensor.shape == put.tensor.shape and found.origin == ORIGIN
        assert found.tensor.reshape(-1).view(torch.uint8).equal(put.tensor.reshape(-1).view(torch.uint8))
        assert store.contains(name)
    assert len(store) == len(tensors) and store.check() == [] and store.errors == 0


def _some(dtype, shape):
    count = 1
    for size in shape:
        count *= size
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int16).remainder(2 if dtype == torch.bool else 120).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize('kind', KINDS)
def test_what_was_not_put_is_not_found(make, kind):
    store = make(kind)
    store.put(key(1), entry(1))
    assert store.get(key(2)) is None and not store.contains(key(2)) and store.get_note(key(1)) is None


@pytest.mark.parametrize('kind', KEEPING)
def test_what_is_found_is_memory_of_its_own(make, kind):
    store = make(kind)
    whole = torch.arange(10_000.0)
    store.put(key(1), Entry(whole[:10].clone()))
    store.flush()
    found = store.get(key(1)).tensor
    assert found.untyped_storage().nbytes() == found.nbytes == 40


@pytest.mark.parametrize('kind', KEEPING)
def test_the_budget_holds_and_the_oldest_go_first(make, kind):
    store = make(kind, budget=50_000)
    for number in range(400):
        store.put(key(number), entry(number))
        if number % 20 == 0:
            store.get(key(0))
            store.flush()
    store.flush()
    assert 0 < store.nbytes <= 50_000 and store.evicted > 0
    assert store.contains(key(399)) and not store.contains(key(1)) and store.contains(key(0))
    assert store.check() == []


@pytest.mark.parametrize('kind', KEEPING)
def test_an_entry_larger_than_the_budget_is_not_kept(make, kind):
    store = make(kind, budget=10_000)
    store.put(key(1), entry(1))
    store.put(key(2), entry(2, size=100_000))
    store.flush()
    assert store.get(key(2)) is None
    assert store.nbytes <= 10_000


@pytest.mark.parametrize('kind', KEEPING)
def test_evict_frees_what_was_asked_for(make, kind):
    store = make(kind)
    for number in range(100):
        store.put(key(number), entry(number))
    store.flush()
    before = store.nbytes
    freed = store.evict(before // 2)
    assert before // 2 <= freed < before and store.nbytes == before - freed
    assert store.contains(key(99)) and not store.contains(key(0))


@pytest.mark.parametrize('kind', KEEPING)
def test_notes(make, kind):
    store = make(kind)
    store.put_note(key(1), b'one')
    store.put_note(key(1), b'two')
    assert store.get_note(key(1)) == b'two'
    store.flush()
    assert store.get_note(key(1)) == b'two' and len(store) == 0


@pytest.mark.parametrize('kind', KINDS)
def test_clear(make, kind):
    store = make(kind)
    store.put(key(1), entry(1))
    store.flush()
    store.put(key(2), entry(2))
    store.put_note(key(3), b'note')
    store.clear()
    assert len(store) == store.nbytes == 0
    assert store.get(key(1)) is None and store.get(key(2)) is None and store.get_note(key(3)) is None
    assert store.put(key(1), entry(1)) == store.keeps


@pytest.mark.parametrize('kind', KINDS)
def test_a_closed_store_finds_nothing_and_raises_nothing(make, kind):
    store = make(kind)
    store.put(key(1), entry(1))
    store.close()
    store.close()
    assert store.get(key(1)) is None and not store.contains(key(1)) and store.get_note(key(1)) is None
    store.put_note(key(1), b'')
    store.clear()
    assert len(store) == store.nbytes == 0


@pytest.mark.parametrize('kind', KEEPING)
def test_many_threads(make, kind):
    store, wrong = make(kind, budget=100_000), []

    def work(seed):
        for step in range(300):
            number = (step * 7 + seed * 13) % 150
            found = store.get(key(number))
            if found is None:
                store.put(key(number), entry(number))
            elif not found.tensor.equal(entry(number).tensor):
                wrong.append(number)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.flush()
    assert not wrong and store.check() == [] and store.nbytes <= 100_000


@pytest.mark.parametrize('kind', ['disk', 'tiered'])
def test_entries_and_notes_stay(make, kind):
    store = make(kind)
    for number in range(10):
        store.put(key(number), entry(number))
    store.put_note(key(77), b'note')
    store.close()
    again = make(kind)
    assert len(again) == 10 and again.get_note(key(77)) == b'note'
    assert all(again.get(key(number)).tensor.equal(entry(number).tensor) for number in range(10))


@pytest.mark.parametrize('kind', KEEPING)
def test_a_forked_child_can_use_it(make, kind):
    store = make(kind)
    store.put(key(1), entry(1))
    child = os.fork()
    if not child:
        fine = False
        try:
            found = store.get(key(1))
            fine = (found is not None or kind == 'disk') and store.put(key(2), entry(2)) and store.flush()
        finally:
            os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    store.flush()
    assert store.get(key(1)).tensor.equal(entry(1).tensor)
    assert store.contains(key(2)) == (kind != 'ram') and store.check() == []
