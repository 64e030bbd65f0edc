"""Real photographs with true captions: crops of the pictures that scikit-image ships, as a dataset in ms-swift's format."""
import json
from pathlib import Path
from typing import NamedTuple

import skimage
from PIL import Image


class Photo(NamedTuple):
    """A crop ``(left, top, right, bottom)`` in parts of the picture's sides, a question about it and the true answer."""

    picture: str
    crop: tuple[float, float, float, float]
    question: str
    answer: str


WHOLE = (0.0, 0.0, 1.0, 1.0)
PHOTOS = (
    Photo('astronaut.png', WHOLE, 'Who is in this picture?', 'An astronaut in an orange suit, smiling at the camera.'),
    Photo('astronaut.png', (0.25, 0.0, 0.75, 0.4), 'What does this person look like?', 'A smiling woman with short blond hair.'),
    Photo('astronaut.png', (0.0, 0.0, 0.3, 0.5), 'What hangs in the background?', 'A flag with red and white stripes.'),
    Photo('astronaut.png', (0.65, 0.0, 1.0, 0.6), 'What stands behind her?', 'A model of a space shuttle with its tank.'),
    Photo('astronaut.png', (0.5, 0.6, 1.0, 1.0), 'Which piece of equipment is this?', 'A white helmet with a dark visor.'),
    Photo('astronaut.png', (0.0, 0.4, 0.6, 1.0), 'What colour is the suit?', 'It is orange, with a round patch on the chest.'),
    Photo('camera.png', WHOLE, 'What is the man doing?', 'He looks through a camera that stands on a tripod.'),
    Photo('camera.png', (0.25, 0.05, 0.75, 0.45), 'Describe the close-up.', 'A man with dark hair bends towards a camera.'),
    Photo('camera.png', (0.4, 0.45, 0.85, 1.0), 'What holds the camera?', 'A tripod whose legs stand on the grass.'),
    Photo('camera.png', (0.6, 0.15, 1.0, 0.55), 'What is on the horizon?', 'Buildings at the far end of a field.'),
    Photo('camera.png', (0.0, 0.1, 0.5, 1.0), 'What is he wearing?', 'A long black coat.'),
    Photo('chelsea.png', WHOLE, 'Which animal is this?', 'A tabby cat with green eyes.'),
    Photo('chelsea.png', (0.25, 0.2, 0.6, 0.6), 'What is in the centre?', 'The green eye of a cat.'),
    Photo('chelsea.png', (0.3, 0.5, 0.85, 1.0), 'Which part of the animal is shown?', 'Its nose and white whiskers.'),
    Photo('chelsea.png', (0.0, 0.0, 0.7, 0.5), 'What pattern has the fur?', 'Dark stripes on light brown fur.'),
    Photo('coffee.png', WHOLE, 'What is on the table?', 'A cup of coffee on a red saucer.'),
    Photo('coffee.png', (0.25, 0.0, 0.75, 0.5), 'How full is the cup?', 'About half full of coffee.'),
    Photo('coffee.png', (0.45, 0.5, 0.8, 0.9), 'What lies on the saucer?', 'A small metal spoon.'),
    Photo('coffee.png', (0.7, 0.0, 1.0, 0.6), 'What is the table made of?', 'It is made of brown wood.'),
    Photo('coffee.png', (0.1, 0.4, 0.6, 1.0), 'What colour is the saucer?', 'The saucer is red.'),
    Photo('rocket.jpg', WHOLE, 'What stands between the towers?', 'A rocket on its launch pad at dusk.'),
    Photo('rocket.jpg', (0.35, 0.25, 0.65, 1.0), 'What is this tall object?', 'A white rocket that stands upright.'),
    Photo('rocket.jpg', (0.0, 0.7, 1.0, 1.0), 'What lights the ground?', 'Bright lamps around the launch pad.'),
    Photo('rocket.jpg', (0.0, 0.0, 0.35, 1.0), 'What is on the left?', 'A tall lattice tower against a blue sky.'),
    Photo('motorcycle_left.png', WHOLE, 'Which vehicle is this?', 'A red motorcycle in a garage.'),
    Photo('motorcycle_left.png', (0.62, 0.5, 1.0, 1.0), 'Which part is in front?', 'The front wheel with its black tyre.'),
    Photo('motorcycle_left.png', (0.4, 0.4, 0.75, 0.85), 'What is under the tank?', 'The engine, made of shiny metal.'),
    Photo('motorcycle_left.png', (0.45, 0.0, 1.0, 0.4), 'What stands at the wall?', 'Shelves that are full of boxes.'),
    Photo('motorcycle_left.png', (0.1, 0.25, 0.5, 0.85), 'What colour is the seat?', 'The seat is black.'),
    Photo('coins.png', WHOLE, 'What is laid out here?', 'Four rows of old coins on a dark ground.'),
    Photo('coins.png', (0.0, 0.0, 1.0, 0.28), 'What is in this row?', 'Six coins; the last one is the largest.'),
    Photo('coins.png', (0.0, 0.72, 1.0, 1.0), 'What do you see?', 'The bottom row of a tray of coins.'),
    Photo('coins.png', (0.7, 0.0, 1.0, 1.0), 'What is at the right?', 'Two columns of coins; some are large.'),
    Photo('moon.png', WHOLE, 'What kind of landscape is this?', 'The grey surface of the moon with craters.'),
    Photo('moon.png', (0.1, 0.0, 0.45, 0.35), 'What is the round thing?', 'A crater with one side in shadow.'),
    Photo('moon.png', (0.3, 0.5, 0.7, 1.0), 'What is dark here?', 'Shadows among rough ground.'),
    Photo('page.png', WHOLE, 'What was photographed?', 'A page of printed text.'),
    Photo('page.png', (0.0, 0.0, 1.0, 0.28), 'What does the heading say?', 'It says Region-based segmentation.'),
    Photo('text.png', WHOLE, 'What is written here?', 'Handwritten formulas on lined paper.'),
    Photo('retina.jpg', WHOLE, 'What does this medical image show?', 'The back of an eye with its blood vessels.'),
    Photo('retina.jpg', (0.0, 0.25, 0.45, 0.7), 'What is the bright spot?', 'The place where vessels enter the eye.'),
    Photo('ihc.png', WHOLE, 'What was this taken with?', 'A microscope: it shows stained tissue.'),
    Photo('hubble_deep_field.jpg', WHOLE, 'What are the small lights?', 'Distant galaxies in a black sky.'),
    Photo('hubble_deep_field.jpg', (0.5, 0.4, 1.0, 0.9), 'What is behind the galaxies?', 'Only the black of space.'),
    Photo('grass.png', WHOLE, 'What covers the ground?', 'Short grass with small leaves.'),
    Photo('gravel.png', WHOLE, 'What covers this surface?', 'Many small stones.'),
    Photo('brick.png', WHOLE, 'What is this wall made of?', 'Bricks in long straight rows.'),
    Photo('cell.png', WHOLE, 'What is the bright object?', 'A single cell seen through a microscope.'),
    # Drawings, last: they fill up only when more than the photographs are asked for.
    Photo('horse.png', WHOLE, 'Which animal has this outline?', 'A horse, all in black.'),
    Photo('horse.png', (0.55, 0.0, 1.0, 0.5), 'Which part of it is this?', 'The head and neck of a horse.'),
    Photo('horse.png', (0.0, 0.5, 1.0, 1.0), 'How many legs are there?', 'There are four legs.'),
    Photo('color.png', WHOLE, 'What is shown on black?', 'A round wheel of all colours.'),
)


