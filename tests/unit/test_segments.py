"""Segments as executed: their kinds, what reached them, when they are traced again; towers that nobody entered."""
import pytest
import torch
from parity import families, tunings
from parity.harness import lora, prepare, train
from torch import nn

from swift_speedup import MyModel


def plan_of(family, tuning, checkpointing='reentrant', steps=1):
    case = families.build(family)
    model = (tunings.TEXT | tunings.VISUAL)[tuning](case)
    MyModel(prepare(model, checkpointing))
    before = model.speedup.plan
    train(model, case.batches[:steps])
    return before, model.speedup.plan


@pytest.mark.parametrize(('family', 'tuning', 'expected'), [
    ('llama', 'lower layers frozen', [('prefix', 'model.layers.0-2')]),
    ('gpt2', 'lower layers frozen', [('prefix', 'transformer.h.0-2')]),
    ('bart', 'lower layers frozen', [('prefix', 'model.encoder.layers.0-1')]),
    ('bert', 'lower layers frozen', [('prefix', 'bert.encoder.layer.0-1')]),
    ('llava', 'adapters on the language model', [('tower + aligner', 'vision_tower + multi_modal_projector')]),
    ('llava', 'aligner only', [('tower', 'vision_tower')]),
    ('llava', 'adapters on the upper half', [('tower + aligner', 'vision_tower + multi_modal_projector'), ('prefix', 'layers.0-1')]),
    ('qwen2_vl', 'lower layers frozen', [('tower', 'model.visual'), ('prefix', 'model.language_model.layers.0')]),
    ('qwen2_vl', 'aligner only', [('partial tower', 'model.visual: patch_embed + blocks.0-1')]),
    ('qwen2_5_vl', 'adapters in the last vision block', [('partial tower', 'visual: patch_embed + blocks.0')]),
    ('florence2', 'adapters on the language model', [('tower + aligner', 'vision_tower + multi_modal_projector')]),
    ('llama', 'adapters everywhere', []),
])
def test_kinds(family, tuning, expected):
    def short(path):
        return ' + '.join(part.replace('base_model.model.', '').replace('model.language_model.layers', 'layers')
                          .replace('model.vision_tower', 'vision_tower').replace('model.multi_modal', 'multi_modal')
                          for part in path.split(' + '))
    before, after = plan_of(family, tuning)
    assert not before.executed and after.executed
    found = [(segment.kind, segment.path) for segment in after.segments if segment.graph_skipped]
    assert [(kind, short(path)) for kind, path in found] == [
        (kind, short(path if path.startswith(('model.visual', 'visual', 'trans', 'bert')) or kind == 'prefix' else path))
        if not path.startswith('visual') else (kind, short('model.' + path)) for kind, path in expected]


def test_a_text_encoder_is_not_a_tower():
    model = families.build('t5').model
    model.encoder.requires_grad_(False)
    MyModel(prepare(model, 'off'))
    train(model, families.text_batches(1))
    (segment,) = model.speedup.plan.segments
    assert (segment.kind, segment.path) == ('text encoder', 'encoder') and 'dropout' in segment.reason


def test_the_plan_follows_what_is_frozen_at_the_next_step():
    case = families.build('llama')
    tunings.lower_layers(case)
    model = MyModel(prepare(case.model, 'reentrant'))
    train(model, case.batches)
    assert [segment.path for segment in model.speedup.plan.segments] == ['model.layers.0-2']
    case.layers[2].requires_grad_(True)
    case.layers[3].requires_grad_(False)
    train(model, case.batches)
    plan = model.speedup.plan
    assert [segment.path for segment in plan.segments] == ['model.layers.0-1']
    assert plan.kept == ('model.layers.3',) and 'gradients pass through' in plan.line()
    model.requires_grad_(True)
    assert model.speedup.plan.segments == () and 'nothing is frozen' in model.speedup.plan.line()


def test_tied_weights_count_once_and_by_identity():
    case = families.build('qwen2-tied')
    case.model.requires_grad_(False)
    case.layers[-1].requires_grad_(True)
    model = MyModel(prepare(case.model, 'off'))
    train(model, case.batches[:1])
    (segment,) = model.speedup.plan.segments
    assert segment.parameters == sum(p.numel() for layer in case.layers[:-1] for p in layer.parameters())
    assert 'lm_head' in model.speedup.plan.frozen_modules  # it is the embedding's weight


def test_what_a_frozen_part_draws_or_writes_is_seen_in_the_first_step():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, hidden):
            return self.proj(hidden) + torch.rand(())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.aligner, self.head = Noisy(), nn.Linear(4, 4)

        def forward(self, features):
            return type('Output', (), {'loss': self.head(self.aligner(features)).sum()})

    model = Model()
    model.aligner.requires_grad_(False)
    train(MyModel(model), [{'features': torch.rand(2, 4)}])
    (segment,) = model.speedup.plan.segments
    assert segment.kind == 'aligner' and segment.graph_skipped and 'draws random numbers' in segment.reason


def test_tracing_changes_neither_values_nor_random_numbers():
    case, other = families.build('qwen2_vl'), families.build('qwen2_vl')
    models = [lora(found.model, r'language_model\.layers') for found in (case, other)]
    fast, blind = (MyModel(prepare(model, 'reentrant')) for model in models)
    blind.speedup._frontier._observing = False
    assert train(fast, case.batches).losses == train(blind, other.batches).losses
    assert fast.speedup.plan.executed and not blind.speedup.plan.executed
