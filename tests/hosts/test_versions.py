"""Each older ms-swift release really trains: an overlay of it in front of this environment, stock against plugin, same values."""
import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import overlays
import pytest
from hosts.conftest import Job
from safetensors.torch import load_file
from toys import preloaded, swift_run

from swift_speedup.cli.main import plugin_path

# By the release's own transformers: what one saves, another cannot always read.
SAVE = f'''
import pathlib, sys
sys.path.append({str(Path(overlays.__file__).parent)!r})
from toys import models, photos
models.save(models.build('qwen2_vl'), 'qwen2_vl', pathlib.Path(sys.argv[1]), photos.texts())
'''
LAYERS = ['--freeze_llm', 'false', '--freeze_parameters',
          *(f'model.language_model.{name}' for name in ('embed_tokens', 'layers.0', 'layers.1'))]
LORA, FULL = ['lora'], ['full', *LAYERS]
RUNS = {  # name -> console command and its word, how to tune, plugins beside the recorder
    'full-command': ('swift-speedup', 'sft', FULL, []),
    'full-stock': ('swift', 'sft', FULL, []),
    'lora-stock': ('swift', 'sft', LORA, []),
    'lora-plugin': ('swift', 'sft', LORA, [str(plugin_path())]),
    'pt': ('swift-speedup', 'pt', LORA, []),
    'dpo': ('swift-speedup', 'rlhf', LORA, []),
}
BY_LAUNCHER = 'full-command'  # starts as a user's does; the others are forks of one process, in seconds
PAIRS = [('lora-stock', 'lora-plugin'), ('full-stock', 'full-command')]
STEPS = 12  # two epochs of six rows
# What differs most between releases of transformers: who collects layers' outputs, and what layers are told about padding.
PARITY = ['pytest', '-n0', '-q', '-p', 'no:cacheprovider', str(Path(__file__).parent.parent / 'parity' / 'test_prefix.py'),
          '-k', 'whoever_asks_for_insides or found_again and right-left']


@pytest.fixture(scope='module', params=overlays.RELEASES)
def runs(request, inputs, tmp_path_factory):
    """The runs of one release by name, two at a time, on the dataset that all tests here use."""
    release = request.param
    overlay = overlays.folder(release)
    folder = tmp_path_factory.mktemp(f'swift-{release}')
    (folder / 'save.py').write_text(SAVE, encoding='utf-8')
    rows = (inputs / 'data.jsonl').read_text(encoding='utf-8').splitlines()
    rows = [json.dumps(json.loads(row) | {'rejected_response': 'No.'}) for row in rows]
    (folder / 'data.jsonl').write_text('\n'.join(rows) + '\n', encoding='utf-8')

    def variables(*record):
        return swift_run.environment(*record, PYTHONPATH=str(overlay), OMP_NUM_THREADS='1')

    with contextlib.closing(preloaded.Server(variables())) as server, ThreadPoolExecutor(2) as pool:
        def run(name):
            if name == 'parity':
                status = server.run(swift_run.command(*PARITY), variables(), folder / 'parity', timeout=300)
                return Job(status, (folder / 'parity').read_text(encoding='utf-8'), folder)
            door, word, tuning, plugins = RUNS[name]
            place = folder / name
            place.mkdir()
            command = swift_run.command(
                door, word, '--model', str(folder / 'model'), '--model_type', 'qwen2_vl', '--template', 'qwen2_vl',
                '--dataset', str(folder / 'data.jsonl'), '--num_train_epochs', '2', '--gradient_accumulation_steps', '2',
                '--learning_rate', '1e-2', '--output_dir', str(place / 'out'), *swift_run.CPU_FLAGS,
                '--train_type' if (overlay / 'swift' / 'llm').is_dir() else '--tuner_type', *tuning,
                *(['--rlhf_type', 'dpo'] if word == 'rlhf' else []), '--external_plugins', str(swift_run.RECORDER), *plugins)
            start = swift_run.run if name == BY_LAUNCHER else server.run
            status = start(command, variables(place / 'record.jsonl'), place / 'log', timeout=300)
            return Job(status, (place / 'log').read_text(encoding='utf-8'), place)

        status = server.run([str(folder / 'save.py'), str(folder / 'model')], variables(), folder / 'log', timeout=300)
        assert status == 0, (folder / 'log').read_text(encoding='utf-8')[-4000:]
        names = [*RUNS, 'parity']
        finished = dict(zip(names, pool.map(run, names)))
    for name in sum(PAIRS, ()):  # a run of the installed release would prove nothing
        assert str(overlay / 'swift') in finished[name].log, finished[name].log[-4000:]
    return finished


def losses(job):
    return [row['loss'].hex() for row in job.record]


def weights(job):
    (file,) = job.checkpoint.glob('*model.safetensors')
    return load_file(file)


def attached(job):
    return [line for line in job.log.splitlines() if 'swift_speedup]' in line and 'attached to' in line]


@pytest.mark.parametrize(('stock', 'sped_up'), PAIRS)
def test_same_losses_and_bitwise_equal_weights(runs, stock, sped_up):
    assert losses(runs[sped_up]) == losses(runs[stock]) and len(losses(runs[stock])) == STEPS
    expected, found = weights(runs[stock]), weights(runs[sped_up])
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize(('name', 'samples', 'per_epoch'), [
    # 4 different pictures (one also as a copy under another name), and ms-swift's black picture for the text-only sample
    ('lora-plugin', 5, 8),
    # the same, and the token sequences of 6 rows up to the first trained layer
    ('full-command', 5 + 6, 8 + 6)])
def test_each_sample_is_computed_once(runs, name, samples, per_epoch):
    first, last = (runs[name].record[row]['stats'] for row in (STEPS // 2 - 1, -1))
    assert first['misses'] == last['misses'] == samples and last['hits'] == 2 * per_epoch - samples > 0
    assert last['frozen_calls'] == first['frozen_calls'] and last['bypassed'] == last['errors'] == 0


@pytest.mark.parametrize(('stock', 'sped_up'), PAIRS)
def test_one_line_tells_what_is_attached(runs, stock, sped_up):
    (line,) = attached(runs[sped_up])
    assert 'model.visual (tower' in line and 'outputs reused' in line
    assert not attached(runs[stock]) and 'stats' not in runs[stock].record[-1]


@pytest.mark.parametrize('name', ['pt', 'dpo'])
def test_the_other_commands_train_with_it(runs, name):
    stats = runs[name].record[-1]['stats']
    assert len(runs[name].record) == STEPS and len(attached(runs[name])) == 1
    assert stats['misses'] >= 5 and stats['hits'] > stats['misses'] and stats['bypassed'] == stats['errors'] == 0


def test_parity_with_the_releases_transformers(runs):
    job = runs['parity']
    assert job.status == 0 and re.search(r'\b1\d passed', job.log), job.log[-4000:]
