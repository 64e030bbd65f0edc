"""What was trained with the plugin is used without it: inference, merging, a second training. And configuration files."""
import json
import re

import pytest
from hosts import conftest
from safetensors.torch import load_file
from toys import swift_run

from swift_speedup.cli.main import plugin_path

WITHOUT = ['--external_plugins', str(conftest.PYTHON_DOOR.with_name('no_speedup_plugin.py'))]
COMMON = ['--torch_dtype', 'float32', '--attn_impl', 'sdpa']
TRAINING = ['--model_type', 'qwen2_vl', '--template', 'qwen2_vl', '--num_train_epochs', '1', '--learning_rate', '1e-2',
            '--gradient_accumulation_steps', '2', *swift_run.CPU_FLAGS]


@pytest.fixture(scope='module')
def run(inputs, server, tmp_path_factory):
    def start(name, *command):
        place = tmp_path_factory.mktemp(name)
        command = [str(place / word[6:]) if word.startswith('PLACE/') else word for word in command]
        variables = swift_run.environment(place / 'record.jsonl', OMP_NUM_THREADS='1')
        status = server.run(swift_run.command('swift', *command), variables, place / 'log', timeout=300)
        log = (place / 'log').read_text(encoding='utf-8')
        assert status == 0, log[-3000:]
        assert 'swift_speedup' not in re.sub(r'no_speedup_plugin|swift_speedup_recorder|\S*/swift[_-]speedup\S*', '', log)
        return place
    return start


def answers(place):
    return [json.loads(line)['response'] for line in (place / 'answers.jsonl').read_text(encoding='utf-8').splitlines()]


@pytest.fixture(scope='module')
def merged(jobs, run):
    """The adapters of the stock run and of the plugin's, merged."""
    return {name: run(f'merged-{name}', 'export', '--adapters', str(jobs[name].checkpoint), '--merge_lora', 'true', '--output_dir',
                      'PLACE/model', *COMMON, *WITHOUT) / 'model' for name in ('stock', 'command')}


def test_merging_gives_the_same_model(merged):
    stock, fast = (load_file(merged[name] / 'model.safetensors') for name in ('stock', 'command'))
    assert fast.keys() == stock.keys() and all(fast[key].equal(stock[key]) for key in stock)
    assert (merged['command'] / 'config.json').read_bytes() == (merged['stock'] / 'config.json').read_bytes()


def test_inference_gives_the_same_answers(jobs, merged, run, inputs):
    flags = ['--val_dataset', str(inputs / 'data.jsonl'), '--max_new_tokens', '4', '--result_path', 'PLACE/answers.jsonl',
             *COMMON, *WITHOUT]
    adapters = [answers(run(f'infer-{name}', 'infer', '--adapters', str(jobs[name].checkpoint), *flags))
                for name in ('stock', 'command')]
    whole = answers(run('infer-merged', 'infer', '--model', str(merged['command']), '--model_type', 'qwen2_vl', *flags))
    assert adapters[0] == adapters[1] and len(adapters[0]) == len(whole) == 6


def test_a_second_training_on_the_adapters_and_on_the_merged_model(jobs, merged, run, inputs):
    found = {}
    for name in ('stock', 'command'):
        for stage, flags in (('adapters', ['--model', str(inputs / 'model'), '--adapters', str(jobs[name].checkpoint)]),
                             ('merged', ['--model', str(merged[name])])):
            place = run(f'second-{name}-{stage}', 'sft', *flags, '--dataset', str(inputs / 'data.jsonl'), *TRAINING, '--output_dir',
                        'PLACE/out', *WITHOUT, str(swift_run.RECORDER))
            found[name, stage] = [row['loss'] for row in swift_run.read_record(place / 'record.jsonl')]
    for stage in ('adapters', 'merged'):
        assert found['command', stage] == found['stock', stage] and len(set(found['stock', stage])) > 2


@pytest.fixture(scope='module')
def configured(inputs, tmp_path_factory):
    """A training described by a file: flags, variables and the plugin's options; by the real launchers."""
    place = tmp_path_factory.mktemp('configured')
    lines = [f'model: {inputs / "model"}', 'model_type: qwen2_vl', 'template: qwen2_vl', f'dataset: {inputs / "data.jsonl"}',
             'num_train_epochs: 2', 'learning_rate: 1e-2', 'gradient_accumulation_steps: 2', 'use_cpu: true', 'torch_dtype: float32',
             'bf16: false', 'fp16: false', 'check_model: false', 'split_dataset_ratio: 0', 'report_to: none', 'attn_impl: sdpa',
             'dataloader_num_workers: 0', 'logging_steps: 1', 'add_version: false', 'save_only_model: true']
    finished = {}
    for name, door, more in (('yaml', 'swift-speedup', ['frozen_ram_gib: 1', 'frozen_prefix: "off"']),
                             ('ENV', 'swift', ['ENV:', '  SWIFT_SPEEDUP_RAM_GIB: 1',
                                               "model_kwargs: '{\"SWIFT_SPEEDUP_PREFIX\": \"off\"}'"])):
        folder = place / name
        folder.mkdir()
        plugins = [swift_run.RECORDER, *([plugin_path()] if door == 'swift' else [])]
        text = [*lines, *more, f'output_dir: {folder / "out"}', 'external_plugins:', *(f'  - {path}' for path in plugins)]
        (folder / 'run.yaml').write_text('\n'.join(text) + '\n', encoding='utf-8')
        status = swift_run.run(swift_run.command(door, 'sft', str(folder / 'run.yaml')),
                               swift_run.environment(folder / 'record.jsonl', OMP_NUM_THREADS='1'), folder / 'log', timeout=300)
        finished[name] = conftest.Job(status, (folder / 'log').read_text(encoding='utf-8'), folder)
    return finished


@pytest.mark.parametrize('name', ['yaml', 'ENV'])
def test_configuration_files(jobs, configured, name):
    assert [row['loss'] for row in configured[name].record] == [row['loss'] for row in jobs['stock'].record]
    assert configured[name].record[-1]['stats']['hits'] > 0
