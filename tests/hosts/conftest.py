"""A tiny Qwen2-VL checkpoint and dataset, and the real ``swift`` commands run on them in processes of their own."""
import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image
from toys import models, photos, preloaded, swift_run

from swift_speedup.cli.main import plugin_path

# Flags that freeze or train something unusual, or add noise: training must stay the same. With LISA another part is frozen after
# each optimizer step.
FULL = ['--tuner_type', 'full']
LAYERS = ['--freeze_parameters', 'model.language_model.embed_tokens', 'model.language_model.layers.0', '--freeze_llm', 'false']
FREEZING = {
    'ratio 0.3': [*FULL, '--freeze_parameters_ratio', '0.3'],
    'ratio 0.5': [*FULL, '--freeze_parameters_ratio', '0.5'],
    'ratio 0.52': [*FULL, '--freeze_parameters_ratio', '0.52'],  # ends inside the first layer
    'ratio 0.75': [*FULL, '--freeze_parameters_ratio', '0.75'],  # ends inside the second
    'prefix': [*FULL, *LAYERS[:2], 'model.language_model.layers.1', *LAYERS[3:]],
    'regex': [*FULL, '--freeze_parameters_regex', r'embed_tokens|layers\.[01]\.', '--trainable_parameters', 'model.visual.merger'],
    'lisa': [*FULL, '--lisa_activated_layers', '1', '--lisa_step_interval', '1'],
    'merger trained': [*FULL, '--freeze_llm', 'true', '--freeze_aligner', 'false'],
    'tower trained': [*FULL, '--freeze_llm', 'true', '--freeze_vit', 'false', '--vit_lr', '1e-3', '--aligner_lr', '1e-3'],
    'no reentrant, no tower checkpointing': [*FULL, *LAYERS, '--gradient_checkpointing_kwargs', '{"use_reentrant": false}',
                                             '--vit_gradient_checkpointing', 'false'],
    'noise': [*FULL, *LAYERS, '--neftune_noise_alpha', '5'],
    'upper layers': ['--target_regex', r'.*language_model\.layers\.2\..*_proj'],
    'adapters in the tower': ['--target_modules', 'q_proj', 'fc1'],
    'embedding saved': ['--target_regex', r'.*language_model\.layers\.2\..*_proj', '--modules_to_save', 'all-embedding'],
}
# Only planned: what the flags did is said, what they will gain is predicted.
PLANNED = {
    'default': [],
    'ratio': [*FULL, '--freeze_parameters_ratio', '0.75'],
    'prefix': [*FULL, *LAYERS],
    'no such name': [*FULL, '--freeze_parameters', 'visual.'],
    'full only': ['--freeze_parameters_ratio', '0.5'],
    'adapters in the tower': ['--target_modules', 'q_proj', 'fc1'],
    'embedding saved': FREEZING['embedding saved'],
    'merger trained': FREEZING['merger trained'],
}
DOORS = ('stock', 'plugin', 'command', 'python')
ALWAYS_REUSE = Path(__file__).with_name('always_reuse_plugin.py')
PYTHON_DOOR = Path(__file__).with_name('python_door.py')


@dataclasses.dataclass
class Job:
    """One finished run."""

    status: int
    log: str
    folder: Path

    @property
    def record(self) -> list[dict]:
        assert self.status == 0, self.log[-4000:]
        return swift_run.read_record(self.folder / 'record.jsonl')

    @property
    def plan(self) -> dict:
        assert self.status == 0, self.log[-4000:]
        return json.loads((self.folder / 'plan.json').read_text(encoding='utf-8'))

    @property
    def checkpoint(self) -> Path:
        assert self.status == 0, self.log[-4000:]
        return max(self.folder.glob('out/**/checkpoint-*'), key=lambda path: int(path.name.split('-')[1]))


@pytest.fixture(scope='session')
def inputs(tmp_path_factory):
    """Folder with ``model``, ``data.jsonl`` (1 image, 2 images, none, a repeated image) and inputs that are wrong."""
    folder = tmp_path_factory.mktemp('inputs')
    models.save(models.build('qwen2_vl'), 'qwen2_vl', folder / 'model', photos.texts())
    models.save(models.build('qwen2_vl', 'wide'), 'qwen2_vl', folder / 'wide', photos.texts())
    photos.write_photos(folder, count=4, side=84)
    images = sorted((folder / 'images').glob('*.png'))
    Image.open(images[1]).resize((56, 112)).save(images[1])  # a second grid
    shutil.copy(images[0], folder / 'images' / 'copy.png')  # other path, same content
    rows = [[images[0]], [images[1], images[2]], [], [images[3]], [folder / 'images' / 'copy.png'], [images[2], images[3]]]
    write_dataset(folder / 'data.jsonl', rows)
    write_dataset(folder / 'missing.jsonl', [[folder / 'images' / 'nowhere.png']] * 2)
    (folder / 'not_a_model').mkdir()
    return folder


