"""Runs programs on paper: numpy arrays, messages that are taken early, late or at random, and who waits for whom."""

from collections import defaultdict, deque

import numpy as np

from stretto.collectives.reduce import START_RECEIVE, START_SEND, WAIT_RECEIVE, WAIT_SEND

MODES = ("buffered", "early", "late", "random")


class Paper:
    """All processes of one all-reduce. A message's memory is read when it is taken, if it is not buffered."""

    def __init__(self, programs, arrays, mode, rng):
        self.programs, self.arrays, self.mode, self.rng = programs, arrays, mode, rng
        self.spares = [np.full(program.spare, np.nan) for program in programs]
        self.at = [0] * len(programs)
        self.sent, self.posted = defaultdict(deque), defaultdict(deque)
        self.done = set()
        self.messages, self.elements = [0] * len(programs), [0] * len(programs)

    def run(self):
        """To the end. Raises AssertionError at a deadlock, and where messages are left over."""
        moves = [rank for rank in range(len(self.programs)) if self.can_go(rank)]
        matched = []
        while moves or matched:
            take = {"early": bool(matched), "random": self.rng.random() < 0.5}.get(self.mode, not moves)
            if matched and (take or not moves):
                channel = matched[self.rng.integers(len(matched))]
                self.transfer(channel)
                touched = channel
            else:
                rank = moves[self.rng.integers(len(moves))]
                channel, touched = self.go(rank), (rank,)
            for rank in touched:
                keep(moves, rank, self.can_go(rank))
            keep(matched, channel, bool(self.sent[channel] and self.posted[channel]))
        stuck = {r: p.calls[i] for r, (p, i) in enumerate(zip(self.programs, self.at, strict=True)) if i < len(p.calls)}
        assert not stuck, stuck
        assert not any(self.sent.values())
        assert not any(self.posted.values())

    def can_go(self, rank):
        program, at = self.programs[rank], self.at[rank]
        if at == len(program.calls):
            return False
        call = program.calls[at]
        return call.kind in (START_SEND, START_RECEIVE) or (rank, call.number) in self.done

    def go(self, rank):
        """One call of a process; the channel that it is about."""
        call = self.programs[rank].calls[self.at[rank]]
        channel = (rank, call.peer) if call.kind == START_SEND else (call.peer, rank)
        self.at[rank] += 1
        part = self.arrays[rank][call.start : call.stop]
        if call.kind == START_SEND:
            self.messages[rank] += 1
            self.elements[rank] += len(part)
            if self.mode == "buffered":
                self.done.add((rank, call.number))
                part = part.copy()
            self.sent[channel].append((call.number, part))
        elif call.kind == START_RECEIVE:
            self.posted[channel].append((call.number, part if call.spare is None else self.spare(rank, call)))
        elif call.kind == WAIT_RECEIVE and call.spare is not None:
            part += self.spare(rank, call)
        assert call.kind in (START_SEND, START_RECEIVE, WAIT_RECEIVE, WAIT_SEND)
        return channel

    def spare(self, rank, call):
        return self.spares[rank][call.spare : call.spare + call.stop - call.start]

    def transfer(self, channel):
        (number, source), (wanted, target) = self.sent[channel].popleft(), self.posted[channel].popleft()
        assert len(source) == len(target), (channel, len(source), len(target))
        target[:] = source
        self.done |= {(channel[0], number), (channel[1], wanted)}


def keep(items, item, there):
    """See that an item is in a list or is not."""
    if there != (item in items):
        (items.append if there else items.remove)(item)
