"""SpeedupConfig and the console command: clear errors, one source of names."""
import pytest

from swift_speedup import ConfigError, SpeedupConfig
from swift_speedup.cli.main import main, plugin_path
from swift_speedup.config import env_name, flag_name, option_fields


@pytest.mark.parametrize(('values', 'words'), [
    ({'ram_gib': 'lots'}, ('--frozen_ram_gib', "'lots'", 'positive number')),
    ({'ram_gib': '-1'}, ('--frozen_ram_gib', "'-1'", 'positive number')),
    ({'ram_gib': 'nan'}, ('--frozen_ram_gib', "'nan'")),
    ({'cache': 'redis'}, ('--frozen_cache', "'redis'", 'auto, off, ram or disk')),
    ({'dedup': 'maybe'}, ('--frozen_dedup', "'maybe'", 'true or false')),
    ({'speed': 'max'}, ('--frozen_speed', "'max'", '--frozen_cache')),
])
def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(values, words):
    with pytest.raises(ConfigError) as error:
        SpeedupConfig.from_named(values, flag_name)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(('values', 'words'), [
    ({'cache': 'disk'}, ('cache=disk', 'cache_dir')),
    ({'cache': 'ram', 'cache_dir': 'x'}, ('cache=ram', 'cache_dir', 'cache=auto')),
    ({'cache': 'off', 'cache_dir': 'x'}, ('cache=off', 'cache_dir')),
    ({'disk_gib': 2}, ('disk_gib=2', 'cache_dir')),
])
def test_options_that_contradict_each_other(values, words):
    with pytest.raises(ConfigError) as error:
        SpeedupConfig(**values)
    assert all(word in str(error.value) for word in words)


def test_folders_are_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    assert SpeedupConfig(cache_dir='x').cache_dir == str(tmp_path / 'x')
    assert SpeedupConfig(cache_dir='~/x').cache_dir == str(tmp_path / 'home' / 'x')
    assert SpeedupConfig(cache_dir='').cache_dir is None


def test_texts_and_values_mean_the_same():
    texts = {'cache': 'OFF', 'ram_gib': '0.5', 'dedup': 'no', 'eval': 'TRUE'}
    assert SpeedupConfig.from_named(texts) == SpeedupConfig(cache='off', ram_gib=0.5, dedup=False, eval=True)
    assert SpeedupConfig(ram_gib='none') == SpeedupConfig()


def test_environment_and_unknown_names_in_it():
    assert SpeedupConfig.from_env({env_name('ram_gib'): '2', 'PATH': '/bin'}) == SpeedupConfig(ram_gib=2)
    with pytest.raises(ConfigError, match='SWIFT_SPEEDUP_RAM'):
        SpeedupConfig.from_env({'SWIFT_SPEEDUP_RAM': '2'})


@pytest.mark.parametrize(('argv', 'words'), [
    (['sft', '--frozen_ram_gib', 'lots'], ('--frozen_ram_gib', "'lots'")),
    (['sft', '--frozen_ram_gib=lots'], ('--frozen_ram_gib', "'lots'")),
    (['sft', '--frozen-ram-gib', 'lots'], ('--frozen_ram_gib', "'lots'")),
    (['sft', '--frozen_ram', '1'], ('--frozen_ram', '--frozen_ram_gib')),
    (['rlhf', '--frozen_cache'], ('--frozen_cache', 'no value')),
    (['pt', '--frozen_cache', '--model', 'x'], ('--frozen_cache', 'no value')),
    (['fly'], ('unknown command', 'fly', 'usage')),
    ([], ('no command', 'usage')),
    (['sft', 'missing.yaml'], ('missing.yaml', 'cannot read')),
])
def test_a_wrong_command_line_ends_with_2_and_one_clear_line(argv, words, capsys):
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words) and 'Traceback' not in message


def test_options_in_a_configuration_file_are_checked_too(tmp_path, capsys):
    path = tmp_path / 'run.yaml'
    path.write_text('model: x\nfrozen_cache: redis\n')
    assert main(['sft', str(path)]) == 2
    assert "--frozen_cache='redis'" in capsys.readouterr().err


def test_help_names_every_option_and_plugin_prints_a_file(capsys):
    assert main(['--help']) == 0
    shown = capsys.readouterr().out
    assert all(flag_name(option.name) in shown and option.metadata['help'] in shown for option in option_fields())
    assert main(['plugin']) == 0
    assert capsys.readouterr().out.strip() == str(plugin_path())
    assert [path.name for path in plugin_path().parent.glob('*.py')] == [plugin_path().name]  # ms-swift makes the folder importable
