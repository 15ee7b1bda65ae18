"""The object that a user's script needs, and how it is built."""
