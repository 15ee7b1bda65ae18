"""Helpers over torch.nn.Module and tensors: batches, shapes, devices, random generators, tied weights, FLOPs."""
