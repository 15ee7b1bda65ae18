"""One replica's share of a stage's optimizer: its elements of the weights, and the state for these alone."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.nn.state_check import check_like, check_optimizer
from stretto.optim import Masters
from stretto.optim.loading import copied, load
from stretto.replicas.reducer import ReplicaReducer

BLOCK = 64  # elements; no kernel works on more of them at once, so that a cut at a multiple changes no bit


class Elements(NamedTuple):
    """Elements [begin, end) of a parameter laid flat, by its number."""

    parameter: int
    begin: int
    end: int


class Shares:
    """Which elements of a stage's parameters each replica's optimizer steps: at most one range of each parameter.

    Where any element may be stepped alone, the parameters are laid end to end and cut into equal shares:

        [5, 1000]   [1000]   [10, 3]
        |----------------|---------|    two replicas
            replica 0     replica 1

    Shares are of equal size, but for BLOCK, if `elementwise`; else whole parameters are dealt out, each, largest first,
    to the replica that has least. A parameter whose elements do not lie in their order in memory is not cut either.
    """

    def __init__(self, parameters: Sequence[Tensor], replicas: int, *, elementwise: bool) -> None:
        self.parameters = list(parameters)
        self._places = {parameter: index for index, parameter in enumerate(parameters)}
        self._sizes = [parameter.numel() for parameter in parameters]
        self._dtype = reduce(torch.promote_types, (parameter.dtype.to_real() for parameter in parameters))
        cut = [elementwise and parameter.is_contiguous() for parameter in parameters]
        self._of: list[list[Elements]] = [[] for _ in range(replicas)]
        self._deal([index for index, each in enumerate(cut) if not each])
        self._cut([index for index, each in enumerate(cut) if each])
        for elements in self._of:
            elements.sort()

    def _deal(self, indices: Sequence[int]) -> None:
        for index in sorted(indices, key=lambda index: -self._sizes[index]):
            self._of[self._emptiest()].append(Elements(index, 0, self._sizes[index]))

    def _emptiest(self) -> int:
        held = [sum(end - begin for _, begin, end in elements) for elements in self._of]
        return held.index(min(held))

    def _cut(self, indices: Sequence[int]) -> None:
        total, replicas, start = sum(self._sizes[index] for index in indices), len(self._of), 0
        for index in indices:
            size = self._sizes[index]
            ends = [total * (replica + 1) / replicas - start for replica in range(replicas)]
            marks = [0, *(min(size, max(0, round(end / BLOCK) * BLOCK)) for end in ends[:-1]), size]
            if size == 0:
                marks = [0] * (replicas + 1)
            for replica, (begin, end) in enumerate(pairwise(marks)):
                if begin < end:
                    self._of[replica].append(Elements(index, begin, end))
            start += size

    @property
    def replicas(self) -> int:
        return len(self._of)

    def of(self, replica: int) -> list[Elements]:
        return self._of[replica]

    def is_whole(self, elements: Elements) -> bool:
        return elements.end - elements.begin == self._sizes[elements.parameter]

    def views(self, tensors: Sequence[Tensor], replica: int) -> list[Tensor]:
        """A replica's elements of tensors shaped as the parameters: whole ones, and flat parts of others."""
        return [self.view(tensors[each.parameter], each) for each in self._of[replica]]

    def view(self, tensor: Tensor, elements: Elements) -> Tensor:
        """These elements of a tensor shaped as their parameter: the tensor if they are all, else a flat part."""
        return tensor if self.is_whole(elements) else tensor.view(-1)[elements.begin : elements.end]

    def flat(self, tensors: Sequence[Tensor], replica: int) -> list[Tensor]:
        """As `views`, all of them flat, and in the order of elements; copies where memory has another order."""
        return [tensors[each.parameter].reshape(-1)[each.begin : each.end] for each in self._of[replica]]

    def norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norms of whole gradients, [parameters], as replicas find them of which each has the sum of its share."""
        gradients = [torch.zeros(0) if each.grad is None else each.grad for each in self.parameters]
        rows = [self.row(self.flat(gradients, replica), replica) for replica in range(self.replicas)]
        return self.together(rows, parameters)

    def row(self, gradients: Sequence[Tensor], replica: int) -> Tensor:
        """The norms of a replica's part of each gradient, flat; 0 where it has none, [all parameters]."""
        row = torch.zeros(len(self._sizes), dtype=self._dtype, device=self.parameters[0].device)
        norms = torch._foreach_norm(list(gradients)) if gradients else ()
        for elements, norm in zip(self._of[replica], norms, strict=True):
            row[elements.parameter] = norm
        return row

    def together(self, rows: Iterable[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """The norms of whole gradients, [parameters], from replicas' rows in their order; of a single part its own."""
        norms: Tensor = reduce(torch.hypot, rows)
        return norms[[self._places[parameter] for parameter in parameters]]


class OptimizerShare:
    """Lets an optimizer that was built on whole parameters step this replica's `pieces` of them.

    Its groups keep their options. A piece is a view of its parameter; where a parameter has a float32 master, the piece
    is a part of that, and what stays of the master is where gradients are added up. Gradients are whole until
    `sum_gradients`. A checkpoint has the state of a whole optimizer, so that any number of replicas can go on from it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        masters: Masters,
        shares: Shares,
        peers: ReplicaReducer,
    ) -> None:
        assert peers.exchange is not None, "emulated replicas have whole optimizers"
        self._peers, self._exchange, self.shares = peers, peers.exchange, shares
        self.optimizer, self._parameters = optimizer, list(parameters)
        self._has_master = [masters.of(parameter) is not parameter for parameter in parameters]
        self._own = shares.of(self._exchange.me)
        self._groups = groups_of(optimizer, shares.parameters)
        self._names = [group.get("param_names") for group in optimizer.param_groups]
        self.pieces = [self._piece(elements) for elements in self._own]
        self._at = {elements.parameter: number for number, elements in enumerate(self._own)}
        self.with_gradients: list[Tensor] = []  # of whole parameters, at the last sum
        self._take_over(optimizer.param_groups, optimizer.state)
        for parameter, has_master in zip(shares.parameters, self._has_master, strict=True):
            if has_master:
                parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)  # one number of memory

    def _piece(self, elements: Elements) -> nn.Parameter:
        view = self.shares.view(self.shares.parameters[elements.parameter].data, elements)
        return nn.Parameter(view.clone() if self._has_master[elements.parameter] else view)

    def _take_over(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Mapping[str, Any]]) -> None:
        # Groups and state of whole parameters: their options, and this replica's part of the state.
        whole = self.shares.parameters
        cut: dict[Tensor, Any] = {
            self.pieces[at]: self._cut(state[whole[index]], index)
            for index, at in self._at.items()
            if state.get(whole[index])
        }
        own = []
        for group, members, names in zip(groups, self._groups, self._names, strict=True):
            here = [position for position, index in enumerate(members) if index in self._at]
            named = {} if names is None else {"param_names": [names[position] for position in here]}
            own.append({**group, **named, "params": [self.pieces[self._at[members[position]]] for position in here]})
        self.optimizer.state = defaultdict(dict, cut)
        for group, former in zip(own, self.optimizer.param_groups, strict=True):
            former.update(group)  # schedulers and users may hold the groups

    def _cut(self, values: Mapping[str, Any], index: int) -> dict[str, Any]:
        elements, shape = self._own[self._at[index]], self.shares.parameters[index].shape
        if self.shares.is_whole(elements):
            return dict(values)
        return {
            name: value.reshape(-1)[elements.begin : elements.end].clone()
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for name, value in values.items()
        }

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give each piece the sum of all replicas' gradients; the whole ones are dropped.

        A missing gradient counts as 0; one that all replicas miss stays None. Raises UsageError for sparse gradients.
        """
        whole = self.shares.parameters
        given = without_missing(whole)
        gradients = [parameter.grad for parameter in whole if parameter.grad is not None]
        shares = [[*self.shares.flat(gradients, replica), given] for replica in range(self._exchange.count)]
        totals = list(map(torch.empty_like, shares[self._exchange.me]))
        self._exchange.scatter(shares, totals)
        *sums, counts = totals  # of replicas with a gradient
        has_gradient = [count > 0 for count in counts.tolist()]
        for piece, elements, total in zip(self.pieces, self._own, sums, strict=True):
            piece.grad = total.view(piece.shape) if has_gradient[elements.parameter] else None
        for parameter in whole:
            parameter.grad = None
        self.with_gradients = [parameter for parameter, has in zip(whole, has_gradient, strict=True) if has]

    def norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norms of whole gradients, [parameters]. A collective of the replicas."""
        if not parameters:
            return torch.zeros(0)
        flat = [torch.zeros(0) if piece.grad is None else piece.grad.reshape(-1) for piece in self.pieces]
        row = self.shares.row(flat, self._exchange.me)
        rows = row.new_zeros(self._exchange.count, len(row))
        rows[self._exchange.me] = row
        self._peers.add_up([rows], lambda: None)  # the others' rows are 0 here: exact in any order
        return self.shares.together(rows, parameters)

    def drop_gradients(self) -> None:
        for piece in self.pieces:
            piece.grad = None

    def step(self, inner: Callable[[], object]) -> None:
        """Call `inner`, which steps the pieces, and get the other weights from the replicas that have stepped them."""
        views = [self._views(replica) for replica in range(self._exchange.count)]
        own = views[self._exchange.me]
        for piece, view, elements in zip(self.pieces, own, self._own, strict=True):
            if not self._has_master[elements.parameter]:
                piece.data = view  # the parameter may have moved
        inner()
        with torch.no_grad():
            for piece, view, elements in zip(self.pieces, own, self._own, strict=True):
                if self._has_master[elements.parameter]:
                    view.copy_(piece)
        self._exchange.gather(views)
        for parameter in self._parameters:
            torch.autograd.graph.increment_version(parameter)  # as a step in place would

    def _views(self, replica: int) -> list[Tensor]:
        return self.shares.views([parameter.data for parameter in self._parameters], replica)

    def state_dict(self) -> dict[str, Any]:
        """The state of a whole optimizer, on the CPU. A collective of the replicas."""
        state = {
            elements.parameter: dict(self.optimizer.state[piece])
            for elements, piece in zip(self._own, self.pieces, strict=True)
            if self.optimizer.state.get(piece)
        }
        found, whole = self._joined(state), self.shares.parameters
        numbered = [index for members in self._groups for index in members if index in found]
        return self._whole({whole[index]: found[index] for index in numbered}).state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        check_optimizer(state, self._whole({}))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this replica's part of what `state_dict` returned. Sends no messages."""
        whole = self._whole({})
        load(whole, state)
        self._take_over(whole.param_groups, whole.state)

    def _whole(self, state: dict[Any, Any]) -> torch.optim.Optimizer:
        # As the optimizer was before its groups were cut.
        groups = []
        for group, members, names in zip(self.optimizer.param_groups, self._groups, self._names, strict=True):
            named = {} if names is None else {"param_names": names}
            groups.append({**group, **named, "params": [self.shares.parameters[index] for index in members]})
        return copied(self.optimizer, groups, defaultdict(dict, state))

    def _joined(self, own: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        # What all replicas have of each parameter, put together; a collective.
        found: dict[int, list[tuple[Elements, Mapping[str, Any]]]] = {}
        for replica, given in enumerate(self._exchange.states(own)):
            for elements in self.shares.of(replica):
                if elements.parameter in given:
                    found.setdefault(elements.parameter, []).append((elements, given[elements.parameter]))
        return {index: joined_state(parts, self.shares.parameters[index].shape) for index, parts in found.items()}

    def masters(self) -> list[Tensor]:
        """The whole float32 masters, in the order of their parameters, on the CPU. A collective of the replicas."""
        found = self._joined(
            {elements.parameter: {"master": piece.detach()} for elements, piece in self._with_masters()}
        )
        return [found[index]["master"] for index, has_master in enumerate(self._has_master) if has_master]

    @torch.no_grad()
    def load_masters(self, masters: Sequence[Tensor]) -> None:
        numbers = [index for index, has_master in enumerate(self._has_master) if has_master]
        whole = dict(zip(numbers, masters, strict=True))
        for elements, piece in self._with_masters():
            piece.copy_(self._cut({"master": whole[elements.parameter]}, elements.parameter)["master"])

    def check_masters(self, masters: Sequence[Any]) -> None:
        expected = [self.shares.parameters[i].detach() for i, has_master in enumerate(self._has_master) if has_master]
        if len(masters) != len(expected):
            raise ValueError(f"{len(masters)} masters, expected {len(expected)}")
        check_like(list(masters), expected, "masters")

    def _with_masters(self) -> list[tuple[Elements, nn.Parameter]]:
        pairs = zip(self._own, self.pieces, strict=True)
        return [(elements, piece) for elements, piece in pairs if self._has_master[elements.parameter]]


class MasterShare:
    """The state of float32 masters of which each replica has a share: that of `Masters`, which has whole ones."""

    def __init__(self, of: OptimizerShare) -> None:
        self._of = of

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self._of.masters()}

    def check(self, state: Mapping[str, Any]) -> None:
        self._of.check_masters(state["masters"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of.load_masters(state["masters"])


def groups_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[list[int]]:
    """The parameters of each of an optimizer's groups, by their index.

    Raises UsageError for an optimizer that steps others.
    """
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    stepped = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    if not places.keys() >= {each for group in stepped for each in group}:
        raise UsageError(
            "sync='shard-optimizer': the optimizer steps parameters that it was not given, and only those are shared "
            "out: build it from its argument, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    return [[places[each] for each in group] for group in stepped]


def joined_state(parts: Sequence[tuple[Elements, Mapping[str, Any]]], shape: torch.Size) -> dict[str, Any]:
    """The state of a whole parameter, from those of its parts in order: tensors of a part's size are put together."""
    if len(parts) == 1:
        return dict(parts[0][1])
    joined = dict(parts[0][1])
    for name, value in joined.items():
        if isinstance(value, Tensor) and all(
            values[name].shape == (elements.end - elements.begin,) for elements, values in parts
        ):
            joined[name] = torch.cat([values[name] for _, values in parts]).view(shape)
    return joined


def without_missing(parameters: Sequence[Tensor]) -> Tensor:
    """Put zeros in place of missing gradients; 1 for each that there was and 0 for each missing, [parameters].

    Raises UsageError for sparse gradients.
    """
    has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            raise UsageError(
                f"a sparse gradient {tuple(parameter.grad.shape)}: all-reduce adds up dense ones; build the "
                "embedding with sparse=False"
            )
    return has_gradient.to(parameters[0])
