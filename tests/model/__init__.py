"""Random plans of operations on a real mount, compared with a plain model of the source.

``plan`` makes and keeps plans, ``model`` knows what a reader may see, ``rig`` owns the mount, the
tiers and the reading processes, ``play`` brings them together, ``shrink`` makes a failure short.
"""
