"""Patches for the installed ms-swift: which one fits, whether it is applied, and applying and taking it back.

The wheel's RECORD holds a digest of each file. What is on disk is recognised by it: some set of our patches, taken back, must give
the recorded content. So nothing is kept aside for the way back, and the way back is exact.
"""
import base64
import dataclasses
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Optional

from ..errors import PatchError
from . import diffs

FEATURE = 'frozen_speedup'  # the others are fixes of upstream's defects
_LEFT_BEHIND = '.swift_speedup'  # how unfinished files end


@dataclasses.dataclass(frozen=True)
class Patch:
    """One diff. ``hunks``: for each file of the installed package that it changes; its documentation and tests are for upstream."""

    name: str
    path: Path
    hunks: Mapping[str, Sequence[diffs.Hunk]]


@dataclasses.dataclass(frozen=True)
class File:
    """A file that a patch changes, as it is now. ``original`` is ``None`` when the content is not recognised."""

    path: Path
    current: bytes
    original: Optional[bytes]
    applied: frozenset[str]


def patches_folder() -> Path:
    """Where the diffs are, a folder for each release."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / 'patches'
    return shipped if shipped.is_dir() else package.parent / 'patches'  # a checkout whose links were lost


def releases() -> list[str]:
    """The releases of ms-swift that there are patches for."""
    return sorted(folder.name for folder in patches_folder().iterdir() if folder.is_dir())


def load(release: str) -> dict[str, Patch]:
    """The patches for ``release``, the feature first; empty when there are none."""
    found = sorted((patches_folder() / release).glob('*.diff'), key=lambda path: (path.stem != FEATURE, path.stem))
    return {path.stem: Patch(path.stem, path, {file: hunks for file, hunks in diffs.parse(path.read_bytes()).items()
                                               if file.startswith('swift/')}) for path in found}


class Installation:
    """The ms-swift of this environment. Raises ``PatchError`` when there is none, no patch for it, or Python imports another one."""

    def __init__(self):
        try:
            self._distribution = importlib.metadata.distribution('ms-swift')
        except importlib.metadata.PackageNotFoundError:
            raise PatchError('ms-swift is not installed in this environment: there is nothing to patch') from None
        self.release = self._distribution.version
        self.folder = Path(str(self._distribution.locate_file(''))).absolute()
        self.patches = load(self.release)
        if not self.patches:
            raise PatchError(f'there is no patch for ms-swift {self.release} (in {self.folder}), only for {", ".join(releases())}; '
                             'the command "swift-speedup sft" and the plugin file need none')
        self._digests = {str(file): file.hash.value for file in self._distribution.files or ()
                         if file.hash is not None and file.hash.mode == 'sha256'}
        found = importlib.machinery.PathFinder.find_spec('swift')  # what a new process imports, whatever this one has imported
        imported = Path(found.origin).parent if found is not None and found.origin else None
        if imported is None or imported.resolve() != (self.folder / 'swift').resolve():
            raise PatchError(f'ms-swift {self.release} is recorded in {self.folder}, but Python imports "swift" from '
                             f'{imported or "elsewhere"}: in a checkout of ms-swift, run "git apply {self.patches[FEATURE].path}"')

    def files(self) -> dict[str, File]:
        """Every file that some patch changes. Raises ``PatchError`` for one that is missing or has no recorded digest."""
        names = dict.fromkeys(name for patch in self.patches.values() for name in patch.hunks)
        return {name: self._recognised(name) for name in names}

    def _recognised(self, name: str) -> File:
        path = self.folder / name
        if name not in self._digests:
            raise PatchError(f'the RECORD of ms-swift {self.release} in {self.folder} has no digest of {name}, so its content cannot '
                             'be checked; install ms-swift from its wheel')
        try:
            current = path.read_bytes()
        except OSError as trouble:
            raise PatchError(f'cannot read {path}: {trouble.strerror}; {self._reinstall()}') from trouble
        for applied in _subsets([patch.name for patch in self.patches.values() if name in patch.hunks]):
            try:
                original = diffs.apply(current, diffs.reverse(self._hunks(name, applied)))
            except diffs.DiffError:
                continue
            if _digest(original) == self._digests[name]:
                return File(path, current, original, frozenset(applied))
        return File(path, current, None, frozenset())

    def _hunks(self, name: str, patches: Collection[str]) -> list[diffs.Hunk]:
        return [hunk for patch in patches for hunk in self.patches[patch].hunks.get(name, ())]

    def state(self, patch: str) -> str:
        """``applied``, ``not applied``, ``partly applied`` (a run was interrupted) or ``dirty: FILE...`` (unknown contents)."""
        files = self.files()
        concerned = [files[name] for name in self.patches[patch].hunks]
        unknown = [str(file.path) for file in concerned if file.original is None]
        if unknown:
            return f'dirty: {", ".join(unknown)}'
        there = [patch in file.applied for file in concerned]
        return 'applied' if all(there) else 'partly applied' if any(there) else 'not applied'

    def apply(self, patch: str) -> bool:
        """Whether anything had to be changed. Raises ``PatchError``, before anything is changed if a file is unknown."""
        self._refuse_unknown([patch])
        return self._change({patch}, set())

    def revert(self, patches: Optional[Collection[str]] = None) -> bool:
        """The same for taking ``patches`` back; ``None``: all of which each file is recognised, before others are complained of."""
        if patches is not None:
            self._refuse_unknown(patches)
            return self._change(set(), set(patches))
        files = self.files()
        known = {name for name, patch in self.patches.items() if all(files[file].original is not None for file in patch.hunks)}
        changed = self._change(set(), known)
        self._refuse_unknown(self.patches)
        return changed

    def _refuse_unknown(self, patches: Collection[str]) -> None:
        files = self.files()
        for name in dict.fromkeys(name for patch in patches for name in self.patches[patch].hunks):
            if files[name].original is None:
                raise PatchError(f'{files[name].path} is neither what ms-swift {self.release} installs nor that with patches of ours: '
                                 f'somebody has changed it, and it is left alone; {self._reinstall()}')

    def _reinstall(self) -> str:
        return f'to get its own files back: pip install --force-reinstall --no-deps ms-swift=={self.release}'

    def _change(self, add: set[str], remove: set[str]) -> bool:
        contents = {}
        files = self.files()
        for name, file in files.items():
            wanted = (file.applied | {patch for patch in add if name in self.patches[patch].hunks}) - remove
            if file.original is not None and wanted != file.applied:
                contents[file.path] = diffs.apply(file.original, self._hunks(name, wanted))
        try:
            for file in files.values():
                for left in file.path.parent.glob(f'.{file.path.name}.*{_LEFT_BEHIND}'):  # by a run that was killed
                    left.unlink(missing_ok=True)
            _replace(contents)
        except OSError as trouble:
            raise PatchError(f'cannot write in {self.folder} ({trouble.strerror}: {trouble.filename}); see swift-speedup patch --check '
                             'for what is applied. Run it as the owner of this environment, or install ms-swift in one of your '
                             'own') from trouble
        return bool(contents)


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()  # as RECORD spells it


def _replace(contents: Mapping[Path, bytes]) -> None:
    """Each file is the old or the new one at any moment; the first is replaced when all new ones are written."""
    ready: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            handle, name = tempfile.mkstemp(prefix=f'.{path.name}.', suffix=_LEFT_BEHIND, dir=path.parent)
            ready[path] = Path(name)
            with os.fdopen(handle, 'wb') as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(path, name)
        for path, new in ready.items():
            _forget_compiled(path)
            os.replace(new, path)  # not written into: package managers share files between environments by hard links
    finally:
        for new in ready.values():
            new.unlink(missing_ok=True)


def _forget_compiled(path: Path) -> None:
    """Python compares times and sizes, but not for files compiled with unchecked hashes, which images of containers may have."""
    compiled = Path(importlib.util.cache_from_source(str(path))).parent
    for file in compiled.glob(f'{path.stem}.*.pyc'):
        file.unlink(missing_ok=True)
