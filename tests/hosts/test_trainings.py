"""Trainings of ms-swift through each door, with a vision-language and a text model: losses and checkpoints of the stock run; resumed
in the middle, the same end. And what of them is computed how often."""
import contextlib
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from hosts import conftest
from hosts.test_patching import copied
from safetensors.torch import load_file
from toys import models, photos, preloaded, swift_run

from swift_speedup.cli.main import plugin_path

REWARD = conftest.PYTHON_DOOR.with_name('reward_plugin.py')
COUNTER = conftest.PYTHON_DOOR.with_name('tower_counter_plugin.py')
IMAGES = ((0,), (1, 2), (), (3,), (0,), (2, 3))
DISTINCT = 5  # the four and ms-swift's black picture for the row without one
STEPS = 6
FROZEN = {
    'qwen2_vl': ['--freeze_parameters', 'model.language_model.embed_tokens', 'model.language_model.layers.0.', '--freeze_llm', 'false'],
    'qwen2': ['--freeze_parameters', 'model.embed_tokens', 'model.layers.0.', 'model.layers.1.'],
}
UPPER = ['--target_regex', r'.*layers\.[23]\..*_proj']  # else the text model has no frozen part
GENERATING = ['--reward_funcs', 'toy', '--num_generations', '2', '--per_device_train_batch_size', '2', '--max_completion_length', '8',
              '--beta', '0.04', '--steps_per_generation', '2']
TRAININGS = {  # name -> kind of the dataset, full tuning, flags
    'sft': ('sft', False, []),
    'sft full': ('sft', True, []),
    'dpo': ('dpo', False, []),
    'dpo full': ('dpo', True, []),  # with a reference model of its own
    'kto': ('kto', False, []),
    'grpo': ('grpo', False, GENERATING),
}
MORE = {  # once, by the command, on the text model
    **{name: (name, False, []) for name in ('orpo', 'cpo', 'simpo', 'rm')},
    'pt': ('pt', True, []),
    'streaming': ('sft', True, ['--streaming', 'true', '--max_steps', str(STEPS)]),  # with images ms-swift 4.6 itself fails on it
    'grpo full': ('grpo', True, GENERATING),
    'gkd': ('gkd', True, ['--max_completion_length', '8']),
}
MODELS = ('qwen2_vl', 'qwen2')
DOORS = ('plugin', 'command', 'patched')


@pytest.fixture(scope='module')
def folder(inputs, tmp_path_factory):
    """Checkpoints and datasets."""
    place = tmp_path_factory.mktemp('trainings')
    shutil.copytree(inputs / 'model', place / 'qwen2_vl')
    models.save(models.build('qwen2'), 'qwen2', place / 'qwen2', photos.texts())
    pictures = sorted(path for path in (inputs / 'images').glob('*.png') if path.name != 'copy.png')
    for kind in {kind for kind, *_ in (TRAININGS | MORE).values()}:
        for model in MODELS:
            rows = [row_of(kind, number, [str(pictures[image]) for image in images] if model == 'qwen2_vl' else [])
                    for number, images in enumerate(IMAGES)]
            (place / f'{kind}-{model}.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n', encoding='utf-8')
    return place


def row_of(kind, number, images):
    question = {'role': 'user', 'content': '<image>' * len(images) + f'What is number {number}?'}
    answer = {'role': 'assistant', 'content': f'It is number {number}.'}
    row = {'messages': [question] if kind in ('grpo', 'gkd') else [answer] if kind == 'pt' else [question, answer]}
    if kind in ('dpo', 'rm', 'orpo', 'cpo', 'simpo'):
        row['rejected_response'] = f'No, {number + 1} of them.'
    return row | ({'label': bool(number % 2)} if kind == 'kto' else {}) | ({'images': images} if images else {})


@pytest.fixture(scope='module')
def patched(tmp_path_factory):
    """Runs commands with a copy of ms-swift that has the flag."""
    site = copied('4.6.0', tmp_path_factory.mktemp('site') / 'site')
    variables = swift_run.environment(OMP_NUM_THREADS='1', PYTHONPATH=str(site))
    subprocess.run(swift_run.command('swift-speedup', 'patch'), env=variables, check=True, stdout=subprocess.DEVNULL)
    with contextlib.closing(preloaded.Server(variables)) as started:
        yield started


