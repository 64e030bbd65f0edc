"""For ``swift --external_plugins``: writes every training step's loss (exactly), time and counters to ``$SPEEDUP_RECORD``.

Changes nothing in training; the stock and the sped-up run both carry it.
"""
import functools
import json
import os
import time

from transformers import Trainer

_PATH = os.environ['SPEEDUP_RECORD']


def _record(training_step):
    @functools.wraps(training_step)
    def recorded(trainer, model, *args, **kwargs):
        started = time.perf_counter()
        loss = training_step(trainer, model, *args, **kwargs)
        row = {'epoch': int(trainer.state.epoch or 0), 'seconds': time.perf_counter() - started, 'loss': float(loss).hex()}
        handle = getattr(trainer.accelerator.unwrap_model(model), 'speedup', None)
        if handle is not None:
            row['stats'] = handle.stats.to_dict()
        with open(_PATH, 'a', encoding='utf-8') as file:
            file.write(json.dumps(row) + '\n')
        return loss
    return recorded


Trainer.training_step = _record(Trainer.training_step)
