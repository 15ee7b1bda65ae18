"""A parameter server: replicas push gradients when they have them and take the newest weights."""
