"""What Python's os lacks: calls of the kernel, locks, threads, and work on hostile paths."""
