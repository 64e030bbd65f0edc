"""Ways to freeze a :class:`families.Case`, by name; each returns the model that is to be trained."""
from collections.abc import Callable, Iterable

import peft
import torch
from parity.families import Case
from torch import nn
from transformers.pytorch_utils import Conv1D


def lower_layers(case: Case) -> nn.Module:
    """Full tuning of what lies above the middle of the language model."""
    _freeze([*case.tower, *case.aligner, *case.entry, *case.layers[:len(case.layers) // 2]])
    return case.model


def _ratio(share: float) -> Callable[[Case], nn.Module]:
    def freeze(case: Case) -> nn.Module:
        from swift.utils.transformers_utils import freeze_parameters
        freeze_parameters(case.model, share, [], None)
        return case.model
    return freeze


def adapters_everywhere(case: Case) -> nn.Module:
    return _adapters(case.model, [*case.tower, *case.aligner, *case.layers])


def adapters_on_the_upper_half(case: Case) -> nn.Module:
    return _adapters(case.model, case.layers[len(case.layers) // 2:])


def adapters_on_the_language_model(case: Case) -> nn.Module:
    return _adapters(case.model, case.layers)


def aligner_only(case: Case) -> nn.Module:
    """The language model is a frozen suffix; for Qwen-VL this is the merger inside the tower."""
    case.model.requires_grad_(False)
    for module in case.aligner:
        module.requires_grad_(True)
    return case.model


def last_merger_only(case: Case) -> nn.Module:
    case.model.requires_grad_(False)
    case.aligner[-1].requires_grad_(True)
    return case.model


def adapters_in_the_last_vision_block(case: Case) -> nn.Module:
    return _adapters(case.model, case.tower[-1:])


TEXT = {
    'lower layers frozen': lower_layers,
    'ratio 0.3': _ratio(0.3),
    'ratio 0.5': _ratio(0.5),
    'ratio 0.52': _ratio(0.52),
    'adapters everywhere': adapters_everywhere,
    'adapters on the upper half': adapters_on_the_upper_half,
}
VISUAL = {
    'adapters on the language model': adapters_on_the_language_model,
    'aligner only': aligner_only,
    'last merger only': last_merger_only,
    'adapters in the last vision block': adapters_in_the_last_vision_block,
}


def _freeze(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.requires_grad_(False)


def _adapters(model: nn.Module, parts: Iterable[nn.Module]) -> nn.Module:
    """Adapters on every linear layer inside ``parts``, everything else frozen; dropout on, as ms-swift has it."""
    inside = {layer for part in parts for layer in part.modules() if isinstance(layer, (nn.Linear, Conv1D))}
    names = [name for name, module in model.named_modules() if module in inside]
    torch.manual_seed(7)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=names))
    for name, parameter in adapted.named_parameters():  # B starts at zero, and then A has no gradient
        if 'lora_B' in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted
