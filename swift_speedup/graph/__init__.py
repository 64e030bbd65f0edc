"""Rule 3 and nothing else: what is frozen leaves the autograd graph, what is trained stays reachable. Knows no caches."""
