"""How launchers meet: that of a single machine its workers, those of several machines each other.

Several meet at a store on the first of them, where all that counts is signed.

The first is the one that can listen at HOST:PORT, and listens there only. It calls; each of the others answers with a
number that nobody has seen before; it offers places in a roster of those numbers; whoever stands in it takes its place;
then the round begins. A round is named by its roster: nothing of another round or job is taken for a part of it.

A launcher whose workers have failed says that it leaves the round; all others then meet it in a new one.

torch's own rendezvous (2.13) keeps its state as a pickle that whoever reaches the port can write.
"""

import contextlib
import hashlib
import json
import math
import secrets
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined] # mypy does not see that it exports them
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from stretto.errors import StrettoError, UsageError
from stretto.runtime.rendezvous.addresses import Address, addresses_of, answers, connect_to_store, hosted, listening
from stretto.runtime.rendezvous.signed_store import VARIABLE, ForgedError, Secret, Signed, of_round

CONFIRM = 10.0  # seconds in which whoever is offered a place has to take it
GREET = 10.0  # seconds in which a first node has to show itself
LEAVE = 5.0  # seconds for the others to come to their end before the store has gone
PAUSE = 0.1  # seconds between two looks
ASSIGN = 60.0  # seconds for the launchers of a round to tell each other of their workers
ASSIGNED = ("torchelastic/role_info", "torchelastic/assigned_ranks")  # where torch's agents do so
LOST = "lost"  # the key under which a node says what a stranger has changed
STRANGER = "stranger"  # the one key that is not signed: somebody has come with another secret, or with none
REMEDY = f"give all nodes the same one, with --secret-file FILE or the variable {VARIABLE}"
NAME = "stretto"
ADDRESS = "127.0.0.1"


class MeetingError(StrettoError):
    """The launchers of a job on several machines have not met, or have lost each other."""


class MeetingStore:
    """What the launchers write to each other before a round begins, in the store of the first node."""

    def __init__(self, store: TCPStore, address: Address, secret: Secret) -> None:
        self.store, self.address = store, address
        self._unsigned = PrefixStore("meeting", store)
        self.signed = Signed(self._unsigned, secret.key("meeting"))
        self._written: dict[str, bytes] = {}  # by this node, and has to stay as it is

    def greet(self) -> None:
        """Check that a first node is there and has the same secret. Raises MeetingError or UsageError, on both."""
        try:
            self._unsigned.wait(["call"], timedelta(seconds=GREET))
        except RuntimeError as error:
            raise no_job(self.address) from error
        try:
            self.signed.get("call")
        except ForgedError as error:
            self.complain()
            raise UsageError(f"the first node, at {self.address}, has another secret than this: {REMEDY}") from error

    def complain(self) -> None:
        """Tell the first node that somebody has come who cannot take part."""
        self._unsigned.set(STRANGER, "")

    def write(self, key: str, value: str) -> None:
        """Write what nobody else may change."""
        self.signed.set(key, value)
        self._written[key] = value.encode()

    def look(self) -> None:
        """Raise MeetingError if somebody has changed or deleted what this node wrote, or has done so to another."""
        for key, value in self._written.items():
            if self.signed.peek(key) != value:
                self.refuse(key)
        self.look_for_lost()

    def look_for_lost(self) -> None:
        """Raise MeetingError if another node has ended because of what a stranger did."""
        lost = self.signed.peek(LOST)
        if lost is not None:
            raise tampered(lost.decode(), self.address)

    def look_between(self, met: float, keys: Sequence[str]) -> None:
        """While torch's agent waits for what another launcher writes, in a round that began at `met`."""
        self.look_for_lost()
        if any(key.startswith(ASSIGNED) for key in keys) and time.monotonic() > met + ASSIGN:
            self.refuse(keys[0])

    def refuse(self, key: str) -> NoReturn:
        """Raise MeetingError, here and in the others, since a key is not as it was written."""
        self.signed.set(LOST, key)
        raise tampered(key, self.address)

    def hear(self) -> None:
        """Raise UsageError if somebody has complained."""
        if self._unsigned.check([STRANGER]):
            raise UsageError(
                f"a node has come to {self.address} with another secret than this one, or with none: {REMEDY}"
            )

    def answer(self, call: str, number: str) -> None:
        """Write a number in the first free place below a call."""
        place = 0
        while self.signed.compare_set(f"answer/{call}/{place}", "", number) != number.encode():
            place += 1
        self._written[f"answer/{call}/{place}"] = number.encode()

    def answers(self, call: str, known: list[str]) -> list[str]:
        """The numbers below a call, in order; `known` are the first of them."""
        numbers = [*known]
        while (answer := self.signed.peek(f"answer/{call}/{len(numbers)}")) is not None:
            numbers.append(answer.decode())
        return numbers

    def offer(self, call: str, roster: tuple[str, ...]) -> list[str]:
        """Offer places below a call; return who has not taken theirs in time. If that is nobody, the round begins."""
        self.write(f"offer/{call}", json.dumps(roster))
        until, late = time.monotonic() + CONFIRM, [*roster[1:]]
        while late and time.monotonic() < until:
            self.hear()
            self.look()
            late = [each for each in late if not self.signed.check([f"takes/{named(roster)}/{each}"])]
            time.sleep(PAUSE if late else 0)
        if not late:
            self.write(f"begins/{named(roster)}", "")
        return late

    def offered(self, call: str) -> tuple[str, ...]:
        """The roster that is offered below a call; none yet: ()."""
        offered = self.signed.peek(f"offer/{call}")
        return () if offered is None else tuple(json.loads(offered))

    def take(self, roster: tuple[str, ...], number: str) -> bool:
        """Take the place that is offered; whether the round has begun."""
        self.write(f"takes/{named(roster)}/{number}", "")
        return self.signed.check([f"begins/{named(roster)}"])


