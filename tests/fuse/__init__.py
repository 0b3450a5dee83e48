"""The datapath alone, message by message, and real mounts under load."""
