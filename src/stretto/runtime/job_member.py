"""This process as a member of its job: what it does, what has failed, how it leaves. There is one in a process."""

import atexit
import contextlib
import gc
import multiprocessing
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Protocol
from weakref import WeakSet, ref

import torch
import torch.distributed as dist

from stretto.errors import StrettoError
from stretto.runtime.failure import PATIENCE, Failures, PeerLostError, Status, WaitReporter, left_key, reaching
from stretto.runtime.group_sockets import cut, refuse_without_room, sockets
from stretto.runtime.process_memory import keep_memory
from stretto.runtime.world import TIMEOUT, World, group_of, join

START = 30.0  # seconds that processes wait for each other at least before they train
LEAVING = 3.0  # seconds for the others to come to their end too


class Exchange(Protocol):
    """Something that sends messages by a group, and can come to its end: on all processes at the same time."""

    def end_sending(self) -> None:
        """Send what is the last; waits for nobody who does not do the same."""

    def end_receiving(self) -> None:
        """Take everything up to what is the last, and wait until what was sent has been taken."""


class GroupSet:
    """The process groups that one Trainer uses at a time. All processes make and ask for the same ones, in one order.

    A gloo group costs threads and descriptors, and ranks cannot free one alone. So a set that has been closed on every
    process, or given up on every process, leaves its groups to the next Trainer. Nothing may be left in there: each
    channel ends with a last message, after which its receiver posts no other receive, so that gloo knows of nothing
    under its tag.

    `gather` waits until all processes have come there; `timeout` is in seconds.
    """

    def __init__(self, world: World, timeout: float, gather: Callable[[float], None]) -> None:
        self.timeout = timeout
        self.exchanges: list[Exchange] = []
        self._world, self._gather = world, gather
        self._made: dict[tuple[tuple[int, ...], str | None, int], dist.ProcessGroup | None] = {}
        self._asked: Counter[tuple[tuple[int, ...], str | None]] = Counter()
        self.user: weakref.ref[object] | None = None

    @property
    def in_use(self) -> bool:
        return self.user is not None and self.user() is not None

    def end(self) -> None:
        for exchange in self.exchanges:
            exchange.end_sending()
        for exchange in self.exchanges:
            exchange.end_receiving()
        self.exchanges.clear()
        self._asked.clear()
        self.user = None

    def group(self, ranks: Iterable[int], backend: str | None = "gloo") -> dist.ProcessGroup | None:
        """A group of some processes that its user has not yet, None in the others; a collective of all processes.

        Without a backend it has those of the default group. Raises UsageError where descriptors are too few for it.
        """
        among = tuple(ranks)
        key = (among, backend, self._asked[among, backend])
        self._asked[among, backend] += 1
        if key not in self._made:
            refuse_without_room(len(among))  # before anybody connects, who would wait for this process
            self._gather(self.timeout)
            whole = backend == "gloo" and len(among) == self._world.size
            make = self._world.group if whole else lambda timeout: group_of(among, timeout, backend)
            self._made[key] = make(self.timeout)
        return self._made[key]

    def whole(self) -> dist.ProcessGroup:
        """A group of all processes, connected when it returns; a collective."""
        made = self.group(range(self._world.size))
        assert made is not None, "every process is in the group of all"
        return made


class Service(Protocol):
    """Something that answers other processes in threads of its own."""

    def leave(self) -> None:
        """This process asks no more: nobody has to wait for it."""

    def close(self) -> None:
        """Nobody will ask any more: end the threads."""


