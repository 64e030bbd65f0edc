"""Step time of one training step, arm against arm, interleaved in one run on the same data; values are compared too.

``--what store`` measures the persistent store alone.
"""
import argparse
import sys
import time
from pathlib import Path

import torch
from bench import report, store, subjects
from bench.arms import ARMS, make_arms

CHECKPOINTING = ('off', 'reentrant', 'non-reentrant')
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def main() -> int:
    options = parse_options()
    if options.what == 'store':
        return store.measure(Path(options.cache_dir) if options.cache_dir else None)
    subject = subjects.lookup(options.model, options.size)
    arms = make_arms(options.arms, subject, options.tuner, options.frozen_layers, options.checkpointing, options.device,
                     DTYPES[options.dtype], Path(options.cache_dir) if options.cache_dir else None)
    batches = [make_batch(subject, options, index) for index in range(options.batches)]
    for arm in arms:
        torch.manual_seed(0)
        arm.warm_up(batches)
    times, losses, tower_times = measure(arms, batches, options.rounds, options.device)
    peaks = {arm.name: arm.peak_bytes for arm in arms}
    report.show(times, peaks, f'{options.model} {options.size}, {options.tuner}, {options.image} px, '
                              f'checkpointing {options.checkpointing}, {options.device}')
    share = summary(times, tower_times)
    columns = ('model', 'size', 'tuner', 'image', 'same_image', 'batch_size', 'text', 'frozen_layers', 'checkpointing', 'device',
               'dtype')
    facts = {**report.environment(options.device), **{name: getattr(options, name) for name in columns}, 'tower_share': round(share, 4)}
    report.append_csv(Path(options.csv), times, peaks, facts)
    print(f'rows added to {options.csv}')
    # An image that is computed once instead of several times side by side has other last bits.
    return check(arms, losses, exact=options.device == 'cpu' and options.dtype == 'float32' and not options.same_image)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog='; '.join(f'{name}: {text}' for name, text in ARMS.items()))
    parser.add_argument('--what', default='step', choices=('step', 'store'))
    parser.add_argument('--cache-dir', help='arms that cache do so in folders in this one; with --what store, where the store lies')
    parser.add_argument('--model', default='qwen2_vl', choices=subjects.NAMES)
    parser.add_argument('--size', default='small', help='tiny, small or 2b (the real dimensions), where the model has it')
    parser.add_argument('--tuner', default='lora', choices=('lora', 'full'))
    parser.add_argument('--frozen-layers', type=int, default=0, help="freeze this many of the language model's first layers too")
    parser.add_argument('--image', type=int, default=448, help='pixels per side')
    parser.add_argument('--text', type=int, default=64, help='text tokens per sample')
    parser.add_argument('--batch-size', type=int, default=1)
    parser.add_argument('--same-image', action='store_true', help='one image for all samples of a batch, as in GRPO')
    parser.add_argument('--batches', type=int, default=2, help='different batches per round')
    parser.add_argument('--rounds', type=int, default=8)
    parser.add_argument('--checkpointing', default='reentrant', choices=CHECKPOINTING)
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--dtype', default=None, choices=DTYPES, help='default: float32 on the CPU, else bfloat16')
    parser.add_argument('--arms', nargs='+', choices=list(ARMS), help='default: all that the model has; stock is always run')
    parser.add_argument('--csv', default='benchmark.csv')
    options = parser.parse_args()
    if options.frozen_layers < 0:
        parser.error(f'--frozen-layers {options.frozen_layers} is negative')
    options.dtype = options.dtype or ('float32' if options.device == 'cpu' else 'bfloat16')
    for name in ('image', 'text', 'batch_size', 'batches', 'rounds'):
        if getattr(options, name) < 1:
            parser.error(f'--{name.replace("_", "-")} {getattr(options, name)} is not positive')
    try:
        subject = subjects.lookup(options.model, options.size)
    except ValueError as error:
        parser.error(str(error))
    possible = list(ARMS) if subject.tower else ['stock', 'graph', 'cold', 'warm']
    options.arms = list(dict.fromkeys(['stock', *(options.arms or possible)]))
    if not set(options.arms) <= set(possible):
        parser.error(f'{options.model} has no tower: only the arms {", ".join(possible)}')
    if options.image % subject.multiple:
        parser.error(f'--image {options.image} is not a multiple of {subject.multiple}, which {options.model} needs')
    return options


