"""Model -> segments: the callables whose evaluation is skipped and reused as one."""
import dataclasses
import inspect

from torch import nn

from ..graph.swap import original_class, swappable
from ..memo.split import GRID_NAMES


@dataclasses.dataclass(frozen=True)
class Segment:
    """A tower that is called with packed patches and one grid row per image or video."""

    path: str
    module: nn.Module
    signature: inspect.Signature  # of the class's ``forward`` without ``self``: the instance's may be the host's (*args, **kwargs)


def find_towers(root: nn.Module) -> list[Segment]:
    """The outermost modules whose forward takes a grid; names and ``model_arch`` tables are not trusted."""
    towers: list[Segment] = []
    for path, module in root.named_modules():
        if any(path.startswith(f'{tower.path}.') or not tower.path for tower in towers) or not swappable(module):
            continue
        signature = forward_signature(module)
        if any(name in signature.parameters for name in GRID_NAMES):
            towers.append(Segment(path, module, signature))
    return towers


def forward_signature(module: nn.Module) -> inspect.Signature:
    signature = inspect.signature(original_class(module).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def modules_to_swap(root: nn.Module) -> list[nn.Module]:
    """The modules whose calls the frontier must see.

    Those with weights and parts; of the leaves only embeddings and others that a hook could make require grad: for a bare
    layer without inputs that need grad autograd records nothing by itself. One class is swapped for all its instances or not at all.
    """
    entries = {_input_embeddings(module) for module in root.modules()}
    wanted = {original_class(module) for module in root.modules()
              if _has_parts(module) or module in entries or isinstance(module, nn.Embedding) or module._forward_hooks}
    wanted.add(original_class(root))
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return [module for module in root.modules()
            if original_class(module) in wanted and not isinstance(module, containers) and swappable(module)]


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _input_embeddings(module: nn.Module):
    """What ``enable_input_require_grads`` would hook; models that cannot tell raise all kinds of errors."""
    getter = getattr(module, 'get_input_embeddings', None)
    try:
        return getter() if callable(getter) else None
    except Exception:
        return None
