"""ms-swift 3.12.6 to 4.6.0: where the plugin attaches to its trainers, and how flags reach it.

One method has the same name, module and signature in all these releases and runs after adapters, checkpointing and its hooks,
before the optimizer and the parallel wrappers: ``SwiftMixin._prepare_gradient_checkpointing``.
"""
import dataclasses
import functools
import importlib
import importlib.util
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

from torch import nn

from ..api import Speedup
from ..config import FLAG_PREFIX, SpeedupConfig, flag_name, option_fields
from ..errors import HostError
from ..graph.swap import is_swapped
from ..log import logger
from .replicating import keep_whole
from .trainer import SummaryCallback, attach_together, follow, take_back

_HOOKED = '_swift_speedup_original'
_COMPANIONS = ('ref_model', 'reward_model', 'reward_models', 'reward_funcs', 'value_model', 'teacher_model')
# command -> where its pipeline class lives and what it is called, newest layout first
_PIPELINES = {
    'sft': (('swift.pipelines.train.sft', 'SwiftSft'), ('swift.llm.train.sft', 'SwiftSft')),
    'pt': (('swift.pipelines.train.pretrain', 'SwiftPretrain'), ('swift.llm.train.pt', 'SwiftPt')),
    'rlhf': (('swift.pipelines.train.rlhf', 'SwiftRLHF'), ('swift.llm.train.rlhf', 'SwiftRLHF')),
}


def install(config: Optional[SpeedupConfig] = None) -> None:
    """Attach to every model that an ms-swift trainer of this process trains from now on.

    ``None``: options come from the environment, read when the model is there, because ``--model_kwargs`` sets variables after
    plugins are imported. Calling it again replaces the options. Raises ``HostError`` for an ms-swift without the hook point.
    """
    hook(lambda trainer, model: _attach_to(trainer, SpeedupConfig.from_env() if config is None else config))


def hook(prepared: Callable[[Any, Any], None]) -> None:
    """Call ``prepared(trainer, base model)`` when an ms-swift trainer has its model ready to train; replaces an earlier hook."""
    try:
        mixin = importlib.import_module('swift.trainers.mixin').SwiftMixin
        method = mixin._prepare_gradient_checkpointing
    except (ImportError, AttributeError) as missing:
        raise HostError(f'cannot hook into the installed ms-swift ({missing}); versions 3.12.6 to 4.6.0 are supported') from missing
    importlib.import_module('.florence2', __package__).register()  # imports ms-swift: not before it is needed
    original = getattr(method, _HOOKED, method)

    @functools.wraps(original)
    def prepare(trainer: Any, model: Any) -> None:
        original(trainer, model)
        prepared(trainer, model)

    setattr(prepare, _HOOKED, original)
    mixin._prepare_gradient_checkpointing = prepare
    _hook_trainers_of_their_own(mixin, prepared)


def _hook_trainers_of_their_own(mixin: type, prepared: Callable[[Any, Any], None]) -> None:
    """A trainer that prepares its model in a way of its own, as PPO's, is hooked when it trains: it may not be imported yet."""
    original = getattr(mixin.train, _HOOKED, mixin.train)

    @functools.wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        own = type(trainer)._prepare_gradient_checkpointing
        if own is not mixin._prepare_gradient_checkpointing:
            def prepare(model: Any) -> None:
                own(trainer, model)
                prepared(trainer, model)
            trainer._prepare_gradient_checkpointing = prepare
        try:
            return original(trainer, *args, **kwargs)
        finally:
            trainer.__dict__.pop('_prepare_gradient_checkpointing', None)

    setattr(train, _HOOKED, original)
    mixin.train = train


def uninstall() -> None:
    """Take the hook back; models that are attached stay so."""
    mixin = importlib.import_module('swift.trainers.mixin').SwiftMixin
    for name in ('_prepare_gradient_checkpointing', 'train'):
        method = getattr(mixin, name)
        setattr(mixin, name, getattr(method, _HOOKED, method))


def _attach_to(trainer: Any, config: SpeedupConfig) -> tuple[Speedup, ...]:
    """What was attached; nothing if the model was already."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if any(is_swapped(module) for module in model.modules()):
        logger.info('the model already has swift_speedup attached; its own options stay')
        return ()
    if getattr(trainer.args, 'torch_compile', False):
        raise HostError('torch_compile=true compiles the calls that swift_speedup skips, so it would be without effect: '
                        'set torch_compile to false, or train without swift_speedup (frozen_speedup false, no plugin)')
    handles = attach_together(model, _companions(trainer), config)
    if config.replicate:
        for handle in handles:
            keep_whole(trainer, handle)
    follow(trainer, *handles)
    return handles


def _companions(trainer: Any) -> Iterator[nn.Module]:
    """The other models that ``trainer`` runs."""
    for name in _COMPANIONS:
        held = getattr(trainer, name, None)
        for model in held if isinstance(held, (list, tuple)) else [held]:
            if isinstance(model, nn.Module):
                yield trainer.accelerator.unwrap_model(model)


def config_of(arguments: Any) -> SpeedupConfig:
    """What the ``frozen_*`` fields of ms-swift's arguments ask for; ``None`` is a flag that was not given. Raises ``ConfigError``."""
    given = {option.name: getattr(arguments, FLAG_PREFIX + option.name) for option in option_fields()}
    return SpeedupConfig.from_named({name: value for name, value in given.items() if value is not None}, flag_name)


@contextmanager
def training(trainer: Any) -> Iterator[None]:
    """What a patched ms-swift (``patches/``) trains in: its model is attached with the options of ``trainer.args`` meanwhile.

    A model that somebody has attached already keeps that attachment, afterwards too.
    """
    handles = _attach_to(trainer, config_of(trainer.args))
    try:
        yield
    finally:
        if handles:
            trainer.remove_callback(SummaryCallback)
        take_back(handles)


def run_command(command: str) -> None:
    """Run ``swift <command>`` in this process with the plugin's flags added to its own. ``sys.argv`` holds the flags."""
    pipeline = pipeline_of(command)
    pipeline.args_class = with_flags(pipeline.args_class, install)
    runpy.run_path(importlib.util.find_spec(f'swift.cli.{command}').origin, run_name='__main__')


def pipeline_of(command: str) -> type:
    """The class whose ``main`` is ``swift <command>``."""
    places = _PIPELINES[command]
    for module, class_name in places:
        try:
            return getattr(importlib.import_module(module), class_name)
        except ModuleNotFoundError as missing:
            if not module.startswith(missing.name or '?'):
                raise
    raise HostError(f'the installed ms-swift has none of {", ".join(module for module, _ in places)}; '
                    'versions 3.12.6 to 4.6.0 are supported')


def with_flags(arguments: type, use: Callable[[SpeedupConfig], None]) -> type:
    """A subclass of the host's argument class with one text field per option; ``use`` gets them, parsed where all options are."""

    def __post_init__(self):
        use(config_of(self))
        if hasattr(self, 'frozen_speedup'):  # a patched ms-swift, which refuses the options without it
            self.frozen_speedup = True
        arguments.__post_init__(self)

    fields = [(FLAG_PREFIX + option.name, Optional[str], dataclasses.field(
        default=None, metadata={'help': option.metadata['help']})) for option in option_fields()]
    return subclass(arguments, fields, __post_init__)


def subclass(arguments: type, fields: list, post_init: Callable[[Any], None]) -> type:
    """A dataclass that passes for the host's own."""
    extended = dataclasses.make_dataclass(arguments.__name__, fields, bases=(arguments,), namespace={'__post_init__': post_init})
    extended.__module__ = arguments.__module__
    return extended
