"""One call's arguments by name, taken apart into tensors and a text that describes everything else."""
import dataclasses
import inspect
from collections.abc import Sequence

import torch

from ..trees import Structure, UnknownStructure, flatten, rebuild
from .key import NotKeyable, plain

_CACHES = ('past_key_values', 'past_key_value', 'layer_past')
# Hints for kernels: they follow from the batch and change no value.
_HINTS = ('max_seqlen', 'max_length_q', 'max_length_k', 'max_seqlen_q', 'max_seqlen_k')
# Models hand all their keyword arguments to their towers; one whose signature does not have these has no use for them.
_OF_THE_TEXT = ('mm_token_type_ids', 'token_type_ids')
# Where in a key-value cache the tokens go, counted from the batch's left edge: before transformers 5 layers get it without a cache too.
_OF_A_CACHE = ('cache_position',)


class NotSplittable(Exception):
    """The call cannot be taken apart into samples; the text says why."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """``tensors`` by ``names`` (``position_embeddings.0`` for what lies in a container), in the order in which they were passed."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    text: str  # names and values of all other arguments, containers of tensors included
    absent: tuple[str, ...]  # arguments that were passed as None
    structure: Structure
    of_the_text: tuple[str, ...] = ()  # those that mean nothing to a tower; the memo proves it
    of_a_cache: tuple[str, ...] = ()  # those that mean nothing without a cache, and there is none; the memo proves this too

    @classmethod
    def of(cls, signature: inspect.Signature, args: tuple, kwargs: dict) -> 'Arguments':
        """``signature`` is without ``self``. Raises ``NotKeyable`` for what has no content to compare."""
        values = [*zip(_positional(signature, args), args), *kwargs.items()]
        names: list[str] = []
        lines: list[str] = []
        for name, value in values:
            try:
                structure, leaves = flatten(value)
            except UnknownStructure:
                raise NotKeyable(f'argument {name} is a {type(value).__qualname__}'
                                 + (' (use_cache=False leaves it out)' if name in _CACHES else '')) from None
            names += [name] if structure.kind == 'leaf' else [f'{name}.{place}' for place in range(len(leaves))]
            if structure.kind != 'leaf' and name not in _HINTS and value is not None:
                lines.append(f'{name}={_describe(structure)}')
        structure, tensors = flatten((args, kwargs))
        absent = tuple(name for name, value in values if value is None)
        of_the_text = tuple(name for name in names if name in _OF_THE_TEXT and name not in signature.parameters)
        cached = any(name in _CACHES and value is not None for name, value in values)
        of_a_cache = () if cached else tuple(name for name in names if name in _OF_A_CACHE)
        return cls(tuple(names), tuple(tensors), ';'.join(sorted(lines)), absent, structure, of_the_text, of_a_cache)

    def get(self, name: str) -> torch.Tensor | None:
        return self.tensors[self.names.index(name)] if name in self.names else None

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple, dict]:
        """``(args, kwargs)`` of the same call with other tensors."""
        return rebuild(self.structure, list(tensors))


def _positional(signature: inspect.Signature, args: tuple) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    if len(args) > len(names):
        raise NotSplittable(f'{len(args)} positional arguments, but only {len(names)} have names')
    return names[:len(args)]


def _describe(structure: Structure) -> str:
    if structure.kind == 'leaf':
        return 'tensor'
    if structure.kind == 'atom':
        return plain(structure.value)
    if structure.kind in ('list', 'dict') and not structure.items:
        raise NotKeyable('an empty container, into which the module may write')
    items = ','.join(_describe(item) for item in structure.items)
    return f'{structure.kind}:{structure.type.__qualname__}:{structure.names}({items})'
