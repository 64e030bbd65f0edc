"""Tiny native transformers models with media, as a table: one entry says what a family is made of and what its batches hold."""
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

IMAGE, VIDEO, AUDIO, START, END = 63, 62, 61, 60, 59
_WORDS = (6, 4, 7)  # text tokens of each sample, so that batches are padded

TEXT = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA = dict(model_type='llama', **TEXT)
QWEN2 = dict(model_type='qwen2', **TEXT)
QWEN3 = dict(model_type='qwen3', head_dim=8, **TEXT)
MROPE = dict(rope_type='default', mrope_section=[2, 1, 1], rope_theta=1e4)
EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
_TOWER = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8)
CLIP = dict(model_type='clip_vision_model', projection_dim=16, **_TOWER)
SIGLIP = dict(model_type='siglip_vision_model', vision_use_head=False, **_TOWER)
PIXTRAL = dict(model_type='pixtral', head_dim=8, **_TOWER | dict(image_size=32, patch_size=4))
QWEN_TOWER = dict(depth=3, hidden_size=32, out_hidden_size=16, num_heads=2, intermediate_size=64, patch_size=4, spatial_merge_size=2,
                  temporal_patch_size=2)
AUDIO_TOWER = dict(num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32, d_model=16, max_source_positions=24)

_TILES = {'pixel_values': [(1, 2, 3, 16, 16), (1, 3, 3, 16, 16), (1, 2, 3, 16, 16)],
          'image_sizes': [[[16, 16]], [[16, 32]], [[16, 16]]]}
_PADDED = {'pixel_values': [(1, 3, 16, 16), (1, 3, 16, 32), (1, 3, 16, 16)], 'image_sizes': [[[16, 16]], [[16, 32]], [[16, 16]]]}
_SEVERAL = {'pixel_values': [(1, 1, 3, 16, 16), (1, 2, 3, 16, 16), (1, 1, 3, 16, 16)]}
_CROPS = {'pixel_values': [(1, 3, 16, 16), (1, 3, 16, 16), (2, 3, 16, 16)]}
_WHISPER = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_mel_bins=8,
                max_source_positions=24)
_RANDOM = 'it draws random numbers'  # for layer drop, even where that is off


@dataclasses.dataclass
class Native:
    """``samples`` have token ids before their words, and media by argument name; one can be in a batch with any other.

    ``conventions``: how the calls of what must not run again are taken apart, by path. ``refused``: towers that are not reused as
    one, and why; then parts of them are. ``exact``: a sample computed alone has the bits that it has in a batch. ``late``: the epoch
    from which on everything is reused, later than 1 where something is refused, or kept as a whole call, after it was seen.
    ``types`` names the argument that tells images from words; ``per_token`` makes others from the ids.
    """

    model: nn.Module
    samples: list[tuple[list[int], dict[str, torch.Tensor]]]
    conventions: dict[str, str]
    refused: dict[str, str]
    exact: bool = True
    late: int = 1
    types: str = ''
    per_token: Callable[[torch.Tensor], dict] = lambda ids: {}
    words: bool = True

    def batch(self, *places: int) -> dict[str, torch.Tensor]:
        """The samples at ``places``, media one after another and padded where sizes differ."""
        rows, labels, media = [], [], {}
        for place in places:
            marks, own = self.samples[place]
            text = torch.randint(3, 50, (_WORDS[place],), generator=torch.Generator().manual_seed(place))
            rows.append(torch.cat([torch.tensor(marks, dtype=torch.long), text]))
            labels.append(torch.cat([torch.full((len(marks),), -100), text]))
            for name, tensor in own.items():
                media.setdefault(name, []).append(tensor)
        media = {name: _stacked(parts) for name, parts in media.items()}
        labels = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        if not self.words:
            return {'labels': labels} | media
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        kinds = {IMAGE: 1, VIDEO: 2, AUDIO: 3}
        types = {self.types: sum((ids == mark) * kind for mark, kind in kinds.items())} if self.types else {}
        return media | types | self.per_token(ids) | {'input_ids': ids, 'attention_mask': mask, 'labels': labels}


def quiet(case: Any) -> Any:
    """``case.model`` without dropout, which would forbid reuse, and without a cache of keys and values."""
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ('dropout' in name or 'drop_prob' in name):
                setattr(module, name, 0.0)
    for config in (case.model.config, case.model.config.get_text_config()):
        config.use_cache = False  # as ms-swift and the Trainer set it with checkpointing
    return case


