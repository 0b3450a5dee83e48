"""Tests of the nodes of a job as one cache."""
