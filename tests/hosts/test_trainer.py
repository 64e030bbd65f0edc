"""Plain trainers of transformers and trl, by the callback: the same training, and afterwards the plain model."""
import copy

import pytest
import torch
from datasets import Dataset
from toys import models, photos
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from swift_speedup import MyModel, SpeedupCallback

TEXTS = [f'number {number} is {number}' for number in range(8)]


@pytest.fixture(autouse=True)
def callbacks_of_transformers(monkeypatch):
    """ms-swift, if another test has imported it into this process, puts callbacks of its own into every Trainer."""
    from transformers import ProgressCallback, trainer, trainer_callback
    monkeypatch.setattr(trainer, 'DEFAULT_CALLBACKS', [trainer_callback.DefaultFlowCallback])
    monkeypatch.setattr(trainer, 'DEFAULT_PROGRESS_CALLBACK', ProgressCallback)
    monkeypatch.setattr(trainer, 'PrinterCallback', trainer_callback.PrinterCallback)


def frozen_below(vocabulary=600):
    model = models.build('llama', vocabulary=vocabulary)
    for part in (model.model.embed_tokens, model.lm_head, *model.model.layers[:3]):
        part.requires_grad_(False)
    return model


class Losses(TrainerCallback):
    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append(dict(logs))


def arguments(kind, place, **more):
    return kind(output_dir=str(place), num_train_epochs=2, per_device_train_batch_size=2, logging_steps=1, report_to='none',
                use_cpu=True, save_strategy='no', learning_rate=1e-2, seed=1, **more)


def train(make, model, *callbacks):
    """Logged losses, and the weights afterwards."""
    torch.manual_seed(0)
    losses = Losses()
    trainer = make(model, [*callbacks, losses])
    trainer.train()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return [row['loss'] for row in losses.rows if 'loss' in row], weights, losses


def of_transformers(place):
    rows = [{'input_ids': (ids := torch.randint(0, 500, (7,), generator=torch.Generator().manual_seed(number)).tolist()), 'labels': ids}
            for number in range(8)]
    return lambda model, callbacks: Trainer(model, arguments(TrainingArguments, place), train_dataset=rows, callbacks=callbacks)


def of_trl(place):
    return lambda model, callbacks: SFTTrainer(
        model, args=arguments(SFTConfig, place, dataset_text_field='text', max_length=32, packing=False),
        train_dataset=Dataset.from_list([{'text': text} for text in TEXTS]), processing_class=tokenizer(), callbacks=callbacks)


def tokenizer():
    return models.make_tokenizer(photos.texts())


@pytest.mark.parametrize('trainer', [of_transformers, of_trl])
def test_the_same_training_and_the_plain_model_afterwards(trainer, tmp_path):
    plain = frozen_below() if trainer is of_transformers else frozen_below(models.VOCABULARY)
    fast = copy.deepcopy(plain)
    expected, weights, _ = train(trainer(tmp_path), plain)
    callback = SpeedupCallback(prefix='on')
    found, others, losses = train(trainer(tmp_path), fast, callback)
    assert found == expected and len(set(expected)) > 4
    assert others.keys() == weights.keys() and all(others[name].equal(weights[name]) for name in weights)
    assert any('speedup_hit_rate' in row for row in losses.rows) and callback.stats.hits > 0
    assert not isinstance(fast, MyModel) and type(fast) is type(plain)


def test_preferences_with_a_reference_model(tmp_path):
    rows = Dataset.from_list([{'prompt': text, 'chosen': f' yes {place}', 'rejected': f' no {place}'}
                              for place, text in enumerate(TEXTS)])
    plain = frozen_below(models.VOCABULARY)
    fast, results = copy.deepcopy(plain), []
    for model, also in ((plain, False), (fast, True)):
        reference = copy.deepcopy(model).eval()
        callback = SpeedupCallback(also=[reference], prefix='on')

        def make(trained, callbacks, reference=reference):
            return DPOTrainer(trained, ref_model=reference, args=arguments(DPOConfig, tmp_path, max_length=48), train_dataset=rows,
                              processing_class=tokenizer(), callbacks=callbacks)
        results.append(train(make, model, *([callback] if also else []))[:2])
    (expected, weights), (found, others) = results
    assert found == pytest.approx(expected, rel=1e-6) and len(set(expected)) > 4
    assert all(torch.allclose(others[name], weights[name], atol=1e-6) for name in weights)
    assert callback.stats.hits >= 2 * len(TEXTS) and not isinstance(reference, MyModel)


def test_a_model_that_is_attached_keeps_its_attachment(tmp_path):
    model = MyModel(frozen_below(), prefix='off')
    train(of_transformers(tmp_path), model, SpeedupCallback(prefix='on'))
    assert isinstance(model, MyModel) and model.speedup.config.prefix == 'off'


def test_a_compiled_model_is_not_silently_plain(tmp_path, caplog):
    model = frozen_below()
    callback = SpeedupCallback(prefix='on')

    class Elsewhere(Trainer):  # as a compiled model: the attached one is not called
        def compute_loss(self, model, inputs, **kwargs):
            return copy.deepcopy(model)(**inputs).loss * 1.0
    with caplog.at_level('WARNING'):
        Elsewhere(model, arguments(TrainingArguments, tmp_path), callbacks=[callback], train_dataset=[
            {'input_ids': [1, 2, 3], 'labels': [1, 2, 3]}] * 2).train()
    assert 'no call of the model came through' in caplog.text
