"""The console command's own errors; what it starts is tested in tests/hosts."""
import pytest

from swift_speedup.cli.main import main


@pytest.mark.parametrize(('argv', 'words'), [
    (['plan'], 'plan needs the flags'),
    (['precompute'], 'precompute needs the flags'),
    (['precompute', '--model', 'x'], '--frozen_cache_dir'),
    (['plan', '--model', 'x', '--plan_batches', '0'], "'0' is not allowed; expected a positive whole number"),
    (['plan', 'sft', '--model', 'x', '--frozen_cache', 'redis'], '--frozen_cache'),
    (['train'], 'unknown command'),
    ([], 'no command')])
def test_wrong_command_lines(argv, words, capsys):
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_help_lists_every_command_and_option(capsys):
    assert main(['--help']) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ('plan', 'precompute', 'cache', 'plugin', 'sft|pt|rlhf', '--frozen_ram_gib', '--plan_batches'))
