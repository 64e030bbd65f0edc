"""The graph rules on other architectures, precisions and frozen parts: same training; where something is frozen, less is run."""
import pytest
import torch
import transformers
from parity.harness import CHECKPOINTING, assert_same, counted, lora, prepare, train, twins

from swift_speedup import MyModel


def text_batches(**more):
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        ids = torch.randint(3, 64, (2, 8), generator=generator)
        batches.append({'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids, **more})
    return batches


def bart():
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=3, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, forced_eos_token_id=None)
    model = transformers.BartForConditionalGeneration(config)
    frozen = [model.model.shared, model.model.encoder.embed_positions, model.model.encoder.layernorm_embedding,
              *model.model.encoder.layers[:2]]
    return model, frozen, model.model.encoder.layers[1], text_batches()


def t5():
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_decoder_layers=2, num_heads=2,
                                   decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    return model, [model.shared, model.encoder], model.encoder.block[2], text_batches()


def bert():
    config = transformers.BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
                                     max_position_embeddings=32, num_labels=3)
    model = transformers.BertForSequenceClassification(config)
    batches = [batch | {'labels': torch.tensor([0, 2])} for batch in text_batches()]
    return model, [model.bert.embeddings, *model.bert.encoder.layer[:3]], model.bert.encoder.layer[2], batches


def llava():
    text = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                                    num_key_value_heads=2)
    vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                                           image_size=16, patch_size=8, projection_dim=16)
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=63, vision_feature_layer=-2))
    batches = text_batches(pixel_values=torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    for batch in batches:
        batch['input_ids'].clamp_(max=62)[:, :4] = 63
    return model, [model.model.vision_tower], model.model.vision_tower, batches


def florence2():
    text = transformers.BartConfig(vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                                   decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64)
    vision = dict(embed_dim=[8, 8, 16, 16], num_heads=[1, 1, 2, 2], num_groups=[1, 1, 2, 2], depths=[1, 1, 1, 1], projection_dim=16,
                  drop_path_rate=0.1, max_temporal_embeddings=4, max_position_embeddings=16, window_size=4)
    model = transformers.Florence2ForConditionalGeneration(transformers.Florence2Config(
        text_config=text.to_dict(), vision_config=vision, image_token_id=63))
    batches = text_batches(pixel_values=torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
    for batch in batches:
        batch['input_ids'] = torch.cat([torch.full((2, 5), 63), batch['input_ids'].clamp(max=62)], 1)
        batch['attention_mask'] = torch.ones_like(batch['input_ids'])
    return model, [model.model.vision_tower], model.model.vision_tower, batches


FAMILIES = {'bart': bart, 't5': t5, 'bert': bert, 'llava': llava, 'florence2': florence2}


@pytest.mark.parametrize('autocast', (False, True), ids=('fp32', 'bf16-autocast'))
@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
@pytest.mark.parametrize('family', FAMILIES)
def test_frozen_lower_part(family, checkpointing, autocast):
    torch.manual_seed(0)
    model, frozen, watched, data = FAMILIES[family]()
    for module in frozen:
        module.requires_grad_(False)
    path = next(name for name, module in model.named_modules() if module is watched)
    plain, fast = twins(model)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        expected = train(prepare(plain, checkpointing), data)
        MyModel(prepare(fast, checkpointing))
        with counted(fast.get_submodule(path)) as runs:
            found = train(fast, data)
    assert_same(expected, found)
    assert len(runs) == len(data)  # not again in the backward pass
    assert any(frozen_path in path for frozen_path in fast.speedup.plan.frozen_modules)


@pytest.mark.parametrize('checkpointing', CHECKPOINTING)
@pytest.mark.parametrize('family', FAMILIES)
def test_adapters_everywhere_have_nothing_to_skip_and_change_nothing(family, checkpointing):
    torch.manual_seed(0)
    model, _, _, data = FAMILIES[family]()
    plain, fast = twins(lora(model, r'q_proj|query|qkv|\.q$'))
    expected = train(prepare(plain, checkpointing), data)
    assert_same(expected, train(MyModel(prepare(fast, checkpointing)), data))
    assert fast.speedup.stats.hits == 0
