"""Programs that people run over a mount, unchanged: frameworks, formats, tools and system calls."""