@pytest.fixture(scope='module')
def run(folder, server, patched, tmp_path_factory):
    """``run(training, model, door, *flags)`` -> the finished job."""
    def start(training, model, door, *more):
        kind, full, flags = (TRAININGS | MORE)[training]
        place = tmp_path_factory.mktemp(f'{training} {model} {door}'.replace(' ', '-'))
        plugins = [swift_run.RECORDER, COUNTER, REWARD, *([plugin_path()] if door == 'plugin' else [])]
        plugins += [conftest.ALWAYS_REUSE] if door != 'stock' else []
        command = [
            'swift-speedup' if door == 'command' else 'swift', kind if kind in ('sft', 'pt') else 'rlhf',
            *([] if kind in ('sft', 'pt') else ['--rlhf_type', kind]), '--model', str(folder / model), '--model_type', model,
            '--template', 'qwen2_vl' if model == 'qwen2_vl' else 'chatml', '--dataset', str(folder / f'{kind}-{model}.jsonl'),
            '--num_train_epochs', '2', '--per_device_train_batch_size', '1', '--gradient_accumulation_steps', '2',
            '--learning_rate', '1e-3' if full else '1e-2', '--save_steps', str(STEPS // 2), *swift_run.CPU_FLAGS,
            '--save_only_model', 'false', '--external_plugins', *map(str, plugins), '--output_dir', str(place / 'out'),
            *(['--tuner_type', 'full', *FROZEN[model]] if full else UPPER if model == 'qwen2' else []),
            *(['--teacher_model', str(folder / model), '--teacher_model_type', model] if kind == 'gkd' else []), *flags, *more]
        variables = {'SWIFT_SPEEDUP_PREFIX': 'on'} if door == 'plugin' else {}
        command += ['--frozen_prefix', 'on'] if door in ('command', 'patched') else []
        command += ['--frozen_speedup', 'true'] if door == 'patched' else []
        variables = swift_run.environment(place / 'record.jsonl', OMP_NUM_THREADS='1', TOWER_COUNTS=str(place / 'towers'), **variables)
        status = (patched if door == 'patched' else server).run(swift_run.command(*command), variables, place / 'log', timeout=300)
        return conftest.Job(status, (place / 'log').read_text(encoding='utf-8'), place)
    return start


@pytest.fixture(scope='module')
def finished(run, folder):
    """Every training by name, model and door; ``resumed`` goes on from the middle."""
    cases = [(training, model, door) for training in TRAININGS for model in MODELS for door in ('stock', *DOORS)]
    cases += [(training, 'qwen2', door) for training in MORE for door in ('stock', 'command')]
    with ThreadPoolExecutor(2) as pool:
        jobs = dict(zip(cases, pool.map(lambda case: run(*case), cases)))
        halves = [(training, model, door) for training in TRAININGS for model in MODELS for door in ('stock', 'command')]
        resumed = pool.map(lambda half: run(*half, *resuming(half, jobs, folder)), halves)
        jobs |= {(training, model, f'{door} resumed'): job for (training, model, door), job in zip(halves, resumed)}
    return jobs


def resuming(half, jobs, folder):
    """ms-swift loads the weights of a full vision-language checkpoint from ``--model`` only."""
    training, model, _ = half
    middle = jobs[half].checkpoint.with_name(f'checkpoint-{STEPS // 2}')
    flags = ['--resume_from_checkpoint', str(middle)]
    if TRAININGS[training][1]:
        flags += ['--model', str(middle)]
    return flags + (['--ref_model', str(folder / model), '--ref_model_type', model] if training == 'dpo full' else [])


def losses(job):
    return [row['loss'].hex() for row in job.record]


def same_weights(one, other):
    files = [{path.name: path for path in job.checkpoint.glob('*.safetensors')} for job in (one, other)]
    assert files[0] and files[0].keys() == files[1].keys()
    for name in files[0]:
        expected, found = (load_file(each[name]) for each in files)
        assert found.keys() == expected.keys() and all(found[key].equal(expected[key]) for key in expected), name


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('training', TRAININGS)
def test_losses_and_checkpoints_of_the_stock_run(finished, training, model, door):
    stock, fast = finished[training, model, 'stock'], finished[training, model, door]
    assert losses(fast) == losses(stock) and len(set(losses(stock))) > 2
    same_weights(stock, fast)
    stats = fast.record[-1]['stats']
    assert stats['hits'] > 0 and stats['errors'] == 0 and 'attached to' in fast.log


@pytest.mark.parametrize('training', MORE)
def test_other_trainings(finished, training):
    stock, fast = finished[training, 'qwen2', 'stock'], finished[training, 'qwen2', 'command']
    assert losses(fast) == losses(stock) and len(set(losses(stock))) > 2
    same_weights(stock, fast)
    assert fast.record[-1]['stats']['errors'] == 0


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('training', TRAININGS)
def test_resumed_in_the_middle_it_ends_as_the_uninterrupted_run(finished, training, model):
    whole, stock, resumed = (finished[training, model, name] for name in ('stock', 'stock resumed', 'command resumed'))
    assert losses(resumed) == losses(stock) and 0 < len(losses(resumed)) < len(losses(whole))
    same_weights(stock, resumed)
    if training != 'grpo':  # what it generates after a resume is other text, without the plugin too
        assert losses(resumed) == losses(whole)[-len(losses(resumed)):]
        same_weights(whole, resumed)


@pytest.mark.parametrize('training', TRAININGS)
def test_the_tower_runs_once_for_each_distinct_image(finished, training):
    """Counted where the tower really runs: rows of its input, compared by their bytes."""
    counts, stock = ([json.loads(line) for line in (finished[training, 'qwen2_vl', door].folder / 'towers').read_text().splitlines()]
                     for door in ('command', 'stock'))
    computed = [image for call in counts if not call['check'] for image in call['images']]
    # The first batch runs as it comes: nothing is proved yet. Chosen and rejected answers have the same image there.
    again = len(counts[0]['images']) - len(set(counts[0]['images']))
    assert len(set(computed)) == len(computed) - again == DISTINCT, f'{len(computed)} were computed, {len(set(computed))} are distinct'
    assert sum(len(call['images']) for call in stock) >= 2 * sum(max(1, len(images)) for images in IMAGES)
