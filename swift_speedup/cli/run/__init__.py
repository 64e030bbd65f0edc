"""Files that ms-swift's launcher runs as scripts, alone in their folder because it becomes importable."""
