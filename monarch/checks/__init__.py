"""Checks that run without a daemon: of this machine, of a configured mount, of what one left."""
