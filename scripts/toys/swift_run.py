"""Run the real ``swift`` in a process of its own, offline and on the CPU in fp32, and read what the recorder wrote."""
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

RECORDER = Path(__file__).resolve().parent.parent / 'demo_plugin' / 'swift_speedup_recorder.py'
CPU_FLAGS = ['--check_model', 'false', '--split_dataset_ratio', '0', '--report_to', 'none', '--use_cpu', 'true',
             '--torch_dtype', 'float32', '--bf16', 'false', '--fp16', 'false', '--attn_impl', 'sdpa',
             '--dataloader_num_workers', '0', '--dataset_num_proc', '1', '--logging_steps', '1',
             '--add_version', 'false', '--save_only_model', 'true']


def command(door: str, *flags: str) -> list[str]:
    """``door`` is ``swift`` or ``swift-speedup``; both come from the environment this Python belongs to."""
    return [str(Path(sys.executable).parent / door), *flags]


def environment(record: Path | None = None, **more: str) -> dict[str, str]:
    """Nothing looks for a hub; variables that would change the run are taken out."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith('SWIFT_SPEEDUP_') and name not in ('NPROC_PER_NODE', 'NNODES', 'MAX_PIXELS')}
    fixed = {'HF_HUB_OFFLINE': '1', 'USE_HF': '1', 'CUDA_VISIBLE_DEVICES': '', 'TOKENIZERS_PARALLELISM': 'false'}
    return kept | fixed | ({'SPEEDUP_RECORD': str(record)} if record else {}) | more


def start(arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> subprocess.Popen:
    """Everything the process and its children print goes to ``log``; end them all with :func:`stop`."""
    with open(log, 'w', encoding='utf-8') as file:
        return subprocess.Popen(arguments, env=dict(variables), stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process: subprocess.Popen) -> None:
    """End the process and what it started; does nothing when it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(arguments: Sequence[str], variables: Mapping[str, str], log: Path, timeout: float = 900) -> int:
    """Exit status of the finished process; one that takes longer than ``timeout`` seconds is stopped and an error."""
    process = start(arguments, variables, log)
    try:
        return process.wait(timeout)
    finally:
        stop(process)


def read_record(path: Path) -> list[dict]:
    """One dict per training step: ``epoch``, ``seconds``, ``loss`` (a float again) and, with the plugin, ``stats``."""
    rows = [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]
    return [row | {'loss': float.fromhex(row['loss'])} for row in rows]
