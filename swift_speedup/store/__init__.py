"""Where entries live. Knows neither modules nor calls."""
from .base import Entry, NullStore, Store
from .ram import RamStore

__all__ = ['Entry', 'NullStore', 'RamStore', 'Store']
