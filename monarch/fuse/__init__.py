"""The interface to the kernel: the only package that uses pyfuse3."""
