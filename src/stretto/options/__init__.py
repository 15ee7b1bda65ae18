"""What a user wrote, read and checked, before anything is done with it. No torch."""
