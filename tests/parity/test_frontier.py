"""Rule 3 on text models: frozen lower layers leave the graph, and what is trained above them trains as before."""
import pytest
import torch
import transformers
from parity.harness import CHECKPOINTING, assert_same, counted, lora, prepare, saved_bytes, train, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from swift_speedup import FrontierError, MyModel

SHAPE = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
CONFIGS = {
    'llama': transformers.LlamaConfig(**SHAPE),
    'qwen2-tied': transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    'qwen3': transformers.Qwen3Config(**SHAPE, head_dim=8),
    'mixtral': transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    'gpt2': transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=6, n_head=4, n_positions=64),
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name])


def layers_of(model):
    return model.transformer.h if hasattr(model, 'transformer') else model.model.layers


def embeddings_of(model):
    return [m for m in model.modules() if isinstance(m, nn.Embedding)]


def data(steps=3):
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(steps):
        ids = torch.randint(3, 128, (2, 10), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        batches.append({'input_ids': ids, 'attention_mask': mask, 'labels': torch.where(mask == 1, ids, -100)})
    return batches


def freeze(model, layers=4):
    for module in (*embeddings_of(model), *layers_of(model)[:layers]):
        module.requires_grad_(False)
    return model


@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
@pytest.mark.parametrize('name', CONFIGS)
def test_frozen_lower_layers(name, checkpointing):
    plain, fast = twins(freeze(build(name)))
    expected = train(prepare(plain, checkpointing), data())
    MyModel(prepare(fast, checkpointing))
    frozen = layers_of(fast)[1]
    with saved_bytes(frozen) as sizes, counted(frozen) as runs, counted(layers_of(fast)[5]) as trained_runs:
        found = train(fast, data())
    assert_same(expected, found)
    assert sizes == [] and len(runs) == 3  # once per step, not again in the backward pass
    assert len(trained_runs) == (3 if checkpointing == 'off' else 6)


@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
@pytest.mark.parametrize(('targets', 'runs_per_step'), [(r'layers\.[45]\.', 1), (r'layers\.', None)])
def test_adapters_on_the_upper_layers_or_everywhere(targets, runs_per_step, checkpointing):
    plain, fast = twins(lora(build('llama'), targets))
    expected = train(prepare(plain, checkpointing), data())
    MyModel(prepare(fast, checkpointing))
    with counted(fast.get_base_model().model.layers[1]) as runs:
        assert_same(expected, train(fast, data()))
    again = 1 if checkpointing == 'off' else 2
    assert len(runs) == 3 * (runs_per_step or again)


@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
def test_a_frozen_layer_between_trained_ones_is_left_as_it_is(checkpointing):
    plain, fast = twins(build('llama'))
    for model in (plain, fast):
        layers_of(model)[2].requires_grad_(False)
    expected = train(prepare(plain, checkpointing), data())
    MyModel(prepare(fast, checkpointing))
    with counted(layers_of(fast)[2]) as runs:
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
    assert_same(expected, train(MyModel(prepare(fast, checkpointing)), data()))


def test_freezing_changes_between_steps_are_followed_at_once():
    def thaw(model):
        def on_step(step):
            model.requires_grad_(False)
            for layer in layers_of(model)[5 - step:]:
                layer.requires_grad_(True)
        return on_step
    plain, fast = twins(build('llama'))
    expected = train(prepare(plain, 'reentrant'), data(5), on_step=thaw(plain))
    MyModel(prepare(fast, 'reentrant'))
    assert_same(expected, train(fast, data(5), on_step=thaw(fast)))


def test_soft_prompts_keep_their_gradient_through_frozen_layers():
    from peft import PromptTuningConfig, get_peft_model
    torch.manual_seed(0)
    plain = get_peft_model(build('llama'), PromptTuningConfig(num_virtual_tokens=4, task_type='CAUSAL_LM'))
    plain, fast = twins(plain)
    expected = train(prepare(plain, 'reentrant'), data())
    found = train(MyModel(prepare(fast, 'reentrant')), data())
    assert_same(expected, found)
    assert found.gradients[0]


def test_switching_checkpointing_off_and_on_again_changes_nothing():
    plain, fast = twins(freeze(build('llama')))
    MyModel(prepare(fast, 'reentrant'))
    prepare(plain, 'reentrant')
    for model in (plain, fast):
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable({'use_reentrant': True})
    expected = train(plain, data())
    with counted(layers_of(fast)[0]) as runs:
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
        assert_same(expected, train(MyModel(fast.train()), ids))
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
