"""Placement: which tier holds which item, what to move and what to leave. Pure: no I/O, no time.

Everything here belongs to the event loop's thread: no method waits and none locks.
"""
