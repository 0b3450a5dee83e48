"""What the administrator says: the settings of a mount, their defaults, and how they are read."""
