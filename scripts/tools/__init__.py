"""What the commands share, and those of them that are one module."""
