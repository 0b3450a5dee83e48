"""Placement: the tier of each item, and what to copy and evict. Pure: no I/O, no time.

All objects belong to the thread of the event loop: no method waits or locks.
"""