class Rendezvous(RendezvousHandler):
    """What both kinds answer torch's agent."""

    use_agent_store = True
    _closed = False

    def get_backend(self) -> str:
        return NAME

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True


class NodesRendezvous(Rendezvous):
    """The launcher of one of several machines, among all of them.

    Raises UsageError where no secret was given and another machine is the first: only that one makes its own.
    """

    def __init__(self, rendezvous: str, nodes: int, secret: Secret | None, timeout: timedelta) -> None:
        self._addresses, self._nodes, self._timeout = addresses_of(rendezvous, one_machine=nodes == 1), nodes, timeout
        self._meeting: MeetingStore | None = None
        listener = listening(self._addresses)
        self._first = listener is not None
        if listener is None and nodes == 1:
            raise UsageError(f"rendezvous={rendezvous!r}: nothing can listen there; give a free port of this machine")
        if listener is None and secret is None:
            refuse(self._addresses)
        self.secret = secret or Secret.new()
        if listener is not None:
            address = Address(*listener.getsockname()[:2])
            self._meeting = MeetingStore(hosted(listener, timeout), address, self.secret)
            self._meeting.write("call", "")
        if listener is not None and secret is None and nodes > 1:
            say(f"this job's secret, for its other nodes: {VARIABLE}={self.secret.text}")
        self._call, self._number = "", ""  # the last call that led to a round, and this node's number in that round
        self._roster: tuple[str, ...] = ()
        self._round: Signed | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others in a new round; raises MeetingError if they do not come in time."""
        until = time.monotonic() + self._timeout.total_seconds()
        with self._losing():
            if self._round is not None:
                self._round.set("left", "")
            self._meeting = meeting = self._meeting or self._entered(until)
            number = secrets.token_hex(16)
            self._roster, self._number = (self._gather if self._first else self._join)(meeting, number, until)
            self._round = of_round(meeting.store, self.secret, self.get_run_id())
            self._round.between = partial(meeting.look_between, time.monotonic())
        rank = self._roster.index(self._number)
        return RendezvousInfo(self._round, rank, self._nodes, RendezvousStoreInfo(*meeting.address))

    def get_run_id(self) -> str:
        """The round's: nothing that was signed for another is of use."""
        return named(self._roster)

    def num_nodes_waiting(self) -> int:
        """1 once another launcher has left this round: all have to meet again."""
        with self._losing():
            if self._meeting is not None:
                self._meeting.look_for_lost()
            return int(self._round is not None and self._round.check(["left"]))

    def shutdown(self) -> bool:
        """Leave for good. The first waits a while for the others, who may still read from its store."""
        if self._round is not None:
            with contextlib.suppress(RuntimeError, ForgedError):  # the store has gone, and the first node with it
                self._round.set(f"end/{self._number}", "")
                until, ends = time.monotonic() + LEAVE, [f"end/{each}" for each in self._roster]
                while self._first and time.monotonic() < until and not self._round.check(ends):
                    time.sleep(PAUSE)
        self._meeting, self._round, self._closed = None, None, True
        return True

    def _entered(self, until: float) -> MeetingStore:
        # The meeting store of the first node, once that node is there.
        if not any(map(answers, self._addresses)):
            say(f"waiting for the first of {self._nodes} nodes at {self._addresses[0]}: start the same command there")
        while time.monotonic() < until:
            for address in self._addresses:
                if answers(address):
                    meeting = MeetingStore(entered(address, self._timeout), address, self.secret)
                    meeting.greet()
                    return meeting
            time.sleep(5 * PAUSE)
        raise MeetingError(
            f"nobody has listened at {self._addresses[0]} for {self._timeout.total_seconds():.0f} s: start the same "
            "command on the machine that has this address, and see that this one reaches it"
        )

    def _gather(self, meeting: MeetingStore, number: str, until: float) -> tuple[tuple[str, ...], str]:
        # Call, and offer places to those that have answered, until all are taken. The roster, and this node's number.
        call, came, others, gone = secrets.token_hex(16), list[str](), list[str](), set[str]()
        meeting.write("call", call)
        if self._nodes > 1:
            more = f"{self._nodes - 1} more node{'s' * (self._nodes > 2)}"
            say(f"waiting at {meeting.address} for {more}: start the same command on each")
        while time.monotonic() < until:
            self._hear(meeting)
            came = meeting.answers(call, came)
            others = [each for each in came if each not in gone][: self._nodes - 1]
            if len(others) == self._nodes - 1:
                roster = (number, *others)
                late = meeting.offer(call, roster)
                if not late:
                    return roster, number
                gone.update(late)
            time.sleep(PAUSE)
        raise MeetingError(
            f"{1 + len(others)} of {self._nodes} nodes have come to {meeting.address} within "
            f"{self._timeout.total_seconds():.0f} s: start the same command on each"
        )

    def _join(self, meeting: MeetingStore, number: str, until: float) -> tuple[tuple[str, ...], str]:
        # Answer calls, until a place has been offered and the round begins. The roster, and this node's number.
        call, offered, taken = self._call, False, math.inf
        while time.monotonic() < until:
            self._hear(meeting)
            told = meeting.signed.peek("call")
            if told is None:
                meeting.refuse("call")
            latest = told.decode()
            if latest not in ("", call):
                call, offered = latest, False
                meeting.answer(call, number)
            roster = meeting.offered(call) if call != self._call else ()
            if number in roster:
                taken, offered = time.monotonic() if not offered else taken, True
                if time.monotonic() > taken + 2 * CONFIRM:
                    meeting.refuse(f"begins/{named(roster)}")
                if meeting.take(roster, number):
                    self._call = call
                    return roster, number
            elif offered and not roster:
                meeting.refuse(f"offer/{call}")
            elif offered:  # it was too slow to take it
                number, offered = secrets.token_hex(16), False
                meeting.answer(call, number)
            time.sleep(PAUSE)
        raise MeetingError(
            f"the {self._nodes} nodes have not met at {meeting.address} within {self._timeout.total_seconds():.0f} s: "
            "start the same command on each"
        )

    def _hear(self, meeting: MeetingStore) -> None:
        # Raise an error if it is known that the others will not come.
        if self._first:
            meeting.hear()
        meeting.look()
        others = [each for each in self._roster if each != self._number]
        if self._round is not None and any(self._round.check([f"end/{each}"]) for each in others):
            raise MeetingError(
                "another node of this job has ended, and nothing starts again without it; see what it says"
            )

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        # An error of the store means that the first node has gone; a forged value ends the others, too.
        try:
            yield
        except ForgedError as error:
            if self._meeting is not None:
                with contextlib.suppress(RuntimeError):
                    self._meeting.signed.set(LOST, error.key)
            raise
        except RuntimeError as error:
            where = self._addresses[0] if self._meeting is None else self._meeting.address
            raise MeetingError(f"the first node, at {where}, has ended or is not reached; see what it says") from error


