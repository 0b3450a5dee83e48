"""The contents and promises of a mount, read through the kernel and compared with the source."""
