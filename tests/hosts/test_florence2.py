"""Florence-2 through the real ms-swift: training, evaluation by generation, resuming, inference; same losses and weights as stock."""
import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from toys import florence2, photos, swift_run

from swift_speedup.cli.main import plugin_path

REPORTER = Path(__file__).with_name('florence2_plugin.py')
ANSWERS = Path(__file__).with_name('answers_plugin.py')
FLAGS = ['--model_type', 'florence2_native', '--num_train_epochs', '2', '--learning_rate', '1e-2', '--save_steps', '3',
         *swift_run.CPU_FLAGS, '--save_only_model', 'false']
LORA = ['--gradient_accumulation_steps', '2', '--per_device_train_batch_size', '1']
FULL = ['--tuner_type', 'full', '--freeze_vit', 'true', '--freeze_aligner', 'true', '--learning_rate', '1e-3',
        '--gradient_accumulation_steps', '1', '--per_device_train_batch_size', '2', '--predict_with_generate', 'true',
        '--eval_strategy', 'steps', '--eval_steps', '2', '--per_device_eval_batch_size', '3', '--max_new_tokens', '8',
        '--eval_metric', 'answers', '--metric_for_best_model', 'answers']
INFER = ['--max_new_tokens', '8', '--max_batch_size', '2', '--torch_dtype', 'float32', '--attn_impl', 'sdpa']
IMAGES = (1, 1, 0, 2, 1, 1)  # of each sample
STEPS = 6
# Drop path has a rate in six places of the toy, all but the two of the first block. A batch of one without an image does not enter it.
DRAWS_OF_A_CALL = 6
LORA_CALLS = 2 * sum(count > 0 for count in IMAGES)


class Job:
    """One finished run."""

    def __init__(self, folder: Path, status: int):
        self.folder, self.status, self.log = folder, status, (folder / 'log').read_text(encoding='utf-8')

    def checked(self) -> 'Job':
        assert self.status == 0, self.log[-4000:]
        return self

    @property
    def record(self) -> list[dict]:
        return swift_run.read_record(self.checked().folder / 'record.jsonl')

    @property
    def losses(self) -> list[str]:
        return [row['loss'].hex() for row in self.record]

    @property
    def facts(self) -> dict:
        return json.loads((self.checked().folder / 'facts.json').read_text(encoding='utf-8'))

    @property
    def tower(self) -> dict:
        (segment,) = [segment for segment in self.facts['plan']['segments'] if 'vision_tower' in segment['path']]
        return segment

    def checkpoint(self, step: int = STEPS) -> Path:
        return self.checked().folder / 'out' / f'checkpoint-{step}'

    def answers(self, step: int = STEPS) -> list[dict]:
        path = self.checked().folder / 'answers.jsonl'
        return lines(path if path.exists() else self.checkpoint(step) / 'predict.jsonl')


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


@pytest.fixture(scope='session')
def florence(tmp_path_factory):
    """Folder with ``model`` and ``data.jsonl``."""
    folder = tmp_path_factory.mktemp('florence')
    florence2.save(folder / 'model', photos.texts())
    photos.write_photos(folder, count=sum(IMAGES), side=60)
    images = iter(sorted((folder / 'images').glob('*.png')))
    rows = [{'messages': [{'role': 'user', 'content': f'<image>What is number {number}?' if number % 2 else '<CAPTION>'},
                          {'role': 'assistant', 'content': f'It is number {number}.' + ' Really.' * (number % 3)}],
             'images': [str(next(images)) for _ in range(count)]} for number, count in enumerate(IMAGES)]
    (folder / 'data.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n', encoding='utf-8')
    return folder


