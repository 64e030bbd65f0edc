"""Native transformers families with a frozen tower and aligner: same training from the cache, and how each family's calls are read."""
import pytest
import torch
from parity.harness import assert_close, assert_same, counted_forwards, prepare, train, twins
from toys import native
from toys.native import quiet

from swift_speedup import MyModel
from swift_speedup.memo.memo import Memo

REPEATED = ((0, 1), (2, 0))  # a sample comes back in another batch
APART = ((0, 1), (2,))


@pytest.fixture
def conventions(monkeypatch):
    """How the last call of each step was taken apart, by its name."""
    seen, note = {}, Memo._note

    def noted(memo, step, *rest):
        call = note(memo, step, *rest)
        if call is not None:
            seen[step.name] = call.layout.convention
        return call
    monkeypatch.setattr(Memo, '_note', noted)
    return seen


def build(family):
    torch.manual_seed(0)
    case = quiet(native.FAMILIES[family]())
    return case, *twins(prepare(case.model, 'off'))


@pytest.mark.parametrize('family', native.FAMILIES)
def test_same_training_from_the_cache(family, conventions):
    case, plain, fast = build(family)
    batches = [case.batch(*places) for places in REPEATED]
    expected = train(plain, batches * (case.late + 2))
    MyModel(fast)
    with counted_forwards([fast.get_submodule(path) for path in case.conventions]) as runs:
        def on_step(step):
            if step == case.late * len(batches):
                runs.everywhere[:] = [0] * len(case.conventions)
        found = train(fast, batches * (case.late + 2), on_step=on_step)
        again = dict(zip(case.conventions, runs.everywhere))
        warm = fast.speedup.stats.hits
        losses = [[model(**case.batch(*places)).loss.item() for places in ((1, 0), (2,), (0, 2))] for model in (plain, fast)]
    # Where a sample is computed alone, because the other one of its batch is stored already, kernels may order sums differently.
    (assert_same if case.exact else assert_close)(expected, found)
    stats = fast.speedup.stats
    assert stats.errors == 0 and warm > 0 and stats.hits > warm
    assert not any(again.values()), again
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert {path: conventions.get(path) for path in case.conventions} == case.conventions
    assert_planned(case, fast)


@pytest.mark.parametrize('family', ['instructblip', 'idefics2', 'got_ocr2'])
def test_batches_that_stay_together_are_exact_everywhere(family):
    case, plain, fast = build(family)
    assert not case.exact
    batches = [case.batch(*places) for places in APART] * 3
    assert_same(train(plain, batches), train(MyModel(fast), batches))
    assert fast.speedup.stats.hits > 0


def test_clips_that_change_with_the_padding_of_others_are_kept_with_their_batch(conventions):
    """Qwen3-Omni's convolutions see padding: a clip of less than a second comes out differently beside a longer one."""
    case, plain, fast = build('qwen3_omni_moe')
    for place, frames, tokens in ((0, 30, 4), (1, 100, 13), (2, 130, 17)):
        marks, own = case.samples[place]
        own['feature_attention_mask'] = (torch.arange(130) < frames).long()[None]
        case.samples[place] = [mark for mark in marks if mark != native.AUDIO] + [native.AUDIO] * tokens, own
    orders = ((1, 2), (0,), (0, 2), (1, 0))  # alone it is the same as alone
    batches = [case.batch(*places) for places in orders] * 3
    # Images are found one by one, so batches are put together from others; the clips' difference is a thousand times this.
    assert_close(train(plain, batches), train(MyModel(fast), batches))
    assert conventions['audio_tower'] == 'whole call' and fast.speedup.stats.hits > 0 and fast.speedup.stats.errors == 0


def assert_planned(case, fast):
    """Every tower is reused as the table says, or refused with the reason that it gives."""
    segments = fast.speedup.plan.segments
    for path, reason in case.refused.items():
        (segment,) = [segment for segment in segments if path in segment.modules]
        assert segment.graph_skipped and not segment.cached and reason in segment.reason
    for path in case.conventions:
        if not any(f'{path}.'.startswith(f'{tower}.') for tower in case.refused):
            (segment,) = [segment for segment in segments if path in segment.modules]
            assert segment.graph_skipped and segment.cached, segment.summary()


@pytest.mark.parametrize('family', native.FAMILIES)
def test_wrong_entries_would_be_noticed(family):
    case, plain, fast = build(family)
    MyModel(fast)
    train(fast, [case.batch(*places) for places in REPEATED] * 2)
    right = fast(**case.batch(0, 1)).loss.item()
    generator = torch.Generator().manual_seed(2)
    for entry in fast.speedup.store._entries.values():
        entry.tensor.copy_(torch.randn(entry.tensor.shape, generator=generator))
    assert abs(fast(**case.batch(0, 1)).loss.item() / right - 1) > 1e-5
