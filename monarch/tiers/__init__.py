"""The source, the node-local tiers, and the records of the copies in them."""
