"""The door to the kernel: the only package that knows pyfuse3."""
