"""Frozen lower layers of text models, cached per token sequence: put back into any batch, refused where a value would be wrong."""
import copy

import pytest
import torch
from parity import families, tunings
from parity.families import IMAGES, SMALL_VOCABULARY
from parity.harness import assert_close, lora, prepare, train, twins
from toys import models
from toys.models import Sample
from toys.native import quiet

from swift_speedup import AuditError, MyModel

LENGTHS = (7, 4, 9, 2)


def frozen(family='llama', **options):
    """Plain and sped-up model with the lower half of the layers frozen."""
    case = quiet(families.build(family))
    plain, fast = twins(tunings.lower_layers(case).eval())
    return plain, MyModel(fast, **({'prefix': 'on'} | options))


def sequences(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS]


def batch_of(rows, side='right', width=None):
    """Padded, with positions that count real tokens only."""
    width = width or max(map(len, rows))
    pads = [torch.zeros(width - len(row), dtype=torch.long) for row in rows]
    order = (lambda row, pad: (row, pad)) if side == 'right' else (lambda row, pad: (pad, row))
    ids = torch.stack([torch.cat(order(row, pad)) for row, pad in zip(rows, pads)])
    mask = torch.stack([torch.cat(order(torch.ones_like(row), pad)) for row, pad in zip(rows, pads)])
    return {'input_ids': ids, 'attention_mask': mask, 'position_ids': (mask.cumsum(1) - 1).clamp(min=0)}


def packed(rows):
    """One row, in which every sequence sees itself only."""
    ids = torch.cat(rows)[None]
    number = torch.cat([torch.full((len(row),), place) for place, row in enumerate(rows)])
    mask = (number[:, None] == number[None]) & torch.ones(len(number), len(number), dtype=torch.bool).tril()
    places = torch.cat([torch.arange(len(row)) for row in rows])
    return {'input_ids': ids, 'attention_mask': mask[None, None], 'position_ids': places[None]}


LAYOUTS = {
    'right': lambda rows: [batch_of(rows)],
    'left': lambda rows: [batch_of(rows, 'left')],
    'wider': lambda rows: [batch_of(rows, width=16)],
    'one by one': lambda rows: [batch_of([row]) for row in rows],
    'two by two, reversed': lambda rows: [batch_of(rows[:1:-1]), batch_of(rows[1::-1], 'left')],
    'packed': lambda rows: [packed(rows)],
    'packed in two': lambda rows: [packed(rows[2:]), packed(rows[:2])],
}


@pytest.mark.parametrize('family', ['llama', 'qwen3'])
@pytest.mark.parametrize('later', LAYOUTS)
@pytest.mark.parametrize('first', LAYOUTS)
def test_a_sequence_is_found_again_in_any_batch(first, later, family):
    plain, fast = frozen(family)
    rows = sequences()
    for batch in LAYOUTS[first](rows):
        fast(**batch)
    before = fast.speedup.stats.hits
    for batch in LAYOUTS[later](rows):
        mask = batch['attention_mask']
        real = mask == 1 if mask.dim() == 2 else torch.ones_like(batch['input_ids'], dtype=torch.bool)
        wanted, found = plain(**batch).logits[real], fast(**batch).logits[real]
        assert torch.allclose(found, wanted, atol=1e-6)
    stats = fast.speedup.stats
    assert stats.hits - before == len(rows) and stats.errors == 0
    assert {tuple(entry.tensor.shape) for entry in fast.speedup.store._entries.values()} == {(length, 32) for length in LENGTHS}


def test_only_rows_that_miss_are_run():
    plain, fast = frozen()
    layer = fast.model.layers[0]
    shapes = []
    layer.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape[:2])))
    rows = sequences()
    fast(**batch_of(rows[:2]))
    shapes.clear()
    batch = batch_of([rows[0], rows[2], rows[1], rows[2], rows[3]])
    found, wanted = fast(**batch).logits, plain(**batch).logits
    assert torch.allclose(found[batch['attention_mask'] == 1], wanted[batch['attention_mask'] == 1], atol=1e-6)
    assert shapes == [(2, 9)] and fast.speedup.stats.deduplicated == 1


@pytest.mark.parametrize('change', [
    lambda batch: batch | {'position_ids': batch['position_ids'] + 3},
    lambda batch: batch | {'input_ids': batch['input_ids'] + batch['attention_mask']},
    lambda batch: batch | {'attention_mask': torch.ones_like(batch['attention_mask'])},
    lambda batch: batch | {'attention_mask': torch.ones(4, 1, 9, 9, dtype=torch.bool)}])
def test_what_changes_the_value_changes_the_key(change):
    plain, fast = frozen()
    batch = batch_of(sequences())
    fast(**batch)
    hits = fast.speedup.stats.hits
    other = change(batch)
    assert torch.allclose(fast(**other).logits[:, :2], plain(**other).logits[:, :2], atol=1e-6)
    assert fast.speedup.stats.hits - hits <= 1  # the longest row has no padding, so a mask of ones is its own


