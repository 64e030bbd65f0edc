"""``swift-speedup``: one small file per command."""