def say(text: str) -> None:
    """Say on stderr what keeps the user waiting, or what other nodes need."""
    print(f"stretto: {text}", file=sys.stderr, flush=True)


def entered(address: Address, timeout: timedelta) -> TCPStore:
    """The store at an address. Raises MeetingError if something else listens there."""
    try:
        return connect_to_store(address, timeout)
    except RuntimeError as error:
        raise no_job(address) from error


def tampered(key: str, address: Address) -> MeetingError:
    """The error for a key of the meeting store that is not as it was written."""
    return MeetingError(
        f"what this job wrote under {key!r} at {address} has been deleted or changed by somebody else, and its nodes "
        "cannot meet: choose another port, and keep it from strangers"
    )


def no_job(address: Address) -> MeetingError:
    """The error for an address where something else than a store of ours listens."""
    return MeetingError(f"{address} answers, but no stretto job listens there: choose a free port of the first machine")


def refuse(addresses: Sequence[Address]) -> NoReturn:
    """This node was given no secret, and is not the first: it says so, and so does the first if it is there."""
    for address in addresses:
        if answers(address):
            meeting = MeetingStore(entered(address, timedelta(seconds=GREET)), address, Secret.new())
            with contextlib.suppress(RuntimeError):  # the first node has gone meanwhile
                meeting.complain()
    raise UsageError(
        f"this machine is not the first node of the job, which listens at {addresses[0]}, and was given no secret: "
        f"{REMEDY}; the first node prints one if it was given none"
    )


def named(roster: Sequence[str]) -> str:
    """The name of a round: all who are in it see by it that it is new."""
    return hashlib.sha256(json.dumps(roster).encode()).hexdigest()[:32]


class LocalRendezvous(Rendezvous):
    """One node that waits for nobody. Each group of workers has a store of its own, which outlives all of them.

    It listens on the loopback interface only, where torch's own rendezvous listens on every one. Other users of this
    machine reach the loopback, too: values are signed, with a secret that the launcher hands to its workers.
    """

    def __init__(self, secret: Secret, timeout: timedelta) -> None:
        self.secret, self._timeout = secret, timeout
        self._run_id = uuid.uuid4().hex
        self._store: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store, and this node as the first of one."""
        self._store = None  # the former one gives its port back
        self._run_id = uuid.uuid4().hex
        with socket.socket() as listener:
            listener.bind((ADDRESS, 0))
            port = listener.getsockname()[1]
            self._store = of_round(hosted(listener, self._timeout), self.secret, self._run_id)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(ADDRESS, port))

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        """Close the store, which gives its port back."""
        self._store, self._closed = None, True
        return True
