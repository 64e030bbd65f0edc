"""The three doors, by really running ms-swift: same losses, same weights, checkpoints that need no plugin; clear errors."""
import json
import subprocess
import sys

import pytest
from hosts import conftest
from safetensors.torch import load_file

DOORS = conftest.DOORS[1:]


def losses(job):
    return [row['loss'].hex() for row in job.record]


@pytest.mark.parametrize('door', DOORS)
def test_same_losses_and_bitwise_equal_adapters(jobs, door):
    assert losses(jobs[door]) == losses(jobs['stock']) and len(losses(jobs['stock'])) == 12
    expected, found = (load_file(jobs[name].checkpoint / 'adapter_model.safetensors') for name in ('stock', door))
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
    assert any(float(tensor.abs().max()) > 0 for name, tensor in found.items() if 'lora_B' in name)


@pytest.mark.parametrize('door', DOORS)
def test_each_image_is_computed_once(jobs, door):
    first, last = jobs[door].record[5]['stats'], jobs[door].record[-1]['stats']
    # 4 different pictures (one also as a copy under another name), and ms-swift's black picture for the text-only sample
    assert first['misses'] == 5 and last['misses'] == 5
    assert last['hits'] == 16 - 5 and last['frozen_calls'] == first['frozen_calls'] and last['bypassed'] == last['errors'] == 0


@pytest.mark.parametrize('door', DOORS)
def test_one_line_at_attach_and_one_at_the_end(jobs, door):
    lines = [line for line in jobs[door].log.splitlines() if 'swift_speedup' in line and ('attached to' in line or 'samples (' in line)]
    assert len(lines) == 2 - (door == 'python'), lines  # the Python door has no trainer to log at the end of
    assert 'visual' in lines[0] and 'reused' in lines[0]
    assert 'swift_speedup' not in jobs['stock'].log.replace('swift_speedup_recorder', '')


def test_full_tuning_saves_the_plain_models_checkpoint(jobs):
    assert losses(jobs['full-command']) == losses(jobs['full-stock'])
    expected, found = jobs['full-stock'].checkpoint, jobs['full-command'].checkpoint
    assert json.loads((found / 'config.json').read_text())['architectures'] == ['Qwen2VLForConditionalGeneration']
    assert (found / 'config.json').read_bytes() == (expected / 'config.json').read_bytes()
    assert (found / 'model.safetensors').read_bytes() == (expected / 'model.safetensors').read_bytes()
    assert jobs['full-command'].record[-1]['stats']['hits'] > 0


def test_checkpoints_load_where_the_plugin_is_not_installed(jobs, inputs):
    script = f'''
import sys
sys.modules['swift_speedup'] = None  # importing it raises
import transformers, peft
base = transformers.Qwen2VLForConditionalGeneration.from_pretrained({str(inputs / "model")!r})
peft.PeftModel.from_pretrained(base, {str(jobs["command"].checkpoint)!r})
transformers.Qwen2VLForConditionalGeneration.from_pretrained({str(jobs["full-command"].checkpoint)!r})
'''
    subprocess.run([sys.executable, '-c', script], check=True)


@pytest.mark.parametrize(('name', 'words'), [
    ('not-a-model', ('not_a_model',)),
    ('missing-image', ('_load_image', 'Error: ')),  # which error depends on whether the path can be read as base64
    ('bad-environment', ('SWIFT_SPEEDUP_RAM_GIB', "'lots'", 'positive number')),
    ('bad-model-kwargs', ('SWIFT_SPEEDUP_CACHE', "'redis'", 'auto, off, ram or disk')),
    ('bad-flag', ('--frozen_ram_gib', "'lots'", 'positive number'))])
def test_bad_input_ends_the_run_with_a_clear_error(jobs, name, words):
    job = jobs[name]
    assert job.status != 0
    assert all(word in job.log for word in words), job.log[-3000:]
    if name in ('not-a-model', 'missing-image'):  # the host's own error, and nothing of ours on the way
        assert 'swift_speedup/memo' not in job.log and 'ConfigError' not in job.log
    if name == 'bad-flag':
        assert 'Traceback' not in job.log
