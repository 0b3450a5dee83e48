"""Monarch: a FUSE file system that serves training data from node-local tiers."""

__version__ = "0.1.0"
