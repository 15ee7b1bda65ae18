"""What a user writes, read and checked: names with options, arguments, objects by their names. No torch."""
