"""For ``--external_plugins``, before all others, in each rank of a training on the CPU.

DeepSpeed and accelerate's FSDP need some help where there is no GPU. It reaches into them and is for tests only: what wraps the model
is written down, so that a test sees when it no longer helps.
"""
import atexit
import functools
import json
import os
import sys
from pathlib import Path

from transformers import Trainer

RANK = os.environ['RANK']


def help_deepspeed():
    """Without its own operator, which takes a compiler; and the process group before ZeRO-3 looks for it."""
    import deepspeed
    import deepspeed.ops
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo')


def help_fsdp():
    """accelerate takes several processes on CPUs for plain data parallel ones, whatever it is asked for."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        if fsdp_plugin is not None:
            PartialState()._shared_state['distributed_type'] = DistributedType.MULTI_GPU
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    AcceleratorState.__init__ = init


def write_facts():
    """At the end: what wraps the model, how many decisions were made together, and how the plan is."""
    train = Trainer.train

    @functools.wraps(train)
    def with_facts(trainer, *args, **kwargs):
        result = train(trainer, *args, **kwargs)
        handle = getattr(trainer.accelerator.unwrap_model(trainer.model), 'speedup', None)
        together = handle and handle._reuse._together
        facts = {'wrapper': type(trainer.model_wrapped).__name__, 'decisions': together.decisions if together else 0,
                 'plan': handle and handle.plan.to_dict(),
                 'evaluations': [row['eval_loss'] for row in trainer.state.log_history if 'eval_loss' in row]}
        Path(os.environ['RANK_FACTS']).write_text(json.dumps(facts), encoding='utf-8')
        return result
    Trainer.train = with_facts


def break_store():
    from swift_speedup.store.disk import DiskStore

    def broken(self, key):
        raise OSError('the disk is gone')
    DiskStore.get = broken


def end_suddenly(steps):
    step, taken = Trainer.training_step, []

    @functools.wraps(step)
    def dying(trainer, *args, **kwargs):
        taken.append(1)
        if len(taken) == steps:
            os._exit(9)
        return step(trainer, *args, **kwargs)
    Trainer.training_step = dying


def leave_after_training():
    """Processes that have used gloo abort at their end now and then, whatever they did."""
    from swift.pipelines.train.sft import SwiftSft
    main = SwiftSft.main

    @functools.wraps(main)
    def last(pipeline):
        main(pipeline)
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(0)
    SwiftSft.main = last


for name in ('SPEEDUP_RECORD', 'RANK_FACTS'):
    os.environ[name] = f'{os.environ[name]}.{RANK}'
if '--deepspeed' in sys.argv:
    help_deepspeed()
if '--fsdp' in sys.argv:
    help_fsdp()
write_facts()
if os.environ.get('RANK_BROKEN_STORE') == RANK:
    break_store()
if os.environ.get('RANK_KILLED') == RANK:
    end_suddenly(3)
if 'TORCHELASTIC_RUN_ID' in os.environ:
    leave_after_training()
