"""Nested containers of tensors: look for gradients, map, take apart into leaves and put together again.

Model code returns and mutates output objects (``outputs.pooler_output = torch.split(...)``), so a container is never kept:
only its description (``Structure``) and its tensor leaves are, and every call builds a fresh one.
"""
import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum, range, slice)
_MAX_DEPTH = 12


class UnknownStructure(Exception):
    """An object that is neither a tensor, a known container nor a plain value."""


def _children(value: Any) -> Optional[list]:
    """The values directly inside ``value``; ``None`` when its inside cannot be told."""
    if isinstance(value, _ATOMS) or isinstance(value, (type, torch.nn.Module, torch.Generator)) or callable(value):
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if hasattr(value, '__dict__'):  # caches, dataclasses, batch objects
        return list(vars(value).values())
    return None


def version(tensor: torch.Tensor) -> int:
    """Counts writes into a tensor; tensors of inference mode count none."""
    return -1 if tensor.is_inference() else tensor._version


def carries_grad(value: Any) -> bool:
    """Whether a gradient may have to flow into ``value``: some tensor in it requires grad, or its inside cannot be told."""
    return _carries_grad(value, 0, set())


def _carries_grad(value: Any, depth: int, seen: set) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, _ATOMS):
        return False
    if id(value) in seen:
        return False
    seen.add(id(value))
    children = _children(value)
    if children is None or depth > _MAX_DEPTH:
        return True
    return any(_carries_grad(child, depth + 1, seen) for child in children)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists and mappings (model outputs included), in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Rebuild ``value`` with ``function`` applied to each tensor; objects of unknown make are returned as they are."""
    try:
        structure, leaves = flatten(value)
    except UnknownStructure:
        return value
    return rebuild(structure, [function(leaf) for leaf in leaves])


@dataclasses.dataclass(frozen=True)
class Structure:
    """How a container was built. ``kind``: ``leaf``, ``atom``, ``tuple``, ``list``, ``namedtuple``, ``dict`` or ``fields``."""

    kind: str
    type: Optional[type] = None
    names: tuple = ()
    items: tuple = ()
    value: Any = None


_LEAF = Structure('leaf')


def flatten(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """Take ``value`` apart. Raises ``UnknownStructure`` for an object that could not be rebuilt exactly."""
    leaves: list[torch.Tensor] = []
    return _flatten(value, leaves), leaves


def _flatten(value: Any, leaves: list) -> Structure:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _LEAF
    if isinstance(value, _ATOMS):
        return Structure('atom', value=value)
    kind = type(value)
    if dataclasses.is_dataclass(value):  # transformers' ModelOutput is one, and its fields that are None are not in its mapping
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        if set(vars(value)) != set(names):
            raise UnknownStructure(f'{kind.__qualname__} has attributes beside its fields')
        return Structure('fields', kind, names, tuple(_flatten(getattr(value, name), leaves) for name in names))
    if kind in (dict, OrderedDict):
        return Structure('dict', kind, tuple(value), tuple(_flatten(item, leaves) for item in value.values()))
    if isinstance(value, tuple) and hasattr(kind, '_fields'):
        return Structure('namedtuple', kind, (), tuple(_flatten(item, leaves) for item in value))
    if kind in (tuple, list):
        return Structure(kind.__name__, kind, (), tuple(_flatten(item, leaves) for item in value))
    raise UnknownStructure(f'{kind.__module__}.{kind.__qualname__}')


def rebuild(structure: Structure, leaves: list[torch.Tensor]) -> Any:
    """The inverse of :func:`flatten`: a fresh container each time."""
    return _rebuild(structure, iter(leaves))


def _rebuild(structure: Structure, leaves: Any) -> Any:
    if structure.kind == 'leaf':
        return next(leaves)
    if structure.kind == 'atom':
        return structure.value
    items = [_rebuild(item, leaves) for item in structure.items]
    if structure.kind == 'fields':
        return structure.type(**dict(zip(structure.names, items)))
    if structure.kind == 'dict':
        return structure.type(zip(structure.names, items))
    if structure.kind == 'namedtuple':
        return structure.type(*items)
    return structure.type(items)