def write_photos(folder: Path, count: int = 48, side: int = 448) -> Path:
    """Write ``count`` crops as PNG files of ``side`` x ``side`` pixels and ``photos.jsonl``; returns the latter's path."""
    if not 1 <= count <= len(PHOTOS):
        raise ValueError(f'count={count} is not in 1..{len(PHOTOS)}, the number of captioned crops')
    images = folder / 'images'
    images.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, photo in enumerate(PHOTOS[:count]):
        path = (images / f'{number:02d}.png').resolve()
        _crop(photo).resize((side, side), Image.Resampling.BICUBIC).save(path)
        lines.append(json.dumps({'messages': [{'role': 'user', 'content': f'<image>{photo.question}'},
                                              {'role': 'assistant', 'content': photo.answer}], 'images': [str(path)]}))
    dataset = folder / 'photos.jsonl'
    dataset.write_text('\n'.join(lines) + '\n', encoding='utf-8')
    return dataset


def texts() -> list[str]:
    """All questions and answers, to train a tokenizer on."""
    return [text for photo in PHOTOS for text in (photo.question, photo.answer)]


def _crop(photo: Photo) -> Image.Image:
    path = Path(skimage.__file__).parent / 'data' / photo.picture
    if not path.is_file():
        raise FileNotFoundError(f'{path}: the installed scikit-image does not ship this picture')
    picture = Image.open(path)
    if picture.mode == 'RGBA':  # the horse is black on transparent
        white = Image.new('RGBA', picture.size, 'white')
        picture = Image.alpha_composite(white, picture)
    left, top, right, bottom = photo.crop
    width, height = picture.size
    return picture.convert('RGB').crop((round(left * width), round(top * height), round(right * width), round(bottom * height)))
