"""Each older ms-swift release really trains: an overlay of it in front of this environment, stock against plugin, same values."""
import contextlib
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
RUNS = {  # name -> console command, how to tune, plugins beside the recorder
    'lora-stock': ('swift', LORA, []),
    'lora-plugin': ('swift', LORA, [str(plugin_path())]),
    'full-stock': ('swift', FULL, []),
    'full-command': ('swift-speedup', FULL, []),
}
FORKED = ('lora-stock', 'lora-plugin', 'full-stock')  # the other one starts as a user's does, by ms-swift's launcher
PAIRS = [('lora-stock', 'lora-plugin'), ('full-stock', 'full-command')]
STEPS = 12  # two epochs of six rows


@pytest.fixture(scope='module', params=overlays.RELEASES)
def runs(request, inputs, tmp_path_factory):
    """The runs of one release by name, two at a time, on the dataset that all tests here use."""
    release = request.param
    overlay = overlays.folder(release)
    folder = tmp_path_factory.mktemp(f'swift-{release}')
    (folder / 'save.py').write_text(SAVE, encoding='utf-8')

    def variables(*record):
        return swift_run.environment(*record, PYTHONPATH=str(overlay), OMP_NUM_THREADS='1')

    with contextlib.closing(preloaded.Server(variables())) as server, ThreadPoolExecutor(2) as pool:
        def run(name):
            door, tuning, plugins = RUNS[name]
            place = folder / name
            place.mkdir()
            command = swift_run.command(
                door, 'sft', '--model', str(folder / 'model'), '--model_type', 'qwen2_vl', '--template', 'qwen2_vl',
                '--dataset', str(inputs / 'data.jsonl'), '--num_train_epochs', '2', '--gradient_accumulation_steps', '2',
                '--learning_rate', '1e-2', '--output_dir', str(place / 'out'), *swift_run.CPU_FLAGS,
                '--train_type' if (overlay / 'swift' / 'llm').is_dir() else '--tuner_type', *tuning,
                '--external_plugins', str(swift_run.RECORDER), *plugins)
            started = server.run if name in FORKED else swift_run.run
            status = started(command, variables(place / 'record.jsonl'), place / 'log', timeout=300)
            return Job(status, (place / 'log').read_text(encoding='utf-8'), place)

        status = server.run([str(folder / 'save.py'), str(folder / 'model')], variables(), folder / 'log', timeout=300)
        assert status == 0, (folder / 'log').read_text(encoding='utf-8')[-4000:]
        finished = dict(zip(RUNS, pool.map(run, RUNS)))
    for job in finished.values():  # a run of the installed release would prove nothing
        assert str(overlay / 'swift') in job.log, job.log[-4000:]
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