def write_dataset(path: Path, rows) -> None:
    lines = [{'messages': [{'role': 'user', 'content': '<image>' * len(images) + f'What is number {number}?'},
                           {'role': 'assistant', 'content': f'It is number {number}.'}], 'images': [str(image) for image in images]}
             for number, images in enumerate(rows)]
    path.write_text('\n'.join(json.dumps(line) for line in lines) + '\n', encoding='utf-8')


@pytest.fixture(scope='session')
def server():
    """Runs ``swift`` commands without their slow start."""
    started = preloaded.Server(swift_run.environment(OMP_NUM_THREADS='1'))
    yield started
    started.close()


@pytest.fixture(scope='session')
def jobs(inputs, server, tmp_path_factory):
    """All runs by name, two at a time; those of the doors are processes of their own."""
    usual = ['--model', str(inputs / 'model'), '--dataset', str(inputs / 'data.jsonl')]
    recorder, plugin = str(swift_run.RECORDER), str(plugin_path())
    full = ['--tuner_type', 'full', '--save_only_model', 'true']
    planned = {
        'stock': (['swift', *usual, '--external_plugins', recorder], {}),
        'plugin': (['swift', *usual, '--external_plugins', recorder, plugin], {'SWIFT_SPEEDUP_RAM_GIB': '1'}),
        'command': (['swift-speedup', *usual, '--external_plugins', recorder, '--frozen_ram_gib', '1'], {}),
        'python': (['python', *usual, '--external_plugins', recorder], {}),
        'full-stock': (['swift', *usual, *full, '--external_plugins', recorder], {}),
        'full-command': (['swift-speedup', *usual, *full, '--external_plugins', recorder, '--frozen_cache', 'ram'], {}),
        **{f'{name}-{arm}': ([door, '--model', str(inputs / 'wide'), *usual[2:], *flags, '--external_plugins', recorder], {})
           for name, flags in FREEZING.items() for arm, door in (('stock', 'swift'), ('command', 'swift-speedup'))},
        **{f'plan {name}': (['plan', '--model', str(inputs / 'wide'), *usual[2:], *flags], {}) for name, flags in PLANNED.items()},
        'not-a-model': (['swift-speedup', '--model', str(inputs / 'not_a_model'), *usual[2:], '--frozen_cache', 'ram'], {}),
        'missing-image': (['swift-speedup', *usual[:2], '--dataset', str(inputs / 'missing.jsonl'), '--strict', 'true'], {}),
        'bad-environment': (['swift', *usual, '--external_plugins', plugin], {'SWIFT_SPEEDUP_RAM_GIB': 'lots'}),
        'bad-model-kwargs': (['swift', *usual, '--external_plugins', plugin, '--model_kwargs', '{"SWIFT_SPEEDUP_CACHE": "redis"}'], {}),
        'bad-flag': (['swift-speedup', *usual, '--frozen_ram_gib', 'lots'], {}),
    }

    def start(name):
        folder = tmp_path_factory.mktemp(name)
        (door, *flags), variables = planned[name]
        flags = ['--model_type', 'qwen2_vl', '--template', 'qwen2_vl', '--num_train_epochs', '2', '--learning_rate', '1e-2',
                 '--gradient_accumulation_steps', '2', '--output_dir', str(folder / 'out'), *swift_run.CPU_FLAGS, *flags]
        if door == 'plan':
            planning = ['--plan_json', str(folder / 'plan.json'), '--plan_batches', '2']
            arguments = swift_run.command('swift-speedup', 'plan', 'sft', *flags, *planning)
        else:
            arguments = swift_run.command(door, str(PYTHON_DOOR) if door == 'python' else 'sft', *flags)
        run = swift_run.run if name in DOORS else server.run
        status = run(arguments, swift_run.environment(folder / 'record.jsonl', OMP_NUM_THREADS='1', **variables),
                               folder / 'log', timeout=300)
        return Job(status, (folder / 'log').read_text(encoding='utf-8'), folder)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(planned, pool.map(start, planned)))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    for item in items:  # they share the finished runs
        if item.path.parent == PYTHON_DOOR.parent:
            item.add_marker(pytest.mark.xdist_group('hosts'))
