"""One rank of a training on the CPU: ``rank.py stock|speedup <swift sft flags>``; variables of torchrun tell which.

DeepSpeed and accelerate's FSDP need some help where there is no GPU. It reaches into them and is for tests only: what wraps the model is
written down, so that a test sees when it no longer helps.
"""
import functools
import json
import os
import runpy
import sys
from pathlib import Path

RANK = os.environ['RANK']


def main(door, flags):
    sys.argv = ['swift', *flags]
    for name in ('SPEEDUP_RECORD', 'RANK_FACTS'):
        os.environ[name] = f'{os.environ[name]}.{RANK}'
    if '--deepspeed' in flags:
        _help_deepspeed()
    if '--fsdp' in flags:
        _help_fsdp()
    _write_facts()
    _let_it_fail()
    if door == 'speedup':
        from swift_speedup.hosts.ms_swift import run_command
        run_command('sft')
    else:
        import importlib.util
        runpy.run_path(importlib.util.find_spec('swift.cli.sft').origin, run_name='__main__')


def _help_deepspeed():
    """Without its own operator, which takes a compiler; and the process group before ZeRO-3 looks for it."""
    import deepspeed
    import deepspeed.ops
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo')


def _help_fsdp():
    """accelerate takes several processes on CPUs for plain data parallel ones, whatever it is asked for."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        if fsdp_plugin is not None:
            from accelerate import PartialState
            PartialState()._shared_state['distributed_type'] = DistributedType.MULTI_GPU
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    AcceleratorState.__init__ = init


def _write_facts():
    """At the end: what wraps the model, how many decisions were made together, and how the plan is."""
    from transformers import Trainer
    train = Trainer.train

    @functools.wraps(train)
    def with_facts(trainer, *args, **kwargs):
        result = train(trainer, *args, **kwargs)
        model = trainer.accelerator.unwrap_model(trainer.model)
        handle = getattr(model, 'speedup', None)
        together = handle and handle._reuse._together
        facts = {'wrapper': type(trainer.model_wrapped).__name__, 'classes': sorted({type(module).__name__ for module in model.modules()}),
                 'decisions': together.decisions if together else 0, 'plan': handle and handle.plan.to_dict()}
        Path(os.environ['RANK_FACTS']).write_text(json.dumps(facts), encoding='utf-8')
        return result
    Trainer.train = with_facts


def _let_it_fail():
    """``$RANK_FAILS`` = ``store``: the store of rank 1 raises; ``killed``: rank 1 ends in its third step."""
    failing = os.environ.get('RANK_FAILS') if RANK == '1' else None
    if failing == 'store':
        from swift_speedup.store.disk import DiskStore

        def broken(self, key):
            raise OSError('the disk is gone')
        DiskStore.get = broken
    elif failing == 'killed':
        from transformers import Trainer
        step, steps = Trainer.training_step, []

        def dying(trainer, *args, **kwargs):
            steps.append(1)
            if len(steps) == 3:
                os._exit(9)
            return step(trainer, *args, **kwargs)
        Trainer.training_step = dying


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2:])
