"""All-reduce on point-to-point messages: algorithms as plans, one executor, and the predicted cost of each plan."""

from stretto.collectives.algorithms import ALGORITHMS, plan, plans
from stretto.collectives.calibration import Calibration
from stretto.collectives.formulas import Link, Terms, formula
from stretto.collectives.pricing import Traffic, price, traffic
from stretto.collectives.reduce import CollectiveError, all_reduce
from stretto.collectives.step import Plan, Step

__all__ = [
    "ALGORITHMS",
    "Calibration",
    "CollectiveError",
    "Link",
    "Plan",
    "Step",
    "Terms",
    "Traffic",
    "all_reduce",
    "formula",
    "plan",
    "plans",
    "price",
    "traffic",
]