@pytest.fixture(scope='session')
def runs(florence, server, tmp_path_factory):
    """All runs by name, two at a time; those of the second round need the first's checkpoints."""
    folder = tmp_path_factory.mktemp('florence_runs')
    data = str(florence / 'data.jsonl')
    plugins = ['--external_plugins', str(swift_run.RECORDER), str(REPORTER), str(ANSWERS)]
    stock, fast = ('swift', {'FLORENCE2_REGISTER': '1'}), ('swift-speedup', {})

    def train(arm, *flags):
        door, variables = arm
        return door, 'sft', ['--model', str(florence / 'model'), '--dataset', data, '--val_dataset', data, *FLAGS, *flags,
                             *plugins], variables

    def infer(*flags):  # what a checkpoint needs: its model type is in its args.json
        return 'swift', 'infer', ['--val_dataset', data, '--external_plugins', str(plugin_path()), *INFER, *flags], {}

    def resumed(name):
        return '--resume_from_checkpoint', str(folder / name / 'out' / 'checkpoint-3')

    rounds = [{
        'lora stock': train(stock, *LORA), 'lora': train(fast, *LORA, '--frozen_cache', 'ram'),
        'full stock': train(stock, *FULL), 'full': train(fast, *FULL, '--frozen_cache', 'ram'),
        'eval': train(fast, *LORA, '--frozen_eval', 'true'),
    }, {
        'lora resumed': train(fast, *LORA, *resumed('lora')),
        'full resumed stock': train(stock, *FULL, *resumed('full stock')), 'full resumed': train(fast, *FULL, *resumed('full')),
        'infer adapters': infer('--adapters', str(folder / 'lora' / 'out' / f'checkpoint-{STEPS}')),
        'infer full': infer('--model', str(folder / 'full' / 'out' / f'checkpoint-{STEPS}')),
    }]

    def start(item):
        name, (door, command, flags, variables) = item
        place = folder / name
        place.mkdir()
        where = ['--output_dir', str(place / 'out')] if command == 'sft' else ['--result_path', str(place / 'answers.jsonl')]
        environment = swift_run.environment(
            place / 'record.jsonl', OMP_NUM_THREADS='1', FLORENCE2_FACTS=str(place / 'facts.json'), **variables)
        status = server.run(swift_run.command(door, command, *flags, *where), environment, place / 'log', timeout=300)
        return Job(place, status)

    finished = {}
    with ThreadPoolExecutor(2) as pool:
        for planned in rounds:
            finished |= dict(zip(planned, pool.map(start, planned.items())))
    return finished


def assert_same_weights(expected: Path, found: Path):
    tensors, others = load_file(expected), load_file(found)
    assert others.keys() == tensors.keys() and all(others[name].equal(tensors[name]) for name in tensors)
    return tensors


def test_lora_trains_as_stock_does(runs):
    assert runs['lora'].losses == runs['lora stock'].losses and len(runs['lora'].losses) == 2 * STEPS
    adapters = assert_same_weights(*(runs[name].checkpoint() / 'adapter_model.safetensors' for name in ('lora stock', 'lora')))
    assert not any('vision_tower' in name or 'multi_modal_projector' in name for name in adapters)
    assert all(float(tensor.abs().max()) > 0 for name, tensor in adapters.items() if 'lora_B' in name)


def test_full_tuning_trains_as_stock_does_and_leaves_the_frozen_parts_alone(runs, florence):
    assert runs['full'].losses == runs['full stock'].losses and len(runs['full'].losses) == STEPS
    expected, found = runs['full stock'].checkpoint(), runs['full'].checkpoint()
    trained = assert_same_weights(expected / 'model.safetensors', found / 'model.safetensors')
    before = load_file(florence / 'model' / 'model.safetensors')
    assert trained.keys() == before.keys()
    same = {name for name in before if trained[name].equal(before[name])}
    frozen = {name for name in before if name.startswith(('model.vision_tower.', 'model.multi_modal_projector.'))}
    assert frozen and same == frozen
    for name in ('config.json', 'generation_config.json'):
        assert (found / name).read_bytes() == (expected / name).read_bytes()
    for name in ('num_beams', 'early_stopping', 'forced_bos_token_id'):  # not what ms-swift generated with meanwhile
        generation = json.loads((found / 'generation_config.json').read_text())
        assert generation[name] == json.loads((florence / 'model' / 'generation_config.json').read_text())[name]


def test_answers_generated_during_training_are_text_and_those_of_stock(runs):
    for step in (3, STEPS):
        answers = runs['full'].answers(step)
        assert [answer['response'] for answer in answers] == [answer['response'] for answer in runs['full stock'].answers(step)]
    assert runs['full'].log.count("'eval_answers': '6'") == runs['full'].log.count("'eval_texts': '6'") == 3
    for answer in answers:
        assert answer['response'].strip() and '<s>' not in answer['response'] and '</s>' not in answer['response']


