"""The patched ms-swift, by really training with it: ``--frozen_speedup true`` changes no loss, ``false`` changes nothing at all.

And the tests that the diffs have for upstream: each fails without its diff.
"""
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import overlays
import pytest
from hosts.conftest import Job
from hosts.test_patching import FIXES, RELEASES, copied
from hosts.test_versions import SAVE
from toys import photos, swift_run

from swift_speedup.cli.main import plugin_path
from swift_speedup.hosts import patching

FEATURE_TEST = 'test_frozen_speedup.py'
FIX_TESTS = {'test_disable_gradient_checkpointing.py', 'test_layer_trainability.py'}
COMMON = ['--model_type', 'qwen2_vl', '--template', 'qwen2_vl', '--num_train_epochs', '2', '--learning_rate', '1e-2',
          '--gradient_accumulation_steps', '2', *swift_run.CPU_FLAGS]


def environment(folder, release, record=None, scripts=False):
    paths = [folder, *([overlays.folder(release)] if release in overlays.PINS else [])]
    paths += [Path(overlays.__file__).parent] if scripts else []
    return swift_run.environment(record, OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(map(str, paths)))


@pytest.fixture(scope='session')
def sites(tmp_path_factory):
    """For each release a copy that was given the flag, and one with the fixes too."""
    made = {}
    for release in RELEASES:
        for name, patches in (('flag', [[]]), ('all', [[], *(['--fix', fix] for fix in FIXES)])):
            made[release, name] = folder = copied(release, tmp_path_factory.mktemp('site') / 'site')
            for flags in patches:
                done = subprocess.run(swift_run.command('swift-speedup', 'patch', *flags), env=environment(folder, release), text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
                assert done.returncode == 0 and 'applied' in done.stdout and str(folder) in done.stdout, done.stdout
    return made


@pytest.fixture(scope='session')
def runs(inputs, sites, tmp_path_factory):
    """All runs by name, two at a time."""
    preferences = [json.loads(line) for line in (inputs / 'data.jsonl').read_text(encoding='utf-8').splitlines()]
    (inputs / 'preferences.jsonl').write_text(
        '\n'.join(json.dumps(row | {'rejected_response': photos.texts()[0]}) for row in preferences) + '\n', encoding='utf-8')
    cache = tmp_path_factory.mktemp('caches')
    models = {release: tmp_path_factory.mktemp('model') for release in RELEASES[1:]}
    for release, model in models.items():
        variables = environment(sites[release, 'all'], release, scripts=True)
        subprocess.run([sys.executable, '-c', SAVE, str(model)], check=True, env=variables, capture_output=True)
    true = ['--frozen_speedup', 'true']
    speedup = [*true, '--frozen_ram_gib', '1']
    dpo = ['rlhf', '--rlhf_type', 'dpo']
    recorder = ['--external_plugins', str(swift_run.RECORDER)]
    planned = {  # name -> (release and copy, or None for the ms-swift that is installed), command and flags
        'true': (('4.6.0', 'flag'), ['swift', 'sft', *recorder, *true, '--frozen_cache_dir', str(cache / '4.6.0')]),
        'false': (('4.6.0', 'all'), ['swift', 'sft', *recorder, '--frozen_speedup', 'false']),
        'plugin': (('4.6.0', 'all'), ['swift', 'sft', *recorder, str(plugin_path()), *speedup]),
        'command': (('4.6.0', 'flag'), ['swift-speedup', 'sft', *recorder, '--frozen_ram_gib', '1']),
        'dpo stock': (None, ['swift', *dpo, *recorder]),
        'dpo true': (('4.6.0', 'all'), ['swift', *dpo, *recorder, *speedup]),
        'without the flag': (('4.6.0', 'flag'), ['swift', 'sft', *recorder, '--frozen_ram_gib', '1']),
        **{f'{release} {value}': ((release, 'all'), ['swift', 'sft', *recorder, '--frozen_speedup', value])
           for release in RELEASES[1:] for value in ('true', 'false')},
    }

    def run(name):
        folder = tmp_path_factory.mktemp('run')
        site, (door, command, *flags) = planned[name]
        model = inputs / 'model' if site is None else models.get(site[0], inputs / 'model')
        data = inputs / ('preferences.jsonl' if command == 'rlhf' else 'data.jsonl')
        arguments = swift_run.command(door, command, '--model', str(model), '--dataset', str(data), *COMMON, *flags,
                                      '--output_dir', str(folder / 'out'))
        record = folder / 'record.jsonl'
        variables = (swift_run.environment(record, OMP_NUM_THREADS='1') if site is None else environment(sites[site], site[0], record))
        status = swift_run.run(arguments, variables, folder / 'log', timeout=300)
        return Job(status, (folder / 'log').read_text(encoding='utf-8'), folder)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(planned, pool.map(run, planned)))


def losses(job):
    return [row['loss'].hex() for row in job.record]


def arguments_of(job):
    (path,) = job.folder.glob('out/args.json')
    return json.loads(path.read_text(encoding='utf-8'))


