"""``--frozen_cache_dir`` through the real swift: what one run has computed, the next ones find.

Whatever their batches and learning rates.
"""
import json
import re

import pytest
from PIL import Image
from toys import swift_run

from swift_speedup.cli.main import main

COMMON = ['--model_type', 'qwen2_vl', '--template', 'qwen2_vl', '--num_train_epochs', '2', '--gradient_accumulation_steps', '2',
          '--external_plugins', str(swift_run.RECORDER), *swift_run.CPU_FLAGS]
RUNS = {  # name -> flags of its own
    'first': ['--per_device_train_batch_size', '1', '--learning_rate', '1e-2'],
    'again': ['--per_device_train_batch_size', '1', '--learning_rate', '1e-2'],
    'other': ['--per_device_train_batch_size', '2', '--learning_rate', '1e-3', '--frozen_ram_gib', '0.1'],
}


@pytest.fixture(scope='module')
def runs(inputs, server, tmp_path_factory):
    """The runs in their order, with the same folder; and one that cannot use it, because it is a file."""
    folder = tmp_path_factory.mktemp('folder')
    (folder / 'file').write_text('mine')
    finished = {}
    for name, flags in {**RUNS, 'unusable': RUNS['first']}.items():
        place = folder / name
        place.mkdir()
        cache = folder / ('file' if name == 'unusable' else 'cache')
        command = swift_run.command(
            'swift-speedup', 'sft', '--model', str(inputs / 'model'), '--dataset', str(inputs / 'data.jsonl'), *COMMON, *flags,
            '--output_dir', str(place / 'out'), '--frozen_cache_dir', str(cache))
        status = server.run(command, swift_run.environment(place / 'record.jsonl', OMP_NUM_THREADS='1'), place / 'log', timeout=300)
        log = (place / 'log').read_text(encoding='utf-8')
        assert status == 0, log[-4000:]
        logged = [json.loads(line) for path in place.glob('out/**/logging.jsonl') for line in path.read_text().splitlines()]
        finished[name] = swift_run.read_record(place / 'record.jsonl'), log, logged
    return folder / 'cache', finished


def test_the_next_run_finds_everything(runs):
    _, finished = runs
    first, again, other = (finished[name][0][-1]['stats'] for name in RUNS)
    assert first['misses'] > 0
    assert again['misses'] == again['frozen_calls'] == again['checks'] == 0 < again['hits']
    assert other['misses'] == other['frozen_calls'] == 0 < other['hits']
    assert [row['loss'] for row in finished['again'][0]] == [row['loss'] for row in finished['first'][0]]


def test_numbers_are_in_the_log_and_the_size_is_foretold(runs):
    _, finished = runs
    _, log, logged = finished['again']
    assert [row['speedup_hit_rate'] for row in logged if 'speedup_hit_rate' in row][-1] == 1.0
    assert {'speedup_stored_gib', 'speedup_saved_seconds', 'speedup_queue_drops'} <= set(logged[0])
    assert 'per sample are kept: about' in finished['first'][1] and 'GiB at most' in finished['first'][1]


def test_a_folder_that_cannot_be_used_costs_nothing(runs):
    folder, finished = runs
    record, log, _ = finished['unusable']
    assert [row['loss'] for row in record] == [row['loss'] for row in finished['first'][0]]
    assert 'outputs are kept in memory only' in log and record[-1]['stats']['hits'] > 0
    assert (folder.parent / 'file').read_text() == 'mine'


def test_the_command_describes_what_training_left(runs, capsys):
    folder, finished = runs
    assert main(['cache', 'stats', str(folder), '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    (group,) = found['groups']
    assert any('visual' in name for name in group['segments']) and group['foreign'] == [] and found['damaged'] == 0
    assert main(['cache', 'verify', str(folder), '--json']) == 0


@pytest.fixture(scope='module')
def precomputed(inputs, tmp_path_factory):
    """``precompute`` twice, the second time by two ranks, then training; each one's log, and the training's record."""
    folder = tmp_path_factory.mktemp('precomputed')
    flags = ['--model', str(inputs / 'model'), '--dataset', str(inputs / 'data.jsonl'), *COMMON, *RUNS['first'],
             '--output_dir', str(folder / 'out'), '--frozen_cache_dir', str(folder / 'cache')]
    logs = {}
    for name, command, more in (('first', ('precompute',), {}), ('second', ('precompute', 'sft'), {'NPROC_PER_NODE': '2'}),
                                ('training', ('sft',), {})):
        variables = swift_run.environment(folder / 'record.jsonl', OMP_NUM_THREADS='1') | more
        status = swift_run.run(swift_run.command('swift-speedup', *command, *flags), variables, folder / name, timeout=300)
        logs[name] = (folder / name).read_text(encoding='utf-8')
        assert status == 0, logs[name][-4000:]
    return logs, swift_run.read_record(folder / 'record.jsonl'), inputs


def test_precompute_fills_the_folder_and_training_finds_everything(precomputed, runs):
    logs, record, _ = precomputed
    first = re.search(r'(\d+) samples computed, (\d+) were there; 0 lost, 0 troubles', logs['first'])
    assert int(first.group(1)) > 0 and 'computing frozen parts' in logs['first']
    stats = record[-1]['stats']
    assert stats['misses'] == stats['frozen_calls'] == stats['checks'] == 0 < stats['hits']
    assert [row['loss'] for row in record] == [row['loss'] for row in runs[1]['first'][0]]  # nothing was trained before


def test_precompute_again_by_two_ranks_computes_nothing(precomputed):
    logs, _, _ = precomputed
    of = re.compile(r'(\d+) samples computed, (\d+) were there; 0 lost, 0 troubles')
    (first,), (second,) = of.findall(logs['first']), of.findall(logs['second'])  # one rank speaks for all
    assert int(second[0]) == 0 and int(second[1]) >= sum(map(int, first))


def why(folder, inputs, image, place, *flags):
    command = swift_run.command(
        'swift-speedup', 'cache', 'why', str(folder), '--image', str(image), '--json', '--model', str(inputs / 'model'),
        *COMMON, *flags)
    variables = swift_run.environment(place / 'unused', OMP_NUM_THREADS='1')
    status = swift_run.run(command, variables, place / 'log', timeout=300)
    log = (place / 'log').read_text(encoding='utf-8')
    assert status == 0, log[-4000:]
    return json.loads(log[log.rindex('\n[\n'):])


def test_why_tells_what_is_different(runs, inputs, tmp_path):
    folder, _ = runs
    images = sorted((inputs / 'images').glob('*.png'))
    assert why(folder, inputs, images[0], tmp_path) == [{'segment': 'base_model.model.model.visual', 'found': True}]
    Image.open(images[0]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / 'other.png')
    (other,) = why(folder, inputs, tmp_path / 'other.png', tmp_path)
    assert not other['found'] and not other['inputs'] and other['weights'] and other['modules'] and other['settings']
    (full,) = why(folder, inputs, images[0], tmp_path, '--torch_dtype', 'bfloat16')
    assert not full['found'] and not full['weights']
