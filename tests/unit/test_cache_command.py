"""``swift-speedup cache``: folders are described, checked, pruned and merged; wrong command lines end with one clear line."""
import json
import time

import pytest
import torch

from swift_speedup.cli.main import main
from swift_speedup.memo.key import FORMAT_VERSION
from swift_speedup.segments.state import numerics
from swift_speedup.store import Entry
from swift_speedup.store import disk as disk_module
from swift_speedup.store.disk import DiskStore

OURS, FOREIGN, UNKNOWN = b'o' * 16, b'f' * 16, b'u' * 16


def key(number):
    return number.to_bytes(16, 'big')


def note(settings):
    about = {'weights': 'ab' * 16, 'modules': 'cd' * 16, 'settings': settings}
    return json.dumps({'format': FORMAT_VERSION, 'segments': {'model.visual': about}}).encode()


@pytest.fixture
def folder(tmp_path):
    store = DiskStore(tmp_path / 'cache')
    for number in range(30):
        store.put(key(number), Entry(torch.full((100,), float(number)), (OURS, FOREIGN, UNKNOWN)[number % 3]))
    store.put_note(OURS, note(numerics(None)))
    store.put_note(FOREIGN, note(['torch 1.0', *numerics(None)[1:]]))
    store.close()
    return tmp_path / 'cache'


def run(capsys, *words):
    status = main(['cache', *map(str, words)])
    return status, capsys.readouterr()


def stats(capsys, folder):
    status, printed = run(capsys, 'stats', folder, '--json')
    assert status == 0
    return json.loads(printed.out)


def test_stats_as_data_and_for_people(folder, capsys):
    found = stats(capsys, folder)
    groups = {bytes.fromhex(group['origin']): group for group in found['groups']}
    assert found['entries'] == 30 and found['damaged'] == 0 and {group['entries'] for group in groups.values()} == {10}
    assert found['bytes'] == sum(group['bytes'] for group in groups.values()) <= found['file_bytes']
    assert groups[OURS]['foreign'] == [] and 'torch 1.0, not' in groups[FOREIGN]['foreign'][0] and groups[UNKNOWN]['foreign']
    assert abs(groups[OURS]['newest'] - time.time()) < 60
    status, printed = run(capsys, 'stats', folder)
    assert status == 0 and 'model.visual' in printed.out and '30 entries' in printed.out and 'abababab' in printed.out


def damage(folder, number):
    """Flip one byte of an entry's data, as a failing disk would."""
    path = folder / 'data.mdb'
    contents = bytearray(path.read_bytes())
    pattern = torch.full((4,), float(number)).numpy().tobytes()
    places = [place for place in range(len(contents)) if contents.startswith(pattern, place)]
    assert places
    for place in places:  # old pages may hold copies
        contents[place] ^= 1
    path.write_bytes(contents)


def test_verify_and_prune_find_what_is_damaged(folder, capsys):
    assert run(capsys, 'verify', folder)[0] == 0
    damage(folder, 13)
    status, printed = run(capsys, 'verify', folder, '--json')
    assert status == 1 and json.loads(printed.out) == {'entries': 30, 'damaged': [key(13).hex()]}
    store = DiskStore(folder)
    assert store.get(key(13)) is None and store.errors == 1 and store.get(key(12)) is not None
    store.put(key(13), Entry(torch.full((100,), 13.0)))  # computed again
    store.flush()
    assert store.get(key(13)).tensor[0] == 13 and store.check() == []
    store.close()


def test_prune_foreign_and_to_a_size(folder, capsys):
    status, printed = run(capsys, 'prune', folder, '--foreign', '--json')
    assert status == 0 and json.loads(printed.out)['entries'] == 20
    found = stats(capsys, folder)
    assert [bytes.fromhex(group['origin']) for group in found['groups']] == [OURS]
    status, _ = run(capsys, 'prune', folder, '--to-gib', found['bytes'] / 2 / (1 << 30))
    assert status == 0 and 0 < stats(capsys, folder)['bytes'] <= found['bytes'] / 2


def test_prune_by_age_when_the_clock_was_set_back(folder, capsys, monkeypatch):
    monkeypatch.setattr(disk_module.time, 'time', lambda: time.time_ns() / 1e9 - 40 * 86400)
    store = DiskStore(folder)
    for number in range(100, 105):
        store.put(key(number), Entry(torch.ones(10), OURS))
    store.close()
    monkeypatch.undo()
    status, printed = run(capsys, 'prune', folder, '--older-than', '30d', '--json')
    assert status == 0 and json.loads(printed.out)['entries'] == 5
    assert stats(capsys, folder)['entries'] == 30


def test_clear_and_merge(folder, capsys, tmp_path):
    other = DiskStore(tmp_path / 'other')
    for number in range(25, 40):
        other.put(key(number), Entry(torch.full((100,), float(number)), OURS))
    other.close()
    status, printed = run(capsys, 'merge', folder, tmp_path / 'other')
    assert status == 0 and '10 entries copied' in printed.out and stats(capsys, folder)['entries'] == 40
    assert run(capsys, 'merge', tmp_path / 'new', folder)[0] == 0
    assert stats(capsys, tmp_path / 'new')['groups'] == stats(capsys, folder)['groups']
    assert run(capsys, 'clear', folder)[0] == 0 and stats(capsys, folder)['entries'] == 0


@pytest.mark.parametrize(('words', 'message'), [
    (('stats', '{missing}'), 'does not exist'), (('verify', '{empty}'), 'holds no cache'), (('clear', '{empty}'), 'holds no cache'),
    (('prune', '{folder}', '--older-than', 'long'), 'is no age'), (('prune', '{folder}', '--to-gib', '-1'), 'no number of GiB'),
    (('why', '{missing}', '--image', 'x'), 'does not exist'), (('why', '{folder}'), '--image'),
    (('why', '{folder}', '--image', 'nowhere.png'), 'nowhere.png is not a file'),
    (('fly', '{folder}'), 'fly'), (('stats',), 'folder'), (('merge', '{folder}', '{folder}'), 'into itself')])
def test_a_wrong_command_line(words, message, folder, tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    places = {'folder': folder, 'missing': tmp_path / 'missing', 'empty': tmp_path / 'empty'}
    status, printed = run(capsys, *(word.format(**places) for word in words))
    assert status == 2 and message in printed.err and 'Traceback' not in printed.err
    assert not (tmp_path / 'missing').exists() and not list((tmp_path / 'empty').iterdir())
