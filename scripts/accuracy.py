"""What is learned, with the plugin and without: a tiny Qwen2-VL reads handwritten digits after `swift sft`.

The ViT is frozen, the rest is trained. Losses, evaluations during training, weights and the accuracy on digits that were held out
are compared to the last digit.
"""
import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from toys import digits, models, swift_run

DOORS = {'stock': 'swift', 'speedup': 'swift-speedup'}
SAMPLES, EPOCHS, BATCH = 640, 10, 8
EVALUATIONS = 3  # during training
FLAGS = ['--model_type', 'qwen2_vl', '--template', 'qwen2_vl', '--tuner_type', 'full', '--freeze_vit', 'true',
         '--freeze_aligner', 'false', '--learning_rate', '3e-3', '--per_device_train_batch_size', str(BATCH),
         '--gradient_accumulation_steps', '1', '--per_device_eval_batch_size', str(BATCH), '--eval_strategy', 'steps',
         '--save_strategy', 'epoch', '--save_total_limit', '1', *swift_run.CPU_FLAGS]


class Result(NamedTuple):
    """Of one arm. ``accuracy``: share of the held-out digits named right; ``reuse``: hits and misses, none for stock."""

    losses: list[float]
    evaluations: list[dict]
    answers: list[str]
    accuracy: float
    checkpoint: Path
    reuse: tuple[int, int]


def main() -> int:
    options = parse_options()
    folder = Path(options.output)
    shutil.rmtree(folder, ignore_errors=True)
    return report(compare(folder, options.samples, options.held_out, options.epochs))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--samples', type=int, default=SAMPLES, help='digits to train on')
    parser.add_argument('--held-out', type=int, default=300)
    parser.add_argument('--epochs', type=int, default=EPOCHS)
    parser.add_argument('--output', default='accuracy_output', help='folder, emptied first')
    return parser.parse_args()


def compare(folder: Path, samples: int, held_out: int, epochs: int, plugins: Sequence[Path] = ()) -> dict[str, Result]:
    """Train and evaluate both arms, at the same time, one thread each. Raises ``RuntimeError`` with the log when a run fails.

    ``plugins``: more files for the sped-up arm's ``--external_plugins``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train, validation, rows = digits.write_digits(folder, samples, held_out)
    model = models.save(models.build('qwen2_vl'), 'qwen2_vl', folder / 'model', [digits.QUESTION] * 9)
    between = max(1, epochs * -(-samples // BATCH) // EVALUATIONS)
    flags = ['--model', str(model), '--dataset', str(train), '--val_dataset', str(validation), '--num_train_epochs', str(epochs),
             '--eval_steps', str(between), *FLAGS]

    def run(arm: str) -> Result:
        place = folder / arm
        place.mkdir()
        loaded = [swift_run.RECORDER, *(plugins if arm == 'speedup' else ())]
        arguments = swift_run.command(
            DOORS[arm], 'sft', *flags, '--output_dir', str(place / 'out'), '--external_plugins', *map(str, loaded))
        status = swift_run.run(arguments, swift_run.environment(place / 'record.jsonl', OMP_NUM_THREADS='1'), place / 'log')
        if status:
            log = (place / 'log').read_text(encoding='utf-8')
            raise RuntimeError(f'{DOORS[arm]} sft ended with status {status}:\n{log[-4000:]}')
        return read(place, rows)
    with ThreadPoolExecutor(len(DOORS)) as pool:
        return dict(zip(DOORS, pool.map(run, DOORS)))


def read(place: Path, rows: list[digits.Digit]) -> Result:
    (checkpoint,) = place.glob('out/**/checkpoint-*')
    logged = [json.loads(line) for line in next(place.glob('out/**/logging.jsonl')).read_text(encoding='utf-8').splitlines()]
    evaluations = [{name: row[name] for name in ('eval_loss', 'eval_token_acc')} for row in logged if 'eval_loss' in row]
    record = swift_run.read_record(place / 'record.jsonl')
    answers = predict(checkpoint, rows)
    right = sum(answer == row.answer for answer, row in zip(answers, rows, strict=True)) / len(rows)
    stats = record[-1].get('stats', {'hits': 0, 'misses': 0})
    return Result([row['loss'] for row in record], evaluations, answers, right, checkpoint, (stats['hits'], stats['misses']))


def predict(checkpoint: Path, rows: list[digits.Digit]) -> list[str]:
    """The most likely first token of each answer, by transformers alone: neither ms-swift nor the plugin takes part."""
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    question = [{'role': 'system', 'content': 'You are a helpful assistant.'},
                {'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': digits.QUESTION}]}]
    prompt = processor.apply_chat_template(question, add_generation_prompt=True)
    answers = []
    for start in range(0, len(rows), BATCH):
        images = [Image.open(row.image) for row in rows[start:start + BATCH]]
        batch = processor(text=[prompt] * len(images), images=images, return_tensors='pt')
        with torch.no_grad():
            tokens = model(**batch).logits[:, -1].argmax(-1)
        answers += processor.batch_decode(tokens[:, None])
    return answers


def same(results: dict[str, Result]) -> dict[str, bool]:
    """Whether the two arms agree, by what was compared."""
    stock, speedup = (results[arm] for arm in DOORS)
    weights, others = (load_file(result.checkpoint / 'model.safetensors') for result in (stock, speedup))
    return {'losses': stock.losses == speedup.losses, 'evaluations': stock.evaluations == speedup.evaluations,
            'weights': weights.keys() == others.keys() and all(weights[name].equal(others[name]) for name in weights),
            'answers': stock.answers == speedup.answers, 'accuracy': stock.accuracy == speedup.accuracy}


def report(results: dict[str, Result]) -> int:
    table = Table('arm', 'first loss', 'last loss', 'evaluation loss', 'accuracy', 'hits', 'misses', title='Which digit is this?')
    for arm, result in results.items():
        table.add_row(arm, f'{result.losses[0]:.4f}', f'{result.losses[-1]:.4f}', str(result.evaluations[-1]['eval_loss']),
                      f'{result.accuracy:.4f}', *map(str, result.reuse))
    Console().print(table)
    agreed = same(results)
    print(', '.join(f'{name}: {"equal" if equal else "DIFFERENT"}' for name, equal in agreed.items()))
    if not all(agreed.values()) or results['stock'].accuracy < 0.3:  # chance: 0.1
        print('error: the two runs are not the same training, or nothing was learned', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
