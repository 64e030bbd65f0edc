"""For ``swift --external_plugins``: after training, in ``$FLORENCE2_FACTS``, the plan as it is in train mode and how often drop path
drew random numbers.

With ``$FLORENCE2_REGISTER`` it registers the model type and nothing else: the stock run.
"""
import functools
import json
import os
from pathlib import Path

from transformers import Trainer
from transformers.models.florence2.modeling_florence2 import Florence2DropPath

if 'FLORENCE2_REGISTER' in os.environ:
    from swift_speedup.hosts.florence2 import register
    assert register() and register()  # the second time is harmless

draws = []


def _counted(forward):
    @functools.wraps(forward)
    def counted(self, hidden_states):
        if self.training and self.drop_prob:
            draws.append(self.drop_prob)
        return forward(self, hidden_states)
    return counted


def _with_facts(train):
    @functools.wraps(train)
    def with_facts(trainer, *args, **kwargs):
        result = train(trainer, *args, **kwargs)
        model = trainer.accelerator.unwrap_model(trainer.model).train()
        handle = getattr(model, 'speedup', None)
        facts = {'draws': len(draws), 'plan': handle and handle.plan.to_dict(), 'report': handle and handle.report()}
        Path(os.environ['FLORENCE2_FACTS']).write_text(json.dumps(facts), encoding='utf-8')
        return result
    return with_facts


Florence2DropPath.forward = _counted(Florence2DropPath.forward)
Trainer.train = _with_facts(Trainer.train)
