"""A folder serves the next run: same training, every frozen output found, nothing of a frozen segment run.

Other weights, other code: nothing is found.
"""
import copy
import json
import subprocess
import sys

import pytest
import torch
from parity import families, tunings
from parity.harness import assert_close, assert_same, counted_forwards, prepare, train
from toys import native
from toys.native import quiet

from swift_speedup import MyModel

REPEATED = ((0, 1), (2, 0))


def build(family):
    torch.manual_seed(0)
    case = quiet(native.FAMILIES[family]())
    return case, prepare(case.model, 'off')


def attached(model, folder, **options):
    return MyModel(model, cache_dir=folder, prefix='on', **options)


@pytest.mark.parametrize('family', native.FAMILIES)
def test_the_next_run_finds_everything(family, tmp_path):
    case, plain = build(family)
    first, second = copy.deepcopy(plain), copy.deepcopy(plain)
    batches = [case.batch(*places) for places in REPEATED] * (case.late + 2)
    expected = train(plain, batches)
    runs = []
    for model in (first, second):
        attached(model, tmp_path)
        with counted_forwards([model.get_submodule(path) for path in case.conventions]) as counted:  # hooks: in both, as keys hold them
            found = train(model, batches)
        runs.append(sum(counted.everywhere))
        stats = model.speedup.stats
        model.speedup.remove()
    (assert_same if case.exact else assert_close)(expected, found)
    assert stats.hits > 0 and stats.errors == stats.store_errors == 0
    assert (stats.misses, stats.frozen_calls, stats.checks) == (0, 0, 0) and runs[0] > 0 == runs[1]


SCRIPT = '''
import json, sys, torch
from toys import models
from swift_speedup import MyModel
folder, change, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
model = models.build('qwen2_vl').train()
for parameter in [*model.model.visual.parameters(), *model.model.language_model.layers[:2].parameters()]:
    parameter.requires_grad_(False)
model.get_input_embeddings().requires_grad_(False)
if change == 'weight':
    next(model.model.visual.parameters()).data.view(-1)[5] += 1
MyModel(model, cache_dir=folder, prefix='on')
samples = [models.Sample(images=((1, 4, 4 + 4 * (number % 2)),), text=6) for number in range(4)]
whole = models.make_batch('qwen2_vl', samples, 0)
starts = [0, 16, 48, 64, 96]
for step in range(0, 4, rows):
    picked = {name: value[step:step + rows] for name, value in whole.items() if name != 'pixel_values'}
    picked['pixel_values'] = whole['pixel_values'][starts[step]:starts[step + rows]]
    model(**picked).loss.backward()
print(json.dumps(model.speedup.stats.to_dict()))
'''


def run(folder, change='none', rows=2):
    done = subprocess.run([sys.executable, '-c', SCRIPT, str(folder), change, str(rows)], capture_output=True, text=True,
                          env=subprocess.os.environ | {'PYTHONPATH': ':'.join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_another_folder_and_other_batch_sizes(tmp_path):
    first = run(tmp_path / 'one')
    assert first['misses'] > 0
    (tmp_path / 'one').rename(tmp_path / 'moved')
    for rows in (2, 4, 1):
        again = run(tmp_path / 'moved', rows=rows)
        assert again['misses'] == again['frozen_calls'] == 0 < again['hits'], rows
    changed = run(tmp_path / 'moved', change='weight')
    assert changed['hits'] == 0 and changed['misses'] == first['misses']


def test_a_changed_forward_finds_nothing(tmp_path):
    """The same class, name and weights; only the code differs, as when a user edits a file between two runs."""
    source = '''
import torch
from torch import nn
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))])
    def forward(self, pixel_values):
        for layer in self.layers:
            pixel_values = layer(pixel_values)
        return pixel_values FACTOR
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_tower, self.head = Tower(), nn.Linear(4, 1)
    def forward(self, pixel_values):
        return self.head(self.vision_tower(pixel_values))
'''
    main = '''
import sys, torch
from user_model import Model
from swift_speedup import MyModel
torch.manual_seed(0)
model = Model()
model.vision_tower.requires_grad_(False)
MyModel(model, cache_dir=sys.argv[1])
for _ in range(3):
    out = model(torch.ones(2, 4) * torch.tensor([[1.], [2.]])).sum()
    out.backward()
stats = model.speedup.stats
print(stats.hits, stats.misses, out.item())
'''
    answers = []
    for factor in ('', '', '* 2'):
        (tmp_path / 'user_model.py').write_text(source.replace('FACTOR', factor))
        done = subprocess.run([sys.executable, '-B', '-c', main, str(tmp_path / 'cache')], capture_output=True, text=True,
                              env=subprocess.os.environ | {'PYTHONPATH': ':'.join([str(tmp_path), *sys.path])})
        assert done.returncode == 0, done.stderr[-3000:]
        answers.append(done.stdout.split())
    assert int(answers[0][1]) > 0 and int(answers[1][1]) == 0 < int(answers[1][0])
    assert answers[2][1] == answers[0][1] and answers[1][2] == answers[0][2] != answers[2][2]


@pytest.mark.parametrize('family', ['llama', 'gpt2', 'bert', 'bart'])
def test_prefixes_and_text_encoders(family, tmp_path):
    case = quiet(families.build(family))
    plain = tunings.lower_layers(case).eval()
    first, second = copy.deepcopy(plain), copy.deepcopy(plain)
    batches = case.batches
    expected = train(plain, batches)
    train(attached(first, tmp_path), batches)
    first.speedup.remove()
    attached(second, tmp_path)
    found = train(second, batches)
    assert_close(expected, found)
    assert second.speedup.stats.misses == 0 < second.speedup.stats.hits
    second.speedup.remove()
