"""Stock ``swift sft`` against ``swift-speedup sft``: same photographs, same model, same flags; step times, losses, adapters."""
import argparse
import csv
import shutil
import statistics
import sys
import time
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from toys import models, photos, swift_run

matplotlib.use('Agg')
from matplotlib import pyplot  # noqa: E402

DOORS = {'stock': 'swift', 'speedup': 'swift-speedup'}


def main() -> int:
    options = parse_options()
    folder = Path(options.output)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dataset = photos.write_photos(folder, options.samples, options.side)
    print(f'{options.samples} photographs of {options.side} px in {dataset}', flush=True)
    model = models.save(models.build('qwen2_vl', options.size), 'qwen2_vl', folder / 'model', photos.texts())
    records = train(model, dataset, folder, options.epochs)
    same_weights = adapters_equal(folder)
    write_csv(folder / 'demo.csv', records)
    plot(folder / 'demo.png', records)
    return report(records, same_weights, folder)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--size', default='small', choices=list(models.FAMILIES['qwen2_vl'].sizes))
    parser.add_argument('--samples', type=int, default=48, help=f'photographs, at most {len(photos.PHOTOS)}')
    parser.add_argument('--side', type=int, default=308, help='pixels; 448 takes about twice as long')
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--output', default='demo_output', help='folder, emptied first')
    return parser.parse_args()


def train(model: Path, dataset: Path, folder: Path, epochs: int) -> dict[str, list[dict]]:
    """LoRA with ms-swift's defaults, both arms at the same time, one step each in turns; by arm, one dict per step."""
    turns = folder / 'turns'
    turns.write_text('0', encoding='utf-8')
    started, running = time.time(), {}
    for player, (arm, door) in enumerate(DOORS.items()):
        arguments = swift_run.command(
            door, 'sft', '--model', str(model), '--model_type', 'qwen2_vl', '--template', 'qwen2_vl', '--dataset', str(dataset),
            '--num_train_epochs', str(epochs), '--external_plugins', str(swift_run.RECORDER), '--output_dir',
            str(folder / f'out_{arm}'), *swift_run.CPU_FLAGS)
        variables = swift_run.environment(folder / f'{arm}.jsonl', SPEEDUP_TURNS=str(turns), SPEEDUP_PLAYER=str(player))
        print(f'{arm}: {door} sft ... (log: {folder / arm}.log)', flush=True)
        running[arm] = swift_run.start(arguments, variables, folder / f'{arm}.log')
    try:
        while any(process.poll() is None for process in running.values()):
            for arm, process in running.items():
                if process.poll():
                    print((folder / f'{arm}.log').read_text(encoding='utf-8')[-4000:], file=sys.stderr)
                    sys.exit(f'error: {DOORS[arm]} sft ended with status {process.returncode}; the end of its log is above')
            time.sleep(0.5)
    finally:
        for process in running.values():
            swift_run.stop(process)
    print(f'both done in {time.time() - started:.0f} s', flush=True)
    return {arm: swift_run.read_record(folder / f'{arm}.jsonl') for arm in DOORS}


def adapters_equal(folder: Path) -> bool:
    """Whether the last checkpoints of both runs hold the same tensors, bit for bit."""
    stock, speedup = (load_file(last_checkpoint(folder / f'out_{arm}') / 'adapter_model.safetensors') for arm in DOORS)
    return stock.keys() == speedup.keys() and all(stock[name].equal(speedup[name]) for name in stock)


def last_checkpoint(folder: Path) -> Path:
    return max(folder.glob('**/checkpoint-*'), key=lambda path: int(path.name.split('-')[1]))


def by_epoch(rows: list[dict]) -> dict[int, list[float]]:
    epochs: dict[int, list[float]] = {}
    for row in rows:
        epochs.setdefault(row['epoch'], []).append(row['seconds'])
    return epochs


def write_csv(path: Path, records: dict[str, list[dict]]) -> None:
    with open(path, 'w', newline='', encoding='utf-8') as file:
        writer = csv.writer(file)
        writer.writerow(['arm', 'step', 'epoch', 'seconds', 'loss', 'hits', 'misses'])
        for arm, rows in records.items():
            for step, row in enumerate(rows):
                stats = row.get('stats', {})
                writer.writerow([arm, step, row['epoch'] + 1, f'{row["seconds"]:.4f}', repr(row['loss']),
                                 stats.get('hits', ''), stats.get('misses', '')])


def plot(path: Path, records: dict[str, list[dict]]) -> None:
    figure, (losses, times) = pyplot.subplots(1, 2, figsize=(11, 4), layout='constrained')
    for (arm, rows), style in zip(records.items(), ('-', '--')):
        losses.plot([row['loss'] for row in rows], style, label=arm)
        times.plot([row['seconds'] for row in rows], style, label=arm)
    losses.set(xlabel='step', ylabel='loss', title='Loss (the curves lie on each other)')
    times.set(xlabel='step', ylabel='forward + backward, s', title='Step time', ylim=(0, None))
    losses.legend()
    times.legend()
    figure.savefig(path, dpi=120)


def report(records: dict[str, list[dict]], same_weights: bool, folder: Path) -> int:
    """Print the table; the exit status is 1 when the runs are not the same training, or nothing was reused."""
    stock, speedup = by_epoch(records['stock']), by_epoch(records['speedup'])
    table = Table('epoch', 'stock step p50', 'speedup step p50', 'speedup', 'hits', 'misses', title='swift sft, Qwen2-VL, LoRA')
    seen = {'hits': 0, 'misses': 0}
    for epoch in stock:
        last = [row['stats'] for row in records['speedup'] if row['epoch'] == epoch][-1]
        slow, fast = statistics.median(stock[epoch]), statistics.median(speedup[epoch])
        table.add_row(str(epoch + 1), f'{slow:.3f} s', f'{fast:.3f} s', f'{slow / fast:.2f}x',
                      *(str(last[name] - seen[name]) for name in seen))
        seen = {name: last[name] for name in seen}
    Console().print(table)
    pairs = list(zip(records['stock'], records['speedup'], strict=True))
    difference = max(abs(one['loss'] - other['loss']) for one, other in pairs)
    print(f'largest difference between the two loss curves: {difference!r} over {len(pairs)} steps')
    print(f'adapters after training: {"bitwise equal" if same_weights else "DIFFERENT"}')
    print(f'written: {folder / "demo.csv"}, {folder / "demo.png"}')
    if difference or not same_weights or not seen['hits']:
        print('error: the two runs are not the same training, or nothing was reused', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
