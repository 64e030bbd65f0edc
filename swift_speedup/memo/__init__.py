"""Lookup, compute what is missing, keep it. Knows tensors, calls and entries; knows no modules and no storage."""
