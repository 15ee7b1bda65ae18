"""How Stretto's processes start, and end with the process that started them. No torch at import."""
