"""The names and attributes of a source: built once from it, then asked instead of it."""
