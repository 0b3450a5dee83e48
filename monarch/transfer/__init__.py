"""Copies files from the source to the tiers as placement decides, verified and committed."""
