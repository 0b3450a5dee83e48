"""The settings of a mount, their defaults, and how they are read from file and command line."""
