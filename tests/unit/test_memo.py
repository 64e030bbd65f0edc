"""Keys, fingerprints, deferred tensors, the RAM store and the memo's behaviour under trouble."""
import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from swift_speedup.memo.chain import Step
from swift_speedup.memo.deferred import Deferred, settled
from swift_speedup.memo.fingerprint import Fingerprint, _checksums
from swift_speedup.memo.key import NotKeyable, call_prefix, content, plain, sample_key
from swift_speedup.memo.memo import Memo
from swift_speedup.segments.gate import Gate
from swift_speedup.stats import Stats
from swift_speedup.store import Entry, NullStore, RamStore
from swift_speedup.trees import UnknownStructure, carries_grad, flatten, rebuild


def tower(patches, grid_thw, scale=2.0):
    return {'features': patches * scale, 'pooled': [patches.view(-1, 2, patches.shape[-1]).sum(1)]}


GRID = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])
PATCHES = torch.arange(16.0 * 3).view(16, 3)


class Purity(Gate):
    def __init__(self):
        super().__init__('tower', nn.Linear(1, 1))


class Rig:
    """A memo with one step; ``evaluate`` uses every output, as a model would."""

    def __init__(self, store=None, function=tower, kind='media', **more):
        self.store = RamStore(10_000) if store is None else store
        self.stats, self.purity, self.calls = Stats(), Purity(), []
        self.memo = Memo(self.store, self.stats, dedup=True)
        fingerprint = Fingerprint(lambda: 'settings', lambda: [('w', torch.ones(1))])
        self.step = Step('tower', inspect.signature(function), fingerprint, self.purity, kind, **more)
        self.function = function

    def run(self, args, kwargs):
        self.calls.append(args[0].shape[0])
        return self.function(*args, **kwargs)

    def evaluate(self, *args, run=None, **kwargs):
        return settled(self.memo.evaluate(self.step, run or self.run, args, kwargs, b'mode'))

    def packed(self, patches=PATCHES, grid=GRID, run=None, **more):
        return self.evaluate(patches, run=run, grid_thw=grid, **more)


def assert_equal(found, wanted):
    assert torch.equal(found['features'], wanted['features']) and torch.equal(found['pooled'][0], wanted['pooled'][0])


def test_hits_misses_and_duplicates_give_what_the_tower_gives():
    rig = Rig()
    assert_equal(rig.packed(), tower(PATCHES, GRID))
    assert rig.calls == [16, 4]  # the whole call, then one sample alone as a check of both outputs
    assert rig.stats.saved_seconds == 0  # nothing was reused yet
    mixed = torch.cat([PATCHES[4:12], PATCHES[:4] + 1, PATCHES[:4] + 1, PATCHES[:4]])
    grid = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 2, 2], [1, 2, 2]])
    assert_equal(rig.packed(mixed, grid), tower(mixed, grid))
    assert rig.calls == [16, 4, 4]
    stats = rig.stats
    assert (stats.hits, stats.misses, stats.deduplicated, stats.stored_samples) == (2, 4, 1, 8)  # two outputs of each
    assert 0 < stats.saved_seconds and stats.hit_rate == 3 / 7


