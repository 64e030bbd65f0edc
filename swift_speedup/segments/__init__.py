"""Which parts of a model are segments, whether they may be cached, and how that is told to people."""
