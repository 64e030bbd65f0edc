"""Which convention a call follows. Decided from the arguments' names and shapes; the memo proves it on the first batch."""
import inspect
from collections.abc import Callable, Sequence
from typing import Optional

import torch

from .arguments import Arguments, NotSplittable
from .key import NotKeyable
from .layout import Layout, Rows, Single
from .tokens import Tokens

GRID_NAMES = ('grid_thw', 'grid_thws', 'grid_hw', 'grid_hws')  # of towers; whole models take image_grid_thw and video_grid_thw
_GRIDS = (*GRID_NAMES, 'image_grid_thw', 'video_grid_thw')
_BOUNDARIES = ('cu_seqlens', 'cu_window_seqlens')
_LENGTHS = ('feature_lens', 'audio_feature_lengths', 'input_lengths', 'feature_lengths')
_SIZES = ('image_sizes', 'tgt_sizes', 'target_sizes')
_POSITIONS = ('pixel_position_ids', 'image_position_ids')


def layout_of(arguments: Arguments, kind: str, causal: Optional[bool] = None, packing: Sequence[int] = ()) -> Layout:
    """``kind``, ``causal`` and ``packing`` as in ``chain.Step``, or ``whole`` for calls that are not taken apart.

    Raises ``NotSplittable``.
    """
    if kind == 'whole':
        return Single()
    if not arguments.tensors:
        raise NotSplittable('no tensor among the arguments')
    for convention in _CONVENTIONS:
        layout = convention(arguments, packing)
        if layout is not None:
            return layout
    main = arguments.tensors[0]
    if kind == 'tokens' and main.dim() >= (3 if main.is_floating_point() else 2):
        return Tokens.of(arguments, main, causal)
    return _batch_first(arguments)


def rows_of_images(signature: inspect.Signature, args: tuple, kwargs: dict) -> Sequence[int]:
    """Rows of each image in a call with packed patches; ``()`` if this is none."""
    try:
        layout = _packed_grid(Arguments.of(signature, args, kwargs), ())
    except (NotSplittable, NotKeyable):
        return ()
    return layout.sizes if layout is not None else ()


def _packed_grid(arguments: Arguments, packing: Sequence[int]) -> Optional[Layout]:
    """``patches (sum of t*h*w, C)`` and ``grid (n, 3)``: one row of the grid per image or video. Qwen-VL, GLM-4V, Kimi-VL."""
    grids = [name for name in arguments.names if name in _GRIDS]
    if len(grids) != 1:
        return None
    grid = arguments.get(grids[0])
    if grid.dim() != 2 or grid.is_floating_point():
        raise NotSplittable(f'{grids[0]} of shape {tuple(grid.shape)} and dtype {grid.dtype}; expected integers (n, 3)')
    counts = grid.prod(-1).tolist()
    main = next((tensor for tensor in arguments.tensors if tensor.is_floating_point()), grid)
    axis = 1 if main.dim() > 2 and main.shape[0] == 1 else 0
    found = main.shape[axis] if main.dim() else None
    if not counts or sum(counts) != found:
        raise NotSplittable(f'{arguments.names[0]} has {found} rows, {grids[0]} stands for {sum(counts)}')
    axes = {arguments.names[place]: axis for place, tensor in enumerate(arguments.tensors) if tensor is main and axis}
    return Rows('packed patches', counts, axes, _present(arguments, _BOUNDARIES))


def _packed_rows(arguments: Arguments, packing: Sequence[int]) -> Optional[Layout]:
    """``hidden (rows, C)`` and ``cu_seqlens``: blocks inside a packed tower.

    A sample is an image or video if the tower's grid says how many rows it has, else what attends to itself.
    """
    names = _present(arguments, _BOUNDARIES)
    main = arguments.tensors[0]
    if not names or not main.is_floating_point() or main.dim() != 2:
        return None
    ends = arguments.get(names[0]).tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != main.shape[0]:
        raise NotSplittable(f'{names[0]} ends at {ends[-1:]}, but there are {main.shape[0]} rows')
    stretches = [stop - start for start, stop in zip(ends, ends[1:])]
    return Rows('packed rows', packing if sum(packing) == main.shape[0] else stretches, {}, names)


