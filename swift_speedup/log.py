"""The package's logger. Silence means inactive (Rule 11), so the one line at attach must reach the user."""
import logging

logger = logging.getLogger('swift_speedup')
_warned: set[str] = set()


def ensure_visible() -> None:
    """Give the logger a handler if the application configured none, so that INFO lines are not lost."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter('[%(levelname)s:%(name)s] %(message)s'))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def warn_once(message: str) -> None:
    """Log ``message`` as a warning the first time this exact text is seen in the process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
