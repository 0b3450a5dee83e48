"""Data sets as a training script reads them, without a framework: records of LMDB files."""
