"""Small things over torch.nn.Module and tensors that everything above needs."""
