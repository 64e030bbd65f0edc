"""Florence-2 in the layout of its remote code: the tower is entered by ``forward_features_unpool``, and what makes tokens of its
features lies on the top model: positions, a temporal embedding, a bare projection matrix, a norm."""
import pytest
import torch
from parity.harness import assert_close, assert_same, counted, train, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from swift_speedup import MyModel

CHANNELS, WIDTH = 8, 12


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, hidden):
        if not self.training or not self.drop_prob:
            return hidden
        kept = torch.rand(hidden.shape[0], 1, 1, 1) >= self.drop_prob
        return hidden * kept / (1 - self.drop_prob)


class Stage(nn.Module):
    """Halves the sides of a picture; returns what the next one takes."""

    def __init__(self, channels, drop_prob):
        super().__init__()
        self.conv = nn.Conv2d(channels, CHANNELS, 3, stride=2, padding=1)
        self.mix = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.drop_path = DropPath(drop_prob)

    def forward(self, hidden, size):
        hidden = self.conv(hidden)
        return hidden + self.drop_path(self.mix(hidden).tanh()), (size[0] // 2, size[1] // 2)


class DaViT(nn.Module):
    """Two ways in; checkpoints its stages by hand. ``transposed``: its features keep the memory layout of a convolution's output."""

    def __init__(self, drop_prob, transposed):
        super().__init__()
        self.enable_checkpoint = True
        self.transposed = transposed
        self.blocks = nn.ModuleList([Stage(3, drop_prob), Stage(CHANNELS, drop_prob)])
        self.norms = nn.LayerNorm(CHANNELS)
        self.avgpool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Identity()

    def forward_features_unpool(self, pixel_values):
        hidden, size = pixel_values, tuple(pixel_values.shape[-2:])
        for block in self.blocks:
            hidden, size = (checkpoint(block, hidden, size, use_reentrant=True) if self.enable_checkpoint else block(hidden, size))
        hidden = hidden.flatten(2).transpose(1, 2)
        return hidden if self.transposed else hidden.contiguous()

    def forward(self, pixel_values):
        hidden = self.norms(self.forward_features_unpool(pixel_values))
        return self.head(self.avgpool(hidden.transpose(1, 2)).flatten(1))


class PositionEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.row_embeddings = nn.Embedding(8, CHANNELS // 2)
        self.column_embeddings = nn.Embedding(8, CHANNELS // 2)

    def forward(self, features):
        height, width = features.shape[1:3]
        rows = self.row_embeddings(torch.arange(height))[:, None].expand(-1, width, -1)
        columns = self.column_embeddings(torch.arange(width))[None].expand(height, -1, -1)
        return torch.cat([columns, rows], -1).expand(len(features), -1, -1, -1)


class TemporalEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('table', torch.randn(4, CHANNELS))

    def forward(self, frames):
        return self.table[:frames.shape[1]]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        return hidden + self.dropout(self.proj(hidden).tanh())


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def get_input_embeddings(self):
        return self.shared

    def forward(self, inputs_embeds):
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return inputs_embeds


class LegacyFlorence(nn.Module):
    """ms-swift's template encodes the image in a hook before the top model's forward, and merges it in front of the text."""

    def __init__(self, drop_prob, transposed):
        super().__init__()
        self.vision_tower = DaViT(drop_prob, transposed)
        self.image_projection = nn.Parameter(torch.randn(CHANNELS, WIDTH) / 3)
        self.image_proj_norm = nn.LayerNorm(WIDTH)
        self.image_pos_embed = PositionEmbedding()
        self.visual_temporal_embed = TemporalEmbedding()
        self.language_model = Language()
        self.register_forward_pre_hook(self._post_encode, with_kwargs=True)

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def _encode_image(self, pixel_values):
        count = len(pixel_values)
        hidden = self.vision_tower.forward_features_unpool(pixel_values)
        side = int(hidden.shape[1] ** 0.5)
        hidden = hidden.view(count, side, side, -1)
        hidden = (hidden + self.image_pos_embed(hidden)).view(count, 1, side * side, -1)
        hidden = hidden + self.visual_temporal_embed(hidden[:, :, 0]).view(1, 1, 1, -1)
        tokens = torch.cat([hidden.mean(2), hidden.mean(1)], 1)
        return self.image_proj_norm(tokens @ self.image_projection)

    @staticmethod
    def _post_encode(self, args, kwargs):
        text = self.get_input_embeddings()(kwargs['input_ids'])
        if kwargs.get('pixel_values') is not None:
            text = torch.cat([self._encode_image(kwargs['pixel_values']), text], 1)
        return args, {'inputs_embeds': text}

    def forward(self, inputs_embeds):
        return type('Output', (), {'loss': self.language_model(inputs_embeds).square().mean()})


def trained_twins(frozen, drop_prob=0.0, transposed=False):
    torch.manual_seed(0)
    model = LegacyFlorence(drop_prob, transposed).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return twins(model)


PICTURES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def batches(*pairs):
    return [{'pixel_values': PICTURES[list(pair)], 'input_ids': torch.tensor([[1, 2, 3], [4, 5, 6]])} for pair in pairs]


BATCHES = batches((0, 1), (2, 3), (0, 1), (2, 3))
SHUFFLED = batches((0, 1), (2, 3), (3, 0), (1, 2))  # the second epoch pairs the pictures anew
FROZEN = {
    'tower': ('vision_tower',),  # full tuning: the other parts are in no prefix that the host freezes
    'all but the language model': ('vision_tower', 'image_'),
    'all but the last layer': ('vision_tower', 'image_', 'language_model.shared', 'language_model.layers.0'),
}


@pytest.mark.parametrize('transposed', [False, True], ids=['contiguous', 'transposed'])
@pytest.mark.parametrize('frozen', FROZEN.values(), ids=FROZEN)
def test_every_picture_is_computed_once_and_training_is_the_same(frozen, transposed):
    plain, fast = trained_twins(frozen, transposed=transposed)
    expected = train(plain, BATCHES)
    MyModel(fast, cache='ram')
    with counted(fast.vision_tower.blocks[0]) as runs:
        assert_same(expected, train(fast, BATCHES))
    stats = fast.speedup.stats
    assert stats.hits >= 4 and stats.errors == 0
    # two batches of new pictures; one more run proves that a sample does not depend on its batch
    assert len(runs) == 2 + 1
    tower = next(segment for segment in fast.speedup.plan.segments if 'vision_tower' in segment.modules)
    assert tower.graph_skipped and tower.cached and tower.reason is None


def test_pictures_are_found_again_in_other_batches():
    plain, fast = trained_twins(FROZEN['all but the language model'])
    expected = train(plain, SHUFFLED)
    MyModel(fast, cache='ram')
    with counted(fast.vision_tower.blocks[0]) as runs:
        assert_close(expected, train(fast, SHUFFLED))  # kernels may order sums by the size of the batch
    assert len(runs) == 2 + 1 and fast.speedup.stats.hits >= 4


def test_an_entry_with_other_contents_is_served():
    """A poisoned cache shows in the losses: hits are really used."""
    plain, fast = trained_twins(FROZEN['all but the language model'])
    expected = train(plain, BATCHES)
    MyModel(fast, cache='ram')
    poisoned = train(fast, BATCHES, on_step=lambda step: step == 2 and poison(fast.speedup))
    assert poisoned.losses[:2] == expected.losses[:2] and poisoned.losses[2] != expected.losses[2]


def poison(handle):
    for entry in handle.store._entries.values():
        entry.tensor.add_(1)


def test_with_drop_path_the_tower_is_evaluated_every_time_and_eval_reuses_it():
    plain, fast = trained_twins(FROZEN['tower'], drop_prob=0.1)
    expected = train(plain, BATCHES)
    MyModel(fast, cache='ram')
    with counted(fast.vision_tower.blocks[1]) as runs:
        assert_same(expected, train(fast, BATCHES))
    assert len(runs) == len(BATCHES)
    (tower,) = [segment for segment in fast.speedup.plan.segments if 'vision_tower' in segment.modules]
    assert tower.graph_skipped and not tower.cached and 'drop path p=0.1' in tower.reason
    _, changed = trained_twins(FROZEN['tower'], drop_prob=0.1)
    MyModel(changed, cache='ram', eval=True)
    assert train(changed, BATCHES).losses != expected.losses
    assert changed.speedup.stats.hits >= 4
