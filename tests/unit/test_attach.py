"""Rules 2 and 10: the same object, and an exact way back."""
import copy
import inspect
import io
import pickle

import pytest
import torch
from parity.harness import lora
from torch import nn
from toys.models import build

from swift_speedup import AttachError, MyModel, Speedup, SpeedupConfig


@pytest.fixture
def model():
    return lora(build('qwen2_vl', vocabulary=600), r'language_model\.layers')


def anatomy(model):
    return {name: (type(module), dict(module.__dict__), list(module._forward_hooks)) for name, module in model.named_modules()}


def test_everything_a_host_looks_at_stays(model):
    def looks(model):
        return (list(model.state_dict()), [(type(m).__name__, type(m).__qualname__, type(m).__module__, str(type(m)))
                                           for m in model.modules()],
                inspect.signature(model.forward), model.config.to_dict(), repr(model), [n for n, _ in model.named_parameters()])
    before, classes = looks(model), [type(module) for module in model.modules()]
    assert MyModel(model) is model
    assert looks(model) == before
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes))
    assert isinstance(model, MyModel) and isinstance(model.speedup, Speedup)
    assert not isinstance(model.get_base_model(), MyModel) and not hasattr(model.get_base_model(), 'speedup')


def test_remove_leaves_nothing_behind(model):
    before = anatomy(model)
    speedup = MyModel(model).speedup
    assert anatomy(model) != before
    assert speedup.remove() is model and anatomy(model) == before
    assert not isinstance(model, MyModel)
    assert speedup.remove() is model and MyModel(model, cache='off') is model


def test_copies_and_pickles_are_plain_models(model):
    MyModel(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert type(copied).__mro__[0] is type(model).__mro__[1] and not isinstance(copied, MyModel)
        assert b'swift_speedup' not in pickle.dumps(copied)
        assert all(torch.equal(one, other) for one, other in zip(copied.parameters(), model.parameters()))
    assert b'swift_speedup' not in pickle.dumps(model)


def test_one_class_for_all_instances(model):
    MyModel(model)
    layers = model.get_base_model().model.language_model.layers
    assert len({type(layer) for layer in layers}) == 1


def test_attaching_again(model):
    MyModel(model, ram_gib=1)
    first = model.speedup
    assert MyModel(model, ram_gib='1') is model and model.speedup is first
    with pytest.raises(AttachError, match='remove'):
        MyModel(model, cache='off')
    with pytest.raises(AttachError, match='another attachment'):
        MyModel(nn.Sequential(model.get_base_model()))


@pytest.mark.parametrize('thing', [None, 'model', nn.Linear])
def test_things_that_are_not_modules(thing):
    with pytest.raises(AttachError, match='torch.nn.Module'):
        MyModel(thing)


def test_a_saved_checkpoint_is_that_of_the_plain_model(tmp_path):
    plain, fast = build('qwen2_vl', vocabulary=600), MyModel(build('qwen2_vl', vocabulary=600))
    for model, name in ((plain, 'plain'), (fast, 'fast')):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / 'plain').iterdir():
        assert file.read_bytes() == (tmp_path / 'fast' / file.name).read_bytes(), file.name


def test_the_attach_line_and_the_report_say_what_and_why_not(model, caplog, capsys):
    with caplog.at_level('INFO', logger='swift_speedup'):
        MyModel(model)
    lines = [record.message for record in caplog.records if record.name == 'swift_speedup']
    assert len(lines) == 1 and 'visual' in lines[0] and 'reused' in lines[0]
    model.get_base_model().model.visual.merger.requires_grad_(True)
    plan = model.speedup.plan
    assert not plan.segments[0].cached and 'merger' in plan.segments[0].reason and 'is trainable' in plan.segments[0].reason
    text = model.speedup.report()
    assert 'is trainable' in text.replace('\n', ' ') and 'frozen_calls' in text and text in capsys.readouterr().out
    assert plan.to_dict()['segments'][0]['frozen'] is False


def test_config_and_keywords_are_the_same_thing(model):
    MyModel(model, cache='ram', ram_gib=0.25, dedup=False)
    assert model.speedup.config == SpeedupConfig(cache='ram', ram_gib=0.25, dedup=False)


def test_nested_classes_keep_their_qualified_name():
    class Inner(nn.Sequential):
        pass
    model = Inner(nn.Linear(2, 2))
    before = str(type(model))
    assert '<locals>' in before and str(type(MyModel(model))) == before


def test_a_class_that_another_tool_derives_from_ours_keeps_the_attachment():
    model = MyModel(nn.Sequential(nn.Linear(2, 2)))
    model.__class__ = type('FSDPSequential', (type(model),), {})
    assert isinstance(model, MyModel) and model.speedup.plan.segments == ()
    with pytest.raises(AttachError, match='before'):
        model.speedup.remove()


def test_a_class_whose_getattr_asks_super_of_its_own_class():
    """As ms-swift's ``patch_getattr`` writes it: in a subclass it would come back to itself."""
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def look_up(self, name):
        try:
            return super(self.__class__, self).__getattr__(name)
        except AttributeError:
            if name == 'inner':
                raise
            return getattr(self.inner, name)
    Wrapper.__getattr__ = look_up
    model = MyModel(Wrapper())
    assert model.append == model.inner.append
    with pytest.raises(AttributeError):
        model.nothing  # noqa: B018
    assert isinstance(model, MyModel) and type(copy.deepcopy(model)) is Wrapper
    assert model.speedup.remove() is model and type(model) is Wrapper
