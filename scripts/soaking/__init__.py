"""``scripts/soak``: mounts that serve readers for hours while faults are injected."""
