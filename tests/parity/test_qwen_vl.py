"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: same training, bit for bit, while the tower runs once per image."""

import pytest
import torch
from parity.families import IMAGES, SMALL_VOCABULARY
from parity.harness import CHECKPOINTING, assert_same, counted, lora, prepare, saved_bytes, train, twins
from toys import models
from toys.models import Sample, lookup

from swift_speedup import MyModel

FAMILIES = ('qwen2_vl', 'qwen2_5_vl', 'qwen3_vl')


def make_batch(family, samples, seed):
    return models.make_batch(family, samples, seed, SMALL_VOCABULARY)


def batches(family: str) -> list[dict]:
    """One epoch: 0, 1 and several images, two grids, image and video, text only; then the same again in another order."""
    epoch = [
        make_batch(family, [Sample(images=IMAGES[:1]), Sample()], 1),
        make_batch(family, [Sample(images=IMAGES), Sample(images=IMAGES[1:2], text=5)], 2),
        make_batch(family, [Sample(images=IMAGES[:2]), Sample(videos=((2, 4, 4),))], 3),
        make_batch(family, [Sample(), Sample(text=6)], 4),
    ]
    return [*epoch, *reversed(epoch)]


def tuned(family: str, tuner: str):
    model = models.build(family, vocabulary=SMALL_VOCABULARY)
    if tuner == 'lora':
        return lora(model, r'language_model\.layers')
    model.model.visual.requires_grad_(False)
    return model


def tower_of(model, family):
    base = model.get_base_model() if hasattr(model, 'get_base_model') else model
    return base.get_submodule(lookup(family, 'tiny').tower)


@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
@pytest.mark.parametrize('tuner', ('lora', 'full'))
@pytest.mark.parametrize('family', FAMILIES)
def test_same_training(family, tuner, checkpointing):
    plain, fast = twins(tuned(family, tuner))
    data = batches(family)
    expected = train(prepare(plain, checkpointing), data)
    assert MyModel(prepare(fast, checkpointing)) is fast
    with saved_bytes(tower_of(fast, family)) as sizes:
        found = train(fast, data)
    assert_same(expected, found)
    stats = fast.speedup.stats
    assert (stats.misses, stats.hits, stats.errors, stats.bypassed) == (8, 8, 0, 0)  # 7 images and a video, twice
    assert sizes == []  # Rule 3: nothing is saved for backward inside the tower


@pytest.mark.parametrize('family', FAMILIES)
def test_tower_does_not_run_in_the_second_epoch(family):
    model = MyModel(prepare(tuned(family, 'lora'), 'reentrant'))
    data = batches(family)
    with counted(tower_of(model, family)) as runs:
        train(model, data[:4])
        assert len(runs) == model.speedup.stats.frozen_calls + model.speedup.stats.checks
        first = len(runs)
        train(model, data[4:])
    assert first > 0 and len(runs) == first


@pytest.mark.parametrize('family', FAMILIES)
def test_every_output_leaf_is_reproduced(family):
    plain, fast = twins(tuned(family, 'lora'))
    MyModel(fast)
    grid = torch.tensor([[1, 4, 4], [1, 8, 4], [1, 4, 4]])
    pixels = torch.randn(64, lookup(family, 'tiny').patch_values)
    wanted = tower_of(plain, family)(pixels, grid_thw=grid)
    for _ in range(3):  # computed, served, served after the caller changed the answer
        answer = tower_of(fast, family)(pixels, grid_thw=grid)
        assert type(answer) is type(wanted) and list(answer.keys()) == list(wanted.keys())
        for name in wanted:
            one, other = wanted[name], answer[name]
            assert isinstance(other, type(one))
            for left, right in zip(one if isinstance(one, list) else [one], other if isinstance(other, list) else [other]):
                assert torch.equal(left, right) and not right.requires_grad
        answer.pooler_output.zero_()
        answer.pooler_output = None
    assert fast.speedup.stats.hits == 6


def test_a_partial_hit_runs_the_tower_on_the_missing_images_only():
    model = MyModel(tuned('qwen2_vl', 'lora'))
    tower = tower_of(model, 'qwen2_vl')
    pixels = torch.randn(48, 1176)
    grid = torch.tensor([[1, 4, 4]] * 3)
    rows = []
    tower.patch_embed.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    tower(pixels[:16], grid_thw=grid[:1]).pooler_output.sum()
    tower(torch.cat([pixels[16:], pixels[:16], pixels[32:]]), grid_thw=torch.tensor([[1, 4, 4]] * 4)).pooler_output.sum()
    assert rows == [16, 32, 32]  # once; once more beside another image, as the check; the two new ones
    stats = model.speedup.stats
    assert (stats.hits, stats.misses, stats.deduplicated) == (1, 3, 1)


def test_an_image_is_computed_again_after_a_weight_of_the_tower_changed():
    plain, fast = twins(tuned('qwen2_vl', 'lora'))
    MyModel(fast)
    pixels, grid = torch.randn(16, 1176), torch.tensor([[1, 4, 4]])
    for model in (plain, fast):
        tower_of(model, 'qwen2_vl')(pixels, grid_thw=grid)
        next(tower_of(model, 'qwen2_vl').blocks.parameters()).data.view(-1)[0] += 1  # leaves _version alone
    wanted, answer = (tower_of(model, 'qwen2_vl')(pixels, grid_thw=grid).pooler_output for model in (plain, fast))
    assert torch.equal(answer, wanted) and fast.speedup.stats.hits == 0


def test_unfreezing_and_freezing_again_in_the_middle():
    plain, fast = twins(tuned('qwen2_vl', 'full'))
    data = [make_batch('qwen2_vl', [Sample(images=IMAGES[:2])], 5)] * 6

    MyModel(prepare(fast, 'reentrant'))
    prepare(plain, 'reentrant')

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # holds the tower's weights from the start
        losses = []
        for step, batch in enumerate(data):
            model.model.visual.requires_grad_(step in (2, 3))
            loss = model(**batch).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            losses.append((loss.item(), [p.grad is not None for p in model.parameters()]))
            optimizer.step()
        return losses, [p.detach().clone() for p in model.parameters()]
    (expected, weights), (found, fast_weights) = run(plain), run(fast)
    assert found == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, fast_weights))
    assert (fast.speedup.stats.hits, fast.speedup.stats.misses) == (4, 4)  # a miss, a hit, trained twice, a miss, a hit; 2 images


def test_what_inference_mode_computed_can_be_trained_on():
    plain, fast = twins(tuned('qwen2_vl', 'lora'))
    data = batches('qwen2_vl')[:1]
    expected = train(prepare(plain, 'off'), data)
    MyModel(prepare(fast, 'off'))
    with torch.inference_mode():
        fast(**data[0])
    assert_same(expected, train(fast, data))
    assert fast.speedup.stats.hits == 1


def test_evaluation_in_autocast_and_training_outside_do_not_share():
    plain, fast = twins(tuned('qwen2_vl', 'lora').train())
    MyModel(fast)
    pixels, grid = torch.randn(16, 1176), torch.tensor([[1, 4, 4]])
    for enabled in (True, False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            wanted, answer = (tower_of(model, 'qwen2_vl')(pixels, grid_thw=grid).pooler_output for model in (plain, fast))
        assert answer.dtype == wanted.dtype and torch.equal(answer, wanted)
    assert fast.speedup.stats.hits == 1
