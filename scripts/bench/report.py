"""Numbers of a benchmark run: percentiles, table, CSV rows that say where they come from."""
import csv
import datetime
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

PERCENTILES = (20, 50, 80)


def percentiles(seconds: Sequence[float]) -> dict[int, float]:
    values = torch.tensor(seconds, dtype=torch.float64)
    return {p: float(values.quantile(p / 100)) for p in PERCENTILES}


def show(times: Mapping[str, Sequence[float]], peaks: Mapping[str, int], title: str) -> None:
    memory_column = ['peak, GiB'] if any(peaks.values()) else []
    table = Table('arm', *(f'p{p}, s' for p in PERCENTILES), 'stock / arm', *memory_column, title=title)
    stock = percentiles(times['stock'])[50]
    for arm, seconds in times.items():
        found = percentiles(seconds)
        memory = [f'{peaks[arm] / 2 ** 30:.2f}'] if memory_column else []
        table.add_row(arm, *(f'{found[p]:.4f}' for p in PERCENTILES), f'{stock / found[50]:.3f}x', *memory)
    Console().print(table)


def append_csv(path: Path, times: Mapping[str, Sequence[float]], peaks: Mapping[str, int], facts: Mapping[str, object]) -> None:
    """One row per arm; a file with other columns is refused rather than mixed."""
    rows = [{**facts, 'arm': arm, 'steps': len(seconds), **{f'p{p}_s': round(value, 6) for p, value in percentiles(seconds).items()},
             'peak_bytes': peaks[arm]} for arm, seconds in times.items()]
    header = list(rows[0])
    exists = path.exists()
    if exists and path.read_text(encoding='utf-8').splitlines()[0].split(',') != header:
        raise SystemExit(f'error: {path} has other columns; name another file with --csv')
    with open(path, 'a', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, header)
        if not exists:
            writer.writeheader()
        writer.writerows(rows)


def environment(device: str) -> dict[str, object]:
    """Date, commit, hardware and versions."""
    commit = subprocess.run(['git', 'describe', '--always', '--dirty'], capture_output=True, text=True,
                            cwd=Path(__file__).parent).stdout.strip()
    cpu = f'{platform.machine()} CPU, {torch.get_num_threads()} threads'
    hardware = torch.cuda.get_device_name() if device.startswith('cuda') else cpu
    return {'date': datetime.date.today().isoformat(), 'commit': commit or 'unknown', 'hardware': hardware,
            **{name.replace('-', '_'): version(name) for name in ('torch', 'transformers', 'ms-swift', 'peft')}}
