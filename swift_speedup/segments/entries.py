"""Where models are entered and what with, as data: methods beside ``forward``, names of arguments that carry media.

Nothing breaks when a name is missing here: the frozen parts inside such a method leave the graph one by one, and the first training
step says loudly that a frozen tower was not entered as a whole.
"""
from collections.abc import Iterable

from ..memo.split import GRID_NAMES

# Methods through which known models enter a tower instead of calling it; the comment says who.
METHODS = (
    'forward_features',  # timm-style towers: MiniCPM-V 2's vpm, DaViT, EVA
    'forward_features_unpool',  # Florence-2's DaViT as its remote code calls it
    'get_image_features',  # transformers: Qwen-VL, LLaVA, InternVL, CLIP-like dual encoders
    'get_video_features',
    'get_audio_features',
    'extract_feature',  # InternVL's remote code: vision_model, pixel shuffle, mlp1
    'encode_images',  # LLaVA's original code
    'encode_image',  # CLIP-like towers
    '_encode_image',  # Florence-2's remote code: tower, position embeddings, projection
    'get_vllm_embedding',  # MiniCPM-V's remote code: vpm and resampler
    'get_vision_embedding',  # MiniCPM-V's remote code, one image at a time
)

# Parts of the names under which batches carry pixels, frames or sound. A step with such a tensor is a step with media.
_MEDIA = ('pixel', 'image', 'video', 'frame', 'audio', 'speech', 'input_features', 'input_values', 'patches')


def names_media(arguments: Iterable[str]) -> bool:
    """Whether one of the argument names is that of pixels, frames or sound, or of a grid of patches."""
    return any(name in GRID_NAMES or any(part in name for part in _MEDIA) for name in arguments)
