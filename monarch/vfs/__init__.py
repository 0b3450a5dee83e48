"""What the mount means, free of FUSE types."""
