"""What the benchmark trains: models and batches of one form, whatever the family."""
import dataclasses
from collections.abc import Callable, Mapping
from typing import Optional

import torch
from torch import nn
from toys import florence2, models

NAMES = (*models.FAMILIES, 'florence2')


@dataclasses.dataclass(frozen=True)
class Form:
    """Of every batch. ``image``: pixels per side; ``text``: tokens per sample; ``same_image``: one for the whole batch."""

    image: int
    text: int
    batch_size: int
    same_image: bool = False


@dataclasses.dataclass(frozen=True)
class Subject:
    """``frozen``: what is frozen in full tuning. ``layers`` can be frozen from below; adapters go there and to ``adapted``."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[Form, int], dict[str, torch.Tensor]]  # the number is the seed
    tower: Optional[str]
    frozen: tuple[str, ...]
    layers: str
    multiple: int = 1  # of pixels
    tower_inputs: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    dropout: bool = False  # in the layers

    def tower_call(self, batch: Mapping[str, torch.Tensor]) -> tuple:
        return tuple(batch[name] for name in self.tower_inputs)


def lookup(name: str, size: str) -> Subject:
    """Raises ``ValueError`` for names that are not known."""
    if name == 'florence2':
        if size not in florence2.SIZES:
            raise ValueError(f'florence2 has no size {size!r}; known: {", ".join(florence2.SIZES)}')
        language = 'model.language_model'
        # Without drop path, as with frozen_eval: with it a frozen tower is evaluated at every step.
        return Subject(lambda: florence2.build(size=size, drop_path_rate=0.0),
                       lambda form, seed: _florence_batch(form, seed, florence2.STRIDES[size]), 'model.vision_tower',
                       ('model.vision_tower', 'model.multi_modal_projector'), f'{language}.encoder.layers', florence2.STRIDES[size],
                       ('pixel_values',), (f'{language}.decoder.layers',), dropout=True)
    family = models.lookup(name, size)
    tower = () if family.tower is None else (family.tower,)
    return Subject(lambda: models.build(name, size), lambda form, seed: _qwen_batch(name, form, seed), family.tower, tower,
                   family.layers, family.patch * family.merge if tower else 1, ('pixel_values', 'image_grid_thw') if tower else ())


def _qwen_batch(name: str, form: Form, seed: int) -> dict[str, torch.Tensor]:
    family = models.FAMILIES[name]
    side = form.image // family.patch
    sample = models.Sample(images=((1, side, side),) if family.tower else (), text=form.text)
    batch = models.make_batch(name, [sample] * form.batch_size, seed)
    if family.tower and form.same_image:
        batch['pixel_values'] = batch['pixel_values'][:side * side].repeat(form.batch_size, 1)
    kept = min(form.text + 1, batch['labels'].shape[1])  # as ms-swift does: no logits where there are no labels
    return batch | {'logits_to_keep': kept, 'labels': batch['labels'][:, -kept:]}


def _florence_batch(form: Form, seed: int, stride: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(form.batch_size, 3, form.image, form.image, generator=generator)
    if form.same_image:
        pixels = pixels[:1].repeat(form.batch_size, 1, 1, 1)
    text = torch.randint(10, 250, (2, form.batch_size, form.text), generator=generator)
    images = torch.full((form.batch_size, (form.image // stride) ** 2 + 1), florence2.IMAGE_TOKEN)
    ids = torch.cat([images, text[0]], 1)
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'pixel_values': pixels, 'labels': text[1]}
