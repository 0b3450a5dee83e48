"""Packs: many small files in large immutable chunks, their index, and the commands on them."""
