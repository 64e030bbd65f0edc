"""``swift-speedup cache why``: is this image, with this model and these flags, in the folder, and if not, what is different?

The image goes through the real ms-swift up to one forward in training mode, so what is asked for is what training would ask for.
"""
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..api import attach
from ..config import SpeedupConfig
from ..errors import HostError
from ..store import maintenance
from ..store.disk import DiskStore
from ..store.recorder import Recorder
from . import ms_swift


@dataclasses.dataclass
class _Answered(BaseException):
    """Ends the pipeline; no error handler of the host may keep it."""

    answers: list[dict[str, Any]]


def run_why(folder: Path, image: Path, argv: list[str], as_json: bool) -> None:
    """Print which parts of the image's keys match what is in ``folder``."""
    pipeline = ms_swift.pipeline_of('sft')
    with tempfile.TemporaryDirectory() as scratch:
        dataset = Path(scratch) / 'image.jsonl'
        messages = [{'role': 'user', 'content': '<image>What is this?'}, {'role': 'assistant', 'content': 'This.'}]
        dataset.write_text(json.dumps({'messages': messages, 'images': [str(image.resolve())]}) + '\n', encoding='utf-8')

        def answer(trainer: Any, model: Any) -> None:
            raise _Answered(_ask(trainer, folder))
        ms_swift.hook(answer)
        flags = ['--dataset', str(dataset), '--output_dir', scratch, '--add_version', 'false', '--split_dataset_ratio', '0']
        try:
            pipeline([*argv, *flags]).main()
        except _Answered as answered:
            print(json.dumps(answered.answers, indent=2) if as_json else _text(answered.answers, folder, image), flush=True)
            return
    raise HostError('the pipeline ended before a trainer was ready: nothing can be said for these flags')


def _ask(trainer: Any, folder: Path) -> list[dict[str, Any]]:
    store = DiskStore(folder, writable=False)
    recorder = Recorder(store)
    model = trainer.accelerator.unwrap_model(trainer.model)
    attach(model, SpeedupConfig(prefix='off'), store=recorder)
    model.train()
    (batch,) = list(trainer.get_train_dataloader())
    with torch.no_grad(), trainer.compute_loss_context_manager():
        trainer.compute_loss(model, trainer._prepare_inputs(batch))
    groups, _ = maintenance.survey(store)
    answers = [{'segment': _names(_about(recorder, entry.origin)), 'found': True} for entry in recorder.found.values()]
    answers += [_explain(recorder, entry.origin, entry.sample, groups, store) for entry in recorder.missing.values()]
    recorder.close()
    return answers


def _about(recorder: Recorder, origin: bytes) -> dict:
    return maintenance.read_note(recorder, origin) or {}


def _names(about: dict) -> str:
    return ' + '.join(about.get('segments', {}))


def _explain(recorder: Recorder, origin: bytes, sample: bytes, groups: Sequence[maintenance.Group], store: DiskStore) -> dict[str, Any]:
    about = _about(recorder, origin)
    same = [group for group in groups if list(group.segments) == list(about['segments'])]
    parts = {what: any(all(found.get(what) == about['segments'][name].get(what) for name, found in group.segments.items())
                       for group in same) for what in ('weights', 'modules', 'settings')}
    others = sorted({line for group in same for found in group.segments.values() for line in found.get('settings', ())
                     if line not in {own for mine in about['segments'].values() for own in mine['settings']}})
    return {'segment': _names(about), 'found': False, 'segment_known': bool(same), **parts,
            'inputs': maintenance.has_sample(store, sample), 'settings_there': others}


_MEANING = {
    'weights': 'weights and buffers', 'modules': 'code, configuration, attributes and hooks of its modules',
    'settings': 'library versions, device and numerics', 'inputs': 'what enters it of this image: pixels, size, dtype'}


def _text(answers: Sequence[dict[str, Any]], folder: Path, image: Path) -> str:
    if not answers:
        return f'{image}: nothing frozen in this model is looked up; swift-speedup plan says why'
    lines = []
    for answer in answers:
        if answer['found']:
            lines.append(f'{answer["segment"]}: found')
            continue
        lines.append(f'{answer["segment"]}: not found')
        if not answer['segment_known']:
            lines.append(f'  {folder} has nothing of this segment')
            continue
        lines += [f'  {"same " if answer[what] else "OTHER"}  {meaning}' for what, meaning in _MEANING.items()]
        lines += [f'         there: {line}' for line in answer['settings_there']]
        if all(answer[what] for what in _MEANING):
            lines.append('  each of these is there, but not together, or with another train/eval mode, autocast or other arguments')
    return '\n'.join(lines)
