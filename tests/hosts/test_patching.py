"""``swift-speedup patch`` on copies of the real releases: exactly on and off, and nothing that it does not know is touched."""
import ctypes
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import overlays
import pytest

from swift_speedup.cli.main import main
from swift_speedup.config import FLAG_PREFIX, option_fields
from swift_speedup.hosts import diffs, patching

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ('4.6.0', '4.5.2', '3.12.6')
FIXES = ('checkpointing_context', 'layer_trainability')
OPTIONS = [FLAG_PREFIX + option.name for option in option_fields()]
FLAG_FILES = ('swift/trainers/arguments.py', 'swift/trainers/mixin.py')


def copied(release, folder):
    """``folder`` with the packages of ms-swift ``release`` and its metadata, as pip has installed them."""
    source = overlays.folder(release) if release in overlays.PINS else Path(sysconfig.get_path('purelib'))
    shutil.copytree(source / 'swift', folder / 'swift', ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copytree(source / f'ms_swift-{release}.dist-info', folder / f'ms_swift-{release}.dist-info')
    return folder


def contents(folder):
    files = (path for path in folder.rglob('*') if path.is_file() and '__pycache__' not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def changes(release, file, kind):
    """The lines of one kind, ``+`` or context, that the diff with the flag has for ``file``."""
    diff = (patching.patches_folder() / release / 'frozen_speedup.diff').read_text(encoding='utf-8')
    part = diff.partition(f'+++ b/{file}\n')[2].partition('diff --git')[0]
    return '\n'.join(line[1:] for line in part.splitlines() if line.startswith(kind))


@pytest.fixture(params=RELEASES)
def release(request):
    return request.param


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """A copy of the release that is asked for, 4.6.0 if none is, in front on the path."""
    wanted = request.getfixturevalue('release') if 'release' in request.fixturenames else RELEASES[0]
    monkeypatch.syspath_prepend(str(copied(wanted, tmp_path / 'site')))
    return tmp_path / 'site'


def patch(*flags):
    return main(['patch', *flags])


def test_on_and_off_again_in_every_order(release, folder):
    before = contents(folder)
    assert patch('--check') == 1
    for applied in ([], FIXES[:1], FIXES[::-1]):
        for fix in applied:
            assert patch('--fix', fix) == 0
        assert patch() == 0 == patch('--check')
        changed = contents(folder)
        assert {name for name in before if changed[name] != before[name]} >= set(FLAG_FILES)
        assert changed.keys() == before.keys()
        assert patch() == 0 and contents(folder) == changed  # again: nothing happens
        for fix in applied:
            assert patch('--check', '--fix', fix) == 0 == patch('--revert', '--fix', fix)
            assert patch('--check', '--fix', fix) == 1
        assert patch('--check') == 0 == patch('--revert') == patch('--revert')
        assert contents(folder) == before and patch('--check') == 1


def test_git_does_the_same(release, folder, tmp_path):
    other = tmp_path / 'git'
    shutil.copytree(folder, other)
    for language in ('source', 'source_en'):  # upstream's documentation is in no wheel
        hunk = changes(release, f'docs/{language}/Instruction/Command-line-parameters.md', ' ')
        page = other / 'docs' / language / 'Instruction' / 'Command-line-parameters.md'
        page.parent.mkdir(parents=True)
        page.write_text('\n' * 300 + hunk + '\nend\n', encoding='utf-8')
    for name in ('frozen_speedup', *FIXES):
        path = patching.patches_folder() / release / f'{name}.diff'
        subprocess.run(['git', 'apply', str(path)], cwd=other, check=True)
        assert patch(*([] if name == 'frozen_speedup' else ['--fix', name])) == 0
    assert contents(folder).items() <= contents(other).items()
    added = contents(other).keys() - contents(folder).keys()
    assert {Path(name).parts[0] for name in added} == {'docs', 'tests'}
    for name in added:
        if name.startswith('docs'):
            text = (other / name).read_text(encoding='utf-8')
            assert re.findall(r'^- (frozen_\w+):', text, re.MULTILINE) == ['frozen_speedup', *OPTIONS]


def test_the_fields_are_those_of_the_config(release):
    added = changes(release, FLAG_FILES[0], '+')
    assert re.findall(r'^    (frozen_\w+): Optional\[str\] = None$', added, re.MULTILINE) == OPTIONS
    assert re.findall(r'^        (frozen_\w+) \(.*\):', added, re.MULTILINE) == ['frozen_speedup', *OPTIONS]


def test_files_of_others_are_left_alone(folder, capsys):
    mixin = folder / FLAG_FILES[1]
    for state in ('fresh', 'patched'):
        if state == 'patched':
            assert patch() == 0
        good = mixin.read_bytes()
        mixin.write_bytes(good + b'# mine\n')
        before = contents(folder)
        capsys.readouterr()
        for flags in ([], ['--revert']):
            assert patch(*flags) == 2
            told = capsys.readouterr().err
            assert str(mixin) in told and 'pip install --force-reinstall --no-deps ms-swift==4.6.0' in told
        assert patch('--check') == 3 and str(mixin) in capsys.readouterr().out
        assert contents(folder) == before
        mixin.write_bytes(good)
    assert patch('--check') == 0 == patch('--revert')


def test_a_strange_file_of_a_fix_keeps_nobody_from_the_flag(folder, capsys):
    before = contents(folder)
    utils = folder / 'swift/trainers/utils.py'
    utils.write_bytes(utils.read_bytes().replace(b'\n', b'\r\n'))
    assert patch() == 0 == patch('--check') and patch('--fix', FIXES[0]) == 2 and patch('--check', '--fix', FIXES[0]) == 3
    assert patch('--revert') == 2 and str(utils) in capsys.readouterr().err  # after it has done what it can
    assert {name: before[name] for name in FLAG_FILES} == {name: contents(folder)[name] for name in FLAG_FILES}


def test_a_missing_file_is_named(folder, capsys):
    (folder / FLAG_FILES[0]).unlink()
    assert patch() == 2 and FLAG_FILES[0] in capsys.readouterr().err


def test_other_releases_and_checkouts_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(overlays.folder('4.3.0')))
    assert patch() == 2 and patch('--check') == 4
    told = capsys.readouterr()
    assert 'no patch for ms-swift 4.3.0' in told.err and '3.12.6, 4.5.2, 4.6.0' in told.err and 'swift-speedup sft' in told.out
    copied('4.6.0', tmp_path / 'site')
    shutil.move(tmp_path / 'site' / 'swift', tmp_path / 'checkout' / 'swift')
    monkeypatch.syspath_prepend(str(tmp_path / 'site'))
    monkeypatch.syspath_prepend(str(tmp_path / 'checkout'))
    assert patch() == 2
    told = capsys.readouterr().err
    assert str(tmp_path / 'checkout') in told and 'git apply' in told and Path(re.search(r'git apply (.*\.diff)', told)[1]).is_file()
    monkeypatch.setattr(sys, 'path', [str(ROOT)])
    assert patch('--check') == 4 and 'not installed' in capsys.readouterr().out


@pytest.mark.parametrize(('flags', 'word'), [
    (['--fix', 'all'], 'checkpointing_context, layer_trainability'), (['--revert', '--check'], 'not allowed with'), (['now'], 'usage')])
def test_wrong_command_lines(folder, capsys, flags, word):
    before = contents(folder)
    assert patch(*flags) == 2 and word in capsys.readouterr().err and contents(folder) == before


KILLED = """
import os, sys
from swift_speedup.cli.main import main
replace, calls = os.replace, []
def replace_one(*names):
    calls.append(names)
    if len(calls) == 2:
        os._exit(9)  # no clean-up, as after a kill
    replace(*names)
os.replace = replace_one
main(['patch'])
"""


@pytest.mark.parametrize('next_flags', [[], ['--revert']])
def test_a_run_that_was_killed_half_way(folder, next_flags):
    before = contents(folder)
    variables = {**os.environ, 'PYTHONPATH': f'{folder}{os.pathsep}{ROOT}'}
    assert subprocess.run([sys.executable, '-c', KILLED], env=variables, check=False).returncode == 9
    assert len(contents(folder)) == len(before) + 1 and patch('--check') == 3
    assert patch(*next_flags) == 0
    assert patch('--check') == int(bool(next_flags)) and contents(folder).keys() == before.keys()
    assert patch('--revert') == 0 and contents(folder) == before


def _no_override():
    """Root, too, is held to the permissions of files then."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='permissions of root are dropped in a way of Linux')
def test_a_folder_that_is_read_only(folder):
    before = contents(folder)
    (folder / 'swift/trainers').chmod(0o555)
    try:
        done = subprocess.run([sys.executable, '-m', 'swift_speedup.cli.main', 'patch'], preexec_fn=_no_override, capture_output=True,
                              env={**os.environ, 'PYTHONPATH': f'{folder}{os.pathsep}{ROOT}'}, text=True, check=False)
    finally:
        (folder / 'swift/trainers').chmod(0o755)
    assert done.returncode == 2 and f'cannot write in {folder}' in done.stderr and 'Permission denied' in done.stderr
    assert 'Traceback' not in done.stderr and contents(folder) == before


def test_hard_links_modes_and_compiled_files(folder, tmp_path):
    mixin = folder / FLAG_FILES[1]
    os.link(mixin, tmp_path / 'shared')  # as package managers share files between environments
    mixin.chmod(0o640)
    original = mixin.read_bytes()
    compiled = Path(py_compile.compile(str(mixin), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH))
    assert patch() == 0
    assert (tmp_path / 'shared').read_bytes() == original != mixin.read_bytes()
    assert mixin.stat().st_mode & 0o777 == 0o640 and not compiled.exists()


def test_hunks_apply_where_they_say_or_not_at_all():
    text = b'--- a/f\n+++ b/f\n@@ -2,2 +2,3 @@\n b\n-c\n+C\n+CC\n'
    (hunk,) = diffs.parse(text)['f']
    assert diffs.apply(b'a\nb\nc\nd\n', [hunk]) == b'a\nb\nC\nCC\nd\n'
    assert diffs.apply(b'a\nb\nC\nCC\nd\n', diffs.reverse([hunk])) == b'a\nb\nc\nd\n'
    for other in (b'b\nc\nd\n', b'x\na\nb\nc\n', b'a\nb\nc', b'a\nb \nc\n', b''):  # moved, no end of line, other white space
        with pytest.raises(diffs.DiffError):
            diffs.apply(other, [hunk])
    with pytest.raises(diffs.DiffError, match='two hunks'):
        diffs.apply(b'a\nb\nc\nd\n', [hunk, hunk])
    for broken in (text[:-4], text.replace(b'2,3', b'2,2'), text.replace(b'2,2', b'x')):
        with pytest.raises(diffs.DiffError):
            diffs.apply(b'a\nb\nc\nd\n', diffs.parse(broken)['f'])


def test_the_wheel_has_the_patches(tmp_path):
    for name in ('swift_speedup', 'patches'):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('setup.cfg', 'pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, tmp_path)
    build = [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation', '--wheel-dir', 'wheels', '.']
    subprocess.run(build, cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / 'wheels').glob('*.whl')
    shutil.unpack_archive(wheel, tmp_path / 'site', 'zip')
    assert contents(tmp_path / 'site' / 'swift_speedup' / 'patches') == contents(ROOT / 'patches')
