"""Checks without a daemon: of this machine, of a configured mount, of a mount's leftovers."""