def ours(job):
    """Lines about the plugin; the recorder's name and what is said of arguments are none."""
    lines = job.log.replace(str(swift_run.RECORDER), '').splitlines()
    return [line for line in lines if re.search(r'swift_speedup(?!_recorder)\b', line)]


def count(job, words):
    return sum(words in line for line in ours(job))


def test_the_flag_changes_no_loss_and_each_image_is_computed_once(jobs, runs):
    assert losses(runs['true']) == losses(jobs['stock']) and len(losses(jobs['stock'])) == 12
    stats = runs['true'].record[-1]['stats']
    assert stats['misses'] == 5 and stats['hits'] == 16 - 5 and stats['bypassed'] == stats['errors'] == 0
    expected, found = ((job.checkpoint / 'adapter_model.safetensors').read_bytes() for job in (jobs['stock'], runs['true']))
    assert found == expected
    assert count(runs['true'], 'attached to') == count(runs['true'], 'reused 11 of 16') == 1


def test_flags_are_in_the_saved_arguments(runs):
    written = arguments_of(runs['true'])
    assert written['frozen_speedup'] is True and os.path.isdir(written['frozen_cache_dir'])
    assert written['frozen_ram_gib'] is None and '4.6.0' in os.listdir(os.path.dirname(written['frozen_cache_dir']))
    assert arguments_of(runs['command'])['frozen_ram_gib'] == '1' and arguments_of(runs['command'])['frozen_speedup'] is True


def test_switched_off_it_is_stock(jobs, runs):
    assert losses(runs['false']) == losses(jobs['stock']) and not ours(runs['false'])
    assert 'stats' not in runs['false'].record[-1]


@pytest.mark.parametrize('door', ['plugin', 'command'])
def test_the_other_doors_work_as_before(jobs, runs, door):
    assert losses(runs[door]) == losses(jobs['stock']) and runs[door].record[-1]['stats']['hits'] == 16 - 5
    assert count(runs[door], 'attached to') == count(runs[door], 'already has') == 1


def test_preference_training(runs):
    assert losses(runs['dpo true']) == losses(runs['dpo stock']) and len(losses(runs['dpo stock'])) == 12
    assert runs['dpo true'].record[-1]['stats']['hits'] > 0 and arguments_of(runs['dpo true'])['frozen_ram_gib'] == '1'


def test_options_without_the_flag_are_an_error(runs):
    assert runs['without the flag'].status != 0
    assert "['frozen_ram_gib'] only take effect with `--frozen_speedup true`" in runs['without the flag'].log


@pytest.mark.parametrize('release', RELEASES[1:])
def test_older_releases(runs, release):
    job, off = runs[f'{release} true'], runs[f'{release} false']
    assert losses(job) == losses(off) and len(losses(off)) == 12 and not ours(off)
    assert job.record[-1]['stats']['hits'] == 16 - 5 and arguments_of(job)['frozen_speedup'] is True


def upstream_tests(release, folder):
    """The new files of all diffs, written to ``folder``; their names."""
    for patch in patching.load(release).values():
        for part in patch.path.read_text(encoding='utf-8').split('diff --git ')[1:]:
            name = re.search(r'^\+\+\+ b/tests/train/(\S+)$', part, re.MULTILINE)
            if name:
                lines = part.partition('@@\n')[2].splitlines(keepends=True)
                (folder / name[1]).write_text(''.join(line[1:] for line in lines), encoding='utf-8')
    return {path.name for path in folder.iterdir()}


def failing(folder, variables):
    command = [sys.executable, '-m', 'pytest', '-q', '--tb=short', '-p', 'no:cacheprovider', '-p', 'no:xdist', '-rA', str(folder)]
    done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    passed, failed = (set(re.findall(rf'^{word} (\w+\.py)::(\S+)', done.stdout, re.MULTILINE)) for word in ('PASSED', 'FAILED'))
    assert passed and 'ERROR ' not in done.stdout, done.stdout[-4000:]
    return failed, done.stdout


@pytest.mark.parametrize('release', RELEASES)
def test_what_upstream_would_run_passes(sites, release, tmp_path):
    assert upstream_tests(release, tmp_path) == {FEATURE_TEST, *FIX_TESTS}
    failed, output = failing(tmp_path, environment(sites[release, 'all'], release))
    assert not failed, output[-4000:]


def test_what_upstream_would_run_fails_without_the_diffs(sites, tmp_path):
    upstream_tests('4.6.0', tmp_path)
    failed, _ = failing(tmp_path, environment(sites['4.6.0', 'flag'], '4.6.0'))  # the flag, no fixes
    assert {file for file, _ in failed} == FIX_TESTS
    assert {name for _, name in failed} >= {'test_the_vision_tower_stays_as_it_was', 'test_no_hooks_are_added',
                                            'test_layers_above_frozen_ones_get_gradients[True]'}
    for file in FIX_TESTS:
        (tmp_path / file).unlink()
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=swift_run.environment(), stdout=subprocess.PIPE, text=True, check=False)
    assert re.search(r'^6 failed', done.stdout, re.MULTILINE), done.stdout[-4000:]  # the installed ms-swift
