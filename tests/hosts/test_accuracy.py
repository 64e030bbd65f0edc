"""What is learned on real data is the same: handwritten digits, through the real swift. The sizes are those of ``scripts/accuracy.py``."""
import accuracy
import pytest


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    return accuracy.compare(tmp_path_factory.mktemp('accuracy'), accuracy.SAMPLES, 200, accuracy.EPOCHS)


def test_digits_are_learned(results):
    assert results['stock'].accuracy > 0.5  # chance: 0.1


def test_the_plugin_changes_nothing(results):
    assert accuracy.same(results) == dict.fromkeys(('losses', 'evaluations', 'weights', 'answers', 'accuracy'), True)
    assert len(results['stock'].evaluations) > 1


def test_images_came_from_the_cache(results):
    hits, misses = results['speedup'].reuse
    assert misses <= accuracy.SAMPLES + 200 and hits > (accuracy.EPOCHS - 2) * accuracy.SAMPLES
