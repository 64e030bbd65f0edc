"""Entries whose content follows from their key, children that do something to a folder, and a training that must not be changed."""
import copy
import os
import signal
import time
import traceback

import pytest
import torch
from parity.harness import prepare, train
from toys import models

from swift_speedup import MyModel
from swift_speedup.store import Entry
from swift_speedup.store.disk import DiskStore

VOCABULARY = 600


def key(number):
    return number.to_bytes(16, 'big')


def content(number, size=2000):
    return torch.full((size + number % 7,), float(number))


def sound(folder):
    """Every entry is what was put under its key, and the store can be written to."""
    store = DiskStore(folder)
    try:
        assert store.check() == []
        keys = []
        store.scan(lambda name, encoded, place: keys.append(name))
        assert len(keys) == store.totals()[0]
        for name in keys:
            number = int.from_bytes(name, 'big')
            assert store.get(name).tensor.equal(content(number))
        assert store.put(key(10 ** 9), Entry(content(10 ** 9))) and store.flush() and store.get(key(10 ** 9)) is not None
        store.remove([key(10 ** 9)])
        return keys
    finally:
        store.close()


def forked(work, kill_after=None, user=None):
    """Exit status of a child process that runs ``work``; killed after some seconds, as another user, if these are given."""
    child = os.fork()
    if not child:
        status = 1
        try:
            if user is not None:
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


class Training:
    """A tiny Qwen2-VL with a frozen tower; the same training each time, with a cache folder or without."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = prepare(models.build('qwen2_vl', vocabulary=VOCABULARY), 'off')
        self.model.model.visual.requires_grad_(False)
        samples = [models.Sample(images=((1, 4, 4 + 2 * (number % 3)),), text=5) for number in range(6)]
        self.batches = [models.make_batch('qwen2_vl', samples[start:start + 2], start, VOCABULARY) for start in (0, 2, 4)]
        self.expected = train(self.model_twin(), self.batches * 2).losses

    def model_twin(self):
        return copy.deepcopy(self.model)

    def run(self, folder, exact=True, **options):
        """Trains with the folder, checks losses; the counters. Not exact: batches may be put together from hits and misses."""
        model = MyModel(self.model_twin(), cache_dir=folder, **options)
        losses = train(model, self.batches * 2).losses
        stats = model.speedup.stats
        model.speedup.remove()
        if exact:
            assert losses == self.expected
        assert [float.fromhex(loss) for loss in losses] == pytest.approx([float.fromhex(loss) for loss in self.expected], rel=1e-6)
        assert stats.errors == 0
        return stats
