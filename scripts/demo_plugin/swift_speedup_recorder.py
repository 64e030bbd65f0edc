"""For ``swift --external_plugins``: writes every training step's loss (exactly), time and counters to ``$SPEEDUP_RECORD``.

Changes nothing in training; the stock and the sped-up run both carry it. With ``$SPEEDUP_TURNS`` (a file that two runs share) and
``$SPEEDUP_PLAYER`` (0 or 1), the runs take their steps in turns, so that a machine that slows down slows down both.
"""
import contextlib
import functools
import json
import os
import time
from pathlib import Path

from transformers import Trainer

_PATH = os.environ['SPEEDUP_RECORD']
_TURNS = os.environ.get('SPEEDUP_TURNS')
_PLAYER = os.environ.get('SPEEDUP_PLAYER', '0')


@contextlib.contextmanager
def _my_turn():
    """Wait until the file names this player; name the other one afterwards. The file's parent process ends runs that are left alone."""
    if _TURNS is None:
        yield
        return
    while Path(_TURNS).read_text(encoding='utf-8') != _PLAYER:
        time.sleep(0.001)
    try:
        yield
    finally:
        replacement = Path(f'{_TURNS}.{_PLAYER}')
        replacement.write_text(str(1 - int(_PLAYER)), encoding='utf-8')
        replacement.replace(_TURNS)


def _record(training_step):
    @functools.wraps(training_step)
    def recorded(trainer, model, *args, **kwargs):
        with _my_turn():
            started = time.perf_counter()
            loss = training_step(trainer, model, *args, **kwargs)
            seconds = time.perf_counter() - started
        row = {'epoch': int(trainer.state.epoch or 0), 'seconds': seconds, 'loss': float(loss).hex()}
        handle = getattr(trainer.accelerator.unwrap_model(model), 'speedup', None)
        if handle is not None:
            row['stats'] = handle.stats.to_dict()
        with open(_PATH, 'a', encoding='utf-8') as file:
            file.write(json.dumps(row) + '\n')
        return loss
    return recorded


Trainer.training_step = _record(Trainer.training_step)
