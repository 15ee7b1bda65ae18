"""The user's folders, temporary ones, and names that are safe in paths. No torch."""
