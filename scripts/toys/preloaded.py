"""The real ``swift`` commands without their slow start: a server imports ms-swift once and forks for each run.

What runs in the fork is the console script with its own command line, environment and log; only the launcher's
``subprocess.run([python, file, *flags])`` is answered by running that file right there. Several ranks need real processes:
``swift_run.run``.
"""
import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace

_PRELOADED = ('torch', 'transformers', 'transformers.models.qwen2_vl.modeling_qwen2_vl', 'peft',
              'trl', 'datasets', 'swift.model', 'swift.template', 'swift.trainers', 'swift.rlhf_trainers', 'swift.pipelines.train.sft',
              'swift.pipelines.train.pretrain', 'swift.pipelines.train.rlhf', 'swift.pipelines.infer.infer',
              'swift.llm.train')  # the last one is ms-swift 3's


class Server:
    """Forks are made in an environment like ``variables``; each run may add its own. Use from several threads at once."""

    def __init__(self, variables: Mapping[str, str]):
        self._process = subprocess.Popen([sys.executable, __file__], env=dict(variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True)
        self._changed = threading.Condition()
        self._runs: dict[str, dict] = {}  # log -> pid, and status when it has ended
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                self._runs.setdefault(message.pop('log'), {}).update(message)
                self._changed.notify_all()
        with self._changed:
            self._process.wait()
            self._changed.notify_all()

    def run(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path, timeout: float = 900) -> int:
        """Exit status of the finished run, as ``swift_run.run`` has it; one that takes longer than ``timeout`` seconds is an error."""
        place = str(log)
        with self._changed:
            self._runs.pop(place, None)
            self._process.stdin.write(json.dumps({'arguments': list(arguments), 'variables': dict(variables), 'log': place}) + '\n')
            self._process.stdin.flush()
            self._changed.wait_for(lambda: 'status' in self._runs.get(place, {}) or self._process.returncode is not None, timeout)
            run = self._runs.get(place, {})
        if 'status' not in run:
            if 'pid' in run:
                os.killpg(run['pid'], SIGKILL)
            raise RuntimeError(f'{" ".join(arguments[:2])} took more than {timeout:.0f} s, or the server ended; see {log}')
        return run['status']

    def close(self) -> None:
        self._process.stdin.close()


def serve() -> None:
    for name in _PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # not all releases have all of them
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), 'w')  # what imports print is not an answer
    os.dup2(2, 1)
    waiting, logs = b'', {}
    while True:
        if select.select([0], [], [], 0.05)[0]:
            received = os.read(0, 1 << 20)
            if not received:
                break
            *lines, waiting = (waiting + received).split(b'\n')
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _child(**request)
                logs[pid] = request['log']
                print(json.dumps({'log': request['log'], 'pid': pid}), file=answers, flush=True)
        for pid in list(logs):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                print(json.dumps({'log': logs.pop(pid), 'status': os.waitstatus_to_exitcode(status)}), file=answers, flush=True)
    for pid in logs:
        os.killpg(pid, SIGKILL)


def _child(arguments: list[str], variables: dict[str, str], log: str) -> None:
    status = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(variables)
        importlib.import_module('swift.cli.main').subprocess = SimpleNamespace(run=_run_here)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name='__main__')
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()  # as at the end of a process: stores write what waits
        os._exit(status)


def _run_here(arguments: list[str]) -> SimpleNamespace:
    if arguments[1].startswith('-'):  # torchrun
        return subprocess.run(arguments)
    sys.argv = arguments[1:]
    sys.path.insert(0, str(Path(arguments[1]).parent))
    runpy.run_path(arguments[1], run_name='__main__')
    return SimpleNamespace(returncode=0)


if __name__ == '__main__':
    serve()
