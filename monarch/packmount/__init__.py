"""A pack as the source of a mount: its bytes, its tree as a snapshot, and its chunks as units."""
