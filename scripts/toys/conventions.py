"""The multimodal model types of the installed ms-swift, by how their encoders are called.

Classified by architecture, from the signatures of native classes and of the shapes that ms-swift's templates build; for encoders that
exist as remote code only, this is what those shapes imply, and the first batch of a run decides.
"""
import dataclasses

from toys import native

PACKED, BATCH, PADDED, AUDIO = 'packed patches', 'batch first', 'padded, with sizes or positions', 'audio'
NONE = 'no encoder'
# Names of ms-swift's ``model_arch``; a model type stands here by itself where its architecture is called in several ways.
_ARCHITECTURES = {
    PACKED: ('qwen2_vl', 'qwen3_vl', 'qwen3_5', 'wemm_embedding', 'moss_vl', 'qwen2_5_omni', 'qwen3_omni', 'glm4v',
             'llava_onevision1_5', 'keye_vl', 'paddleocr_vl', 'ernie_vl', 'dots_ocr', 'hunyuan_vl', 'kimi_k25', 'llava_hf_legacy',
             'ovis2_5', 'mimo_v2', 'muse_glimmer', 'minimax_m3_vl'),
    BATCH: ('chatglm4v', 'cogvlm', 'deepseek_janus', 'deepseek_ocr', 'deepseek_ocr2', 'deepseek_vl', 'deepseek_vl2', 'doc_owl2',
            'florence', 'florence2_native', 'gemma3n', 'glm_edge_v', 'got_ocr2', 'idefics3', 'interns1', 'internvl',
            'llama3_2_vision', 'llama4', 'llava_hf', 'llava_llama', 'llava_mistral', 'llava_next_video_hf', 'megrez_omni',
            'molmo', 'monkeyocrv2', 'mplug_owl3', 'ovis', 'phi3_vision', 'phi4_multimodal', 'qwen_vl', 'step3_vl',
            'unlimited_ocr', 'xcomposer', None),
    PADDED: ('minicpmv', 'minicpmo', 'minicpmv4_6', 'diffusion_gemma', 'valley', 'deepseek_v41', 'type pixtral', 'type mistral3',
             'type mistral3_2506', 'type gemma4', 'type molmo2'),
    AUDIO: ('llama3_1_omni', 'midashenglm', 'qwen2_audio', 'qwen3_asr', 'qwen_audio', 'step_audio2_mini', 'type step_audio'),
    NONE: ('emu3_chat', 'gemma4_unified', 'qwen3_tts'),
}
# Classes that other tests train: parity of every tuning, and the real swift.
_TESTED_BESIDE = {'Qwen2VLForConditionalGeneration', 'Qwen2_5_VLForConditionalGeneration', 'Qwen3VLForConditionalGeneration',
                  'LlavaForConditionalGeneration', 'Florence2ForConditionalGeneration'}


@dataclasses.dataclass
class Covered:
    """Model types of one convention, and those of them whose own transformers class is among the tested families."""

    types: list[str] = dataclasses.field(default_factory=list)
    tested: list[str] = dataclasses.field(default_factory=list)


def of_model_types() -> dict[str, Covered]:
    """By convention. Raises ``LookupError`` for a model type that is not classified."""
    from swift.model import MODEL_MAPPING

    from swift_speedup.hosts.florence2 import MODEL_TYPE
    conventions = {name: convention for convention, names in _ARCHITECTURES.items() for name in names}
    tested = native.class_names() | _TESTED_BESIDE
    covered = {convention: Covered() for convention in _ARCHITECTURES}
    for model_type, meta in MODEL_MAPPING.items():
        if not meta.is_multimodal or model_type == MODEL_TYPE:  # the plugin's own, if it is loaded
            continue
        arch = getattr(meta.model_arch, 'arch_name', meta.model_arch)
        convention = conventions.get(f'type {model_type}', conventions.get(arch))
        if convention is None:
            raise LookupError(f'model type {model_type} (architecture {arch}) is not classified in scripts/toys/conventions.py')
        covered[convention].types.append(model_type)
        if tested & set(meta.architectures or ()):
            covered[convention].tested.append(model_type)
    return covered
