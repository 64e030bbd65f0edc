"""Ordinary options of ms-swift together with the plugin: the training is the stock one, and something is reused."""
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hosts import conftest
from safetensors.torch import load_file
from toys import swift_run

ANSWERS = conftest.PYTHON_DOOR.with_name('answers_plugin.py')
EVALUATED = ['--eval_strategy', 'steps', '--eval_steps', '2', '--per_device_eval_batch_size', '2']
FULL = [*conftest.FULL, *conftest.LAYERS]
OPTIONS = {
    'dora': ['--use_dora', 'true'],
    'rslora': ['--use_rslora', 'true', '--lora_dropout', '0'],
    'logits kept': ['--use_logits_to_keep', 'true'],
    'by length': ['--group_by_length', 'true', '--per_device_train_batch_size', '2'],
    'tokenized before': ['--lazy_tokenize', 'false', '--load_from_cache_file', 'false'],
    'workers': ['--dataloader_num_workers', '2', '--dataloader_persistent_workers', 'true'],
    'no accumulation': ['--gradient_accumulation_steps', '1', '--per_device_train_batch_size', '3'],
    'bf16': ['--bf16', 'true', '--torch_dtype', 'float32'],
    'bf16 weights': ['--bf16', 'true', '--torch_dtype', 'bfloat16'],
    'eager attention': ['--attn_impl', 'eager'],
    'evaluated': [*EVALUATED, '--load_best_model_at_end', 'true', '--save_steps', '2', '--metric_for_best_model', 'loss'],
    'evaluated by generation': [*EVALUATED, '--predict_with_generate', 'true', '--max_new_tokens', '4', '--eval_metric', 'answers',
                                '--metric_for_best_model', 'answers'],
    'stopped early': [*EVALUATED, '--save_steps', '2', '--early_stop_interval', '1', '--learning_rate', '10'],
    'full, evaluated': [*FULL, *EVALUATED, '--load_best_model_at_end', 'true', '--save_steps', '2'],
    'full, linked': [*FULL, *EVALUATED, '--create_checkpoint_symlink', 'true', '--save_steps', '2'],
    'full, noise': [*FULL, '--neftune_noise_alpha', '5'],
    'no checkpointing': [*FULL, '--gradient_checkpointing', 'false'],
    'padded on the left': [*FULL, '--sequence_parallel_size', '1', '--padding_side', 'left', '--per_device_train_batch_size', '2'],
    'truncated': ['--max_length', '40', '--truncation_strategy', 'right'],
    'adafactor': [*FULL, '--optim', 'adafactor', '--max_grad_norm', '0.1'],
}
MIXED = ('padded on the left',)  # batches are put together from hits and misses, or from hits of other batches
REFUSED = {  # flags -> word of the error
    'compiled': (['--torch_compile', 'true'], 'torch_compile'),
}


@pytest.fixture(scope='module')
def finished(inputs, server, tmp_path_factory):
    def start(case):
        name, door = case
        place = tmp_path_factory.mktemp('option')
        flags = OPTIONS[name] if name in OPTIONS else REFUSED[name][0]
        data = ['--split_dataset_ratio', '0', '--val_dataset', str(inputs / 'data.jsonl')] if EVALUATED[0] in flags else []
        command = swift_run.command(
            door, 'sft', '--model', str(inputs / 'model'), '--model_type', 'qwen2_vl', '--template', 'qwen2_vl', '--dataset',
            str(inputs / 'data.jsonl'), '--num_train_epochs', '2', '--learning_rate', '1e-2', '--gradient_accumulation_steps', '2',
            '--per_device_train_batch_size', '1', '--external_plugins', str(swift_run.RECORDER), str(ANSWERS),
            *([str(conftest.ALWAYS_REUSE)] if door == 'swift-speedup' else []), *swift_run.CPU_FLAGS, *flags, *data,
            '--output_dir', str(place / 'out'), *(['--frozen_prefix', 'on'] if door == 'swift-speedup' else []))
        variables = swift_run.environment(place / 'record.jsonl', OMP_NUM_THREADS='1')
        status = server.run(command, variables, place / 'log', timeout=300)
        return conftest.Job(status, (place / 'log').read_text(encoding='utf-8'), place)
    cases = [*((name, door) for name in OPTIONS for door in ('swift', 'swift-speedup')), *((name, 'swift-speedup') for name in REFUSED)]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(start, cases)))


def logged(job):
    """What the trainer has written down, in order; answers of evaluation by generation too."""
    names = ('loss', 'grad_norm', 'eval_loss', 'eval_token_acc')
    rows = [json.loads(line) for path in sorted(job.folder.glob('out/**/logging.jsonl')) for line in path.read_text().splitlines()]
    answers = [path.read_text() for path in sorted(job.folder.glob('out/**/predict.jsonl'))]
    return [[row[name] for name in names if name in row] for row in rows], answers


def close(rows, others):
    return all(row == pytest.approx(other, rel=1e-6) for row, other in zip(rows, others, strict=True))


@pytest.mark.parametrize('name', OPTIONS)
def test_the_training_is_the_stock_one(finished, name):
    stock, fast = finished[name, 'swift'], finished[name, 'swift-speedup']
    if name in MIXED:
        assert close(logged(fast)[0], logged(stock)[0])
    else:
        assert [row['loss'].hex() for row in fast.record] == [row['loss'].hex() for row in stock.record]
        assert logged(fast) == logged(stock)
    folders = [sorted(str(path.relative_to(job.folder)) for path in job.folder.glob('out/**/*') if 'runs' not in path.parts)
               for job in (stock, fast)]
    assert folders[0] == folders[1]
    for expected, found in zip(*(sorted(job.folder.glob('out/checkpoint-*/*.safetensors')) for job in (stock, fast)), strict=True):
        expected, found = load_file(expected), load_file(found)
        same = partial(torch.allclose, atol=1e-4) if name in MIXED else torch.equal
        assert found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    stats = fast.record[-1]['stats']
    assert stats['hits'] > 0 and stats['errors'] == 0, stats


@pytest.mark.parametrize('name', REFUSED)
def test_what_cannot_work_is_refused(finished, name):
    job = finished[name, 'swift-speedup']
    assert job.status != 0 and REFUSED[name][1] in job.log, job.log[-2000:]
