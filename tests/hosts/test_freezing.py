"""Every flag of ms-swift that freezes, by really running it: the same training; and what ``swift-speedup plan`` says about it."""
import pytest
from hosts.conftest import FREEZING
from safetensors.torch import load_file


def weights(job):
    (file,) = [path for path in job.checkpoint.glob('*model.safetensors')]
    return load_file(file)


@pytest.mark.parametrize('name', FREEZING)
def test_the_same_losses_and_bitwise_equal_weights(jobs, name):
    stock, fast = jobs[f'{name}-stock'], jobs[f'{name}-command']
    assert [row['loss'].hex() for row in fast.record] == [row['loss'].hex() for row in stock.record]
    expected, found = weights(stock), weights(fast)
    assert found.keys() == expected.keys() and all(found[key].equal(expected[key]) for key in expected)
    assert 'FrontierError' not in fast.log and fast.record[-1]['stats']['errors'] == 0


def segments(job):
    return {(segment['kind'], segment['path'].removeprefix('base_model.model.')): segment
            for segment in job.plan['plan']['segments'] if segment['graph_skipped']}


def said(job):
    return ' '.join(job.plan['plan']['remarks'] + job.plan['notes'])


TOWER = ('tower', 'model.visual')


def test_the_default_run_caches_the_tower_and_has_no_prefix(jobs):
    job = jobs['plan default']
    assert list(segments(job)) == [TOWER] and segments(job)[TOWER]['cached']
    assert 'layers.0 holds adapters' in said(job)
    prediction = job.plan['prediction']
    assert prediction['gain_of_skipping'] == 1.0  # ms-swift 4.6 has the tower out of the graph itself
    share = next(iter(prediction['shares'].values()))
    assert 0 < share < 1 and prediction['gain_when_warm'] == pytest.approx(1 / (1 - share))
    assert 'ceiling 1/(1-f)' in job.log and 'GFLOP' in job.log


def test_a_ratio_ends_where_it_ends(jobs):
    job = jobs['plan ratio']
    assert set(segments(job)) >= {TOWER, ('prefix', 'model.language_model.layers.0')}
    assert 'layers.1 is frozen in part' in said(job)
    assert 'freeze_parameters_ratio=0.75 counts weights in the order of registration' in said(job)
    assert job.plan['prediction']['gain_of_skipping'] > 1


def test_a_prefix_and_its_gain(jobs):
    job = jobs['plan prefix']
    assert ('prefix', 'model.language_model.layers.0') in segments(job) and job.plan['prediction']['gain_of_skipping'] > 1


@pytest.mark.parametrize(('name', 'words'), [
    ('no such name', 'freeze_parameters visual. matches no parameter: names begin with model.visual'),
    ('full only', 'freeze_parameters_ratio=0.5 has no effect'),
    ('adapters in the tower', 'freeze_vit is true, but target_modules or target_regex put adapters into base_model.model.model.visual'),
    ('embedding saved', 'is trainable, so gradients pass through every frozen layer above it'),
])
def test_flags_that_do_something_else_than_they_seem_to_are_named(jobs, name, words):
    assert words in said(jobs[f'plan {name}'])


def test_a_trained_merger_leaves_a_partial_tower(jobs):
    job = jobs['plan merger trained']
    assert list(segments(job)) == [('partial tower', 'model.visual: patch_embed + blocks.0-1')]
    assert job.plan['plan']['kept'] and job.plan['prediction']['gain_of_skipping'] > 1


def test_planning_trains_nothing_and_leaves_nothing(jobs):
    assert not (jobs['plan default'].folder / 'out').exists()
    assert 'train_loss' not in jobs['plan default'].log


def test_counters_agree_with_the_plan(jobs):
    assert jobs['merger trained-command'].record[-1]['stats']['hits'] > 0
    assert jobs['upper layers-command'].record[-1]['stats']['hits'] > 0
