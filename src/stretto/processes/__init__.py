"""How processes of ours start, and end with whoever started them. No torch at import."""
