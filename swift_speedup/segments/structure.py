"""What can be read from the module tree alone: layer stacks, token embeddings, towers. Names of modules are never trusted."""
import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterable
from typing import Any, Optional

from torch import nn

from ..graph.swap import original_class
from .entries import names_media


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers of one class (mixed in few places) that run one after another."""

    path: str
    layers: tuple[nn.Module, ...]


def find_stacks(root: nn.Module) -> list[Stack]:
    """Every ``ModuleList`` or ``Sequential`` with two or more layers with weights, most of them of one class; outermost first."""
    stacks = []
    for path, module in root.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            layers = [child for child in module if next(child.parameters(), None) is not None]
            classes = Counter(original_class(layer) for layer in layers)
            if len(layers) > 1 and classes.most_common(1)[0][1] * 2 > len(layers) and _has_parts(layers[0]):
                stacks.append(Stack(path, tuple(module)))
    return stacks


def _has_parts(layer: nn.Module) -> bool:
    return next(layer.children(), None) is not None


def token_embeddings(root: nn.Module) -> set[nn.Module]:
    """The modules that answer token ids, and those that share their weight by identity.

    Only ``nn.Embedding``: a vision model's ``get_input_embeddings`` answers with its patch convolution.
    """
    found = {input_embeddings(module) for module in root.modules()}
    # peft puts a wrapper with a trained copy in the place of an embedding that it saves.
    weights = {id(part.weight) for module in found - {None} for part in module.modules() if isinstance(part, nn.Embedding)}
    return {module for module in root.modules() if isinstance(module, nn.Embedding) and id(module.weight) in weights}


def input_embeddings(module: nn.Module) -> Optional[nn.Module]:
    """What ``enable_input_require_grads`` would hook; models that cannot tell raise all kinds of errors."""
    getter = getattr(module, 'get_input_embeddings', None)
    try:
        found = getter() if callable(getter) else None
    except Exception:
        return None
    # Vision models answer with the module that embeds patches.
    return found if isinstance(found, nn.Module) and not names_media(forward_signature(found).parameters) else None


def find_encoders(root: nn.Module) -> dict[nn.Module, str]:
    """The outermost callable parts that hold a layer stack but no token embedding: towers, and text models' encoders."""
    stacks = [stack.path for stack in find_stacks(root)]
    holds_stack = _ancestors(stacks)
    holds_tokens = _holding_tokens(root)
    found: dict[nn.Module, str] = {}
    for path, module in root.named_modules():
        inside = any(path.startswith(f'{outer}.') for outer in (*found.values(), *stacks) if outer)
        callable_stack = path in stacks and isinstance(module, nn.Sequential)
        if path and not inside and (callable_stack or path in holds_stack) and path not in holds_tokens \
                and not isinstance(module, nn.ModuleList):
            found[module] = path
    return found


def find_towers(root: nn.Module) -> dict[nn.Module, str]:
    """The encoders that are fed with something else than tokens: there is another stack beside them for the tokens."""
    stacks = [stack.path for stack in find_stacks(root)]
    holds_tokens = _holding_tokens(root)
    towers: dict[nn.Module, str] = {}
    for module, path in find_encoders(root).items():
        parents = [path[:place] for place in range(len(path)) if path[place] == '.'] + ['']
        above = max((parent for parent in parents if parent in holds_tokens), key=len, default=None)
        others = [stack for stack in stacks if above is not None and (not above or stack.startswith(f'{above}.'))
                  and stack != path and not stack.startswith(f'{path}.')]
        if others or above is None or names_media(forward_signature(module).parameters):
            towers[module] = path
    return towers


def _holding_tokens(root: nn.Module) -> set[str]:
    """Paths of the modules that have a token embedding somewhere inside; empty for a model without any."""
    embeddings = token_embeddings(root)
    return _ancestors(path for path, module in root.named_modules(remove_duplicate=False) if module in embeddings)


def _ancestors(paths: Iterable[str]) -> set[str]:
    """Every path above these, the root's included if there is any."""
    return {path[:place] for path in paths for place, letter in enumerate(f'.{path}', -1) if letter == '.'}


def forward_signature(module: nn.Module) -> inspect.Signature:
    """Of the class's ``forward`` without ``self``: the instance's may be the host's ``(*args, **kwargs)``."""
    return method_signature(module, 'forward')


def method_signature(module: nn.Module, name: str) -> inspect.Signature:
    signature = inspect.signature(getattr(original_class(module), name))
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def trainable(module: nn.Module) -> list[tuple[str, Any]]:
    """Names and tensors inside that require grad now."""
    return [(name, tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.requires_grad]


def has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