@pytest.mark.parametrize(('resumed', 'whole', 'weights'), [
    ('lora resumed', 'lora', 'adapter_model.safetensors'), ('full resumed', 'full', 'model.safetensors'),
    ('full resumed stock', 'full stock', 'model.safetensors')])
def test_a_resumed_run_ends_as_the_uninterrupted_one(runs, resumed, whole, weights):
    losses = runs[resumed].losses
    assert losses == runs[whole].losses[-len(losses):] and len(losses) == len(runs[whole].losses) // 2
    assert_same_weights(runs[whole].checkpoint() / weights, runs[resumed].checkpoint() / weights)


@pytest.mark.parametrize('name', ['infer adapters', 'infer full'])
def test_a_checkpoint_answers(runs, name):
    answers = runs[name].answers()
    assert len(answers) == len(IMAGES) and all(answer['response'].strip() for answer in answers)
    assert not any(mark in answer['response'] for answer in answers for mark in ('<s>', '</s>', '<pad>', '{'))
    if name == 'infer full':  # the evaluation after the last step had the same weights; ms-swift appends to its file
        during = runs['full'].answers()[-len(IMAGES):]
        assert [answer['response'] for answer in answers] == [answer['response'] for answer in during]


@pytest.mark.parametrize(('name', 'calls'), [('lora', LORA_CALLS), ('full', None)])
def test_drop_path_keeps_the_tower_out_of_the_cache(runs, name, calls):
    assert runs[name].tower['graph_skipped'] and not runs[name].tower['cached']
    assert 'drop path p=' in runs[name].tower['reason'] and 'eval=true' in runs[name].tower['reason']
    assert 'drop path' in runs[name].facts['report'].replace('\n', ' ') or 'drop' in runs[name].facts['report']
    assert runs[name].facts['draws'] == runs[f'{name} stock'].facts['draws'] > 0  # evaluated at every step, as in stock
    if calls:
        assert runs[name].facts['draws'] == DRAWS_OF_A_CALL * calls
    stats = runs[name].record[-1]['stats']
    assert stats['errors'] == 0


def test_frozen_eval_reuses_the_tower_and_says_that_this_changes_training(runs):
    job = runs['eval']
    assert 'eval=true' in job.log and 'changes training' in job.log
    assert job.tower['graph_skipped'] and job.tower['cached'] and job.tower['reason'] is None
    assert job.facts['draws'] == 0
    first, last = job.record[STEPS - 1]['stats'], job.record[-1]['stats']
    assert first['misses'] == last['misses'] > 0 and last['frozen_calls'] == first['frozen_calls']
    assert last['hits'] - first['hits'] == 2 * sum(IMAGES)  # every image of the evaluation in between and of the second epoch
    assert job.losses != runs['lora stock'].losses


def test_ms_swifts_own_type_is_found_as_before():
    from swift.model.model_meta import MODEL_MAPPING, get_matched_model_meta, get_matched_model_types

    from swift_speedup.hosts.florence2 import MODEL_TYPE, register
    assert register()
    registered = MODEL_MAPPING[MODEL_TYPE]
    register.__wrapped__()
    assert MODEL_MAPPING[MODEL_TYPE] is registered
    assert get_matched_model_types(['Florence2ForConditionalGeneration']) == ['florence']
    assert get_matched_model_meta('microsoft/Florence-2-base').model_type == 'florence'


def test_another_ms_swift_gets_one_line_and_the_rest_of_the_plugin():
    script = f'''
import runpy, swift.model
from swift.trainers.mixin import SwiftMixin
del swift.model.register_model_arch
before = SwiftMixin._prepare_gradient_checkpointing
for _ in range(2):
    runpy.run_path({str(plugin_path())!r})
assert SwiftMixin._prepare_gradient_checkpointing is not before
assert 'florence2_native' not in swift.model.MODEL_MAPPING
'''
    done = subprocess.run([sys.executable, '-c', script], env=swift_run.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if 'florence2_native' in line]
    assert 'ms-swift 4.6' in line and 'register_model_arch' in line


@pytest.fixture(scope='module')
def host(florence):
    """Model and template, as ms-swift makes them."""
    from swift.model import get_model_processor
    from swift.template import get_template

    from swift_speedup.hosts.florence2 import register
    assert register()
    model, processor = get_model_processor(
        str(florence / 'model'), model_type='florence2_native', torch_dtype=torch.float32, device_map='cpu')
    return model.eval(), get_template(processor, max_length=120)


