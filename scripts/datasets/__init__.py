"""``scripts/dataset``: makes data sets of the kinds that training reads."""
