"""Rule 3 for every family, way to freeze, checkpointing and precision: same training bit for bit, and nothing of what lies below the
frontier runs twice, is saved for backward or costs a backward FLOP."""
import copy

import pytest
import torch
from parity import families, tunings
from parity.harness import CHECKPOINTING, assert_same, backward_flops, counted_forwards, prepare, saved_bytes, train

from swift_speedup import MyModel

UNTRAINED_ALONE = {('qwen3_vl', 'adapters everywhere'), ('qwen3_vl', 'adapters in the last vision block'), ('qwen3_vl', 'ratio 0.3')}
CASES = [(family, tuning) for family in families.FAMILIES
         for tuning in (*tunings.TEXT, *(tunings.VISUAL if family in families.VISUAL else ()))]


@pytest.mark.parametrize('autocast', (False, True), ids=('fp32', 'bf16-autocast'))
@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
@pytest.mark.parametrize(('family', 'tuning'), CASES)
def test_same_training_and_nothing_below_the_frontier_costs_more_than_its_forward(family, tuning, checkpointing, autocast):
    case = families.build(family)
    case.model = (tunings.TEXT | tunings.VISUAL)[tuning](case)
    plain, fast = copy.deepcopy(case), case
    below = fast.below_the_frontier()
    # Alone, reentrant checkpointing leaves adapters in some towers without a gradient (peft issue 2880): the leaf rule trains them,
    # so the run without checkpointing says what is right.
    untrained_alone = checkpointing == 'reentrant' and (family, tuning) in UNTRAINED_ALONE
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        with counted_forwards(plain.below_the_frontier()) as expected_runs:
            expected = train(prepare(plain.model, 'off' if untrained_alone else checkpointing), plain.batches)
        MyModel(prepare(fast.model, checkpointing), cache='off', dedup=False)
        with counted_forwards(below) as runs, saved_bytes(*below) as sizes, backward_flops(below) as flops:
            found = train(fast.model, fast.batches)
    if untrained_alone and autocast:  # bf16 rounds otherwise with checkpointing than without
        assert [step.keys() for step in found.gradients] == [step.keys() for step in expected.gradients]
    else:
        assert_same(expected, found)
    assert any(gradient.abs().max() > 0 for gradient in found.gradients[0].values())
    assert runs.everywhere == expected_runs.in_forward  # not again in the backward pass
    assert sizes == [] and flops.inside == 0 and flops.anywhere > 0
    skipped = any(segment.graph_skipped for segment in fast.model.speedup.plan.segments)
    if tuning == 'adapters everywhere' and family in families.TEXT_CONFIGS:
        assert not skipped  # and the report says so
    assert skipped or not any(module in below for module in (*fast.layers, *fast.tower, *fast.aligner))