def make_batch(subject: subjects.Subject, options: argparse.Namespace, index: int) -> dict[str, torch.Tensor]:
    form = subjects.Form(options.image, options.text, options.batch_size, options.same_image)
    batch = {name: value.to(options.device) if isinstance(value, torch.Tensor) else value
             for name, value in subject.make_batch(form, index).items()}
    if 'pixel_values' in batch:
        batch['pixel_values'] = batch['pixel_values'].to(DTYPES[options.dtype])
    return batch


def measure(arms: list, batches: list, rounds: int, device: str) -> tuple[dict, dict, list]:
    """Arms take turns on each batch, each round beginning with another one; seconds and losses by arm, and the tower's seconds."""
    times, losses, tower_times = {arm.name: [] for arm in arms}, {arm.name: [] for arm in arms}, []
    for turn in range(rounds):
        for index, batch in enumerate(batches):
            first = (turn * len(batches) + index) % len(arms)
            for arm in arms[first:] + arms[:first]:
                torch.manual_seed(turn * len(batches) + index)
                arm.prepare_step()
                started = begin(device)
                losses[arm.name].append(arm.step(index, batch))
                times[arm.name].append(end(device) - started)
                if device.startswith('cuda'):
                    arm.peak_bytes = max(arm.peak_bytes, torch.cuda.max_memory_allocated())
            if arms[0].tower is not None:
                started = begin(device)
                with torch.no_grad():
                    arms[0].tower(*arms[0].subject.tower_call(batch))
                tower_times.append(end(device) - started)
    return times, losses, tower_times


def begin(device: str) -> float:
    if device.startswith('cuda'):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    return time.perf_counter()


def end(device: str) -> float:
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    return time.perf_counter()


def summary(times: dict, tower_times: list) -> float:
    """Print the ratios that matter; returns the tower's share of a stock step."""
    middle = {arm: report.percentiles(seconds)[50] for arm, seconds in times.items()}
    share = report.percentiles(tower_times)[50] / middle['stock'] if tower_times else 0.0
    if tower_times:
        print(f'tower share of a stock step f = {share:.3f}; ceiling 1/(1-f) = {1 / (1 - share):.3f}x')
    ratios = (('stock', 'warm', 'speedup; the ceiling is above'), ('warm', 'floor', '1 = nothing left to gain'),
              ('cold', 'stock', '1 = the first epoch costs nothing extra'), ('stock', 'graph', 'speedup of the graph skip alone'))
    for arm, base, meaning in ratios:
        if arm in middle and base in middle:
            print(f'{arm} / {base} = {middle[arm] / middle[base]:.3f} ({meaning})')
    return share


def check(arms: list, losses: dict, exact: bool) -> int:
    """Whether all arms trained the same, and did what they are named for; the exit status."""
    largest = max(abs(one - other) for arm in losses for one, other in zip(losses[arm], losses['stock']))
    print(f'largest loss difference to stock over {len(losses["stock"])} steps: {largest!r}')
    failed = largest != 0 if exact else largest > 0.02 * abs(losses['stock'][0])
    for arm in arms:
        stats = getattr(arm.model, 'speedup', None) and arm.model.speedup.stats
        if arm.name == 'warm':
            print(f'warm: {stats.hits} hits, {stats.misses} misses, {stats.frozen_calls} runs of the tower (all in warm-up)')
            failed |= stats.hits < len(losses['warm'])
        if arm.name == 'cold':
            failed |= stats.hits > 0
    if failed:
        print('error: the arms did not train the same, or did not do what they are named for', file=sys.stderr)
    return int(failed)


if __name__ == '__main__':
    sys.exit(main())
