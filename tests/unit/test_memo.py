"""Splitting, keys, fingerprints, the store and the memo's behaviour under trouble."""
import inspect

import pytest
import torch
from torch import nn

from swift_speedup.memo.fingerprint import Fingerprint, _checksums
from swift_speedup.memo.key import NotKeyable, call_prefix, plain, sample_key
from swift_speedup.memo.memo import Memo
from swift_speedup.memo.split import Call, PackedGrid
from swift_speedup.segments.gate import Gate
from swift_speedup.stats import Stats
from swift_speedup.store import Entry, NullStore, RamStore
from swift_speedup.trees import UnknownStructure, carries_grad, flatten, rebuild


def tower(patches, grid_thw, scale=2.0):
    return {'features': patches * scale, 'pooled': [patches.view(-1, 2, patches.shape[-1]).sum(1)]}


SIGNATURE = inspect.signature(tower)
GRID = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])
PATCHES = torch.arange(16.0 * 3).view(16, 3)


class Purity(Gate):
    def __init__(self):
        super().__init__('tower', nn.Linear(1, 1))


def make_memo(store, **more):
    options = dict(fingerprint=Fingerprint(lambda: 'settings', lambda: [('w', torch.ones(1))]), purity=Purity(), dedup=True) | more
    return Memo('tower', SIGNATURE, store=store, stats=Stats(), **options)


def run(args, kwargs):
    return tower(*args, **kwargs)


def evaluate(memo, function=run, patches=PATCHES, grid=GRID, **more):
    return memo.evaluate(function, (patches,), {'grid_thw': grid, **more}, b'mode')


def assert_equal(found, wanted):
    assert torch.equal(found['features'], wanted['features']) and torch.equal(found['pooled'][0], wanted['pooled'][0])


def test_packed_grid_takes_calls_apart_and_together():
    batch = PackedGrid.of(Call(SIGNATURE, (PATCHES,), {'grid_thw': GRID, 'scale': 3.0}))
    assert batch.rows == (4, 8, 4) and batch.context == {'scale': 3.0}
    args, kwargs = batch.subset([2, 0])
    assert torch.equal(args[0], torch.cat([PATCHES[12:], PATCHES[:4]])) and kwargs['scale'] == 3.0
    assert [part.shape[0] for part in batch.split_leaf(torch.zeros(6, 5), [1, 2])] == [4, 2]


@pytest.mark.parametrize(('patches', 'grid', 'more', 'words'), [
    (PATCHES[:3], GRID, {}, 'rows'),
    (PATCHES, GRID.float(), {}, 'expected integers'),
    (PATCHES, GRID[:0], {}, 'rows'),
    (PATCHES, GRID, {'scale': torch.ones(3)}, 'other tensor arguments'),
    (PATCHES, [[1, 4, 4]], {}, 'no single grid'),
])
def test_a_call_of_another_form_is_bypassed_with_the_reason(patches, grid, more, words):
    memo = make_memo(RamStore(10_000))
    assert memo.evaluate(lambda args, kwargs: 'real', (patches,), {'grid_thw': grid, **more}, b'mode') == 'real'
    assert words in memo.bypass_reason and memo._stats.bypassed == 1


def test_an_output_that_does_not_follow_the_rows_is_never_reused():
    memo = make_memo(RamStore(10_000))
    for _ in range(2):
        assert evaluate(memo, lambda args, kwargs: args[0].sum().view(1, 1).expand(3, 1)).shape == (3, 1)
    assert memo._stats.hits == 0 and memo._stats.bypassed == 1


def test_samples_that_depend_on_their_batch_are_never_reused():
    memo = make_memo(RamStore(10_000))
    for _ in range(2):
        evaluate(memo, lambda args, kwargs: args[0] - args[0].mean(0))
    assert memo._stats.hits == 0 and 'alone' in memo._purity.refusal(b'mode')


