"""Is what was stored, or computed alone, what the batch has? Equal but for the noise that batch composition makes."""
from collections.abc import Sequence
from typing import Optional

import torch

from .layout import Single
from .value import Value

# Kernels may order sums by the shape of the batch; a sample alone must equal its rows in the batch within this share of the
# largest value.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def difference_alone(value: Value, parts: Sequence[torch.Tensor]) -> Optional[str]:
    """What is wrong with the smallest sample of a batch, evaluated once more and alone; ``parts`` are those of the batch."""
    layout = value.layout
    chosen = min(range(len(layout)), key=layout.sizes.__getitem__)
    alone = [chosen] if len(set(value.keys)) > 1 or isinstance(layout, Single) else [chosen, chosen]
    indices = layout.closure(alone) if len(set(alone)) == len(alone) else alone
    found = layout.cut(value.spec, value.rows(indices), indices)[indices.index(chosen)]
    return None if close(found, parts[chosen]) else (
        f'output {value.text} of a sample evaluated again and alone differs from its rows in the batch')


def difference_text(value: Value, index: int, found: torch.Tensor, wanted: torch.Tensor) -> str:
    size = (f'by up to {(found.double() - wanted.double()).abs().max().item():.3g} (largest value {wanted.abs().max().item():.3g})'
            if found.shape == wanted.shape else f'in shape: {tuple(found.shape)}, computed {tuple(wanted.shape)}')
    return (f'{value.call.step.name}: the stored output {value.text} of sample {value.keys[index].hex()} differs from the computed one '
            f'{size}. It is not reused any more. Clear the cache; if it happens again, what this module computes depends on '
            'something that is not in the key: please report it')


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal within the noise that batch composition makes."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    noise = TOLERANCE.get(found.dtype, 0.0) * wanted.abs().max().double() if wanted.numel() else 0.0
    return bool(((found.double() - wanted.double()).abs() <= noise).all())
