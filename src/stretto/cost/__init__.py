"""What training costs, in FLOPs and in simulated time."""

from stretto.cost.costs import NOTES, Accounting, Costs, measure

__all__ = ["NOTES", "Accounting", "Costs", "measure"]
