"""Tests of the models and simulations of jobs."""
