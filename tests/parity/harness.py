"""Plain and sped-up twins, trained from the same seed on the same batches, and compared exactly."""
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CHECKPOINTING = ('off', 'reentrant', 'non-reentrant')


@dataclasses.dataclass
class Run:
    """What training left behind. ``gradients`` has one dict per step."""

    losses: list[str]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    keys: list[str]


def lora(model: nn.Module, targets: str) -> nn.Module:
    """Adapters on the linear layers whose path matches ``targets``, everything else frozen; dropout on, as ms-swift has it."""
    torch.manual_seed(7)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and re.search(targets, name)]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=names))
    for name, parameter in adapted.named_parameters():  # B starts at zero, and then A has no gradient
        if 'lora_B' in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


def prepare(model: nn.Module, checkpointing: str) -> nn.Module:
    """What ms-swift does before training: checkpointing with its kwargs, input-grad hooks twice over."""
    model.train()
    if checkpointing != 'off':
        model.gradient_checkpointing_enable({'use_reentrant': checkpointing == 'reentrant'})
        model.enable_input_require_grads()
    return model


def train(model: nn.Module, batches: Sequence[Mapping], steps_seed: int = 100, on_step: Callable[[int], None] = None) -> Run:
    """One optimizer step per batch. ``on_step(step)`` is called before each."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses, gradients = [], []
    for step, batch in enumerate(batches):
        if on_step is not None:
            on_step(step)
        torch.manual_seed(steps_seed + step)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item().hex())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return Run(losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()},
               {name: buffer.clone() for name, buffer in model.named_buffers()}, list(model.state_dict()))


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def assert_same(plain: Run, fast: Run) -> None:
    """Bitwise, everywhere."""
    assert fast.losses == plain.losses
    assert fast.keys == plain.keys
    for step, (expected, found) in enumerate(zip(plain.gradients, fast.gradients, strict=True)):
        assert found.keys() == expected.keys(), f'step {step}'
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, f'step {step}: gradients of {different[:5]}'
    for what in ('weights', 'buffers'):
        expected, found = getattr(plain, what), getattr(fast, what)
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(found[name], expected[name])], what


def assert_close(plain: Run, fast: Run, tolerance: float = 1e-5) -> None:
    """Within the noise that other batch compositions make: relative to the largest value of each tensor."""
    assert fast.keys == plain.keys
    assert [float.fromhex(loss) for loss in fast.losses] == pytest.approx([float.fromhex(loss) for loss in plain.losses], rel=tolerance)
    for expected, found in zip([*plain.gradients, plain.weights], [*fast.gradients, fast.weights], strict=True):
        assert found.keys() == expected.keys()
        for name in expected:
            assert (found[name] - expected[name]).abs().max() <= tolerance * expected[name].abs().max(), name


@contextmanager
def saved_bytes(*modules: nn.Module) -> Iterator[list[int]]:
    """Bytes that autograd saves for backward while one of ``modules`` runs; one element per tensor."""
    inside, sizes = [], []
    handles = [handle for module in modules for handle in (
        module.register_forward_pre_hook(lambda *_: inside.append(1)), module.register_forward_hook(lambda *_: inside.pop() and None))]

    def pack(tensor):
        if inside:
            sizes.append(tensor.nbytes)
        return tensor
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield sizes
    finally:
        _remove(handles)


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """The list grows by one at each run of ``module``'s forward."""
    runs: list[int] = []
    handle = module.register_forward_pre_hook(lambda *_: runs.append(1))
    try:
        yield runs
    finally:
        handle.remove()


@dataclasses.dataclass
class Forwards:
    """Runs of each of some modules: all of them, and those outside of backward, where checkpointing runs layers again."""

    everywhere: list[int]
    in_forward: list[int]


@contextmanager
def counted_forwards(modules: Sequence[nn.Module]) -> Iterator[Forwards]:
    runs = Forwards([0] * len(modules), [0] * len(modules))

    def count(number):
        runs.everywhere[number] += 1
        runs.in_forward[number] += not in_backward()
    handles = [module.register_forward_pre_hook(lambda *_, number=number: count(number)) for number, module in enumerate(modules)]
    try:
        yield runs
    finally:
        _remove(handles)


def _remove(handles: Sequence) -> None:
    for handle in handles:
        handle.remove()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class backward_flops(TorchDispatchMode):
    """FLOPs of operations in the backward pass: ``anywhere``, and ``inside``, with a weight that only ``modules`` own."""

    def __init__(self, modules: Sequence[nn.Module]):
        super().__init__()
        self.anywhere = self.inside = 0
        self._weights = {parameter.untyped_storage().data_ptr() for module in modules for parameter in module.parameters()
                         if parameter.dim() > 1 and not isinstance(module, nn.Embedding)}  # a tied head is another matter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if in_backward() and func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=output)
            self.anywhere += flops
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.inside += flops * any(tensor.untyped_storage().data_ptr() in self._weights for tensor in tensors)
        return output
