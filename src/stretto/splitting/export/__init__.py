"""Any model, cut where the least has to travel: by torch.export."""
