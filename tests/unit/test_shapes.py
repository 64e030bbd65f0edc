"""What outputs look like before they are computed, and what may stay out of a key."""
import pytest
import torch
from unit.test_memo import GRID, PATCHES, Rig

from swift_speedup import ShapeError

REAL = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)


def test_a_mask_decides_how_many_rows_a_sample_leaves():
    def masked(pixels, mask):
        return pixels[mask] * 2
    rig, pixels = Rig(function=masked), torch.rand(4, 4, 3)
    for pick in ([0, 1], [1, 0], [2, 3], [3, 2], [0, 1]):
        found = rig.evaluate(pixels[pick], REAL[pick])
        assert torch.equal(found, masked(pixels[pick], REAL[pick]))
    assert rig.stats.hits == 6 and rig.stats.errors == 0


def test_a_shape_that_was_not_expected_raises_instead_of_passing_on_silently():
    def bright(pixels):  # the numbers decide, which no signature tells
        return pixels[pixels.amax(1) > 0.5]
    rig = Rig(function=bright)
    low, high = torch.full((2, 3), 0.1), torch.ones(2, 3)
    for scale in (1.0, 0.9, 0.8):
        assert rig.evaluate(high * scale).shape == (2, 3)
    with pytest.raises(ShapeError, match=r'tower: an output is torch.float32 \(0, 3\).*\(2, 3\) was expected.*cache=off'):
        rig.evaluate(low)


def ignoring(patches, grid_thw, **more):
    return patches * 2


def listening(patches, grid_thw, **more):
    return patches * 2 + more['token_type_ids'].sum()


@pytest.mark.parametrize(('function', 'hits'), [(ignoring, 3), (listening, 0)])
def test_types_of_text_tokens_are_no_part_of_an_images_key_unless_the_tower_reads_them(function, hits):
    rig = Rig(function=function)
    for types in ([[0, 1]], [[1, 1]], [[0, 1, 1]]):
        found = rig.evaluate(PATCHES, grid_thw=GRID, token_type_ids=torch.tensor(types))
        assert torch.equal(found, function(PATCHES, GRID, token_type_ids=torch.tensor(types)))
    assert (rig.stats.hits > 0) == (hits > 0) and rig.stats.errors == 0


def test_a_sample_is_checked_again_beside_a_larger_one_than_before():
    def padded(frames, feature_lens):  # what a sample comes out as depends on the largest of its batch
        return frames * feature_lens.max()
    rig = Rig(function=padded)
    small, large = (PATCHES[:4], torch.tensor([4])), (PATCHES[4:12], torch.tensor([8]))
    both = torch.cat([small[0], large[0]]), torch.tensor([4, 8])
    for batch in (small, large, small, both, both, small, large):
        assert torch.equal(rig.evaluate(batch[0], feature_lens=batch[1]), padded(*batch))
    assert rig.step.whole and 'differs from its rows' in rig.step.note and rig.stats.errors == 0


def test_calls_in_inference_mode_are_looked_up_too():
    rig = Rig()
    with torch.inference_mode():
        for _ in range(2):
            found = rig.packed(PATCHES.clone())
            assert torch.equal(found['features'], PATCHES * 2)
    assert torch.equal(rig.packed()['features'].requires_grad_() + 1, PATCHES * 2 + 1)
    assert rig.stats.hits == 6 and rig.stats.errors == 0


def test_writes_into_arguments_are_seen_in_inference_mode_too():
    def writing(patches, grid_thw):
        return patches.mul_(2)
    rig = Rig(function=writing)
    with torch.inference_mode():
        rig.packed(PATCHES.clone())
    assert rig.purity.refusal(b'mode') == 'it writes into its arguments'
