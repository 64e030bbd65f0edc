"""Handwritten digits, the images that scikit-learn ships, as a dataset in ms-swift's format: "Which digit is this?"."""
import json
from pathlib import Path
from typing import NamedTuple

import numpy
from PIL import Image
from sklearn.datasets import load_digits

QUESTION = 'Which digit is this?'


class Digit(NamedTuple):
    image: Path
    answer: str


def write_digits(folder: Path, count: int, held_out: int, side: int = 56) -> tuple[Path, Path, list[Digit]]:
    """Write two datasets, the first ``count`` digits and the last ``held_out`` ones, with images of ``side`` pixels; returns their
    paths and what is held out. Raises ``ValueError`` when there are not so many."""
    data = load_digits()
    if count < 1 or held_out < 1 or count + held_out > len(data.images):
        raise ValueError(f'count={count} and held_out={held_out} do not fit into {len(data.images)} digits')
    images = folder / 'images'
    images.mkdir(parents=True, exist_ok=True)
    chosen = {'train': range(count), 'validation': range(len(data.images) - held_out, len(data.images))}
    digits = {name: [_write(images, number, data, side) for number in numbers] for name, numbers in chosen.items()}
    for name, rows in digits.items():
        lines = [json.dumps({'messages': [{'role': 'user', 'content': f'<image>{QUESTION}'},
                                          {'role': 'assistant', 'content': row.answer}], 'images': [str(row.image)]}) for row in rows]
        (folder / f'{name}.jsonl').write_text('\n'.join(lines) + '\n', encoding='utf-8')
    return folder / 'train.jsonl', folder / 'validation.jsonl', digits['validation']


def _write(folder: Path, number: int, data, side: int) -> Digit:
    path = (folder / f'{number:04d}.png').resolve()
    grey = (data.images[number] * (255 / 16)).astype(numpy.uint8)  # 8 x 8, 0 to 16
    Image.fromarray(grey).convert('RGB').resize((side, side), Image.Resampling.BICUBIC).save(path)
    return Digit(path, str(data.target[number]))