def encoded(template, florence, query, answer='It is a cat.', mode='train'):
    template.set_mode(mode)
    image = str(florence / 'images' / '00.png')
    messages = [{'role': 'user', 'content': query}, {'role': 'assistant', 'content': answer}]
    return template.encode({'messages': messages, 'images': [image]}), Image.open(image)


@pytest.mark.parametrize(('query', 'task'), [
    ('<image>What is it?', 'What is it?'), ('<image><OD>', '<OD>'), ('<CAPTION>', '<CAPTION>')])
def test_the_encoder_reads_what_the_native_processor_makes(host, florence, query, task):
    model, template = host
    row, image = encoded(template, florence, query)
    native = template.processor(text=task, images=image, return_tensors='pt')
    assert row['input_ids'] == native['input_ids'][0].tolist() and torch.equal(row['pixel_values'], native['pixel_values'])
    tokenizer = template.tokenizer
    assert row['labels'] == tokenizer('<s>It is a cat.</s>', add_special_tokens=False)['input_ids']


@pytest.mark.parametrize('strategy', ['left', 'right'])
def test_a_long_prompt_is_shortened_beside_its_image(host, florence, strategy):
    model, template = host
    template = copy.copy(template)
    template.truncation_strategy = strategy
    row, _ = encoded(template, florence, 'What ' * 200, 'Yes ' * 200)
    assert len(row['input_ids']) == len(row['labels']) == 120
    assert row['input_ids'].count(template.processor.image_token_id) == florence2.IMAGE_TOKENS
    assert row['labels'][0] == template.tokenizer.bos_token_id


@pytest.mark.parametrize('answers', [['It is a cat.'], ['It is a cat.', 'No.']])
def test_the_loss_is_the_mean_over_all_labels(host, florence, answers):
    """ms-swift shortens labels as for a decoder-only model (``logits_to_keep``); that is undone, and the first label counts."""
    from swift.trainers.mixin import SwiftMixin
    model, template = host
    batch = template.data_collator([encoded(template, florence, 'What is it?', answer)[0] for answer in answers])
    batch['labels'][:, 2] = -100
    labels = batch['labels'].clone()
    inputs = dict(batch)
    trainer = SimpleNamespace(template=SimpleNamespace(sequence_parallel_size=1), args=SimpleNamespace(tuner_backend='peft'))
    SwiftMixin.prepare_logits_to_keep(trainer, inputs)
    with torch.no_grad():
        logits = model(**{**batch, 'labels': labels}).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')
        outputs = template.compute_sft_loss(model, inputs, num_items_in_batch=torch.tensor(20))
    assert torch.equal(inputs['labels'], labels)
    torch.testing.assert_close(outputs.loss, expected / 20)


def test_losses_outside_of_the_model_are_refused(host, florence):
    model, template = host
    batch = template.data_collator([encoded(template, florence, 'What is it?')[0]])
    del batch['labels']
    with pytest.raises(ValueError, match='florence2_native.*labels'):
        template.compute_sft_loss(model, batch)


def test_answers_with_places_become_json(host, florence):
    model, template = host
    template.set_mode('transformers')
    ids = template.tokenizer('</s><s>cat<loc_1><loc_2><loc_3><loc_4></s>', add_special_tokens=False)['input_ids']
    said = {'pure_text': {}, 'description_with_bboxes': {'PATTERN': r'([a-zA-Z0-9 ]+)<loc_(\d+)><loc_(\d+)><loc_(\d+)><loc_(\d+)>'}}
    template.processor.post_processor.parse_task_config = said
    inputs = template.encode({'messages': [{'role': 'user', 'content': '<image><OD>'}], 'images': [Image.new('RGB', (1000, 1000))]},
                             return_template_inputs=True)['template_inputs']
    answer = json.loads(template.decode_generate_ids(ids, template_inputs=inputs))
    assert answer == {'<OD>': {'bboxes': [[1, 2, 3, 4]], 'labels': ['cat']}}
    inputs.query = 'What is it?'
    assert template.decode_generate_ids(ids, template_inputs=inputs) == 'cat<loc_1><loc_2><loc_3><loc_4>'
