"""Any model that torch.export can follow, cut where the fewest bytes are sent between stages."""
