"""Bytes: the source, the node-local tiers above it, and the record of what they hold."""
