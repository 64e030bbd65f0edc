"""What ms-swift's freezing flags did, compared with what they say; facts come from the model, only intentions from the flags."""
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..segments.adapters import adapter_tensors
from ..segments.detect import expected_towers
from ..segments.remarks import ranges
from ..segments.structure import trainable

_FULL_ONLY = ('freeze_parameters_ratio', 'freeze_parameters', 'freeze_parameters_regex', 'trainable_parameters',
              'trainable_parameters_regex')


def flag_remarks(given: Mapping[str, Any], arguments: Any, model: nn.Module) -> list[str]:
    """``given``: the flags before ms-swift filled them in. ``arguments``: the trainer's, afterwards."""
    full = given.get('tuner_type', given.get('train_type')) == 'full'
    return [*(_prefixes(given, model) if full else _ignored(given)), *(_ratio(given, model) if full else ()), *_towers(given, model)]


def _ignored(given: Mapping[str, Any]) -> Iterator[str]:
    for name in _FULL_ONLY:
        if given.get(name):
            yield f'{name}={given[name]} has no effect: ms-swift reads it for tuner_type full only'


def _prefixes(given: Mapping[str, Any], model: nn.Module) -> Iterator[str]:
    names = [name for name, _ in model.named_parameters()]
    for flag in ('freeze_parameters', 'trainable_parameters'):
        for prefix in given.get(flag) or ():
            if not any(name.startswith(prefix) for name in names):
                yield f'{flag} {prefix} matches no parameter: names begin with {", ".join(dict.fromkeys(_heads(names)))}'
                continue
            found = re.fullmatch(r'(.*\.)(\d+)', prefix)
            more = sorted({int(match.group(1)) for name in names if found
                           if (match := re.match(re.escape(found.group(1)) + r'(\d+)\.', name)) and name.startswith(prefix)})
            if len(more) > 1:
                yield (f'{flag} {prefix} is the beginning of a name and means layers {ranges(more)}; write "{prefix}." to mean '
                       f'layer {found.group(2)} only')


def _heads(names: list[str]) -> list[str]:
    return ['.'.join(name.split('.')[:2]) for name in names]


def _ratio(given: Mapping[str, Any], model: nn.Module) -> Iterator[str]:
    ratio = given.get('freeze_parameters_ratio') or 0
    if ratio <= 0:
        return
    named = list(model.named_parameters())
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    towers = [path for path in expected_towers(model).values() if any(name.startswith(f'{path}.') for name in frozen)]
    text = (f'freeze_parameters_ratio={ratio} counts weights in the order of registration; '
            f'frozen are {len(frozen)} of {len(named)} tensors')
    if frozen:
        text += f', the last {frozen[-1]}'
    yield text + (f'; {" and ".join(towers)} come{"s" * (len(towers) == 1)} before the language model' if towers else '')


def _towers(given: Mapping[str, Any], model: nn.Module) -> Iterator[str]:
    if not given.get('freeze_vit', True):
        return
    adapters = adapter_tensors(model)
    for tower, path in expected_towers(model).items():
        own = [name for name, tensor in trainable(tower) if id(tensor) not in adapters]
        everything = sum(1 for _ in tower.parameters())
        if own:
            yield (f'freeze_vit is true, but {len(own)} of {everything} tensors in {path} are trainable (the first: {own[0]}): '
                   'an aligner inside it that is not frozen, trainable_parameters, or a prefix that matches nothing')
        elif any(id(tensor) in adapters for _, tensor in trainable(tower)):
            yield f'freeze_vit is true, but target_modules or target_regex put adapters into {path}'
