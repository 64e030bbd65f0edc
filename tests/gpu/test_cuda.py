"""On one NVIDIA GPU: same losses, hits, and a changed weight that is noticed there. Skipped where there is none."""
import pytest
import torch
from parity.harness import lora, prepare, train, twins
from toys.models import Sample, build, make_batch

from swift_speedup import MyModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')]


@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16))
def test_same_training_and_a_changed_weight_is_noticed(dtype):
    plain, fast = twins(lora(build('qwen2_vl', vocabulary=600).to('cuda', dtype), r'language_model\.layers'))
    batch = make_batch('qwen2_vl', [Sample(images=((1, 4, 4), (1, 4, 8)))], 1, vocabulary=600)
    batches = [{name: value.cuda() for name, value in batch.items()}] * 3
    expected = train(prepare(plain, 'reentrant'), batches)
    found = train(MyModel(prepare(fast, 'reentrant')), batches)
    for one, other in zip(expected.losses, found.losses):
        assert float.fromhex(other) == pytest.approx(float.fromhex(one), rel=1e-5 if dtype == torch.float32 else 1e-2)
    assert (fast.speedup.stats.hits, fast.speedup.stats.misses) == (4, 2)
    next(fast.get_base_model().model.visual.blocks.parameters()).data.view(-1)[0] += 1
    train(fast, batches[:1])
    assert fast.speedup.stats.misses == 4
