"""Movement: what placement has decided is copied, verified and committed here."""
