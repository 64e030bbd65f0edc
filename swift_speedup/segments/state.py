"""What the value of a segment depends on besides its inputs: weights, buffers, settings, train/eval mode, versions."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from ..graph.swap import original_class
from ..memo.key import Digest, NotKeyable, plain
from . import capture

_HARMLESS_HOOKS = ('make_inputs_require_grads', capture.HOOK)
_NOT_NUMERIC = ('training', 'gradient_checkpointing', '_name_or_path', 'name_or_path', 'problem_type', 'use_cache',
                '_output_capturing_hooks_installed')


def tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and all buffers, in registration order."""
    return [*module.named_parameters(), *module.named_buffers()]


def mode(module: nn.Module) -> bytes:
    """Which of the modules inside train and which are in eval mode."""
    return Digest().add('training', bytes(part.training for part in module.modules())).value()


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Every module inside in eval mode; afterwards each is back in the mode it was in."""
    switched = [part for part in module.modules() if part.training]
    for part in switched:
        part.training = False
    try:
        yield
    finally:
        for part in switched:
            part.training = True


def settings(module: nn.Module) -> str:
    """Classes, plain attributes, configuration and hooks of every module inside, numerics switches and library versions."""
    lines = [f'torch {torch.__version__}', f'transformers {transformers.__version__}',
             f'matmul {torch.get_float32_matmul_precision()}',
             f'deterministic {torch.are_deterministic_algorithms_enabled()}',
             f'tf32 {torch.backends.cuda.matmul.allow_tf32} {torch.backends.cudnn.allow_tf32}']
    lines += [f'{path}: {_describe(part)}' for path, part in module.named_modules()]
    return '\n'.join(lines)


def _describe(module: nn.Module) -> str:
    cls = original_class(module)
    parts = [f'{cls.__module__}.{cls.__qualname__}']
    for name, value in module.__dict__.items():
        if name == 'config':
            parts.append(f'config={_config(value)}')
        elif name in ('_forward_hooks', '_forward_pre_hooks'):
            # A set: ms-swift adds the same input-grad hook again at each switch of checkpointing, and no value depends on it.
            # transformers adds hooks that collect outputs when they are first asked for.
            names = {_callable_name(hook) for hook in value.values()}
            parts += sorted(name for name in names if not name.endswith(_HARMLESS_HOOKS))
        elif not name.startswith('_') and name not in _NOT_NUMERIC:
            parts += _attribute(name, value)
    return ' '.join(parts)


def _attribute(name: str, value: Any) -> list[str]:
    if callable(value):  # a forward replaced on the instance
        return [f'{name}={_callable_name(value)}']
    try:
        return [f'{name}={plain(value)}']
    except NotKeyable:
        return []


def _config(config: Any) -> str:
    contents = vars(config) if hasattr(config, '__dict__') else {}
    return repr(sorted((name, repr(value)) for name, value in contents.items() if name not in _NOT_NUMERIC))


def _callable_name(function: Any) -> str:
    return f'{getattr(function, "__module__", "")}.{getattr(function, "__qualname__", type(function).__qualname__)}'
