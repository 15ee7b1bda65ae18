"""What programs that train large models do while they compute: for networks that are only planned.

`exchanges` are those of processes that share weights: "waited" for, "beside products" (`hidden_exchanges.py`), or "in
parts", each part beside the product of another. `sums_in_products`: whether the product that gives a weight's gradient
adds it to those of earlier micro-batches; else an operator of its own does. `replicas` meet at the "end" of a step, at
"each micro-batch", or "beside a pass": gradients during the last backward, weights during the next forward.
`persistent_norms` keep a row in registers and read it once: apex's FastLayerNorm takes 54 and 87 us where torch's and
apex's former take 250 to 290 (github.com/NVIDIA/apex/pull/1037). They are priced as a copy, others by `memory_of`.
`buckets`: replicas that share nothing out keep a copy of all gradients to sum them, as DistributedDataParallel does
unless gradients are views of it (`gradient_as_bucket_view`).

    megatron-2021     Megatron-LM before 16c90445e7 (September 2021), with which sums of input gradients are not waited
                      for, and 83b1e42f30 (February 2022), gradient accumulation fusion
    megatron-2022     with both (Korthikanti et al. 2022, sections 4.2.2 and 6.2), and FastLayerNorm
    nemo-2024         ub_tp_comm_overlap, overlap_grad_sync and overlap_param_sync in NeMo's configurations, as of
                      github.com/NVIDIA/dgxc-benchmarking at 8f5cbb37
    torch             torch's backward adds gradients by operators (torch/csrc/autograd/functions/accumulate_grad.h)
    apex-2019         the same, and apex's DistributedDataParallel, which sums gradients in every backward
"""

from typing import NamedTuple

from stretto.cost.attained import Attained
from stretto.errors import UsageError, nearest


class ProgramTraits(NamedTuple):
    """What a program does while it computes, as described above."""

    exchanges: str = "beside products"
    sums_in_products: bool = True
    replicas: str = "end"
    persistent_norms: bool = False
    buckets: bool = False

    def attains(self, attained: Attained) -> Attained:
        """What a device attains of the program's kernels."""
        if self.persistent_norms:
            attained = attained.with_persistent_norms()
        return attained


PROGRAMS = {
    "megatron-2021": ProgramTraits("waited", sums_in_products=False),
    "megatron-2022": ProgramTraits(persistent_norms=True),
    "nemo-2024": ProgramTraits("in parts", replicas="beside a pass", persistent_norms=True),
    "torch": ProgramTraits(sums_in_products=False, buckets=True),
    "apex-2019": ProgramTraits(sums_in_products=False, replicas="each micro-batch"),
}
USUAL = "megatron-2022"


def program_named(name: str) -> ProgramTraits:
    """The program of a name. Raises UsageError if there is none."""
    if name not in PROGRAMS:
        raise UsageError(f"program={name!r}: {nearest(name, PROGRAMS)}")
    return PROGRAMS[name]
