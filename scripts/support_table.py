"""Which families are reused, by which convention, and how that is tested: prints tables, and keeps those of README.md up to date.

What is cached is not looked up in a list: each tiny model of ``toys.native`` is trained for a few steps, and what the store holds
afterwards is the answer.
"""
import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from toys import conventions, native

from swift_speedup import MyModel
from swift_speedup.log import logger

README = Path(__file__).resolve().parent.parent / 'README.md'
BEGIN, END = '<!-- made by scripts/support_table.py: begin -->', '<!-- made by scripts/support_table.py: end -->'
Row = tuple[str, ...]
TYPE_COLUMNS = ('convention', 'model types', 'of these, with a native class that is tested')
FAMILY_COLUMNS = ('family', 'convention', 'outputs of these are kept', 'tested by')
# tests/parity/families.py builds these; there the frontier lies in many places, so what is kept differs.
OTHERS: tuple[Row, ...] = (
    ('Qwen2-VL, Qwen2.5-VL, Qwen3-VL', 'packed patches, packed rows, tokens', 'tower with merger; last frozen block or layer',
     '`test_reuse`, `test_qwen_vl`, `tests/hosts`'),
    ('Florence-2, LLaVA-1.5', 'batch first, tokens', 'tower with projector; last frozen block or layer', '`test_reuse`, `tests/hosts`'),
    ('Llama, Qwen2, Qwen3, GPT-2, Mixtral, BART, BERT', 'tokens', 'last frozen layer, per sequence', '`test_reuse`, `test_prefix`'),
    ('T5', '', 'nothing: its blocks pass on a position bias that all samples share', '`test_reuse`'),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--check', action='store_true', help='write nothing; status 1 if README.md is out of date')
    options = parser.parse_args()
    logger.setLevel(logging.WARNING)
    types, families = type_rows(), [*map(family_row, native.FAMILIES), *OTHERS]
    console = Console(width=180)
    for title, (columns, rows) in {'multimodal model types of the installed ms-swift': (TYPE_COLUMNS, types),
                                   'families': (FAMILY_COLUMNS, families)}.items():
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    text = README.read_text(encoding='utf-8')
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    wanted = f'{before}{BEGIN}\n{markdown(TYPE_COLUMNS, types)}\n\n{markdown(FAMILY_COLUMNS, families)}\n{END}{after}'
    if options.check:
        return int(wanted != text)
    README.write_text(wanted, encoding='utf-8')
    return 0


def type_rows() -> list[Row]:
    covered = conventions.of_model_types()
    rows = [(name, str(len(some.types)), str(len(some.tested))) for name, some in covered.items()]
    reached = [len(some.types) for name, some in covered.items() if name != conventions.NONE]
    return [*rows, ('all', f'{sum(reached)} of {sum(len(some.types) for some in covered.values())}',
                    str(sum(len(some.tested) for some in covered.values())))]


def family_row(name: str) -> Row:
    """Trains the family for a few steps and tells what was kept."""
    case = native.quiet(native.FAMILIES[name]())
    model = MyModel(case.model.train(), cache='ram')
    for places in ((0, 1), (2, 0)) * (case.late + 1):
        model(**case.batch(*places)).loss.backward()
    kept = [remark.split(' is kept')[0].split(': output ')[0] for remark in model.speedup.plan.remarks if ' is kept, ' in remark]
    found = ', '.join(dict.fromkeys(case.conventions.values()))
    return type(model).__name__, found, ', '.join(f'`{path}`' for path in dict.fromkeys(kept)), f'`test_native[{name}]`'


def markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in (columns, ['---'] * len(columns), *rows))


if __name__ == '__main__':
    sys.exit(main())