@pytest.mark.parametrize('family', ['llama', 'mixtral', 'gpt2'])
@pytest.mark.parametrize('asked', ['output_hidden_states', 'output_attentions', 'output_router_logits', 'use_cache'])
def test_whoever_asks_for_insides_gets_those_of_the_plain_model(asked, family):
    if asked == 'output_router_logits' and family != 'mixtral':
        pytest.skip('no router')
    plain, fast = frozen(family)
    for model in (plain, fast):
        model.set_attn_implementation('eager')
    batch = batch_of(sequences(), width=9)
    real = batch['attention_mask'] == 1
    for options in ({}, {}, {asked: True}, {}, {asked: True}):
        wanted, found = plain(**batch, **options), fast(**batch, **options)
        assert found.keys() == wanted.keys() and torch.allclose(found.logits[real], wanted.logits[real], atol=1e-6)
        for name in ('hidden_states', 'attentions', 'router_logits'):
            for one, other in zip(wanted.get(name) or (), found.get(name) or (), strict=True):
                rows = (lambda tensor: tensor[real]) if name == 'hidden_states' else (lambda tensor: tensor)
                assert torch.allclose(rows(other), rows(one), atol=1e-5), name
    if asked != 'use_cache':
        assert fast.speedup.stats.hits > 0


def test_generation_is_the_plain_models():
    plain, fast = frozen()
    for model in (plain, fast):
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
    batch = {name: value for name, value in batch_of(sequences(), 'left').items() if name != 'position_ids'}
    fast(**batch)
    found, wanted = (model.generate(**batch, max_new_tokens=5, do_sample=False) for model in (fast, plain))
    assert torch.equal(found, wanted)


def test_equal_text_with_other_images_and_one_image_in_two_sizes_share_nothing():
    case = families.build('qwen2_vl')
    model = quiet(case).model
    model.requires_grad_(False)
    model.model.language_model.layers[-1].requires_grad_(True)
    fast = MyModel(model, prefix='on')
    batch = models.make_batch('qwen2_vl', [Sample(images=IMAGES[:1])], 1, SMALL_VOCABULARY)
    fast(**batch)
    other = batch | {'pixel_values': batch['pixel_values'] + 1}
    fast(**other)
    assert fast.speedup.stats.hits == 0
    turned = batch | {'image_grid_thw': batch['image_grid_thw'][:, [0, 2, 1]]}
    wide = models.make_batch('qwen2_vl', [Sample(images=IMAGES[1:2])], 1, SMALL_VOCABULARY)
    tall = wide | {'image_grid_thw': wide['image_grid_thw'][:, [0, 2, 1]]}
    fast(**wide), fast(**tall)  # equal bytes, another shape
    assert fast.speedup.stats.hits == 0
    fast(**turned)  # 4 x 4 either way
    assert fast.speedup.stats.hits == 2  # the image and the sequence


def test_passes_of_one_step_share_what_is_frozen_under_all_of_them():
    """DPO and GRPO: policy, reference (adapters off) and old policy see the same sequences."""
    case = quiet(families.build('llama'))
    plain = tunings.adapters_on_the_upper_half(case).train()
    fast = MyModel(copy.deepcopy(plain), prefix='on')
    batch = batch_of(sequences())
    answers = []
    for model in (plain, fast):
        torch.manual_seed(0)  # adapters have dropout
        policy = model(**batch).logits
        with torch.no_grad(), model.disable_adapter():
            reference = model(**batch).logits
        with torch.no_grad():
            old = model.eval()(**batch).logits
        model.train()
        answers.append([tensor[batch['attention_mask'] == 1] for tensor in (policy, reference, old)])
    for one, other in zip(*answers):
        assert torch.allclose(other, one, atol=1e-6)
    stats = fast.speedup.stats
    assert (stats.misses, stats.hits) == (8, 4)  # the first pass; what eval mode gives is shown once to be the same
    with torch.no_grad():
        fast.eval()(**batch)
    assert stats.hits == 8


def test_eight_completions_of_one_image_run_the_tower_once():
    model = lora(models.build('qwen2_vl', vocabulary=SMALL_VOCABULARY), r'language_model\.layers')
    plain, fast = twins(model)
    one = models.make_batch('qwen2_vl', [Sample(images=IMAGES[:1])], 1, SMALL_VOCABULARY)
    batch = {name: value.repeat(8, *[1] * (value.dim() - 1)) for name, value in one.items()}
    expected = train(prepare(plain, 'reentrant'), [batch] * 2)
    rows = []
    fast.base_model.model.model.visual.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    MyModel(prepare(fast, 'reentrant'))
    warm = models.make_batch('qwen2_vl', [Sample(images=IMAGES[1:])], 2, SMALL_VOCABULARY)
    with torch.no_grad():
        fast(**warm)
    rows.clear()
    assert_close(expected, train(fast, [batch] * 2))
    assert rows == [16] and (fast.speedup.stats.deduplicated, fast.speedup.stats.hits) == (7, 8)


def test_an_audit_finds_a_wrong_entry_and_passes_right_ones():
    plain, fast = frozen(audit=1.0)
    batch = batch_of(sequences())
    for _ in range(3):
        fast(**batch)
    assert fast.speedup.stats.audited == fast.speedup.stats.hits == 8
    entry = next(iter(fast.speedup.store._entries.values()))
    entry.tensor[0, 0] += 1e-2
    with pytest.raises(AuditError, match=r'model.layers.2.*differs from the computed one by up to 0.01'):
        fast(**batch)
    real = batch['attention_mask'] == 1
    assert torch.equal(fast(**batch).logits[real], plain(**batch).logits[real])  # not reused any more


def test_prefix_off_keeps_the_layers_out_and_says_so():
    _, fast = frozen(prefix='off')
    fast.train()
    fast(**batch_of(sequences()), labels=batch_of(sequences())['input_ids']).loss.backward()
    (segment,) = fast.speedup.plan.segments
    assert segment.graph_skipped and segment.reason == 'prefix=off' and fast.speedup.stats.stored_samples == 0

