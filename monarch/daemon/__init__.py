"""The process of one mount: its objects, their order of life, and what it is asked."""
