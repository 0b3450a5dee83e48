"""``scripts/bench``: measures Monarch next to the source, the tier, and other file systems."""
