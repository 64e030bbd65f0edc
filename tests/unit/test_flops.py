"""FLOPs counted on shapes equal those of the real step, and the prediction is arithmetic on them."""
import copy

import pytest
import torch
from parity import families, tunings
from parity.harness import CHECKPOINTING, prepare
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from swift_speedup import MyModel
from swift_speedup.segments.flops import Prediction, ShapesOnly, count_steps


def steps_of(model, batches):
    def steps():
        for batch in batches:
            model(**batch).loss.backward()
    return steps


@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
@pytest.mark.parametrize('family', families.FAMILIES)
def test_counts_equal_those_of_real_steps(family, checkpointing):
    case = families.build(family)
    model = prepare(tunings.lower_layers(case), checkpointing)
    if family == 'mixtral':
        model.config._experts_implementation = 'eager'  # torch counts no grouped products
    shapes = copy.deepcopy(model).to('meta')
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as real:  # torch counts no fused CPU attention
        steps_of(model, case.batches)()
    assert count_steps(shapes, steps_of(shapes, case.batches), {}).total == real.get_total_flops()


@pytest.mark.parametrize('family', ['llama', 'mixtral', 'qwen2_vl', 'qwen3_vl', 'llava'])
def test_prediction_equals_what_is_really_run(family):
    case = families.build(family)
    model = prepare(tunings.lower_layers(case), 'reentrant')
    if family == 'mixtral':
        model.config._experts_implementation = 'eager'
    shapes = copy.deepcopy(model).to('meta')
    steps = steps_of(shapes, case.batches)
    stock = count_steps(shapes, steps, {})
    plan, prediction = MyModel(shapes).speedup.predict(stock, steps, len(case.batches))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as real:  # torch counts no fused CPU attention
        steps_of(MyModel(model, cache='off', dedup=False), case.batches)()
    assert prediction.skipped == real.get_total_flops() < prediction.stock == stock.total
    segments = {segment.path: segment for segment in plan.segments if segment.graph_skipped}
    assert set(prediction.forward) == set(segments) and all(flops > 0 for flops in prediction.forward.values())
    assert all('meta' not in (segment.reason or '') for segment in plan.segments)
    assert prediction.reused and all(segments[path].cached for path in prediction.reused)
    assert prediction.warm == prediction.skipped - sum(prediction.forward[path] for path in prediction.reused)


def test_a_linear_layer_by_hand():
    layer = nn.Linear(8, 16, device='meta')
    counted = count_steps(layer, lambda: layer(torch.rand(4, 8)).sum().backward(), {'layer': layer})
    assert counted.forward == {'layer': 2 * 4 * 8 * 16} and counted.total == 2 * counted.forward['layer']  # no gradient for the input


def test_ids_masks_and_grids_stay_real_and_hidden_states_do_not():
    weight = torch.empty(10, 4, device='meta')
    with ShapesOnly():
        ids = torch.tensor([1, 2, 3]).to('meta')
        hidden = nn.functional.embedding(ids, weight)
        picked = hidden[ids > 1]
        assert ids.tolist() == [1, 2, 3] and hidden.is_meta and picked.shape == (2, 4)
        assert torch.arange(3, device=hidden.device).tolist() == [0, 1, 2]
        assert hidden.argmax(-1).tolist() == [0, 0, 0]  # numbers that depend on hidden states: right in number only


def test_prediction_arithmetic():
    prediction = Prediction(2, 1000, 800, {'tower': 200, 'layers': 100}, ('tower',))
    assert (prediction.warm, prediction.gain_of_skipping, prediction.gain_when_warm) == (600, 1.25, 1000 / 600)
    assert prediction.share('tower') == 0.2 and prediction.to_dict()['shares'] == {'tower': 0.2, 'layers': 0.1}