def class_names() -> set[str]:
    """Of the models in the table."""
    return {build.args[0] + build.keywords.get('head', 'ForConditionalGeneration') for build in FAMILIES.values()}


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts))]
    return torch.cat([nn.functional.pad(part, [n for size, most in zip(part.shape[:0:-1], largest[::-1]) for n in (0, most - size)])
                      for part in parts])


def make(name: str, sections: dict[str, dict], marks: Sequence, media: dict[str, Sequence], conventions: dict[str, str],
         refused: Mapping[str, str] = MappingProxyType({}), exact: bool = True, late: int = 1,
         trained: Sequence[str] = ('model.language_model', 'lm_head'), head: str = 'ForConditionalGeneration', types: str = '',
         per_token: Callable = lambda ids: {}, words: bool = True, **top) -> Native:
    """``marks``: ids, or the number of image tokens, of each sample. ``media``: per sample a shape to be filled, or values."""
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(getattr(transformers, f'{name}Config')(**copy.deepcopy(sections), **top))
    for parameter in model.parameters():  # gates and scales that start at zero would keep media from mattering
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.requires_grad_(False)
    for path in trained:
        model.get_submodule(path).requires_grad_(True)
    generator = torch.Generator().manual_seed(1)
    filled = {name: [torch.rand(value, generator=generator) if isinstance(value, tuple) else torch.tensor(value) for value in values]
              for name, values in media.items()}
    samples = [([IMAGE] * count if isinstance(count, int) else count, {name: values[place] for name, values in filled.items()})
               for place, count in enumerate(marks)]
    return Native(model, samples, conventions, dict(refused), exact, late, types, per_token, words)


