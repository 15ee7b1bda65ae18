"""`Trainer`, the object that a user's script needs, and what it is built from."""
