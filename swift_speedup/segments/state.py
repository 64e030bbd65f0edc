"""What the value of a segment depends on besides its inputs: weights, buffers, settings, train/eval mode, versions."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
import transformers
from torch import nn

from ..graph.swap import original_class
from ..memo.fingerprint import BETWEEN
from ..memo.key import Digest, NotKeyable, plain
from . import capture
from .adapters import idle_parts
from .code import code_digest, function_digest

_HARMLESS_HOOKS = ('make_inputs_require_grads', capture.HOOK)
_OF_RANKS = ('torch.distributed.', 'deepspeed.', 'accelerate.')  # hooks that bring weights together
_NOT_NUMERIC = ('training', 'gradient_checkpointing', '_gradient_checkpointing_func', 'supports_gradient_checkpointing',
                'get_input_embeddings', '_name_or_path', 'name_or_path', 'problem_type', 'use_cache',
                '_output_capturing_hooks_installed')
# Marks and counters that FSDP and DeepSpeed keep on modules.
_OF_ENGINES = ('_is_fsdp_', '_fsdp_', 'ds_', 'applied_pre_backward_ref_cnt', '_external_params', 'pre_bwd_fn', 'post_bwd_fn')
_WRAPPED = '_checkpoint_wrapped_module.'
_WRITTEN_BY_SAVING = ('architectures', 'transformers_version', 'auto_map', '_commit_hash')  # and dtype, as text then
_OWN = frozenset(nn.Module().__dict__)  # what every module has; hooks are looked at apart from the others


def tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and all buffers, in registration order, but for those of adapters that are switched off."""
    idle = {id(tensor) for part in idle_parts(module) for tensor in part.parameters(recurse=False)}
    return [(_unwrapped(name), tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if id(tensor) not in idle]


def _unwrapped(path: str) -> str:
    return f'{path}.'.replace(_WRAPPED, '')[:-1]


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules, without those that torch puts around a module to checkpoint it."""
    return ((_unwrapped(path), part) for path, part in module.named_modules() if not hasattr(part, _WRAPPED[:-1]))


def mode(module: nn.Module) -> bytes:
    """Which of the modules inside train and which are in eval mode."""
    return Digest().add('training', bytes(part.training for _, part in _parts(module))).value()


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
    """Numerics switches and library versions; then classes, their code, plain attributes, configuration and hooks of every module."""
    modules = [f'{path}: {_describe(part)}' for path, part in _parts(module)]
    return '\n'.join(numerics(next(module.parameters(), None))) + BETWEEN + '\n'.join(modules)


def numerics(tensor: Optional[torch.Tensor]) -> list[str]:
    """What decides about bits beside the module; ``tensor`` tells the device."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    lines = [f'torch {torch.__version__}', f'transformers {transformers.__version__}',
             f'matmul precision {torch.get_float32_matmul_precision()}',
             f'deterministic algorithms {torch.are_deterministic_algorithms_enabled()}']
    if tensor is not None and tensor.device.type == 'cuda':
        return [*lines, f'device {torch.cuda.get_device_name(tensor.device)}', f'tf32 {cuda.matmul.allow_tf32} {cudnn.allow_tf32}',
                f'reduced precision {cuda.matmul.allow_fp16_reduced_precision_reduction} '
                f'{cuda.matmul.allow_bf16_reduced_precision_reduction}', f'cudnn {cudnn.enabled} {cudnn.deterministic}',
                f'attention {cuda.flash_sdp_enabled()} {cuda.mem_efficient_sdp_enabled()} {cuda.math_sdp_enabled()}']
    return [*lines, f'device {tensor.device.type if tensor is not None else "cpu"} {torch.backends.cpu.get_cpu_capability()}',
            f'mkldnn {torch.backends.mkldnn.enabled}']


def _describe(module: nn.Module) -> str:
    cls = unsharded_class(original_class(module))
    parts = [f'{cls.__module__}.{cls.__qualname__}', code_digest(cls)]
    for name, value in module.__dict__.items():
        if name == 'config':
            parts.append(f'config={_config(value)}')
        elif name in ('_forward_hooks', '_forward_pre_hooks'):
            # A set: ms-swift adds the same input-grad hook again at each switch of checkpointing, and no value depends on it.
            # transformers adds hooks that collect outputs when they are first asked for.
            names = {(_callable_name(hook), function_digest(hook)) for hook in value.values()}
            parts += sorted(f'{name} {digest}' for name, digest in names
                            if not name.endswith(_HARMLESS_HOOKS) and not name.startswith(_OF_RANKS))
        elif name not in _OWN and name not in _NOT_NUMERIC and not name.startswith(_OF_ENGINES):
            # Private ones too: which adapter is active is one.
            parts += _attribute(module, name, value)
    return ' '.join(parts)


def unsharded_class(cls: type) -> type:
    """``fully_shard`` derives a class of its own from that of a module."""
    return cls.__bases__[1] if len(cls.__bases__) > 1 and cls.__bases__[0].__name__ == 'FSDPModule' else cls


def _attribute(module: nn.Module, name: str, value: Any) -> list[str]:
    if callable(value):  # a forward replaced on the instance
        own = getattr(value, '__func__', None) is original_class(module).__dict__.get('forward', value)
        return [] if own or _is_gate_of_ms_swift(value) else [f'{name}={_callable_name(value)} {function_digest(value)}']
    try:
        return [f'{name}={plain(value)}']
    except NotKeyable:
        return []


def _config(config: Any) -> str:
    contents = vars(config) if hasattr(config, '__dict__') else {}
    return repr(sorted((name, str(value).removeprefix('torch.') if name in ('dtype', 'torch_dtype') else repr(value))
                       for name, value in contents.items() if name not in _NOT_NUMERIC and name not in _WRITTEN_BY_SAVING))


def _is_gate_of_ms_swift(forward: Any) -> bool:
    """ms-swift 4.6 replaces the forward of a frozen tower by one that only decides about gradients, and keeps the old one beside it."""
    kept = getattr(getattr(forward, '__self__', None), '__dict__', {}).get('_swift_frozen_module_forward')
    return kept is not None and getattr(forward, '__wrapped__', None) == kept


def _callable_name(function: Any) -> str:
    return f'{getattr(function, "__module__", "")}.{getattr(function, "__qualname__", type(function).__qualname__)}'
