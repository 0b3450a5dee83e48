"""The placement policies, one module each."""
