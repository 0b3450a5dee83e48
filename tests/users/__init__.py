"""Hostile users: the mount must not allow one user more against another than the source allows.

``calls.py`` has the system calls and the processes of the users that make them, ``trees.py`` the
contents of a directory afterwards, ``history.py`` the random histories and the check of them.
"""
