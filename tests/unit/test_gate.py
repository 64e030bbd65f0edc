"""Rule 4: what may not be cached, and the reason that is given."""
import copy

import pytest
import torch
from torch import nn

from swift_speedup import MyModel


class Tower(nn.Module):
    """Packed patches in, one row per patch out, through ``middle``."""

    def __init__(self, middle):
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.middle = middle

    def forward(self, patches, grid_thw):
        return self.middle(self.proj(patches))


class Noise(nn.Module):
    def forward(self, hidden):
        return hidden + torch.rand(())


class DropPath(nn.Module):
    drop_prob = 0.1

    def forward(self, hidden):
        return hidden


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('calls', torch.zeros(()))

    def forward(self, hidden):
        self.calls += 1
        return hidden


class Mixing(nn.Module):
    def forward(self, hidden):
        return hidden - hidden.mean(0)


def attached(middle):
    torch.manual_seed(0)
    return MyModel(nn.Sequential(Tower(middle).requires_grad_(False)))


def call(model, seed=0):
    pixels = torch.rand(12, 6, generator=torch.Generator().manual_seed(seed))
    output = model[0](pixels, grid_thw=torch.tensor([[1, 2, 2], [1, 2, 4]]))
    output.sum()  # what nobody uses is neither computed nor looked up
    return output


@pytest.mark.parametrize(('middle', 'words'), [
    (nn.Dropout(0.1), 'dropout p=0.1 is active at 0.middle'), (DropPath(), 'drop path p=0.1'), (nn.BatchNorm1d(6), 'batch statistics'),
    (Noise(), 'random numbers'), (Counting(), 'writes its buffers')])
def test_impure_segments_are_computed_every_time_and_say_why(middle, words):
    model = attached(middle).train()
    for _ in range(3):
        assert not call(model).requires_grad  # the graph is skipped all the same
    assert model.speedup.stats.hits == 0
    segment = model.speedup.plan.segments[0]
    assert ('eval=true' in segment.reason) == isinstance(middle, (nn.Dropout, DropPath, nn.BatchNorm1d))
    assert segment.graph_skipped and not segment.cached and words in segment.reason


@pytest.mark.parametrize('middle', [nn.Dropout(0.1), nn.BatchNorm1d(6), DropPath()])
def test_the_same_segment_is_cached_in_eval_mode_only(middle):
    model = attached(middle).train()
    call(model.eval()), call(model)
    assert model.speedup.stats.hits == 2
    call(model.train())
    assert model.speedup.stats.hits == 2


@pytest.mark.parametrize('middle', [nn.Dropout(0.5), nn.BatchNorm1d(6), DropPath()])
@pytest.mark.parametrize('cache', ('ram', 'off'))
def test_eval_runs_frozen_segments_in_eval_mode_and_leaves_every_flag_as_it_was(middle, cache, caplog):
    torch.manual_seed(0)
    tower = Tower(middle).requires_grad_(False)
    plain = copy.deepcopy(tower).eval()
    with caplog.at_level('WARNING', logger='swift_speedup'):
        model = MyModel(nn.Sequential(tower), cache=cache, dedup=False, eval=True).train()
    assert 'changes training' in caplog.text
    tower.proj.eval()
    pixels, grid = torch.rand(12, 6), torch.tensor([[1, 2, 2], [1, 2, 4]])
    for _ in range(2):
        assert torch.equal(model[0](pixels, grid_thw=grid), plain(pixels, grid_thw=grid))
    assert [part.training for part in model.modules()] == [True, True, False, True]
    assert model.speedup.stats.hits == (2 if cache == 'ram' else 0)
    assert model.speedup.plan.segments[0].reason == (None if cache == 'ram' else 'cache=off')
    tower.requires_grad_(True)  # a trained tower is left in its mode
    if isinstance(middle, nn.Dropout):
        assert not torch.equal(model[0](pixels, grid_thw=grid), plain(pixels, grid_thw=grid))


def test_samples_that_depend_on_their_batch_are_reused_with_it_only():
    model = attached(Mixing())
    for seed in (0, 0, 0, 1, 0):
        call(model, seed)
    assert model.speedup.stats.hits == 2
    remark, kept = [remark for remark in model.speedup.plan.remarks if remark.startswith('0: ')]
    assert kept.startswith('0: output 0 is kept, ') and kept.endswith(' KiB per sample')
    assert 'only whole calls that repeat are reused' in remark and 'differs from its rows in the batch' in remark


def test_counting_towers_count_as_without_the_plugin():
    model = attached(Counting())
    for _ in range(3):
        call(model)
    assert model[0].middle.calls == 3


@pytest.mark.parametrize('place', ('parameter', 'buffer'))
def test_weights_on_the_meta_device_are_never_fingerprinted(place):
    model = attached(Noise())
    if place == 'parameter':
        model[0].proj.bias = nn.Parameter(torch.empty(6, device='meta'), requires_grad=False)
    else:
        model[0].register_buffer('table', torch.empty(2, device='meta'))
    assert 'meta device' in model.speedup.plan.segments[0].reason


def test_cache_off_keeps_nothing_and_says_so():
    model = MyModel(nn.Sequential(Tower(nn.Tanh()).requires_grad_(False)), cache='off', dedup=False)
    for _ in range(2):
        call(model)
    assert model.speedup.stats.hits == 0 and model.speedup.plan.segments[0].reason == 'cache=off'


def test_a_tower_inside_a_larger_frozen_part_is_reused_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(Tower(nn.Tanh()))
            self.head = nn.Linear(6, 2)
            self.body.forward = lambda pixels, grid: self.body[0](pixels, grid_thw=grid)

        def forward(self, pixels, grid):
            return self.head(self.body(pixels, grid))

    model = Model()
    model.body.requires_grad_(False)
    MyModel(model)
    for _ in range(2):
        model(torch.ones(4, 6), torch.tensor([[1, 2, 2]])).sum().backward()
    assert model.speedup.stats.hits == 1 and model.head.weight.grad is not None
    assert model.speedup.plan.frozen_modules == ('body',)
