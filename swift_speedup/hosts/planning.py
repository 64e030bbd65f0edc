"""``swift-speedup plan``: the user's flags go through the real ms-swift pipeline up to the first step, with weights that have
shapes only; then the plan is made, and FLOPs are counted on the first batches of the user's data."""
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from accelerate import Accelerator
from torch import nn
from transformers import Trainer

from ..api import attach
from ..config import SpeedupConfig
from ..segments.flops import Prediction, count_steps
from ..segments.plan import Plan, render
from . import ms_swift
from .flag_remarks import flag_remarks

# What planning cannot or need not do as training does: field -> (value, what to tell the user; nothing where no number depends on it).
_SETTINGS: dict[str, tuple[Any, str]] = {
    'device_map': ('meta', ''), 'use_cpu': (True, ''), 'deepspeed': (None, ''), 'fsdp': ('', ''), 'bf16': (False, ''),
    'fp16': (False, ''), 'dataloader_num_workers': (0, ''), 'split_dataset_ratio': (0.0, ''), 'val_dataset': ([], ''),
    'eval_strategy': ('no', ''), 'lazy_tokenize': (True, ''), 'resume_from_checkpoint': (None, ''), 'push_to_hub': (False, ''),
    'create_checkpoint_symlink': (False, ''), 'add_version': (False, ''), 'report_to': (['none'], ''),
    'packing': (False, 'counted without packing'), 'padding_free': (False, 'counted with padding'),
    'sequence_parallel_size': (1, 'counted for one rank that holds whole sequences'),
    'use_liger_kernel': (False, 'counted without liger kernels'), 'torch_compile': (False, 'counted without torch.compile'),
    'quant_method': (None, 'counted without quantisation'), 'quant_bits': (None, ''),
}


@dataclasses.dataclass
class Planned(BaseException):
    """Ends the pipeline where training would begin; no error handler of the host may keep it."""

    plan: Plan
    prediction: Optional[Prediction]
    notes: list[str]

    def text(self) -> str:
        return render(self.plan, prediction=self.prediction) + ''.join(f'{note}\n' for note in self.notes)

    def to_dict(self) -> dict[str, Any]:
        prediction = self.prediction.to_dict() if self.prediction else None
        return {'plan': self.plan.to_dict(), 'prediction': prediction, 'notes': self.notes}


def run_plan(command: str, argv: list[str], batches: int, json_file: Optional[Path]) -> None:
    """Plan ``swift <command> <argv>``, print the result, and write it to ``json_file`` if one is named."""
    with tempfile.TemporaryDirectory() as scratch, _nothing_moves():
        planned = make_plan(command, argv, batches, scratch)
    print(planned.text())
    if json_file is not None:
        json_file.write_text(json.dumps(planned.to_dict(), indent=2), encoding='utf-8')
        print(f'written to {json_file}')


def make_plan(command: str, argv: list[str], batches: int, scratch: str) -> Planned:
    pipeline = ms_swift.pipeline_of(command)
    configs: list[SpeedupConfig] = []
    notes: list[str] = []
    given: dict[str, Any] = {}

    def plan(trainer: Any, model: Any) -> None:
        remarks = flag_remarks(given, trainer.args, trainer.accelerator.unwrap_model(trainer.model))
        raise _plan(trainer, configs[-1], batches, [*remarks, *notes], command)

    arguments = _with_settings(pipeline.args_class, scratch, given, notes)
    pipeline.args_class = ms_swift.with_flags(arguments, configs.append)
    ms_swift.hook(plan)
    try:
        pipeline(argv).main()
    except Planned as planned:
        return planned
    raise RuntimeError('the pipeline ended before a trainer was ready: nothing can be planned for these flags')


def _with_settings(arguments: type, scratch: str, given: dict[str, Any], notes: list[str]) -> type:
    def __post_init__(self):
        given.update({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        for name, (value, note) in {**_SETTINGS, 'output_dir': (scratch, '')}.items():
            if not hasattr(self, name):
                continue
            if note and getattr(self, name) not in (value, None, False):
                notes.append(f'{name}={getattr(self, name)}: {note}')
            setattr(self, name, value)
        if 'flash' in str(getattr(self, 'attn_impl', '')):
            self.attn_impl = 'sdpa'  # needs no GPU; the same products
        arguments.__post_init__(self)

    return ms_swift.subclass(arguments, [], __post_init__)


@contextmanager
def _nothing_moves() -> Iterator[None]:
    """Weights that have only shapes cannot be moved to a device."""
    before = Trainer._move_model_to_device, Accelerator.prepare_model
    Trainer._move_model_to_device = lambda self, model, device: model
    Accelerator.prepare_model = lambda self, model, *args, **kwargs: model
    try:
        yield
    finally:
        Trainer._move_model_to_device, Accelerator.prepare_model = before


def _plan(trainer: Any, config: SpeedupConfig, batches: int, notes: list[str], command: str) -> Planned:
    model = trainer.accelerator.unwrap_model(trainer.model).train()
    prediction = None
    try:
        data = list(itertools.islice(trainer.get_train_dataloader(), batches))
        steps = _steps(trainer, model, data)
        stock = count_steps(model, steps, {})
        attach(model, config)
        plan, prediction = model.speedup.predict(stock, steps, len(data))
        if command == 'rlhf':
            notes.append("FLOPs are those of the policy's forward and backward; reference passes and generation come on top")
    except Exception as trouble:  # a plan without numbers is better than none
        plan = attach(model, config).speedup.plan
        notes.append(f'FLOPs could not be counted ({type(trouble).__name__}: {trouble})')
    return Planned(plan, prediction, notes)


def _steps(trainer: Any, model: nn.Module, data: list[Mapping]) -> Callable[[], None]:
    if not data or 'input_ids' not in data[0] or 'labels' not in data[0]:
        raise ValueError(f'batches of this trainer hold {sorted(data[0]) if data else "nothing"}, not input_ids and labels')

    def steps() -> None:
        for batch in data:
            inputs = dict(batch)
            if hasattr(trainer, 'prepare_logits_to_keep') and trainer.get_use_logits_to_keep(True):
                trainer.prepare_logits_to_keep(inputs)
            for name in ('compute_loss_func', 'loss_scale', 'channel', 'text_position_ids'):
                inputs.pop(name, None)
            output = model(**inputs)
            loss = output['loss'] if output.get('loss') is not None else output['logits'].sum()
            loss.backward()
    return steps
