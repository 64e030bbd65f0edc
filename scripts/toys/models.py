"""Models with random weights, made from configs: the real architectures and token ids, no downloads.

``build(family, size)`` gives a model, ``save(model, folder)`` a checkpoint folder that ``swift sft --model`` takes.
"""
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# ms-swift's Qwen-VL templates hard-code these ids.
SPECIAL_TOKENS = {
    '<|endoftext|>': 151643, '<|im_start|>': 151644, '<|im_end|>': 151645, '<|object_ref_start|>': 151646,
    '<|object_ref_end|>': 151647, '<|box_start|>': 151648, '<|box_end|>': 151649, '<|quad_start|>': 151650,
    '<|quad_end|>': 151651, '<|vision_start|>': 151652, '<|vision_end|>': 151653, '<|vision_pad|>': 151654,
    '<|image_pad|>': 151655, '<|video_pad|>': 151656,
}
VOCABULARY = 151936
_TEXT = dict(vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=4096, bos_token_id=151643,
             eos_token_id=151645, pad_token_id=151643)
_VISION_IDS = dict(image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653,
                   tie_word_embeddings=True)
_PROMPT = 'system\nYou are a helpful assistant.\nuser\nassistant\n'  # in every sample, by ms-swift's template
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|>"
    "<|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@dataclasses.dataclass(frozen=True)
