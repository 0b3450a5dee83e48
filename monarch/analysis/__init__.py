"""Measurements of training jobs and models of them: where a job waits, and what would help."""