def packed(name: str, vision: dict, text: dict, conventions: dict[str, str], values: tuple[int, ...] = (96,), **more) -> Native:
    """Images of different sizes, their patches one after another, and grids."""
    grids = [[[1, 4, 4]], [[1, 4, 8]], [[1, 8, 4], [1, 4, 4]]]
    marks = [[mark for t, h, w in rows for mark in (START, *[IMAGE] * (t * h * w // 4), END)] for rows in grids]
    media = {'pixel_values': [(sum(t * h * w for t, h, w in rows), *values) for rows in grids], 'image_grid_thw': grids}
    if more.pop('merge', False):
        media['image_merge_sizes'] = [[2] * len(rows) for rows in grids]
    ids = dict(image_token_id=IMAGE, video_token_id=VIDEO)
    return make(name, dict(text_config=text, vision_config=vision), marks, media, conventions,
                types=more.pop('types', 'mm_token_type_ids'), **ids | more)


def _square(side: int = 16, channels: int = 3) -> dict[str, list]:
    return {'pixel_values': [(1, channels, side, side)] * 3}


def _frames(*lengths: int, most: int, name: str = 'feature_attention_mask') -> dict[str, list]:
    return {'input_features': [(1, 8, most)] * 3, name: [[[1] * n + [0] * (most - n)] for n in lengths]}


FAMILIES: dict[str, Callable[[], Native]] = {
    'qwen3_vl_moe': partial(
        packed, 'Qwen3VLMoe', QWEN_TOWER | dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        TEXT | EXPERTS | dict(head_dim=8, rope_parameters=MROPE), {'model.visual': 'packed patches'}, vision_start_token_id=START,
        vision_end_token_id=END),
    'qwen2_5_omni': partial(
        make, 'Qwen2_5OmniThinker', dict(
            text_config=TEXT | dict(rope_parameters=MROPE), audio_config=AUDIO_TOWER | dict(n_window=4, output_dim=16),
            vision_config=QWEN_TOWER | dict(window_size=16, fullatt_block_indexes=[1])),
        [[START, *[IMAGE] * 4, END, *[AUDIO] * 5], [START, *[IMAGE] * 8, END, *[AUDIO] * 7], [START, *[IMAGE] * 8, END, *[AUDIO] * 11]],
        {'pixel_values': [(16, 96), (32, 96), (32, 96)], 'image_grid_thw': [[[1, 4, 4]], [[1, 4, 8]], [[1, 8, 4]]],
         **_frames(21, 30, 43, most=43)},
        {'visual': 'packed patches', 'audio_tower': 'audio lengths'}, trained=('model', 'lm_head'), audio_token_index=AUDIO,
        image_token_index=IMAGE, video_token_index=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
        audio_start_token_id=58, audio_end_token_id=57),
    'glm4v': partial(
        packed, 'Glm4v', QWEN_TOWER | dict(image_size=16), TEXT | dict(rope_parameters=MROPE), {'model.visual': 'packed patches'},
        image_start_token_id=START, image_end_token_id=END),
    'llava_next': partial(
        make, 'LlavaNext', dict(text_config=LLAMA, vision_config=CLIP), (10, 14, 10),
        _TILES,
        {'model.vision_tower': 'batch first'}, image_token_index=IMAGE, image_grid_pinpoints=[[16, 16], [16, 32]]),
    'llava_onevision': partial(
        make, 'LlavaOnevision', dict(text_config=QWEN2, vision_config=SIGLIP), (10, 14, 10),
        _TILES,
        {'model.vision_tower': 'batch first'}, image_token_index=IMAGE, video_token_index=VIDEO,
        image_grid_pinpoints=[[16, 16], [16, 32]]),
    'internvl': partial(
        make, 'InternVL', dict(text_config=QWEN2, vision_config=_TOWER | dict(image_size=[16, 16], patch_size=[4, 4])), (4, 4, 8),
        _CROPS,
        {'model.vision_tower': 'batch first'}, image_token_id=IMAGE),
    'gemma3': partial(
        make, 'Gemma3', dict(text_config=TEXT | dict(model_type='gemma3_text', head_dim=8), vision_config=SIGLIP | dict(patch_size=4)),
        (4, 4, 4), _square(), {'model.vision_tower': 'batch first'}, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=START, eoi_token_index=END, types='token_type_ids'),
    'paligemma': partial(
        make, 'PaliGemma', dict(text_config=TEXT | dict(model_type='gemma', head_dim=8), vision_config=SIGLIP), (4, 4, 4), _square(),
        {'model.vision_tower': 'batch first'}, projection_dim=16, image_token_index=IMAGE, types='token_type_ids'),
    'idefics3': partial(
        make, 'Idefics3', dict(text_config=LLAMA, vision_config=_TOWER | dict(patch_size=4)), (4, 8, 4),
        _SEVERAL,
        {'model.vision_model': 'batch first'}, trained=('model.text_model', 'lm_head'),
        scale_factor=2, image_token_id=IMAGE, pad_token_id=0),
    'smolvlm': partial(
        make, 'SmolVLM', dict(text_config=LLAMA, vision_config=_TOWER | dict(patch_size=4)), (4, 8, 4),
        _SEVERAL,
        {'model.vision_model': 'batch first'}, trained=('model.text_model', 'lm_head'),
        scale_factor=2, image_token_id=IMAGE, pad_token_id=0),
    'mistral3': partial(
        make, 'Mistral3', dict(text_config=dict(model_type='mistral', head_dim=8, **TEXT), vision_config=PIXTRAL), (4, 8, 4),
        _PADDED,
        {'model.vision_tower': 'sizes'}, image_token_index=IMAGE),
    'llava_pixtral': partial(
        make, 'Llava', dict(text_config=LLAMA, vision_config=PIXTRAL), (16, 32, 16),
        _PADDED,
        {'model.vision_tower': 'sizes'}, image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy='full'),
    'mllama': partial(
        make, 'Mllama', dict(
            text_config=TEXT | dict(cross_attention_layers=[1], num_hidden_layers=3),
            vision_config=dict(hidden_size=16, num_hidden_layers=2, num_global_layers=1, attention_heads=2, intermediate_size=32,
                               vision_output_dim=32, image_size=16, patch_size=8, max_num_tiles=2, intermediate_layers_indices=[0],
                               supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]])),
        (1, 1, 1), {'pixel_values': [(1, 1, 2, 3, 16, 16)] * 3, 'aspect_ratio_ids': [[[1]], [[2]], [[3]]],
                    'aspect_ratio_mask': [[[[1, 0]]], [[[1, 1]]], [[[1, 1]]]]},
        {'model.vision_model': 'batch first'}, image_token_index=IMAGE,
        per_token=lambda ids: {'cross_attention_mask': torch.ones(*ids.shape, 1, 2, dtype=torch.long)}),
    'blip_2': partial(
        make, 'Blip2', dict(
            text_config=dict(model_type='opt', ffn_dim=32, word_embed_proj_dim=16, **TEXT), vision_config=_TOWER,
            qformer_config=dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                                encoder_hidden_size=16)),
        (4, 4, 4), _square(), {'vision_model': 'batch first'}, trained=('language_model',), num_query_tokens=4,
        image_token_index=IMAGE),
    'instructblip': partial(
        make, 'InstructBlip', dict(
            text_config=LLAMA, vision_config=_TOWER,
            qformer_config=dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                                encoder_hidden_size=16)),
        (4, 4, 4), _square() | {'qformer_input_ids': [[[5, 6, 7]], [[8, 9]], [[7, 6, 5]]],
                                'qformer_attention_mask': [[[1, 1, 1]], [[1, 1]], [[1, 1, 1]]]},
        {'vision_model': 'batch first'}, trained=('language_model',), num_query_tokens=4, image_token_index=IMAGE, exact=False),
    'qwen2_audio': partial(
        make, 'Qwen2Audio', dict(text_config=QWEN2, audio_config=AUDIO_TOWER), [[AUDIO] * 5, [AUDIO] * 12, [AUDIO] * 10],
        _frames(20, 48, 40, most=48), {'model.audio_tower.layers.0': 'batch first', 'model.audio_tower.layers.1': 'batch first'},
        {'model.audio_tower': _RANDOM}, late=2, audio_token_index=AUDIO),
    'whisper': partial(
        make, 'Whisper', {}, [[], [], []], {'input_features': [(1, 8, 48)] * 3},
        {'model.encoder.layers.0': 'batch first', 'model.encoder.layers.1': 'batch first'},
        {'model.encoder': _RANDOM}, late=2,
        trained=('model.decoder',), words=False, **AUDIO_TOWER, vocab_size=64, decoder_layers=2, decoder_attention_heads=2,
        decoder_ffn_dim=32, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        begin_suppress_tokens=None),
    'aya_vision': partial(
        make, 'AyaVision', dict(text_config=dict(model_type='cohere2', **TEXT), vision_config=SIGLIP | dict(patch_size=4)), (4, 4, 8),
        _CROPS, {'model.vision_tower': 'batch first'},
        image_token_index=IMAGE, downsample_factor=2),
    'cohere2_vision': partial(
        make, 'Cohere2Vision', dict(text_config=dict(model_type='cohere2', **TEXT), vision_config=SIGLIP | dict(patch_size=4)),
        (4, 4, 8), _CROPS, {'model.vision_tower': 'batch first'},
        image_token_id=IMAGE, alignment_intermediate_size=32),
    'idefics2': partial(
        make, 'Idefics2', dict(
            text_config=dict(model_type='mistral', **TEXT), vision_config=_TOWER,
            perceiver_config=dict(hidden_size=16, resampler_n_latents=3, resampler_depth=2, resampler_n_heads=2, resampler_head_dim=8,
                                  num_key_value_heads=2)), (3, 6, 3),
        _SEVERAL,
        {'model.vision_model': 'batch first', 'model.connector': 'batch first'},
        trained=('model.text_model', 'lm_head'), image_token_id=IMAGE, exact=False),
    'qwen3_omni_moe': partial(
        make, 'Qwen3OmniMoeThinker', dict(
            text_config=TEXT | EXPERTS | dict(head_dim=8, rope_parameters=MROPE),
            audio_config=AUDIO_TOWER | dict(n_window=50, n_window_infer=100, output_dim=16, downsample_hidden_size=8),
            vision_config=QWEN_TOWER | dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])),
        [[START, *[IMAGE] * images, END, *[AUDIO] * clips] for images, clips in ((4, 15), (8, 13), (8, 17))],
        {'pixel_values': [(16, 96), (32, 96), (32, 96)], 'image_grid_thw': [[[1, 4, 4]], [[1, 4, 8]], [[1, 8, 4]]],
         **_frames(110, 100, 130, most=130)},
        {'visual': 'packed patches', 'audio_tower': 'audio lengths'}, trained=('model', 'lm_head'), audio_token_id=AUDIO,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END, audio_start_token_id=58,
        audio_end_token_id=57),
    'ovis2': partial(
        make, 'Ovis2', dict(text_config=QWEN2, vision_config=_TOWER | dict(vocab_size=24, hidden_stride=1, patch_size=8)),
        [[START, *[IMAGE] * 4, END]] * 3, _square(), {'model.vision_tower': 'batch first'}, image_token_id=IMAGE,
        visual_indicator_token_ids=[START, END, 58, 57, 56], vocab_size=64, hidden_size=16),
    'lfm2_vl': partial(
        make, 'Lfm2Vl', dict(
            text_config=dict(model_type='lfm2', full_attn_idxs=[1], block_auto_adjust_ff_dim=False, **TEXT),
            vision_config=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, patch_size=4,
                               num_patches=16, vision_use_head=False)), (4, 2, 4),
        {'pixel_values': [(1, 16, 48)] * 3, 'spatial_shapes': [[[4, 4]], [[2, 4]], [[4, 4]]],
         'pixel_attention_mask': [[[1] * 16], [[1] * 8 + [0] * 8], [[1] * 16]]},
        {'model.vision_tower': 'batch first'}, image_token_id=IMAGE, projector_hidden_size=32),
    'voxtral': partial(
        make, 'Voxtral', dict(text_config=LLAMA, audio_config=_WHISPER),
        [[AUDIO] * 12, [AUDIO] * 12, [AUDIO] * 24], {'input_features': [(1, 8, 48), (1, 8, 48), (2, 8, 48)]},
        {'model.audio_tower': 'batch first'}, audio_token_id=AUDIO),
    'video_llama_3': partial(
        packed, 'VideoLlama3', dict(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, patch_size=4),
        QWEN2, {'model.vision_model': 'packed patches'}, values=(48,), merge=True, types=''),
    'llama4': partial(
        make, 'Llama4', dict(
            text_config=TEXT | dict(head_dim=8, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=64),
            vision_config=dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vision_output_dim=16,
                               image_size=16, patch_size=4, projector_input_dim=16, projector_output_dim=16)), (4, 4, 8),
        _CROPS, {'vision_model': 'batch first'},
        trained=('language_model',), image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END),
    'janus': partial(
        make, 'Janus', dict(
            text_config=LLAMA,
            vision_config=dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8, mlp_ratio=2.0,
                               projection_dim=16, num_image_tokens=4),
            vq_config=dict(embed_dim=8, num_embeddings=16, latent_channels=8, base_channels=32, channel_multiplier=[1, 1],
                           num_res_blocks=1, num_patches=4, projection_dim=16, image_token_embed_dim=16)), (4, 4, 4), _square(),
        {'model.vision_model': 'batch first'}, image_token_id=IMAGE),
    'got_ocr2': partial(
        make, 'GotOcr2', dict(
            text_config=QWEN2,
            vision_config=dict(hidden_size=16, output_channels=8, num_hidden_layers=2, num_attention_heads=2, image_size=32,
                               patch_size=4, window_size=4, global_attn_indexes=[1], mlp_dim=32)), (4, 4, 4), _square(32),
        {'model.vision_tower': 'batch first'}, image_token_index=IMAGE, exact=False),
    'deepseek_vl': partial(
        make, 'DeepseekVL', dict(text_config=LLAMA, vision_config=SIGLIP), (4, 4, 4), _square(), {'model.vision_model': 'batch first'},
        image_token_id=IMAGE),
    'vip_llava': partial(
        make, 'VipLlava', dict(text_config=LLAMA, vision_config=CLIP), (4, 4, 4), _square(), {'model.vision_tower': 'batch first'},
        image_token_index=IMAGE, vision_feature_layers=[-2, 1]),
    'video_llava': partial(
        make, 'VideoLlava', dict(text_config=LLAMA, vision_config=CLIP), [[VIDEO] * 10] * 3,
        {'pixel_values_videos': [(1, 2, 3, 16, 16)] * 3}, {'model.video_tower': 'batch first'}, image_token_index=IMAGE,
        video_token_index=VIDEO),
    'qwen3_5': partial(
        packed, 'Qwen3_5', QWEN_TOWER | dict(num_position_embeddings=64), TEXT | dict(
            head_dim=8, rope_parameters=MROPE, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
            linear_num_value_heads=2, layer_types=['linear_attention', 'full_attention']), {'model.visual': 'packed patches'},
        vision_start_token_id=START, vision_end_token_id=END),
    'glm_ocr': partial(
        packed, 'GlmOcr', QWEN_TOWER | dict(image_size=16),
        TEXT | dict(head_dim=8, rope_parameters=MROPE | dict(partial_rotary_factor=1.0)),
        {'model.visual': 'packed patches'},
        image_start_token_id=START, image_end_token_id=END),
    'ernie4_5_vl_moe': partial(
        packed, 'Ernie4_5_VLMoe', dict(depth=2, hidden_size=16, num_heads=2, patch_size=4, intermediate_size=32),
        TEXT | dict(moe_intermediate_size=[16, 16], moe_k=2, moe_num_experts=4, moe_num_shared_experts=1,
                    rope_parameters=MROPE | dict(mrope_section=[1, 1, 2])),
        {'model.vision_tower': 'packed patches'}, values=(48,), image_start_token_id=START, image_end_token_id=END,
        per_token=lambda ids: {'moe_mm_token_type_ids': (ids == IMAGE).long()}),
    'paddleocr_vl': partial(
        packed, 'PaddleOCRVL', _TOWER | dict(patch_size=4), TEXT | dict(head_dim=8, rope_parameters=MROPE),
        {'model.visual': 'packed patches'}, values=(3, 4, 4), vision_start_token_id=START, vision_end_token_id=END),
    'kimi_k25': partial(
        packed, 'Kimi_K25', _TOWER | dict(patch_size=4, pos_emb_height=8, pos_emb_width=8), LLAMA,
        {'model.vision_tower': 'packed patches'},
        values=(3, 4, 4), projection_hidden_size=16, vision_start_token_id=START, vision_end_token_id=END, types=''),
    'exaone4_5': partial(
        packed, 'Exaone4_5_', QWEN_TOWER | dict(window_size=16, fullatt_block_indexes=[1], num_key_value_heads=2),
        dict(model_type='exaone4', **TEXT), {'model.visual': 'packed patches'}, types=''),
    'lighton_ocr': partial(
        make, 'LightOnOcr', dict(text_config=QWEN3, vision_config=PIXTRAL), (4, 8, 4),
        _PADDED,
        {'model.vision_encoder': 'sizes'}, image_token_id=IMAGE),
    'aria': partial(
        make, 'Aria', dict(
            text_config=TEXT | dict(model_type='aria_text', moe_num_experts=4), vision_config=dict(
                model_type='idefics3_vision', **_TOWER)), (2, 2, 2), _square(),
        {'model.vision_tower': 'batch first'},
        image_token_index=IMAGE, projector_patch_to_query_dict={4: 2}, exact=False),
    'kosmos2': partial(
        make, 'Kosmos2', dict(
            text_config=dict(vocab_size=64, max_position_embeddings=128, embed_dim=16, layers=2, ffn_dim=32, attention_heads=2,
                             pad_token_id=0, bos_token_id=1, eos_token_id=2, dropout=0.0, attention_dropout=0.0),
            vision_config=_TOWER), (3, 3, 3), _square(), {'vision_model': 'batch first'}, trained=('text_model',), latent_query_num=3,
        per_token=lambda ids: {'image_embeds_position_mask': ids == IMAGE}),
    'dinov2': partial(
        make, 'Dinov2', {}, [[], [], []], _square() | {'labels': [[0], [2], [1]]}, {'dinov2': 'batch first'},
        trained=('classifier',), head='ForImageClassification', words=False, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        mlp_ratio=2, image_size=16, patch_size=8, num_labels=3),
    'audioflamingo3': partial(
        make, 'AudioFlamingo3', dict(text_config=QWEN2, audio_config=_WHISPER),
        [[AUDIO] * 5, [AUDIO] * 12, [AUDIO] * 10], _frames(20, 48, 40, most=48, name='input_features_mask'),
        {'model.audio_tower.layers.0': 'batch first', 'model.audio_tower.layers.1': 'batch first'},
        {'model.audio_tower': _RANDOM}, late=2, audio_token_id=AUDIO),
    'gemma4': partial(
        make, 'Gemma4', dict(
            text_config=TEXT | dict(head_dim=8, vocab_size_per_layer_input=64, hidden_size_per_layer_input=4, global_head_dim=8),
            vision_config=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                               head_dim=8, patch_size=4, pooling_kernel_size=2, position_embedding_size=16)), (4, 8, 4),
        {'pixel_values': [(1, 32, 48)] * 3,
         'image_position_ids': [[[[y, x] for y in range(4) for x in range(n)] + [[-1, -1]] * (32 - 4 * n)] for n in (4, 8, 4)]},
        {'model.vision_tower': 'positions'}, image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO,
        boi_token_id=START, eoi_token_id=END, types='mm_token_type_ids'),
}
