"""A tiny Florence-2 in the native format (``florence-community/Florence-2-*``): real classes, random weights, no downloads."""
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIDE = 48  # pixels; two stages of strides 4 and 2 leave 6 x 6 positions
IMAGE_TOKENS = 6 * 6 + 1  # and their mean
# BART's, at their real ids, then Florence's.
_SPECIAL = ('<s>', '<pad>', '</s>', '<unk>', '<mask>')
_FLORENCE = ('<image>', '<od>', '</od>', '<ocr>', '</ocr>', *(f'<loc_{place}>' for place in range(8)))
_GENERATION = dict(bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_bos_token_id=0,
                   forced_eos_token_id=2, num_beams=3, no_repeat_ngram_size=3, early_stopping=True)  # as the real checkpoints have them
VOCABULARY, IMAGE_TOKEN = 51289, 51288  # of a model without a tokenizer
STRIDES = {'tiny': 8, 'small': 32}  # pixels per position and side


def _bart(width: int, layers: int, heads: int, positions: int) -> dict:
    return dict(d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
                encoder_attention_heads=heads, decoder_attention_heads=heads, max_position_embeddings=positions)


SIZES = {
    'tiny': (_bart(32, 2, 2, 256), dict(
        depths=(1, 1), patch_size=(7, 3), patch_stride=(4, 2), patch_padding=(3, 1), patch_prenorm=(False, True), embed_dim=(8, 16),
        num_heads=(2, 2), num_groups=(2, 2), window_size=4, projection_dim=32)),
    'small': (_bart(256, 12, 4, 1024), dict(
        depths=(1, 1, 9, 1), embed_dim=(64, 128, 256, 512), num_heads=(2, 4, 8, 16), num_groups=(2, 4, 8, 16), projection_dim=256)),
}


def save(folder: Path, texts: Sequence[str] = (), seed: int = 0, drop_path_rate: float = 0.1) -> Path:
    """Write weights drawn from ``seed``, configs, a tokenizer trained on ``texts`` and the processor; returns ``folder``.

    Drop path and dropout have the rates of the real checkpoints.
    """
    tokenizer = make_tokenizer(texts)
    build(len(tokenizer), tokenizer.image_token_id, seed, drop_path_rate).save_pretrained(folder)
    size = {'height': SIDE, 'width': SIDE}
    image_processor = transformers.CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False, resample=3)
    image_processor.image_seq_length = IMAGE_TOKENS
    transformers.Florence2Processor(image_processor=image_processor, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def build(vocabulary: int = VOCABULARY, image_token: int = IMAGE_TOKEN, seed: int = 0, drop_path_rate: float = 0.1,
          size: str = 'tiny') -> transformers.PreTrainedModel:
    """The model in fp32: ``tiny`` has two stages of the vision tower and two layers in encoder and decoder, ``small`` a quarter of
    the width of Florence-2-large and all of its depth."""
    text, vision = SIZES[size]
    text = dict(vocab_size=vocabulary, dropout=0.1, **text,
                **{name: _GENERATION[name] for name in ('bos_token_id', 'pad_token_id', 'eos_token_id', 'decoder_start_token_id')})
    vision = dict(vision, drop_path_rate=drop_path_rate)
    torch.manual_seed(seed)
    model = transformers.Florence2ForConditionalGeneration(transformers.Florence2Config(
        text_config=text, vision_config=vision, image_token_id=image_token))
    model.generation_config = transformers.GenerationConfig(**_GENERATION)
    return model


def make_tokenizer(texts: Sequence[str] = ()) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE with few merges, BART's special tokens at their real ids and some of Florence's after the text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(_SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    bos, pad, eos, unk, mask = _SPECIAL
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token=bos, pad_token=pad, eos_token=eos, unk_token=unk, mask_token=mask,
        extra_special_tokens={'image_token': '<image>'})
    tokenizer.add_tokens(list(_FLORENCE), special_tokens=True)
    return tokenizer
