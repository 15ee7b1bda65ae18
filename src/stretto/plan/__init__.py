"""Which combination trains a model best on a cluster: every axis, method and cut, searched exactly. No torch here."""

from stretto.plan.branch_and_bound import Found, Plan, search
from stretto.plan.objective import GOALS, Objective, Penalty
from stretto.plan.problem import Problem
from stretto.plan.search_space import Candidate, candidates

__all__ = ["GOALS", "Candidate", "Found", "Objective", "Penalty", "Plan", "Problem", "candidates", "search"]
