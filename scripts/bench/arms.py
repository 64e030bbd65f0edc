"""The arms of the benchmark: twins of one model that differ in how their frozen tower is evaluated."""
import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from swift_speedup import MyModel
from swift_speedup.trees import flatten, rebuild

from .subjects import Subject

ARMS = {
    'stock': 'as ms-swift 4.6 runs it: frozen tower without a graph, evaluated at every step',
    'graph': 'swift_speedup with cache=off: graph skip only',
    'cold': 'swift_speedup, cache emptied before each step: every image is a miss',
    'warm': 'swift_speedup, every image is a hit',
    'floor': 'stock with the tower and the frozen layers (unless they have dropout) replaced by recorded outputs, for free',
}
_GRAPH_ONLY = dict(cache='off', dedup=False)
_OPTIONS = {'graph': _GRAPH_ONLY, 'cold': {}, 'warm': {}}


class Arm:
    """One model with its optimizer. ``prepare_step`` is outside the clock, ``step`` is inside."""

    def __init__(self, name: str, model: nn.Module, subject: Subject, tower: nn.Module | None, layers: Sequence[nn.Module],
                 options: Mapping | None):
        self.name = name
        self.model = model
        self.subject = subject
        self.tower = tower
        self._layers = layers  # the frozen ones
        self.peak_bytes = 0
        self._now = 0
        self._optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        if options is not None:
            MyModel(model, **options)

    def warm_up(self, batches: Sequence[Mapping]) -> None:
        """Fill the cache or record what the floor replays; every arm takes the same steps."""
        if self.name == 'floor':
            self._replay(batches)
        for index in range(len(batches)):
            self.step(index, batches[index])

    def _replay(self, batches: Sequence[Mapping]) -> None:
        replaced = [] if self.subject.dropout else self._layers  # random numbers are to be drawn as in the other arms
        recorded, last = [], replaced[-1:]
        with torch.no_grad():
            towers = [flatten(self.tower(*self.subject.tower_call(batch))) for batch in batches]
            hooks = [layer.register_forward_hook(lambda module, args, output: recorded.append(flatten(output))) for layer in last]
            for batch in batches if last else ():
                self.model(**batch)
        for hook in hooks:
            hook.remove()

        def again(outputs: Sequence) -> Any:  # new tensors: autograd writes into those that leave a checkpointed function
            structure, tensors = outputs[self._now]
            return rebuild(structure, [tensor.detach() for tensor in tensors])
        self.tower.forward = lambda *args, **kwargs: again(towers)
        for layer in replaced:
            layer.gradient_checkpointing = False  # there is nothing to compute again
        for layer in replaced[:-1]:
            layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
        for layer in last:
            layer.forward = lambda *args, **kwargs: again(recorded)

    def prepare_step(self) -> None:
        if self.name == 'cold':
            self.model.speedup.clear()

    def step(self, index: int, batch: Mapping) -> float:
        """Forward, backward, optimizer; returns the loss, and with it has waited for the device."""
        self._now = index
        loss = self.model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()


def make_arms(names: Sequence[str], subject: Subject, tuner: str, frozen_layers: int, checkpointing: str, device: str,
              dtype: torch.dtype, folder: Path | None = None) -> list[Arm]:
    """Twins that share the storage of what is frozen, each prepared as ms-swift prepares a model for training.

    The first ``frozen_layers`` layers of the language model are frozen, with the embeddings when there are any. With a ``folder``, arms
    that cache do so in a folder of their own in it.
    """
    model = subject.build().to(device=device, dtype=dtype)
    model.config.use_cache = False
    if tuner == 'lora':
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, lora_dropout=0.05, target_modules=_targets(
            model, subject, frozen_layers)))
    else:
        _freeze(model, subject, frozen_layers)
    frozen = [t for t in (*model.parameters(), *model.buffers()) if not t.requires_grad]
    arms = []
    for name in names:
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in frozen}).train()
        tower = subject.tower and _base(twin).get_submodule(subject.tower)
        layers = list(_base(twin).get_submodule(subject.layers))[:frozen_layers]
        _prepare(twin, tower, checkpointing)
        # With frozen layers the trainable part alone is what is left when their graph is skipped too.
        skipped = _GRAPH_ONLY if name == 'floor' and frozen_layers else None
        options = _OPTIONS.get(name, skipped)
        if folder is not None and options == {}:
            options = {'cache_dir': folder / name}
        arms.append(Arm(name, twin, subject, tower, layers, options))
    return arms


def _targets(model: nn.Module, subject: Subject, frozen_layers: int) -> list[str]:
    """Paths of the linear layers in the language model's layers that are not frozen."""
    first = {subject.layers: frozen_layers} | dict.fromkeys(subject.adapted, 0)
    pattern = re.compile(f'({"|".join(map(re.escape, first))})' r'\.(\d+)\.')
    found = {name: pattern.match(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [name for name, match in found.items() if match and int(match.group(2)) >= first[match.group(1)]]


def _freeze(model: nn.Module, subject: Subject, frozen_layers: int) -> None:
    for path in subject.frozen:
        model.get_submodule(path).requires_grad_(False)
    if frozen_layers:
        model.get_input_embeddings().requires_grad_(False)
        for layer in model.get_submodule(subject.layers)[:frozen_layers]:
            layer.requires_grad_(False)


def _base(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, 'get_base_model') else model


def _prepare(model: nn.Module, tower: nn.Module | None, checkpointing: str) -> None:
    if checkpointing != 'off':
        model.gradient_checkpointing_enable({'use_reentrant': checkpointing == 'reentrant'})
        model.enable_input_require_grads()
    if tower is None:
        return
    try:
        from swift.model.patcher import patch_frozen_module
    except ImportError:  # before ms-swift 4.6 the host does not do this
        return
    patch_frozen_module(tower)
