"""What Stretto finds: on this machine, and in a model."""
