"""What attacks compare Stretto with: networks, and training by definition, without a line of Stretto."""
