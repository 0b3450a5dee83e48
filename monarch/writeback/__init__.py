"""The way of absorbed writes to the source: journal, objects, and the drain between them."""
