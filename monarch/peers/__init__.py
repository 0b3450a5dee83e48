"""The nodes of a job as one cache: which nodes belong to it, and which of them owns a file.

A file is read from the source and kept by one node only, its owner. Each node computes the owner
from the names of the nodes, so no directory service is needed.
"""
