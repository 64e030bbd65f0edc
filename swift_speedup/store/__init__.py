"""Where entries live. Knows neither modules nor calls."""
from .base import NO_ORIGIN, Entry, NullStore, Store
from .ram import RamStore

__all__ = ['NO_ORIGIN', 'Entry', 'NullStore', 'RamStore', 'Store']