@pytest.mark.parametrize('convention', ['packed patches', 'batch first', 'tokens'])
def test_a_first_batch_of_one_sample_many_times(convention):
    """Completions of one image: it is proved with another sample beside it, and computed once from then on."""
    def layers(pixels, **more):
        return pixels * 2

    kind, shape, more = {
        'packed patches': ('media', (4, 3), {'grid_thw': torch.tensor([[1, 2, 2]] * 5)}),
        'batch first': ('media', (1, 3, 4, 4), {}), 'tokens': ('tokens', (1, 6, 4), {})}[convention]
    rig = Rig(function=layers, kind=kind, causal=True)
    batches = [torch.rand(shape).repeat(5, *[1] * (len(shape) - 1)) for _ in range(2)]
    for batch in (*batches, *batches):
        assert torch.equal(rig.evaluate(batch, **more), batch * 2)
    assert not rig.step.whole and (rig.stats.hits, rig.stats.deduplicated, rig.stats.errors) == (10, 4, 0)
    assert rig.calls == [size * batches[0].shape[0] // 5 for size in (5, 2, 1)]


def test_what_nobody_uses_is_neither_computed_nor_kept():
    rig = Rig()
    for patches in (PATCHES, PATCHES, PATCHES + 1):
        output = rig.memo.evaluate(rig.step, rig.run, (patches,), {'grid_thw': GRID}, b'mode')
        assert output['features'].shape == (16, 3) and output['features'].dtype is torch.float32
        assert torch.equal(output['pooled'][0], tower(patches, GRID)['pooled'][0])
    assert rig.stats.stored_samples == 6 and rig.calls == [16, 4, 16]
    assert torch.equal(output['features'], PATCHES * 2 + 2)  # used late: not there, so computed
    rig.memo.evaluate(rig.step, rig.run, (PATCHES + 2,), {'grid_thw': GRID}, b'mode')
    assert rig.calls[-1] == 4 and rig.stats.errors == 0


def test_rows_and_columns_may_move_before_the_value_is_needed():
    def layers(pixels):
        return {'hidden': (pixels.flatten(2).transpose(1, 2), pixels.flatten(2).transpose(1, 2) * 2)}

    def selected(output):
        hidden = output['hidden'][-1][:, 1:].contiguous()
        return hidden.reshape(hidden.shape[0], 2, -1).permute(0, 2, 1).to(torch.float64)
    rig, pixels = Rig(function=layers), torch.rand(3, 4, 3, 3)
    for batch in (pixels, pixels.flip(0), torch.cat([pixels[1:], pixels[:1] + 1])):
        found = selected(rig.memo.evaluate(rig.step, rig.run, (batch,), {}, b'mode'))
        assert isinstance(found, Deferred) and found.shape == (3, 16, 2)
        assert torch.equal(found + 0, selected(layers(batch)))
    assert rig.calls == [3, 1, 1] and rig.stats.hits == 5 and rig.stats.stored_samples == 4
    assert all(entry.tensor.shape == (1, 16, 2) for entry in rig.store._entries.values())


@pytest.mark.parametrize('use', [
    lambda x: x.sum(0), lambda x: x + 1, lambda x: torch.cat([x, x]), lambda x: x[1:], lambda x: x[x > 3], lambda x: x.transpose(0, 1),
    lambda x: x.reshape(-1), lambda x: x.view(2, -1), lambda x: x[None], lambda x: x.unsqueeze(0), lambda x: x.tolist(),
    lambda x: x.numpy(), lambda x: copy.deepcopy(x), lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.clone().mul_(2),
    lambda x: x.detach().requires_grad_(), lambda x: x.expand(2, *x.shape), lambda x: x.split(4), lambda x: nn.functional.linear(x, x),
    lambda x: x.double(), lambda x: x[..., 1], lambda x: x[:, :2], lambda x: x[:, None], lambda x: x[:, [0, 2]],
    lambda x: x[0], lambda x: x[..., :2, 0], lambda x: x.to('meta').shape, lambda x: x.flatten(0), lambda x: x.view(torch.int32),
    lambda x: x.squeeze(), lambda x: x.permute(1, 0), lambda x: _Double.apply(x.detach().requires_grad_())])
def test_every_use_gives_what_it_gives_on_the_real_tensor(use):
    rig = Rig()
    rig.packed()
    output = rig.memo.evaluate(rig.step, rig.run, (PATCHES,), {'grid_thw': GRID}, b'mode')['features']
    found, wanted = use(output), use(tower(PATCHES, GRID)['features'])
    assert found.requires_grad == wanted.requires_grad if isinstance(wanted, torch.Tensor) else True
    found, wanted = ([value.tolist() if isinstance(value, torch.Tensor) else value for value in values] if isinstance(values, tuple)
                     else values.tolist() if hasattr(values, 'tolist') else values for values in (found, wanted))
    assert found == wanted


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_change_in_place_is_seen_by_later_uses_and_not_by_the_store():
    rig = Rig()
    for _ in range(3):
        output = rig.memo.evaluate(rig.step, rig.run, (PATCHES,), {'grid_thw': GRID}, b'mode')['features']
        assert torch.equal(output, PATCHES * 2)
        output[:, 1:].zero_()
        assert output[:, 1:].sum() == 0 and output[:, 0].sum() > 0


def aligner(features, scale=1.0):
    return features[:, :2] * scale


def test_frozen_calls_that_follow_are_looked_up_as_one():
    rig = Rig()
    calls = []
    fingerprint = Fingerprint(lambda: '', lambda: [('w', torch.ones(1))])
    follower = Step('aligner', inspect.signature(aligner), fingerprint, Purity(), 'follower')

    def project(args, kwargs):
        calls.append(args[0].shape[0])
        return aligner(*args, **kwargs)

    def whole(patches, scale=1.0):
        features = rig.memo.evaluate(rig.step, rig.run, (patches,), {'grid_thw': GRID}, b'mode')['features']
        answer = rig.memo.evaluate(follower, project, (features,), {'scale': scale}, b'mode')
        assert torch.equal(answer + 0, aligner(patches * 2, scale))
    whole(PATCHES), whole(PATCHES), whole(torch.cat([PATCHES[:12], PATCHES[12:] + 1]))
    assert calls == [16, 4, 4] and rig.calls == [16, 4, 4] and (rig.stats.hits, rig.stats.misses) == (5, 4)
    assert all(entry.tensor.shape[1] == 2 for entry in rig.store._entries.values())  # only what comes out at the end is kept
    whole(PATCHES, 3.0)
    assert rig.stats.hits == 5


@pytest.mark.parametrize('mixing', (True, False))
def test_outputs_that_cannot_be_taken_apart_are_reused_for_equal_calls_only(mixing):
    def pooled(patches, grid_thw):
        return patches - patches.mean(0) if mixing else patches.sum().view(1, 1).expand(3, 1)
    rig = Rig(function=pooled)
    for patches in (PATCHES, PATCHES, PATCHES + 1, PATCHES):
        assert torch.equal(rig.packed(patches), pooled(patches, GRID))
    assert rig.step.whole and rig.stats.hits == 1 and rig.step.note


def test_weights_that_change_with_every_call_give_no_hit():
    rig = Rig(function=lambda patches, grid_thw: patches * len(rig.calls))
    for _ in range(4):
        assert torch.equal(rig.packed(), PATCHES * len(rig.calls)) or rig.stats.checks
    assert rig.stats.hits == 0 and 'alone' in rig.purity.refusal(b'mode')


def test_a_poisoned_entry_shows_that_a_hit_is_really_served():
    rig = Rig()
    rig.packed()
    for entry in rig.store._entries.values():
        entry.tensor.fill_(-1)
    assert bool((rig.packed()['features'] == -1).all())


@pytest.mark.parametrize('fails', ('get', 'put'))
def test_trouble_in_the_store_is_a_miss(fails):
    rig = Rig()
    rig.packed()

    def broken(*_):
        raise MemoryError('no room')
    setattr(rig.store, fails, broken)
    assert_equal(rig.packed(PATCHES + 1), tower(PATCHES + 1, GRID))
    assert rig.stats.errors > 0


@pytest.mark.parametrize('known', (False, True))
def test_the_segments_own_error_passes_through(known):
    rig = Rig()
    if known:
        rig.packed()

    def out_of_memory(args, kwargs):
        raise torch.OutOfMemoryError('theirs')
    with pytest.raises(torch.OutOfMemoryError, match='theirs'):
        rig.packed(PATCHES + 1, run=out_of_memory)
    assert rig.stats.errors == 0


def test_a_check_that_fails_is_not_tried_again():
    rig = Rig()

    def no_room_for_more(args, kwargs):
        rig.calls.append(args[0].shape[0])
        if len(rig.calls) == 2:
            raise torch.OutOfMemoryError('the extra run')
        return tower(*args, **kwargs)
    for _ in range(3):
        rig.packed(run=no_room_for_more)
    assert rig.stats.errors == 1 and 4 not in rig.calls[2:]


def test_drawing_random_numbers_forbids_reuse_and_draws_as_often_as_without():
    rig = Rig(function=lambda patches, grid_thw: patches + torch.rand(1))
    torch.manual_seed(0)
    wanted = [torch.rand(1), torch.rand(1), torch.rand(1)]
    torch.manual_seed(0)
    for expected in wanted[:2]:
        assert torch.equal(rig.packed(), PATCHES + expected)
    assert torch.equal(torch.rand(1), wanted[2]) and 'random numbers' in rig.purity.refusal(b'mode')


def test_the_check_leaves_random_state_alone():
    rig, state = Rig(), torch.get_rng_state()
    rig.packed()
    assert rig.stats.checks == 1 and torch.equal(torch.get_rng_state(), state)


def test_a_step_that_writes_into_its_arguments_is_not_reused():
    rig = Rig(function=lambda patches, grid_thw: patches.mul_(2))
    for _ in range(2):
        rig.packed(PATCHES.clone())
    assert rig.stats.hits == 0 and 'writes into its arguments' in rig.purity.refusal(b'mode')


@pytest.mark.parametrize('value', [object(), {}, [], iter([1])])
def test_arguments_without_content_are_computed_and_named(value):
    rig = Rig()
    rig.packed(scale=1.0)
    rig.memo.evaluate(rig.step, lambda args, kwargs: 'real', (PATCHES,), {'grid_thw': GRID, 'scale': value}, b'mode')
    assert rig.stats.bypassed == 1 and rig.step.refused


def key(patches=PATCHES, fingerprint=b'f', context='', mode=b'm', autocast=False, name='patches'):
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        return sample_key(call_prefix(fingerprint, 'packed patches', context, mode, 'cpu'), {name: content(patches)})


def test_a_key_holds_everything_the_value_depends_on():
    variants = [key(), key(PATCHES.double()), key(PATCHES.view(8, 6)), key(PATCHES + 1), key(fingerprint=b'g'), key(mode=b'n'),
                key(context='a=1'), key(autocast=True), key(name='other')]
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
    def entry(value, size=25):
        return Entry(torch.full((size,), value))  # 100 bytes
    store = RamStore(250)
    assert store.put(b'a', entry(1.0)) and store.put(b'b', entry(2.0))
    store.get(b'a')
    assert store.put(b'c', entry(3.0)) and store.put(b'c', entry(4.0))
    assert store.get(b'b') is None and store.get(b'a') is not None and store.get(b'c').tensor[0] == 4
    assert (len(store), store.nbytes, store.evicted) == (2, 200, 1)
    assert not store.put(b'd', entry(1.0, 100))
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)
    null = NullStore()
    assert not null.put(b'a', entry(1.0)) and null.get(b'a') is None


def test_entries_own_their_storage():
    rig = Rig()
    rig.packed()
    assert len(rig.store._entries) == 6
    assert all(entry.tensor.untyped_storage().nbytes() == entry.nbytes for entry in rig.store._entries.values())


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
