"""Test equipment: a slow source, a capped disk and a counter of opens, all real file systems."""