def test_hits_misses_and_duplicates_give_what_the_tower_gives():
    memo, calls = make_memo(RamStore(10_000)), []

    def counting(args, kwargs):
        calls.append(args[0].shape[0])
        return run(args, kwargs)
    assert_equal(evaluate(memo, counting), tower(PATCHES, GRID))
    assert calls == [16, 4]  # the whole call, then one sample alone as a check
    assert memo._stats.saved_seconds == 0  # nothing was reused yet
    mixed = torch.cat([PATCHES[4:12], PATCHES[:4] + 1, PATCHES[:4] + 1, PATCHES[:4]])
    grid = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 2, 2], [1, 2, 2]])
    assert_equal(evaluate(memo, counting, mixed, grid), tower(mixed, grid))
    assert calls == [16, 4, 4]
    stats = memo._stats
    assert (stats.hits, stats.misses, stats.deduplicated, stats.stored_samples) == (2, 4, 1, 4)
    assert 0 < stats.saved_seconds and stats.hit_rate == 3 / 7


def test_a_poisoned_entry_shows_that_a_hit_is_really_served():
    store = RamStore(10_000)
    memo = make_memo(store)
    evaluate(memo)
    for entry in store._entries.values():
        entry.leaves[0].fill_(-1)
    assert bool((evaluate(memo)['features'] == -1).all())


@pytest.mark.parametrize('fails', ('get', 'put'))
def test_trouble_in_the_store_is_a_miss(fails):
    store = RamStore(10_000)
    memo = make_memo(store)
    evaluate(memo)

    def broken(*_):
        raise MemoryError('no room')
    setattr(store, fails, broken)
    assert_equal(evaluate(memo, patches=PATCHES + 1), tower(PATCHES + 1, GRID))
    assert memo._stats.errors == 1


def test_the_segments_own_error_passes_through():
    memo = make_memo(RamStore(10_000))

    def out_of_memory(args, kwargs):
        raise torch.OutOfMemoryError('theirs')
    with pytest.raises(torch.OutOfMemoryError, match='theirs'):
        evaluate(memo, out_of_memory)
    assert memo._stats.errors == 0


def test_a_check_that_fails_is_not_tried_again():
    memo, calls = make_memo(RamStore(10_000)), []

    def no_room_for_more(args, kwargs):
        calls.append(args[0].shape[0])
        if len(calls) == 2:
            raise torch.OutOfMemoryError('the extra run')
        return run(args, kwargs)
    for _ in range(3):
        assert_equal(evaluate(memo, no_room_for_more), tower(PATCHES, GRID))
    assert calls == [16, 4, 16, 16] and memo._stats.errors == 1 and 'the extra run' in memo.bypass_reason


def test_drawing_random_numbers_forbids_reuse_and_draws_as_often_as_without():
    memo = make_memo(RamStore(10_000))
    torch.manual_seed(0)
    wanted = [torch.rand(1), torch.rand(1), torch.rand(1)]
    torch.manual_seed(0)

    def noisy(args, kwargs):
        return {'features': args[0] + torch.rand(1), 'pooled': [args[0]]}
    for expected in wanted[:2]:
        assert torch.equal(evaluate(memo, noisy)['features'], PATCHES + expected)
    assert torch.equal(torch.rand(1), wanted[2]) and 'random numbers' in memo._purity.refusal(b'mode')


def test_the_check_leaves_random_state_alone():
    memo, state = make_memo(RamStore(10_000)), torch.get_rng_state()
    evaluate(memo)
    assert memo._stats.checks == 1 and torch.equal(torch.get_rng_state(), state)


def key(patches=PATCHES, fingerprint=b'f', context=None, mode=b'm', autocast=False):
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        return sample_key(call_prefix(fingerprint, 'PackedGrid', context or {}, mode, 'cpu'), {'patches': patches})