class Size:
    """Keyword arguments of the text and vision parts of a config; ``vision=None`` for a text model."""

    text: dict[str, Any]
    vision: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture: its classes in transformers, its sizes, and how its images become patches."""

    config: str
    model: str
    sizes: dict[str, Size]
    patch: int = 14
    merge: int = 2
    tower: str | None = 'model.visual'
    layers: str = 'model.language_model.layers'
    vocabulary: int = VOCABULARY
    processor: str = 'Qwen2VLProcessor'
    image_processor: str = 'Qwen2VLImageProcessor'

    @property
    def patch_values(self) -> int:
        return 3 * 2 * self.patch * self.patch


def _text(layers: int, hidden: int, heads: int, key_value_heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    return dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=key_value_heads,
                intermediate_size=intermediate, **more)


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return dict(rope_scaling={'type': 'mrope', 'rope_type': 'default', 'mrope_section': list(section), 'rope_theta': 1e6, **more})


_TINY_TEXT = _text(3, 32, 4, 2, 64)

FAMILIES = {
    'qwen2_vl': Family('Qwen2VLConfig', 'Qwen2VLForConditionalGeneration', {
        'tiny': Size(_TINY_TEXT | _mrope(1, 1, 2), dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)),
        # Most weights lie in the language model's layers, so that a share of all weights can end inside one.
        'wide': Size(_text(3, 32, 4, 2, 16384) | _mrope(1, 1, 2),
                     dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)),
        'small': Size(_text(9, 512, 8, 2, 2944) | _mrope(8, 12, 12),
                      dict(depth=10, embed_dim=416, hidden_size=512, num_heads=8, mlp_ratio=4)),
        '2b': Size(_text(28, 1536, 12, 2, 8960) | _mrope(16, 24, 24),
                   dict(depth=32, embed_dim=1280, hidden_size=1536, num_heads=16, mlp_ratio=4)),
    }),
    'qwen2_5_vl': Family('Qwen2_5_VLConfig', 'Qwen2_5_VLForConditionalGeneration', {
        'tiny': Size(_TINY_TEXT | _mrope(1, 1, 2), dict(
            depth=2, hidden_size=32, out_hidden_size=32, num_heads=2, intermediate_size=64, window_size=56,
            fullatt_block_indexes=[1])),
    }, processor='Qwen2_5_VLProcessor'),
    'llama': Family('LlamaConfig', 'LlamaForCausalLM', {
        'tiny': Size(_text(6, 32, 4, 2, 64)),
        'small': Size(_text(12, 512, 8, 8, 1376)),
    }, tower=None, layers='model.layers', vocabulary=4096),  # head : layer as in a 7B model
    'qwen2': Family('Qwen2Config', 'Qwen2ForCausalLM', {'tiny': Size(_text(4, 32, 4, 2, 64))}, tower=None, layers='model.layers'),
    'qwen3_vl': Family('Qwen3VLConfig', 'Qwen3VLForConditionalGeneration', {
        'tiny': Size(_text(3, 32, 4, 2, 64, head_dim=8) | _mrope(2, 1, 1, mrope_interleaved=True), dict(
            depth=3, hidden_size=32, out_hidden_size=32, num_heads=2, intermediate_size=64, num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1])),
    }, patch=16, processor='Qwen3VLProcessor', image_processor='Qwen2VLImageProcessor'),
}


def build(family: str, size: str = 'tiny', seed: int = 0, vocabulary: int | None = None) -> torch.nn.Module:
    """A model in fp32 with weights drawn from ``seed``. Raises ``ValueError`` for names that are not in the table.

    A smaller ``vocabulary`` than the family's (at least 600) moves the special ids down with its end; ms-swift's templates for
    Qwen-VL need the real one.
    """
    described = lookup(family, size)
    shift = VOCABULARY - (vocabulary or described.vocabulary)
    shape = described.sizes[size]
    text = _moved(_TEXT, shift) | shape.text
    if shape.vision is None:
        config = getattr(transformers, described.config)(**text)
    else:
        vision = dict(spatial_merge_size=described.merge, patch_size=described.patch) | shape.vision
        config = getattr(transformers, described.config)(text_config=text, vision_config=vision, **_moved(_VISION_IDS, shift))
    torch.manual_seed(seed)
    model = getattr(transformers, described.model)(config)
    model.generation_config = transformers.GenerationConfig(
        **{name: value - shift for name, value in _TEXT.items() if name.endswith('_token_id')})
    return model


def _moved(values: dict[str, Any], shift: int) -> dict[str, Any]:
    return {name: value - shift if name.endswith('_token_id') or name == 'vocab_size' else value for name, value in values.items()}


def lookup(family: str, size: str) -> Family:
    if family not in FAMILIES:
        raise ValueError(f'unknown model {family!r}; known: {", ".join(FAMILIES)}')
    if size not in FAMILIES[family].sizes:
        raise ValueError(f'{family} has no size {size!r}; known: {", ".join(FAMILIES[family].sizes)}')
    return FAMILIES[family]


def save(model: torch.nn.Module, family: str, folder: Path, texts: Sequence[str] = ()) -> Path:
    """Write weights, configs, tokenizer (trained on ``texts``) and processor; returns ``folder``."""
    described = FAMILIES[family]
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(texts)
    if described.tower is None:
        tokenizer.save_pretrained(folder)
        return folder
    image_processor = getattr(transformers, described.image_processor)(patch_size=described.patch, merge_size=described.merge)
    video = 'Qwen3VLVideoProcessor' if family == 'qwen3_vl' else 'Qwen2VLVideoProcessor'
    processor = getattr(transformers, described.processor)(
        image_processor=image_processor, tokenizer=tokenizer, chat_template=_CHAT_TEMPLATE,
        video_processor=getattr(transformers, video)(patch_size=described.patch, merge_size=described.merge))
    processor.save_pretrained(folder)
    return folder


def make_tokenizer(texts: Sequence[str] = ()) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE with few merges and the special tokens at their real ids."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator([*texts, *[_PROMPT] * 3], trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    merges = [tuple(merge) for merge in _merges(trained)]
    tokenizer = Tokenizer(models.BPE(vocab=trained.get_vocab() | SPECIAL_TOKENS, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Before transformers 5 a Qwen-VL processor takes its own tokenizer's class only.
    kind = transformers.PreTrainedTokenizerFast if hasattr(transformers, 'TokenizersBackend') else transformers.Qwen2TokenizerFast
    fast = kind(
        tokenizer_object=tokenizer, eos_token='<|im_end|>', pad_token='<|endoftext|>', chat_template=_CHAT_TEMPLATE,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in ('<|im_end|>', '<|endoftext|>')])
    wrong = [token for token, number in SPECIAL_TOKENS.items() if fast.convert_tokens_to_ids(token) != number]
    if wrong:
        raise RuntimeError(f'special tokens without their real ids: {wrong}')
    return fast


def _merges(tokenizer: Tokenizer) -> list:
    return json.loads(tokenizer.to_str())['model']['merges']


@dataclasses.dataclass(frozen=True)
class Sample:
    """One row of a batch: image and video grids ``(t, h, w)`` in patches, and the number of text tokens after them."""

    images: tuple[tuple[int, int, int], ...] = ()
    videos: tuple[tuple[int, int, int], ...] = ()
    text: int = 12


def make_batch(family: str, samples: Sequence[Sample], seed: int, vocabulary: int | None = None) -> dict[str, torch.Tensor]:
    """Keyword arguments of one training forward of ``samples``, right-padded. Equal seeds give equal batches."""
    described = FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    rows, kinds = [], []
    for sample in samples:
        row, kind = [], []
        for token, grids, number in ((151655, sample.images, 1), (151656, sample.videos, 2)):
            for t, h, w in grids:
                # Qwen3-VL writes every frame between marks of its own.
                frames = [1] * t if family == 'qwen3_vl' and number == 2 else [t]
                for count in frames:
                    pads = count * h * w // described.merge ** 2
                    row += [151652, *[token] * pads, 151653]
                    kind += [0, *[number] * pads, 0]
        text = torch.randint(0, 256, (sample.text,), generator=generator).tolist()
        rows.append(row + text)
        kinds.append(kind + [0] * sample.text)
    length = max(len(row) for row in rows)
    shift = VOCABULARY - (vocabulary or described.vocabulary)
    rows = [[token if token < 256 else token - shift for token in row] for row in rows]
    padded = torch.tensor([row + [151643 - shift] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    batch = {'input_ids': padded, 'attention_mask': mask,
             'labels': torch.where((padded < 256) & (mask == 1), padded, -100)}
    if described.tower is not None:
        batch['mm_token_type_ids'] = torch.tensor([kind + [0] * (length - len(kind)) for kind in kinds])
    for name, grids in (('', [g for s in samples for g in s.images]), ('_videos', [g for s in samples for g in s.videos])):
        if grids:
            patches = sum(t * h * w for t, h, w in grids)
            batch[f'pixel_values{name}'] = torch.randn(patches, described.patch_values, generator=generator)
            batch['video_grid_thw' if name else 'image_grid_thw'] = torch.tensor(grids)
    return batch
