"""What freezing really did, told to people: the mistakes that flags invite, read from ``requires_grad`` alone."""
from collections.abc import Iterator

from torch import nn

from .adapters import adapter_tensors
from .detect import expected_towers
from .structure import Stack, find_stacks, token_embeddings, trainable


def freezing_remarks(root: nn.Module) -> list[str]:
    """One sentence per surprise; empty when nothing surprising is frozen or trained."""
    if not any(parameter.requires_grad for parameter in root.parameters()):
        return ['nothing is trainable now']
    return [*_adapters_in_towers(root), *_embeddings(root), *_layers(root)]


def _adapters_in_towers(root: nn.Module) -> Iterator[str]:
    adapters = adapter_tensors(root)
    for tower, path in expected_towers(root).items():
        names = [name for name, tensor in trainable(tower) if id(tensor) in adapters]
        if names and len(names) == len(trainable(tower)):
            yield (f'{path} is frozen but for {len(names)} adapter tensors inside it (the first: {names[0]}), so its output is '
                   'computed at every step. If it was meant to be frozen, give target_modules or a target_regex that name the '
                   "language model's layers only")


def _embeddings(root: nn.Module) -> Iterator[str]:
    """A trained embedding under frozen layers keeps all of them in the graph."""
    names = {id(parameter): [] for module in token_embeddings(root) for parameter in module.parameters() if parameter.requires_grad}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            names[id(parameter)].append(name)
    if not names or not any(_frozen(stack.layers[0]) for stack in _text_stacks(root)):
        return
    for first, *others in names.values():
        tied = f', tied to {" and ".join(others)},' if others else ''
        yield (f'{first}{tied} is trainable, so gradients pass through every frozen layer above it. '
               'Freezing it too would let those layers be skipped')


def _layers(root: nn.Module) -> Iterator[str]:
    adapters = adapter_tensors(root)
    for stack in _text_stacks(root):
        states = [_state(layer, adapters) for layer in stack.layers]
        frozen = [index for index, state in enumerate(states) if state == 'frozen']
        cut = [index for index, state in enumerate(states) if state == 'part']
        if states[0] == 'adapters':
            yield f'{stack.path}.0 holds adapters, so no layer of {stack.path} can be skipped: there is no frozen prefix'
        if len(cut) == 1:
            yield (f'{stack.path}.{cut[0]} is frozen in part, as a freeze_parameters_ratio that ends inside a layer does; '
                   'only the layers before it can be skipped')
        elif cut:
            yield f'{stack.path}: layers {ranges(cut)} are frozen in part; such layers are not skipped'
        above = [index for index in frozen if index > next((i for i, state in enumerate(states) if state != 'frozen'), len(states))]
        if above:
            yield _out_of_order(stack, frozen, above)


def _out_of_order(stack: Stack, frozen: list[int], above: list[int]) -> str:
    text = (f'{stack.path}: layers {ranges(frozen)} are frozen, but {ranges(above)} lie above a layer that is trained, '
            'so gradients pass through them and they are not skipped')
    short = [index for index in frozen if len(frozen) > 1 and all(str(other).startswith(str(index)) for other in frozen)]
    if short:
        text += f'. freeze_parameters matches the beginning of a name: write "{stack.path}.{short[0]}." to mean that layer only'
    return text


def _state(layer: nn.Module, adapters: set[int]) -> str:
    flags = [(parameter.requires_grad, id(parameter) in adapters) for parameter in layer.parameters()]
    if not any(grad for grad, _ in flags):
        return 'frozen'
    own = [grad for grad, adapter in flags if not adapter]
    if not any(own):
        return 'adapters'
    return 'trained' if all(own) else 'part'


def _frozen(module: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in module.parameters())


def _text_stacks(root: nn.Module) -> list[Stack]:
    """The outermost stacks outside towers."""
    towers = list(expected_towers(root).values())
    stacks: list[Stack] = []
    for stack in find_stacks(root):
        if not any(stack.path == path or stack.path.startswith(f'{path}.') for path in [*towers, *(other.path for other in stacks)]):
            stacks.append(stack)
    return stacks


def ranges(numbers: list[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ', '.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)