def test_a_key_holds_everything_the_value_depends_on():
    variants = [key(), key(PATCHES.double()), key(PATCHES.view(8, 6)), key(PATCHES + 1), key(fingerprint=b'g'), key(mode=b'n'),
                key(context={'a': 1}), key(context={'a': True}), key(context={'a': '1'}), key(context={'b': 1}), key(autocast=True)]
    assert len(set(variants)) == len(variants)
    assert key(PATCHES.clone()) == key() and key(PATCHES.t().contiguous().t()) == key()


def test_values_without_content_are_not_keyable():
    with pytest.raises(NotKeyable):
        plain(object())


@pytest.mark.parametrize('change', [
    lambda m: m.weight.data.add_(1), lambda m: m.weight.data.view(-1)[-1:].mul_(2), lambda m: nn.init.zeros_(m.bias),
    lambda m: m.load_state_dict(nn.Linear(4, 4).state_dict()), lambda m: setattr(m, 'bias', nn.Parameter(torch.rand(4)))])
def test_fingerprints_see_every_way_to_change_a_weight(change):
    module = nn.Linear(4, 4)
    fingerprint = Fingerprint(lambda: '', lambda: list(module.named_parameters()))
    before = fingerprint.current()
    assert fingerprint.current() == before
    change(module)
    assert fingerprint.current() != before


@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16, torch.int8))
@pytest.mark.parametrize('change', [
    lambda t: t[-1:].add_(1), lambda t: t[:1].add_(1), lambda t: t.copy_(t.flip(0)), lambda t: swap(t)])
def test_the_checksum_of_other_devices_sees_changes_and_exchanged_values(dtype, change):
    values = (torch.arange(1003) % 100).to(dtype)[1:]  # an odd offset, and a rest that does not fill a word or a row
    before = _checksums([('w', values)])
    assert torch.equal(_checksums([('w', values.clone())]), before)
    change(values)
    assert not torch.equal(_checksums([('w', values)]), before)


def swap(tensor):
    tensor[0], tensor[8] = tensor[8].clone(), tensor[0].clone()


def test_ram_store_keeps_to_its_budget_and_drops_the_oldest():
    def entry(value):
        return Entry(flatten(torch.ones(1))[0], (torch.full((25,), value),))  # 100 bytes
    store = RamStore(250)
    assert store.put(b'a', entry(1.0)) and store.put(b'b', entry(2.0))
    store.get(b'a')
    assert store.put(b'c', entry(3.0)) and store.put(b'c', entry(4.0))
    assert store.get(b'b') is None and store.get(b'a') is not None and store.get(b'c').leaves[0][0] == 4
    assert (len(store), store.nbytes, store.evicted) == (2, 200, 1)
    assert not store.put(b'd', Entry(flatten(torch.ones(1))[0], (torch.ones(100),)))
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)
    null = NullStore()
    assert not null.put(b'a', entry(1.0)) and null.get(b'a') is None


def test_entries_own_their_storage():
    store = RamStore(10_000)
    evaluate(make_memo(store))
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for entry in store._entries.values() for leaf in entry.leaves)


def test_trees_round_trip_and_refuse_what_they_do_not_know():
    from transformers.modeling_outputs import BaseModelOutputWithPooling
    value = BaseModelOutputWithPooling(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(1), torch.ones(1)))
    structure, leaves = flatten([value, {'n': 3}])
    again = rebuild(structure, leaves)
    assert type(again[0]) is type(value) and list(again[0].keys()) == list(value.keys()) and again[1] == {'n': 3}
    with pytest.raises(UnknownStructure):
        flatten(object())


def test_gradients_are_found_in_caches_and_missing_information_counts_as_one():
    from transformers import DynamicCache
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    assert not carries_grad({'past_key_values': cache, 'flag': True})
    cache.update(torch.ones(1, 1, 1, 1, requires_grad=True), torch.ones(1, 1, 1, 1), 0)
    assert carries_grad({'past_key_values': cache})
    assert carries_grad(iter([torch.ones(1)]))
