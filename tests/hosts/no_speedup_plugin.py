"""For ``swift --external_plugins``: as where swift_speedup is not installed; importing it raises."""
import sys

sys.modules['swift_speedup'] = None
