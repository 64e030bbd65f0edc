"""Options -> the store. A store that cannot be opened is replaced by memory: training goes on, and says so."""
import shutil

import psutil

from ..config import SpeedupConfig
from ..log import logger
from .base import NullStore, Store
from .disk import DiskStore
from .environment import Unusable
from .ram import DEFAULT_SHARE, GIB, RamStore, default_budget, local_ranks
from .shared import run_folder
from .tiered import TieredStore


def make_store(config: SpeedupConfig) -> Store:
    """``off``: nothing. A folder: that, with memory in front of it if ``ram_gib`` was given. ``auto`` with several ranks on the node: a
    folder that they share while they run. Else the memory of this process."""
    if config.cache == 'off':
        return NullStore()
    if config.cache_dir is not None:
        try:
            disk = DiskStore(config.cache_dir, None if config.disk_gib is None else int(config.disk_gib * GIB))
        except (Unusable, OSError) as trouble:
            logger.warning('cache_dir: %s; outputs are kept in memory only', trouble)
            return _ram(config)
        if not disk.keeps:
            logger.info('%s cannot be written to: what is there is read, the rest is kept in memory', config.cache_dir)
        return TieredStore(_ram(config), disk) if config.ram_gib is not None or not disk.keeps else disk
    if config.cache == 'auto' and local_ranks() > 1:
        try:
            folder = run_folder()
            return DiskStore(folder, _shared_budget(config, shutil.disk_usage(folder).free))
        except (Unusable, OSError) as trouble:
            logger.warning('no folder for the ranks to share (%s); each keeps its own outputs in memory', trouble)
    return _ram(config)


def _ram(config: SpeedupConfig) -> RamStore:
    return RamStore(default_budget() if config.ram_gib is None else int(config.ram_gib * GIB))


def _shared_budget(config: SpeedupConfig, free: int) -> int:
    """Bytes for all ranks of the node together."""
    asked = None if config.ram_gib is None else int(config.ram_gib * GIB) * local_ranks()
    return min(free // 2, int(psutil.virtual_memory().available * DEFAULT_SHARE) if asked is None else asked)
