"""Towers that are entered by another method than forward, in the layouts of known remote code."""
import inspect

import pytest
import torch
from parity.harness import assert_same, train, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from swift_speedup import MyModel


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, hidden):
        return self.proj(hidden).tanh()


class Tower(nn.Module):
    """Entered by ``method``; checkpoints its stages by hand, as DaViT does."""

    def __init__(self):
        super().__init__()
        self.enable_checkpoint = True
        self.stages = nn.ModuleList(Stage() for _ in range(3))

    def _run(self, pixels):
        hidden = pixels.requires_grad_() if self.enable_checkpoint else pixels  # what input-grad hooks amount to
        for stage in self.stages:
            hidden = checkpoint(stage, hidden, use_reentrant=True) if self.enable_checkpoint else stage(hidden)
        return hidden

    def forward(self, pixel_values):
        raise AssertionError('never called')


def tower_entered_by(method):
    return type('Tower', (Tower,), {method: lambda self, pixels: self._run(pixels)})()


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Stage() for _ in range(2))

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Florence(nn.Module):
    """The remote-code layout: the image is encoded in a pre-forward hook through a method of the top model."""

    def __init__(self, method):
        super().__init__()
        self.method = method
        self.vision_tower, self.image_projection, self.language_model = tower_entered_by(method), nn.Linear(4, 4), Language()
        self.register_forward_pre_hook(self._encode, with_kwargs=True)

    def _encode_image(self, pixel_values):
        return self.image_projection(getattr(self.vision_tower, self.method)(pixel_values))

    @staticmethod
    def _encode(self, args, kwargs):
        kwargs = dict(kwargs)
        kwargs['hidden'] = self._encode_image(kwargs.pop('pixel_values')) + self.language_model.embed_tokens(kwargs.pop('input_ids'))
        return args, kwargs

    def forward(self, hidden):
        return type('Output', (), {'loss': self.language_model(hidden).square().mean()})


def batches(steps=2):
    generator = torch.Generator().manual_seed(0)
    return [{'pixel_values': torch.rand(2, 4, generator=generator), 'input_ids': torch.tensor([1, 2])} for _ in range(steps)]


def frozen(method):
    torch.manual_seed(0)
    model = Florence(method)
    model.vision_tower.requires_grad_(False)
    return twins(model)


@pytest.mark.parametrize('method', ['forward_features_unpool', 'forward_features', 'get_image_features', 'encode_image'])
def test_a_registered_method_is_an_entry_like_forward(method, caplog):
    plain, fast = frozen(method)
    expected = train(plain, batches())
    MyModel(fast, cache='off', dedup=False)
    runs = []
    fast.vision_tower.stages[0].register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    assert_same(expected, train(fast, batches()))
    assert runs == [False, False]  # once per step, without a graph, past the tower's own checkpoint
    (segment,) = fast.speedup.plan.segments
    assert (segment.kind, segment.path, segment.graph_skipped) == ('tower', 'vision_tower', True)
    assert not [record for record in caplog.records if record.levelname == 'WARNING']


def test_a_method_nobody_knows_is_a_loud_warning_and_the_same_training(caplog):
    plain, fast = frozen('unheard_of')
    expected = train(plain, batches())
    assert_same(expected, train(MyModel(fast), batches()))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert 'vision_tower is frozen' in warning and 'entries.py' in warning


def test_a_frozen_tower_that_is_never_used_is_a_loud_warning(caplog):
    class Blind(Florence):
        def _encode_image(self, pixel_values):
            return self.image_projection(pixel_values)
    model = Blind('forward_features')
    model.vision_tower.requires_grad_(False)
    train(MyModel(model), batches())
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert 'never entered' in warning
    caplog.clear()
    model.speedup.remove()
    train(MyModel(model), [{**batch, 'pixel_values': batch['pixel_values'][:0].sum(0)[None]} for batch in batches(1)])


def test_a_trained_tower_is_left_alone():
    plain, fast = frozen('forward_features')
    for model in (plain, fast):
        model.vision_tower.stages[1].requires_grad_(True)
    expected = train(plain, batches())
    assert_same(expected, train(MyModel(fast), batches()))
    assert len(expected.gradients[0]) > len(list(fast.language_model.parameters()))


class InternVL(nn.Module):
    """Remote code: a method of the top model calls tower and aligner as modules."""

    def __init__(self):
        super().__init__()
        self.vision_model, self.mlp1, self.language_model = CalledTower(), nn.Sequential(nn.Linear(4, 4), nn.GELU()), Language()

    def extract_feature(self, pixel_values):
        return self.mlp1(self.vision_model(pixel_values=pixel_values))

    def forward(self, pixel_values, input_ids):
        hidden = self.extract_feature(pixel_values) + self.language_model.embed_tokens(input_ids)
        return type('Output', (), {'loss': self.language_model(hidden).square().mean()})


class CalledTower(Tower):
    def forward(self, pixel_values):
        return self._run(pixel_values)


def test_tower_and_aligner_that_a_method_calls_are_one_segment():
    torch.manual_seed(0)
    plain, fast = twins(InternVL())
    for model in (plain, fast):
        model.vision_model.requires_grad_(False)
        model.mlp1.requires_grad_(False)
    expected = train(plain, batches())
    assert_same(expected, train(MyModel(fast), batches()))
    assert [(segment.kind, segment.path) for segment in fast.speedup.plan.segments] == [('tower + aligner', 'vision_model + mlp1')]


def test_entries_keep_their_signature_and_go_away_with_remove():
    _, model = frozen('forward_features')
    before = inspect.signature(model.vision_tower.forward_features), type(model.vision_tower).forward_features
    MyModel(model)
    assert inspect.signature(model.vision_tower.forward_features) == before[0]
    assert model.vision_tower.forward_features.__name__ == before[1].__name__
    model.speedup.remove()
    assert type(model.vision_tower).forward_features is before[1]
