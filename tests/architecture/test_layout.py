"""Imports run downwards, files stay readable, nothing of a machine is named."""
import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'swift_speedup'
# A part may import from parts further left only.
ORDER = ['errors', 'log', 'config', 'trees', 'stats', 'ranks', 'graph', 'store', 'memo', 'segments', 'api', 'hosts', 'cli', 'plugin']
FORBIDDEN = {'graph': {'store', 'memo', 'segments'}, 'memo': {'graph', 'segments'}, 'store': {'graph', 'memo', 'segments'}}
FILES = sorted(path for path in PACKAGE.rglob('*.py') if path != PACKAGE / '__init__.py')


def imported(path):
    """First-level parts of the package that a file imports."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else ()
            full = (*base, *(node.module.split('.') if node.module else ()))
            if full[:1] == ('swift_speedup',):
                yield from [full[1]] if len(full) > 1 else [alias.name for alias in node.names]


def test_every_part_has_its_place():
    assert {path.relative_to(PACKAGE).parts[0].removesuffix('.py') for path in FILES} == set(ORDER)


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
    for name in imported(path):
        assert name == own or ORDER.index(name) < ORDER.index(own), f'{own} imports {name}'
        assert name not in FORBIDDEN.get(own, ()), f'{own} must not know {name}'


def tracked(*patterns):
    names = subprocess.run(['git', 'ls-files', *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {name: (ROOT / name).read_text(encoding='utf-8') for name in names if (ROOT / name).is_file() and not name.endswith('.png')}


def test_files_can_be_read_at_a_sitting():
    assert not [name for name, text in tracked('*.py').items() if len(text.splitlines()) > 400]


def test_no_file_names_a_machine():
    pattern = re.compile(r'/(?:home|root|work|opt|Users)/\w')
    assert not [name for name, text in tracked().items() if pattern.search(text)]
