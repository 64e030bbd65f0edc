"""Florence-2 as transformers has it natively, as a model type of ms-swift 4.6: ``--model_type florence2_native``.

ms-swift's own type, ``florence``, needs the checkpoints' remote code, which fails on current transformers. This one is for checkpoints
of the ``florence-community/Florence-2-*`` kind. Loading the plugin registers it: ``swift-speedup sft --model_type florence2_native``,
or ``swift sft|infer|export --external_plugins "$(swift-speedup plugin)" --model_type florence2_native``; what such a run saves is
recognised by its ``args.json``. The flag is needed because both kinds of checkpoints name the same architecture and have the same
names: if this type claimed them too, ms-swift would find neither by itself.

The vision tower has drop path, which is active in training: a frozen one leaves the graph, but is evaluated at every step.
``eval=true`` (``--frozen_eval true``) runs it in eval mode, so that its outputs can be reused; that changes training.
"""
import functools
import json
from typing import Any, Optional

import torch
from torch import nn

from ..log import ensure_visible, logger

try:
    from swift.model import (
        MODEL_MAPPING,
        Model,
        ModelGroup,
        ModelLoader,
        ModelMeta,
        MultiModelKeys,
        register_model,
        register_model_arch,
    )
    from swift.template import Template, TemplateMeta, register_template
    from swift.template.templates.microsoft import FlorenceTemplate
    from transformers import Florence2ForConditionalGeneration, Florence2Processor, GenerationConfig
    _missing = None
except ImportError as error:
    FlorenceTemplate = ModelLoader = object
    _missing = error

MODEL_TYPE = 'florence2_native'
_SIZES = ('base', 'base-ft', 'large', 'large-ft')


@functools.cache
def register() -> bool:
    """Make the model type known to ms-swift; whether it is. Never raises: without it everything else works. Once is enough."""
    trouble: Optional[Exception] = _missing
    if trouble is None:
        try:
            if MODEL_TYPE not in MODEL_MAPPING:
                _register()
            return True
        except Exception as unknown_interface:
            trouble = unknown_interface
    ensure_visible()
    logger.info('model type %s is not available: it needs ms-swift 4.6 and a transformers with Florence2ForConditionalGeneration '
                '(%s: %s)', MODEL_TYPE, type(trouble).__name__, trouble)
    return False


def _register() -> None:
    register_model_arch(MultiModelKeys(
        MODEL_TYPE, language_model=['model.language_model', 'lm_head'], aligner='model.multi_modal_projector',
        vision_tower='model.vision_tower'))
    register_template(TemplateMeta(
        MODEL_TYPE, prefix=['<s>'], prompt=['{{QUERY}}</s>'], chat_sep=None, suffix=['</s>'], template_cls=Florence2Template))
    # No architectures: see the module's docstring.
    models = [Model(hf_model_id=f'florence-community/Florence-2-{size}') for size in _SIZES]
    register_model(ModelMeta(
        MODEL_TYPE, [ModelGroup(models)], Florence2Loader, template=MODEL_TYPE, model_arch=MODEL_TYPE, is_multimodal=True,
        requires=['transformers>=4.57'], tags=['vision']))


class Florence2Loader(ModelLoader):
    """Loads the classes of transformers itself, whatever the checkpoint says about remote code."""

    default_trust_remote_code = False

    def get_processor(self, model_dir: str, config: Any) -> Any:
        return Florence2Processor.from_pretrained(model_dir)

    def get_model(self, model_dir: str, *args: Any, **kwargs: Any) -> nn.Module:
        self.auto_model_cls = self.auto_model_cls or Florence2ForConditionalGeneration
        return super().get_model(model_dir, *args, **kwargs)


class Florence2Template(FlorenceTemplate):
    """The encoder reads image tokens, then the prompt; labels are the decoder's. The model itself puts image features in."""

    def _encode(self, inputs: Any) -> dict[str, Any]:
        for message in inputs.messages:  # a task such as <OD> must stand alone
            if isinstance(message['content'], str):
                message['content'] = message['content'].replace('<image>', '')
        encoded = super()._encode(inputs)
        if encoded.get('pixel_values') is not None:
            count = self.processor.num_image_tokens * len(encoded['pixel_values'])
            encoded['input_ids'] = [self.processor.image_token_id] * count + encoded['input_ids']
        return encoded

    def _post_encode(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    def register_post_encode_hook(self, models: list[nn.Module]) -> None:
        """Training begins. ms-swift has set one beam unless it was told otherwise, and with one beam transformers does not save the
        ``early_stopping`` that Florence's checkpoints come with: it raises. The configuration as it was loaded is kept elsewhere."""
        for model in models:
            config = self.get_base_model(model).generation_config
            if config is not None and config.num_beams in (None, 1):
                config.early_stopping = GenerationConfig().early_stopping
        super().register_post_encode_hook(models)

    def _truncate(self, input_ids: list[int], labels: Optional[list[int]], encoded: dict[str, Any],
                  truncation_strategy: str) -> tuple[list[int], Optional[list[int]]]:
        """Prompt and answer have lengths of their own."""
        input_ids, _ = super()._truncate(input_ids, None, {}, truncation_strategy)
        return input_ids, None if labels is None else labels[:self.max_length]

    def compute_sft_loss(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None, trainer: Any = None) -> Any:
        """The model's outputs with their loss: the mean over all labels, the first one included, because the decoder's are not shifted.

        ``inputs['labels']`` is ``(batch, length)``. Raises ``ValueError`` where the host computes the loss without the model.
        """
        if inputs.get('labels') is None:
            raise ValueError(f'{MODEL_TYPE}: the decoder is fed from the labels, so losses that ms-swift computes outside of the model '
                             '(label smoothing, loss_scale, loss_type, DFT, channel loss) cannot be used')
        inputs['labels'] = labels = _unshortened(inputs['labels'], inputs.pop('logits_to_keep', None))
        outputs = model(**inputs)
        if num_items_in_batch is not None:
            outputs.loss = outputs.loss * ((labels != -100).sum() / num_items_in_batch)
        return outputs

    def decode_generate_ids(self, generate_ids: list[int], *, is_finished: bool = True, template_inputs: Any = None,
                            **kwargs: Any) -> str:
        """Text; for tasks whose answers have places in them, such as ``<OD>``, JSON as from the host's own type."""
        text = Template.decode_generate_ids(
            self, generate_ids, is_finished=is_finished, template_inputs=template_inputs, **kwargs)
        for token in (self.tokenizer.bos_token, self.tokenizer.eos_token, self.tokenizer.pad_token):
            text = text.replace(token, '')
        before, mark, _ = getattr(template_inputs, 'query', '').partition('>')
        if not is_finished or self.processor.tasks_answer_post_processing_type.get(before + mark, 'pure_text') == 'pure_text':
            return text
        image = template_inputs.images[0] if template_inputs.images else None
        size = (image.width, image.height) if image is not None else None
        return json.dumps(self.processor.post_process_generation(text, task=before + mark, image_size=size))


def _unshortened(labels: torch.Tensor, kept: Any) -> torch.Tensor:
    """Undo what ms-swift's ``prepare_logits_to_keep`` does to the labels: it takes them to be those of a decoder-only model.

    For one row ``kept`` is a mask, true one place before each label that is not masked; ``labels`` are these, after a -100.
    """
    if not isinstance(kept, torch.Tensor):
        return labels
    used = torch.cat([torch.ones_like(kept[:1]), kept[:-1]])  # the first label is never masked: it starts the answer
    full = labels.new_full((1, len(used)), -100)
    full[0, used] = labels[0, 1:]
    return full
