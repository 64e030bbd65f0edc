"""Several ranks of one training: each is a fork of the preloaded server with torchrun's variables."""
import dataclasses
import importlib.util
import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toys import swift_run

PLUGIN = Path(__file__).with_name('ranks_plugin.py')
ENGINES = {
    'ddp': [],
    'zero1': ['--deepspeed', 'zero1'],
    'zero2': ['--deepspeed', 'zero2'],
    'zero3': ['--deepspeed', 'zero3'],
    'fsdp2': ['--fsdp', 'fsdp2'],
}
WRAPPERS = {'ddp': 'DistributedDataParallel', 'zero1': 'DeepSpeedEngine', 'zero2': 'DeepSpeedEngine', 'zero3': 'DeepSpeedEngine',
            'fsdp2': 'FSDP'}


@dataclasses.dataclass
class Ranks:
    """What is left of a finished run."""

    folder: Path
    statuses: list[int]

    def log(self, rank: int) -> str:
        return (self.folder / f'log.{rank}').read_text(encoding='utf-8')

    def _well(self) -> None:
        assert not any(self.statuses), '\n'.join(f'rank {rank}: {self.log(rank)[-3000:]}' for rank in range(len(self.statuses)))

    @property
    def records(self) -> list[list[dict]]:
        """Of each rank, a dict per training step."""
        self._well()
        return [swift_run.read_record(self.folder / f'record.{rank}') for rank in range(len(self.statuses))]

    @property
    def losses(self) -> list[list[float]]:
        return [[row['loss'] for row in record] for record in self.records]

    @property
    def facts(self) -> list[dict]:
        self._well()
        return [json.loads((self.folder / f'facts.{rank}').read_text(encoding='utf-8')) for rank in range(len(self.statuses))]

    @property
    def checkpoint(self) -> Path:
        self._well()
        return max(self.folder.glob('out/**/checkpoint-*'), key=lambda path: int(path.name.split('-')[1]))

    def stats(self, epoch: int | None = None) -> list[dict]:
        """Counters of each rank at the end, or what was added to them in ``epoch``."""
        found = []
        for record in self.records:
            last = record[-1]['stats'] if epoch is None else [row for row in record if row['epoch'] == epoch][-1]['stats']
            before = [row['stats'] for row in record if epoch is not None and row['epoch'] < epoch]
            found.append({name: value - before[-1][name] if before and isinstance(value, (int, float)) else value
                          for name, value in last.items()})
        return found


def command_of(door: str, flags: Sequence[str]) -> list[str]:
    """What torchrun starts for ``swift sft`` (``stock``), ``swift-speedup sft`` (``speedup``) and ``swift-speedup precompute sft``."""
    if door == 'stock':
        return [importlib.util.find_spec('swift.cli.sft').origin, *flags]
    name = 'swift_speedup_sft' if door == 'speedup' else 'swift_speedup_precompute'
    file = importlib.util.find_spec(f'swift_speedup.cli.run.{name}').origin
    return [file, *(['--precompute_command', 'sft'] if door == 'precompute' else []), *flags]


def run(server, folder: Path, door: str, flags: Sequence[str], ranks: int = 2, timeout: float = 120, per_rank: Sequence[dict] = (),
        **variables: str) -> Ranks:
    """``per_rank``: more variables of each."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    shared = swift_run.environment(
        folder / 'record', OMP_NUM_THREADS='1', RANK_FACTS=str(folder / 'facts'), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), DS_ACCELERATOR='cpu', **variables)
    command = command_of(door, complete(flags, folder))

    def start(rank: int) -> int:
        own = shared | {'RANK': str(rank), 'LOCAL_RANK': str(rank)} | (dict(per_rank[rank]) if per_rank else {})
        return server.run(command, own, folder / f'log.{rank}', timeout)
    with ThreadPoolExecutor(ranks) as pool:
        return Ranks(folder, list(pool.map(start, range(ranks))))


def complete(flags: Sequence[str], folder: Path) -> list[str]:
    """With what all runs have. More plugins come after ``--external_plugins`` at the end of ``flags``."""
    flags, more = list(flags), []
    if '--external_plugins' in flags:
        place = flags.index('--external_plugins')
        flags, more = flags[:place], flags[place + 1:]
    return [*swift_run.CPU_FLAGS, '--output_dir', str(folder / 'out'), *flags,
            '--external_plugins', str(PLUGIN), str(swift_run.RECORDER), *more]
