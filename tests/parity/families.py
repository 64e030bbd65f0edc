"""Tiny models of every family with batches, and where their parts lie: the data behind the parity matrix."""
import dataclasses
from collections.abc import Sequence

import torch
import transformers
from torch import nn
from toys import models
from toys.models import Sample

SMALL_VOCABULARY = 600
IMAGES = ((1, 4, 4), (1, 4, 8), (1, 8, 4))
SHAPE = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
_SMALL_BART = dict(vocab_size=64, d_model=16, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
                   encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, forced_eos_token_id=None)
TEXT_CONFIGS = {
    'llama': transformers.LlamaConfig(**SHAPE),
    'qwen2-tied': transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    'qwen3': transformers.Qwen3Config(**SHAPE, head_dim=8),
    'mixtral': transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    'gpt2': transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=6, n_head=4, n_positions=64),
}


@dataclasses.dataclass
class Case:
    """``entry``, ``layers``: what tokens pass, in order; pixels join between the two, after ``tower`` and ``aligner``."""

    model: nn.Module
    batches: list[dict]
    entry: list[nn.Module]
    layers: list[nn.Module]
    tower: list[nn.Module] = dataclasses.field(default_factory=list)
    aligner: list[nn.Module] = dataclasses.field(default_factory=list)

    def below_the_frontier(self) -> list[nn.Module]:
        """What no gradient has to reach as things are frozen now: each chain up to its first trained module."""
        pixels = _frozen_beginning([*self.tower, *self.aligner])
        whole = len(pixels) == len(self.tower) + len(self.aligner)
        return [*pixels, *(_frozen_beginning([*self.entry, *self.layers]) if whole else _frozen_beginning(self.entry))]


def _frozen_beginning(chain: Sequence[nn.Module]) -> list[nn.Module]:
    trained = [any(parameter.requires_grad for parameter in module.parameters()) for module in chain]
    return list(chain[:trained.index(True)] if True in trained else chain)


def text_batches(steps: int = 2, vocabulary: int = 64, **more) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(steps):
        ids = torch.randint(3, vocabulary, (2, 8), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        batches.append({'input_ids': ids, 'attention_mask': mask, 'labels': torch.where(mask == 1, ids, -100), **more})
    return batches


def _decoder(name: str) -> Case:
    model = transformers.AutoModelForCausalLM.from_config(TEXT_CONFIGS[name])
    base = model.base_model
    entry = [base.wte, base.wpe] if name == 'gpt2' else [base.embed_tokens]
    return Case(model, text_batches(vocabulary=128), entry, list(base.h if name == 'gpt2' else base.layers))


def bart() -> Case:
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**_SMALL_BART, encoder_layers=4))
    encoder = model.model.encoder
    return Case(model, text_batches(), [model.model.shared, encoder.embed_positions, encoder.layernorm_embedding], list(encoder.layers))


def t5() -> Case:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_decoder_layers=2, num_heads=2, decoder_start_token_id=0))
    return Case(model, text_batches(), [model.encoder.embed_tokens], list(model.encoder.block))


def bert() -> Case:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32,
        num_labels=3))
    batches = [batch | {'labels': torch.tensor([0, 2])} for batch in text_batches()]
    return Case(model, batches, [model.bert.embeddings], list(model.bert.encoder.layer))


def _with_pixels(side: int, places: int) -> list[dict]:
    batches = text_batches(pixel_values=torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1)))
    for batch in batches:
        marks = torch.full((2, places), 63)
        batch['labels'] = torch.cat([torch.full_like(marks, -100), batch['labels']], 1)
        batch['input_ids'] = torch.cat([marks, batch['input_ids'].clamp(max=62)], 1)
        batch['attention_mask'] = torch.cat([torch.ones_like(marks), batch['attention_mask']], 1)
    return batches


def llava() -> Case:
    text = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
                                    num_key_value_heads=2)
    vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                                           image_size=16, patch_size=8, projection_dim=16)
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=63, vision_feature_layer=-2))
    tower = getattr(model.model.vision_tower, 'vision_model', model.model.vision_tower)
    # The last layer's output is not read: vision_feature_layer is -2.
    return Case(model, _with_pixels(16, 4), [model.model.language_model.embed_tokens], list(model.model.language_model.layers),
                [tower.embeddings, tower.pre_layrnorm, *tower.encoder.layers[:-1]], [model.model.multi_modal_projector])


def florence2() -> Case:
    text = transformers.BartConfig(**_SMALL_BART, encoder_layers=4)
    vision = dict(embed_dim=[8, 8, 16, 16], num_heads=[1, 1, 2, 2], num_groups=[1, 1, 2, 2], depths=[1, 1, 1, 1], projection_dim=16,
                  drop_path_rate=0.1, max_temporal_embeddings=4, max_position_embeddings=16, window_size=4)
    model = transformers.Florence2ForConditionalGeneration(transformers.Florence2Config(
        text_config=text.to_dict(), vision_config=vision, image_token_id=63))
    tower, language = model.model.vision_tower, model.model.language_model
    stages = [part for conv, blocks in zip(tower.convs, tower.blocks) for part in (conv, *blocks)]
    encoder = [language.encoder.embed_positions, language.encoder.layernorm_embedding, *language.encoder.layers]
    return Case(model, _with_pixels(64, 5), [language.shared], encoder, stages, [model.model.multi_modal_projector])


def _qwen_vl(name: str) -> Case:
    model = models.build(name, vocabulary=SMALL_VOCABULARY)
    samples = ([Sample(images=IMAGES[:1]), Sample()], [Sample(images=IMAGES[:2]), Sample(videos=((2, 4, 4),))])
    batches = [models.make_batch(name, sample, seed, SMALL_VOCABULARY) for seed, sample in enumerate(samples)]
    visual = model.model.visual
    deep = list(getattr(visual, 'deepstack_merger_list', ()))
    first = [visual.patch_embed, *([visual.pos_embed] if hasattr(visual, 'pos_embed') else [])]
    return Case(model, batches, [model.model.language_model.embed_tokens], list(model.model.language_model.layers),
                [*first, *visual.blocks], [*deep, visual.merger])


def build(family: str) -> Case:
    torch.manual_seed(0)
    if family in TEXT_CONFIGS:
        return _decoder(family)
    return {'bart': bart, 't5': t5, 'bert': bert, 'llava': llava, 'florence2': florence2}.get(family, lambda: _qwen_vl(family))()


VISUAL = ('qwen2_vl', 'qwen2_5_vl', 'qwen3_vl', 'llava', 'florence2')
FAMILIES = (*TEXT_CONFIGS, 'bart', 't5', 'bert', *VISUAL)
