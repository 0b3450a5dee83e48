"""The way of written data to the source: journal, objects, and the drain between them."""
