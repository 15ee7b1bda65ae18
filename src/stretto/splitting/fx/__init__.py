"""A model's forward traced by torch.fx, and cut between units of it."""
