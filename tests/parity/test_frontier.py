"""Rule 3 on text models: frozen lower layers leave the graph, and what is trained above them trains as before."""
import re

import pytest
import torch
import transformers
from parity.families import TEXT_CONFIGS, text_batches
from parity.harness import CHECKPOINTING, assert_same, counted, lora, prepare, train, twins
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from swift_speedup import FrontierError, MyModel

GRAPH_ONLY = dict(cache='off', dedup=False)


def build(name):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(TEXT_CONFIGS[name])


def data(steps=3):
    return text_batches(steps, vocabulary=128)


def freeze(model, layers=4):
    for module in (model.model.embed_tokens, *model.model.layers[:layers]):
        module.requires_grad_(False)
    return model


@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
def test_a_frozen_layer_between_trained_ones_is_left_as_it_is(checkpointing):
    plain, fast = twins(build('llama'))
    for model in (plain, fast):
        model.model.layers[2].requires_grad_(False)
    expected = train(prepare(plain, checkpointing), data())
    MyModel(prepare(fast, checkpointing), **GRAPH_ONLY)
    with counted(fast.model.layers[2]) as runs:
        assert_same(expected, train(fast, data()))
    assert len(runs) == (3 if checkpointing == 'off' else 6)


@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
def test_the_frontier_may_lie_inside_a_layer(checkpointing):
    def only_mlp(model):
        model.requires_grad_(False)
        model.model.layers[2].mlp.requires_grad_(True)
        return model
    plain, fast = twins(only_mlp(build('qwen3')))
    expected = train(prepare(plain, checkpointing), data())
    assert_same(expected, train(MyModel(prepare(fast, checkpointing), **GRAPH_ONLY), data()))


def test_freezing_changes_between_steps_are_followed_at_once():
    def thaw(model):
        def on_step(step):
            model.requires_grad_(False)
            for layer in model.model.layers[5 - step:]:
                layer.requires_grad_(True)
        return on_step
    plain, fast = twins(build('llama'))
    expected = train(prepare(plain, 'reentrant'), data(5), on_step=thaw(plain))
    MyModel(prepare(fast, 'reentrant'), **GRAPH_ONLY)
    assert_same(expected, train(fast, data(5), on_step=thaw(fast)))


def test_soft_prompts_keep_their_gradient_through_frozen_layers():
    from peft import PromptTuningConfig, get_peft_model
    torch.manual_seed(0)
    plain = get_peft_model(build('llama'), PromptTuningConfig(num_virtual_tokens=4, task_type='CAUSAL_LM'))
    plain, fast = twins(plain)
    expected = train(prepare(plain, 'reentrant'), data())
    found = train(MyModel(prepare(fast, 'reentrant'), **GRAPH_ONLY), data())
    assert_same(expected, found)
    assert found.gradients[0]


def test_switching_checkpointing_off_and_on_again_changes_nothing():
    plain, fast = twins(freeze(build('llama')))
    MyModel(prepare(fast, 'reentrant'), **GRAPH_ONLY)
    prepare(plain, 'reentrant')
    for model in (plain, fast):
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable({'use_reentrant': True})
    expected = train(plain, data())
    with counted(fast.model.layers[0]) as runs:
        assert_same(expected, train(fast, data()))
    assert len(runs) == 3


def test_layers_without_native_checkpointing_under_ms_swifts_wrapper():
    from swift.trainers.utils import dynamic_gradient_checkpointing

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, hidden):
            return hidden + self.proj(hidden).tanh()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(10))
            self.head = nn.Linear(8, 16)

        def forward(self, input_ids):
            hidden = self.embed(input_ids)
            for block in self.blocks:
                hidden = block(hidden)
            logits = self.head(hidden)
            return type('Output', (), {'loss': nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())})

    torch.manual_seed(0)
    reference, fast = twins(Model())
    for model in (reference, fast):
        model.embed.requires_grad_(False)
        model.blocks[:6].requires_grad_(False)
    dynamic_gradient_checkpointing(fast)
    for block in fast.blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = lambda function, *args: checkpoint(function, *args, use_reentrant=True)
    ids = [{'input_ids': torch.arange(12).view(2, 6) % 16}] * 3
    expected = train(reference.train(), ids)  # no checkpointing: with it, the host's shared flag loses the gradients
    with counted(fast.blocks[0].proj) as runs, counted(fast.blocks[9].proj) as trained_runs:
        assert_same(expected, train(MyModel(fast.train(), **GRAPH_ONLY), ids))
    assert (len(runs), len(trained_runs)) == (3, 6)


class ByHand(nn.Module):
    """The parent checkpoints its layers itself, as remote code does."""

    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = True
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True) if self.gradient_checkpointing and self.training else layer(hidden)
        return type('Output', (), {'loss': nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), input_ids.flatten())})


def test_parents_that_checkpoint_by_hand_are_left_alone_and_reported():
    torch.manual_seed(0)
    plain, fast = twins(ByHand())
    for model in (plain, fast):
        model.embed.requires_grad_(False)
        model.layers[:2].requires_grad_(False)
        model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    ids = [{'input_ids': torch.arange(12).view(2, 6) % 16}] * 3
    expected = train(plain.train(), ids)
    assert_same(expected, train(MyModel(fast.train()), ids))
    assert fast.speedup.plan.left_alone == ('(root)',) and 'left alone' in fast.speedup.plan.line()


