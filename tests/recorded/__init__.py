"""Training runs recorded bit for bit, and what released versions wrote (README.md)."""
