"""What the readers of the mount will open next, from what they have opened and announced."""