class Member:
    """All trainers of a process share it. `abort_all_on_error` is where it works with the others."""

    def __init__(self, world: World, timeout: float = TIMEOUT.total_seconds()) -> None:
        self.world = world
        self.status = Status()
        self._default = dist.group.WORLD
        self._group: dist.ProcessGroup | None = world.group(timeout)
        self.failures = Failures(world.store, world.rank)
        self.services: WeakSet[Service] = WeakSet()
        self._group_sets: list[GroupSet] = []
        self.failed = self._inside = self._leaves = False
        self._gathered = 0  # how often
        self.requests = 0  # how many names for requests to stop have been given
        self._watchman = None if world.store is None else WaitReporter(self.status, world.store, world.rank, self._miss)
        if self._watchman is not None:
            self._watchman.start()
        atexit.register(self._leave)
        self._excepthook, sys.excepthook = sys.excepthook, self._except
        keep_memory()

    @property
    def parted(self) -> bool:
        """Whether its processes have left each other, because of an error, and nothing has come in between."""
        return self.failed and self.world.base is not None and not dist.is_initialized()

    @property
    def belongs(self) -> bool:
        """Whether the process group is still the one that was joined."""
        return dist.is_initialized() and dist.group.WORLD is self._default

    def group_set(self, user: object, timeout: float) -> GroupSet:
        """The process groups of a new user; a collective. `timeout` is in seconds.

        They are those of one that has ended in every process, if there are any.
        """
        with self.abort_all_on_error():
            self._gather(timeout)
            left = self._left_over(timeout)
            if left is None:
                left = GroupSet(self.world, timeout, self._gather)
                self._group_sets.append(left)
            else:
                left.end()
            left.user = ref(user)
        return left

    def _left_over(self, timeout: float) -> GroupSet | None:
        # A set that no process uses. Python may not have noticed yet that a Trainer has gone: it is made to look.
        for look in (False, True) if self._group_sets else ():
            if look:
                gc.collect()
            in_use = [each.in_use or each.timeout != timeout for each in self._group_sets]
            taken = torch.tensor(in_use, dtype=torch.uint8)
            dist.all_reduce(taken, dist.ReduceOp.MAX, group=self._group)
            if not taken.all():
                return self._group_sets[int(taken.argmin())]
        return None

    def _gather(self, timeout: float) -> None:
        # gloo waits for those with whom it connects until the time is out; so all begin that only once all are here.
        world, until = self.world, time.monotonic() + timeout
        if world.store is None:
            return
        self._gathered += 1
        keys = [f"here/{self._gathered}/{rank}" for rank in range(world.size)]
        with reaching(0):  # who holds the store
            world.store.set(keys[world.rank], "")
            for rank, key in enumerate(keys):
                with self.status.waiting("its part in making process groups", rank):
                    while not world.store.check([key]):
                        if self.failures.known() or world.store.check([left_key(rank)]):
                            raise PeerLostError(rank, RuntimeError("it, or another worker, has ended"))
                        if time.monotonic() > until:
                            raise PeerLostError(rank, TimeoutError(f"timed out after {timeout:g} s"))
                        time.sleep(0.01)

    def expect(self, timeout: float) -> None:
        """Somebody gives up after `timeout` seconds: say who waits for whom well before."""
        if self._watchman is not None:
            self._watchman.patience = min(self._watchman.patience, timeout / 4, PATIENCE)

    @contextmanager
    def abort_all_on_error(self) -> Iterator[None]:
        """An error here parts all processes: it is said once, by the process where it happened.

        What one refuses, all refuse, with the same error; if it crashes, the others end.
        """
        if self.failed and not self._inside:
            raise StrettoError(
                "these processes have parted, because of an error before or as their process group was destroyed: make "
                "a new Trainer, in each of them"
            )
        outermost, self._inside = not self._inside, True
        try:
            yield
        except BaseException as error:
            if self.failed:
                raise
            self.failed = True
            raised = self.failures.translate(error, self.status.told(), self._chain)
            self._close()
            if raised is error:
                raise
            raise raised from None
        finally:
            if outermost:
                self._inside = False
        self.status.rests()

    def _miss(self, worker: int) -> None:
        # It has left, and this process waits for it: let that fail.
        if not self._leaves:
            self.failures.left = worker
            cut()

    def _chain(self) -> str:
        return f"worker {self.world.rank} {self.status.told()}" if self._watchman is None else self._watchman.chain()

    def fail(self, error: BaseException) -> None:
        """An error of this process outside of `abort_all_on_error`: do not keep the others waiting."""
        if not self.failed:
            self.failed = True
            self.failures.translate(error, self.status.told(), self._chain)
            cut()

    def _except(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self.fail(error)
        if not (isinstance(error, StrettoError) and error.said_by is not None):
            self._excepthook(kind, error, traceback)

    def _leave(self) -> None:
        # What this process has sent must have been taken before it ends, and others may still need it.
        if not self.failed and self.belongs:
            self._leaves = True
            waiting = self.status.waiting("its end", (self.world.rank + 1) % self.world.size)
            with contextlib.suppress(RuntimeError), waiting:
                for service in self.services:
                    service.leave()
                # An error in a child of multiprocessing never comes to the excepthook: do not keep its parent waiting.
                if multiprocessing.parent_process() is not None and not self._others_leave(LEAVING):
                    keep_connections()
                    return
                if self.world.store is not None:
                    self.world.store.set(left_key(self.world.rank), "")
                dist.barrier(group=self._group)
        self._close()

    def _others_leave(self, seconds: float) -> bool:
        # Whether all come to their end within that time. (A barrier that is given up would keep this process from it.)
        store, until = self.world.store, time.monotonic() + seconds
        if store is None:
            return True
        store.set(f"leaving/{self.world.rank}", "")
        while not store.check([f"leaving/{rank}" for rank in range(self.world.size)]):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def retire(self) -> None:
        """Somebody has destroyed the process group: let go of what was made in it, and leave the process to another."""
        atexit.unregister(self._leave)
        self._close()
        self.failed = True
        # Hooks that others have put around this one's keep it, and must not keep the store, which has threads.
        self.world, self._watchman = replace(self.world, store=None, base=None, origin=None), None
        self.failures = Failures(None, self.world.rank)

    def _close(self) -> None:
        for service in self.services:
            service.close()
        if self._watchman is not None:
            self._watchman.end()
        if self.failed:
            cut()
        if self.belongs:
            dist.destroy_process_group()
        self._group_sets.clear()
        self._default = self._group = None  # whoever holds a group keeps its thread


def keep_connections() -> None:
    """Keep what is connected so until this process has ended, whoever closes it before.

    Those who miss this process then fail after it, and a parent hears of the first error first.
    """
    for number, _ in sockets():
        with contextlib.suppress(OSError):  # it has been closed since
            os.dup(number)


_members: list[Member] = []  # at most one: what torch.distributed's default group is to it, this is to us


def fail(error: BaseException) -> None:
    """An error ends this process, and nobody else sees it: tell the others."""
    for member in _members:
        member.fail(error)


def membership(timeout: float = TIMEOUT.total_seconds()) -> Member | None:
    """This process's part in its job; None where it is alone. Joins the others the first time, and once they parted.

    It waits for them for `timeout` seconds, but for half a minute at least: some start later than others.
    """
    former = _members[0] if _members else None
    if former is not None and former.belongs:
        return former
    if former is not None and not former.failed:
        former.retire()
    patience = timedelta(seconds=min(TIMEOUT.total_seconds(), max(timeout, START)))
    world = former.world.reinitialize(patience) if former is not None and former.parted else join(timeout=patience)
    if world is None:
        return None
    _members[:] = [Member(world, patience.total_seconds())]
    return _members[0]