def _packed_lengths(arguments: Arguments, packing: Sequence[int]) -> Optional[Layout]:
    """``features (bins, sum of frames)`` or ``(sum of frames, bins)`` and the number of frames of each clip. Qwen2.5-Omni."""
    names = _present(arguments, _LENGTHS)
    if not names:
        return None
    lengths = arguments.get(names[0])
    if lengths.dim() != 1 or lengths.is_floating_point():
        return None
    counts = lengths.tolist()
    for name, tensor in zip(arguments.names, arguments.tensors):
        axes = [axis for axis, size in enumerate(tensor.shape) if size == sum(counts)]
        if tensor.is_floating_point() and axes:
            return Rows('audio lengths', counts, {name: axes[-1]}, _present(arguments, _BOUNDARIES), padded=True)
    return None


def _sized(arguments: Arguments, packing: Sequence[int]) -> Optional[Layout]:
    """Images padded to the largest of the batch, and their sizes. Pixtral, Mistral3: ``(n, 3, H, W)``, ``image_sizes (n, 2)``."""
    names = _present(arguments, _SIZES)
    main = arguments.tensors[0]
    if not names or main.dim() != 4 or not main.is_floating_point():
        return None
    sizes = arguments.get(names[0])
    if sizes.dim() != 2 or tuple(sizes.shape) != (main.shape[0], 2):
        return None
    pairs = sizes.tolist()
    if any(height > main.shape[2] or width > main.shape[3] for height, width in pairs):
        return None  # sizes in patches

    def crop(part: torch.Tensor, place: int) -> torch.Tensor:
        height, width = pairs[place]
        return part[..., :height, :width]
    return Rows('sizes', [height * width for height, width in pairs], {}, (), {arguments.names[0]: crop})


def _positioned(arguments: Arguments, packing: Sequence[int]) -> Optional[Layout]:
    """Patches padded to the most of the batch, with positions of -1 where there is none. Gemma4: ``(n, p, C)`` and ``(n, p, 2)``."""
    names = _present(arguments, _POSITIONS)
    main = arguments.tensors[0]
    if not names or main.dim() != 3 or not main.is_floating_point():
        return None
    positions = arguments.get(names[0])
    if positions.dim() != 3 or positions.shape[:2] != main.shape[:2] or positions.is_floating_point():
        return None
    real = (positions >= 0).all(-1)

    def crop(part: torch.Tensor, place: int) -> torch.Tensor:
        return part[:, real[place]]
    return Rows('positions', real.sum(1).tolist(), {}, (), {arguments.names[0]: crop, names[0]: crop})


_CONVENTIONS: tuple[Callable[[Arguments, Sequence[int]], Optional[Layout]], ...] = (
    _packed_grid, _packed_rows, _packed_lengths, _sized, _positioned)


def _batch_first(arguments: Arguments) -> Layout:
    """Image, crop, tile or clip on dimension 0, tensors beside it split together. CLIP, SigLIP, DaViT, Whisper."""
    main = arguments.tensors[0]
    if main.dim() < 2:
        raise NotSplittable(f'{arguments.names[0]} of shape {tuple(main.shape)} has no batch dimension')
    for name, tensor in zip(arguments.names, arguments.tensors):
        if tensor.dim() > 1 and tensor.is_floating_point() and tensor.shape[0] not in (1, main.shape[0]):
            raise NotSplittable(f'{arguments.names[0]} has {main.shape[0]} samples, {name} has {tensor.shape[0]}')
    if not main.shape[0]:
        raise NotSplittable(f'{arguments.names[0]} is empty')
    return Rows('batch first', (1,) * main.shape[0], {})


def _present(arguments: Arguments, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in arguments.names)

