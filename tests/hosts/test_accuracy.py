"""What is learned on real data is the same: handwritten digits, through the real swift."""
from pathlib import Path

import accuracy
import pytest

HELD_OUT = 200


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    plugin = Path(__file__).with_name('always_reuse_plugin.py')
    return accuracy.compare(tmp_path_factory.mktemp('accuracy'), accuracy.SAMPLES, HELD_OUT, accuracy.EPOCHS, [plugin])


def test_digits_are_learned(results):
    assert results['stock'].accuracy > 0.5  # chance: 0.1


def test_the_plugin_changes_nothing(results):
    assert accuracy.same(results) == dict.fromkeys(('losses', 'evaluations', 'weights', 'answers', 'accuracy'), True)
    assert len(results['stock'].evaluations) >= accuracy.EVALUATIONS


def test_each_image_is_computed_once(results):
    hits, misses = results['speedup'].reuse
    lookups = accuracy.EPOCHS * accuracy.SAMPLES + accuracy.EVALUATIONS * HELD_OUT
    assert misses == accuracy.SAMPLES + HELD_OUT and hits == lookups - misses
