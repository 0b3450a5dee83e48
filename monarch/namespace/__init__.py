"""The names and attributes of a source: read once into a snapshot, which then answers for it."""
