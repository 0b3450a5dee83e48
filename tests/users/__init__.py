"""Hostile users: what one user may not do to another at the source, the mount must not do either.

``calls.py`` has the system calls and the processes of the users that make them, ``trees.py`` what a
directory looks like afterwards, ``history.py`` the random histories and their judgement.
"""
