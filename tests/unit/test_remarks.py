"""What is said about freezing that surprises: each of the mistakes that ms-swift's flags invite."""
import pytest
import torch
import transformers
from parity import families, tunings
from parity.harness import lora, prepare

from swift_speedup import MyModel
from swift_speedup.segments.remarks import freezing_remarks, ranges


def llama(layers=12):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**families.SHAPE | {'num_hidden_layers': layers}))


def frozen_by_name(model, *prefixes):
    from swift.utils.transformers_utils import freeze_parameters
    freeze_parameters(model, 0, list(prefixes))
    return model


def test_nothing_to_say_about_an_ordinary_prefix():
    model = llama()
    for part in (model.model.embed_tokens, *model.model.layers[:5]):
        part.requires_grad_(False)
    assert freezing_remarks(model) == []


def test_a_prefix_without_a_dot_means_more_layers():
    (remark,) = freezing_remarks(frozen_by_name(llama(), 'model.embed_tokens', 'model.layers.1'))
    assert 'layers 1, 10-11 are frozen' in remark and 'write "model.layers.1."' in remark


def test_a_frozen_layer_above_a_trained_one():
    (remark,) = freezing_remarks(frozen_by_name(llama(6), 'model.embed_tokens', 'model.layers.0.', 'model.layers.3.'))
    assert 'layers 0, 3 are frozen, but 3 lie above a layer that is trained' in remark and 'write' not in remark


@pytest.mark.parametrize('ratio', [0.3, 0.52])
def test_a_ratio_that_ends_inside_a_layer(ratio):
    from swift.utils.transformers_utils import freeze_parameters
    model = llama()
    freeze_parameters(model, ratio, [])
    remarks = freezing_remarks(model)
    cut = next(i for i, layer in enumerate(model.model.layers) if len({p.requires_grad for p in layer.parameters()}) == 2)
    assert any(f'model.layers.{cut} is frozen in part' in remark and 'freeze_parameters_ratio' in remark for remark in remarks)


def test_adapters_in_the_first_layer():
    (remark,) = freezing_remarks(lora(llama(), r'q_proj'))
    assert 'layers.0 holds adapters' in remark and 'no frozen prefix' in remark
    assert freezing_remarks(lora(llama(), r'layers\.1[01]\.')) == []


@pytest.mark.parametrize('targets', ['q_proj|v_proj', r'vision_tower.*fc1'])
def test_adapters_inside_a_tower(targets):
    remarks = freezing_remarks(lora(families.build('llava').model, targets))
    assert 'model.vision_tower is frozen but for' in remarks[0] and 'target_regex' in remarks[0]


def test_a_trained_head_that_is_tied_to_the_embedding():
    case = families.build('qwen2-tied')
    for layer in case.layers[:3]:
        layer.requires_grad_(False)
    (remark,) = freezing_remarks(case.model)
    assert 'model.embed_tokens.weight, tied to lm_head.weight, is trainable' in remark


def test_embeddings_that_are_saved_with_the_adapters():
    import peft
    model = peft.get_peft_model(llama(), peft.LoraConfig(
        target_modules=r'.*layers\.1[01]\..*q_proj', modules_to_save=['embed_tokens']))
    assert any('embed_tokens.modules_to_save' in remark and 'is trainable' in remark for remark in freezing_remarks(model))


def test_remarks_are_in_the_line_at_attach_and_in_the_report():
    case = families.build('llama')
    model = MyModel(prepare(tunings.adapters_everywhere(case), 'off'))
    assert 'no frozen prefix' in model.speedup.plan.line() and 'no frozen prefix' in ' '.join(model.speedup.report().split())


def test_a_model_in_which_nothing_is_trained():
    assert freezing_remarks(torch.nn.Linear(2, 2).requires_grad_(False)) == ['nothing is trainable now']


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == '0-2, 5, 7-8'