def test_a_module_that_would_silently_stay_untrained_stops_the_training():
    class Swallowing(transformers.modeling_layers.GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)
            self.gradient_checkpointing = True
            self._gradient_checkpointing_func = lambda function, *args: function(*(arg.detach() for arg in args))

        def forward(self, hidden):
            with torch.no_grad():
                return self.proj(hidden)

    model = MyModel(nn.Sequential(nn.Embedding(4, 8).requires_grad_(False), Swallowing()).train())
    with pytest.raises(FrontierError, match='1: .*remove'):
        model(torch.tensor([1, 2]))


def test_a_step_without_any_trained_module_can_still_call_backward():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 8)
            self.body = nn.Sequential(nn.Linear(8, 8))
            self.extra = nn.Sequential(nn.Linear(8, 8))

        def forward(self, ids, pixels=None):
            hidden = self.body(self.embed(ids))
            return hidden if pixels is None else hidden + self.extra(pixels)

    model = TwoInputs()
    model.embed.requires_grad_(False)
    model.body.requires_grad_(False)
    model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    MyModel(model)
    model(torch.tensor([1])).sum().backward()
    model(torch.tensor([1]), torch.rand(1, 8)).sum().backward()
    assert model.extra[0].weight.grad is not None


def test_evaluation_and_generation_are_the_plain_models():
    plain, fast = twins(freeze(build('llama')))
    MyModel(fast)
    ids = torch.tensor([[5, 6, 7]])
    for model in (plain.eval(), fast.eval()):
        model.generation_config.pad_token_id = 0
    with torch.no_grad():
        assert torch.equal(fast(ids).logits, plain(ids).logits)
    assert torch.equal(fast.generate(ids, max_new_tokens=5), plain.generate(ids, max_new_tokens=5))
    wanted, hidden = (model(ids, output_hidden_states=True).hidden_states for model in (plain, fast))
    assert len(hidden) == 7 and all(torch.equal(one, other) for one, other in zip(hidden, wanted))


def adapted(targets=r'layers\.[45]\.'):
    """Two adapters on the upper layers; the second also reaches one layer further down."""
    model = lora(build('llama'), targets)
    model.add_adapter('wider', LoraConfig(r=2, target_modules=[
        name.removeprefix('base_model.model.').replace('.base_layer', '') for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search(r'layers\.[345]\..*(q_proj|v_proj)(\.base_layer)?$', name)]))
    for name, parameter in model.named_parameters():
        if 'lora_B.wider' in name:
            nn.init.normal_(parameter, std=0.02)
    model.set_adapter('default')
    return model


def test_the_adapter_that_is_active_decides_from_the_next_step_on():
    def switch(model):
        def on_step(step):
            model.set_adapter('wider' if step in (1, 2) else 'default')
        return on_step
    plain, fast = twins(adapted())
    for model in (plain, fast):
        model.train()
    expected = train(prepare(plain, 'reentrant'), data(4), on_step=switch(plain))
    MyModel(prepare(fast, 'reentrant'), **GRAPH_ONLY)
    layers = fast.get_base_model().model.layers
    with counted(layers[2]) as below, counted(layers[3]) as between:
        assert_same(expected, train(fast, data(4), on_step=switch(fast)))
    assert len(below) == 4 and len(between) == 6  # layer 3 runs again in backward while it holds the active adapter


def test_reference_passes_with_adapters_off_and_merged_weights_are_those_of_the_plain_model():
    def passes(model):
        batch = {name: value for name, value in data(1)[0].items() if name != 'labels'}
        real = batch['attention_mask'] == 1  # what stands at padding is nobody's
        answers = []
        for _ in range(2):
            with torch.no_grad(), model.disable_adapter():
                answers.append(model(**batch).logits[real])
            model.merge_adapter()
            with torch.no_grad():
                answers.append(model(**batch).logits[real])
            model.unmerge_adapter()
            answers.append(train(model, data(1)).losses)
        return answers
    plain, fast = twins(adapted())
    expected = passes(prepare(plain, 'reentrant'))
    found = passes(MyModel(prepare(fast, 'reentrant')))
    assert all(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in zip(expected, found))


def test_a_frozen_layer_in_eval_mode_above_a_trained_one_keeps_its_mode_and_its_checkpointing():
    plain, fast = twins(build('llama'))
    for model in (plain, fast):
        model.requires_grad_(False)
        model.model.layers[0].requires_grad_(True)
        prepare(model, 'reentrant')
        model.model.layers[1].eval()
    expected = train(plain, data())
    assert_same(expected, train(MyModel(fast), data()))
    assert not fast.model.layers[1].training and fast.model.layers[2].training


def test_a_compiled_model_trains_the_same():
    plain, fast = twins(freeze(build('llama')))
    expected = train(plain.train(), data())
    MyModel(fast.train())
    compiled = torch.compile(fast, backend='eager')
    found = train(compiled, data())
    assert found.losses == expected.losses
