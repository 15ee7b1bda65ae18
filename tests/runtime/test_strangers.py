"""What somebody without a job's secret can do to it: end it, at worst. The stranger has a TCPStore of torch."""

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from runtime.nursery import Forked
from runtime.processes import ended, free_port
from stretto.errors import StrettoError, UsageError
from stretto.runtime.rendezvous import addresses, nodes
from stretto.runtime.rendezvous.nodes import MeetingError, NodesRendezvous
from stretto.runtime.rendezvous.signed_store import ForgedError, Secret, Signed, given_secret, of_round
from waiting import wait_for

SECRET, OTHER = Secret("the secret of this test"), Secret("the secret of another")
NODE = str(Path(__file__).with_name("node.py"))


class Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def stranger(port):
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))


def at(port, secret=SECRET, nodes=2, seconds=20):
    return NodesRendezvous(f"127.0.0.1:{port}", nodes, secret, timedelta(seconds=seconds))


def outcome(act):
    try:
        return act()
    except StrettoError as error:
        return error


def met(*launchers):
    """What each launcher comes to, all at the same time."""
    with ThreadPoolExecutor(len(launchers)) as threads:
        return list(threads.map(lambda each: outcome(each.next_rendezvous), launchers))


READ = {
    "get": lambda store: store.get("name"),
    "check": lambda store: store.check(["name"]),
    "wait": lambda store: store.wait(["name"]),
    "wait for a while": lambda store: store.wait(["name"], timedelta(seconds=1)),
    "add": lambda store: store.add("name", 1),
    "compare and set": lambda store: store.compare_set("name", "", "1"),
    "compare and set again": lambda store: store.compare_set("name", "5", "6"),
    "several": lambda store: store.multi_get(["name"]),
    "a clone's": lambda store: store.clone().get("name"),
}


@pytest.mark.parametrize("way", READ)
def test_nothing_is_read_that_is_not_signed_for_this_name_round_and_job(way, tmp_path):
    store = HashStore()
    mine, later = of_round(store, SECRET, "round 1"), of_round(store, SECRET, "round 2")
    mine.set("other", "5")
    later.set("name", "5")
    of_round(store, OTHER, "round 1").set("name", "5")
    copies = [store.get(key) for key in ("round 1/other", "round 2/name", "round 1/name")]
    for value in ["5", b"\0" * 48 + b"5", pickle.dumps(Trap(tmp_path / "made")), *copies]:
        store.set("round 1/name", value)
        with pytest.raises(ForgedError, match="'name' that is not signed with the secret of this job"):
            READ[way](mine)
    assert not (tmp_path / "made").exists()


def test_a_signed_store_does_what_others_do():
    """The same calls on torch's own store give the same."""
    one, other = Signed(HashStore(), b"key"), HashStore()
    calls = [
        lambda store: store.set("a", "1"), lambda store: store.get("a"), lambda store: store.check(["a"]),
        lambda store: store.check(["a", "b"]), lambda store: [store.add("n", each) for each in (0, 1, 1, -3, 0)],
        lambda store: store.get("n"), lambda store: store.compare_set("f", "", "x"),
        lambda store: store.compare_set("f", "", "y"), lambda store: store.compare_set("f", "x", "z"),
        lambda store: store.get("f"), lambda store: store.compare_set("f", "no", "w"), lambda store: store.get("f"),
        lambda store: store.multi_set(["g", "h"], ["1", "2"]), lambda store: store.multi_get(["g", "h"]),
        lambda store: store.num_keys(), lambda store: store.delete_key("a"), lambda store: store.check(["a"]),
        lambda store: store.wait(["g"]), lambda store: store.set("e", ""), lambda store: store.get("e"),
    ]  # fmt: skip
    assert [call(one) for call in calls] == [call(other) for call in calls]


def test_many_add_at_the_same_time():
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    stores = [Signed(stranger(port), b"key") for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        sums = threads.map(lambda store: [store.add("n", 1) for _ in range(25)], stores)
        assert sorted(each for own in sums for each in own) == list(range(1, 101))
    del server


def test_launchers_meet_and_meet_again():
    port = free_port()
    first, second, third = launchers = [at(port, nodes=3) for _ in range(3)]
    rounds = []
    for _ in range(2):
        found = met(*launchers)
        assert sorted(each.rank for each in found) == [0, 1, 2]
        assert found[0].rank == 0
        assert {each.world_size for each in found} == {3}
        assert {tuple(vars(each.bootstrap_store_info).values()) for each in found} == {("127.0.0.1", port)}
        rounds += {each.get_run_id() for each in launchers}
        found[1].store.set("word", "of the second")
        assert found[2].store.get("word") == b"of the second"
        assert [each.num_nodes_waiting() for each in launchers] == [0, 0, 0]
        leaves = threading.Thread(target=second.next_rendezvous)
        leaves.start()
        wait_for(first.num_nodes_waiting)
        assert third.num_nodes_waiting() == 1
        for each in met(first, third):
            assert each.store.check(["word"]) is False
        leaves.join()
    assert len(set(rounds)) == 2
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(NodesRendezvous.shutdown, launchers))


def test_another_launcher_takes_the_place_of_one_that_has_gone(monkeypatch):
    """The one that has gone had answered already."""
    monkeypatch.setattr(nodes, "CONFIRM", 1.0)
    port = free_port()
    first, gone, second = at(port), at(port, seconds=0.3), at(port)
    assert isinstance(outcome(gone.next_rendezvous), MeetingError)  # nobody has called yet
    with ThreadPoolExecutor(1) as threads:
        begun = threads.submit(first.next_rendezvous)
        board = gone._meeting
        call = wait_for(lambda: board.signed.get("call").decode())
        board.answer(call, "the number of one that has gone")
        time.sleep(0.3)
        assert second.next_rendezvous().rank == 1
        assert begun.result().rank == 0
    assert first.get_run_id() == second.get_run_id()


@pytest.mark.parametrize("secret", [OTHER, None], ids=["another", "none"])
def test_another_secret_or_none_is_said_at_both_ends(secret, capsys):
    port = free_port()
    first = at(port)
    with ThreadPoolExecutor(1) as threads:
        begun = threads.submit(outcome, first.next_rendezvous)
        error = outcome(lambda: at(port, secret=secret).next_rendezvous())
        assert isinstance(error, UsageError)
        assert ("another secret than this" if secret else "was given no secret") in str(error)
        assert "give all nodes the same one, with --secret-file FILE or the variable STRETTO_SECRET" in str(error)
        assert isinstance(begun.result(10), UsageError)
        assert f"a node has come to 127.0.0.1:{port} with another secret than this one, or with none" in str(
            begun.result()
        )
    waits = f"stretto: waiting at 127.0.0.1:{port} for 1 more node: start the same command on each\n"
    assert waits in capsys.readouterr().err


def test_the_first_makes_a_secret_and_prints_it_for_the_others(capsys, monkeypatch):
    port = free_port()
    first = at(port, secret=None)
    out, err = capsys.readouterr()
    told = err.partition("STRETTO_SECRET=")[2].strip()
    assert (out, err.count("\n"), len(told)) == ("", 1, 64)
    monkeypatch.setenv("STRETTO_SECRET", told)
    assert [each.rank for each in met(first, at(port, secret=given_secret(None)))] == [0, 1]
    assert told not in repr(first.secret)
    assert told != at(free_port(), secret=None).secret.text


def test_it_listens_where_it_was_told_and_nowhere_else():
    port = free_port()
    first = at(port)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    for address in {"127.0.0.2", "::1", *(each[4][0] for each in socket.getaddrinfo(socket.gethostname(), port))}:
        if address != "127.0.0.1":
            with pytest.raises(OSError, match=r"refused|unreachable|assign"):
                socket.create_connection((address, port), timeout=5)
    first.shutdown()


WRONG = {
    "0.0.0.0:29400": "stands for all interfaces",
    "[::]:29400": "stands for all interfaces",
    "127.0.0.1:0": "a port is a number from 1 to 65535",
    "127.0.0.1:70000": "a port is a number from 1 to 65535",
    "127.0.0.1": "write it as HOST:PORT",
    "nowhere.invalid:29400": "nobody knows the host 'nowhere.invalid'",
}


@pytest.mark.parametrize("rendezvous", WRONG)
def test_places_where_nobody_can_meet(rendezvous):
    with pytest.raises(UsageError, match=WRONG[rendezvous]):
        NodesRendezvous(rendezvous, 2, SECRET, timedelta(seconds=1))


def test_a_name_that_only_this_machine_takes_for_itself(monkeypatch):
    """As Debian's /etc/hosts has it."""
    monkeypatch.setattr(
        addresses.socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 29400))]
    )
    with pytest.raises(UsageError, match=r"'node7' stands for 127\.0\.1\.1, which the others do not reach"):
        NodesRendezvous("node7:29400", 2, SECRET, timedelta(seconds=1))


@pytest.mark.parametrize("text", ["", "short", "a line\nand another one"])
def test_what_is_no_secret(text, tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(UsageError, match="give at least 16, all printable"):
        given_secret(file)
    with pytest.raises(UsageError, match="cannot be read"):
        given_secret(tmp_path)
    monkeypatch.setenv("STRETTO_SECRET", "  ")
    assert given_secret(None) is None


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
def test_something_else_listens_there(secret):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(addresses, "HERE_TIMEOUT", 0.5)  # it is this machine's own port
            patch.setattr(addresses, "ANSWER_TIMEOUT", 2.0)
            error = outcome(lambda: at(listener.getsockname()[1], secret=secret).next_rendezvous())
    for thread in threading.enumerate():
        if thread.name == "stretto-connect":
            thread.join()  # torch says on stderr that the listener has gone
    assert "answers, but no stretto job listens there" in str(error)


def test_values_of_another_job_with_the_same_secret_lead_nowhere(monkeypatch):
    """A stranger has heard all of one job, and says it again in the next, on the same port: nobody begins alone."""
    monkeypatch.setattr(nodes, "CONFIRM", 0.5)
    port = free_port()
    launchers = [at(port) for _ in range(2)]
    assert [each.rank for each in met(*launchers)] == [0, 1]
    listener = stranger(port)
    heard = {key.removeprefix("/"): listener.get(key.removeprefix("/")) for key in listener.list_keys()}
    assert {key.split("/")[1] for key in heard if key.startswith("meeting/")} == {
        "call", "answer", "offer", "takes", "begins"
    }  # fmt: skip
    old = launchers[0].get_run_id()
    for each in launchers:
        each._meeting = each._round = None
    del listener, each, launchers
    first, second = at(port, seconds=2), at(port, seconds=2)
    again = stranger(port)
    stop = threading.Event()

    def repeat():
        while not stop.wait(0.01):
            for key, value in heard.items():
                again.set(key, value)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        found = met(first, second)
    finally:
        stop.set()
        thread.join()
    if any(isinstance(each, MeetingError) for each in found):
        assert all(isinstance(each, MeetingError) for each in found), found
    else:
        assert [each.rank for each in found] == [0, 1]
        assert first.get_run_id() == second.get_run_id() != old


def everywhere(port, payload, stop, within="", after=lambda keys: None):
    """Write a payload under every key that there is and that torch might read, once somebody listens there.

    After each round `after` has the keys that there were.
    """
    known = ("meeting/call", "torch.rendezvous.stretto", "torchelastic/role_info/0", "MASTER_ADDR", "init/")
    store = None
    while not stop.wait(0.002):
        with contextlib.suppress(RuntimeError, OSError):
            if store is None:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                store = stranger(port)
            keys = [each.removeprefix("/") for each in store.list_keys()]
            for key in {*known, *keys}:
                if not key.startswith("meeting/") or within == "meeting":
                    store.set(key, payload)
            after(keys)


@contextlib.contextmanager
def writing(port, made, **options):
    stop = threading.Event()
    thread = threading.Thread(target=everywhere, args=(port, pickle.dumps(Trap(made)), stop), kwargs=options)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not made.exists()


def test_a_stranger_writes_while_launchers_meet(tmp_path):
    port = free_port()
    first, second = at(port, seconds=20), at(port, seconds=20)
    with writing(port, tmp_path / "made", within="meeting"):
        found = met(first, second)
    assert {type(each) for each in found} <= {ForgedError, UsageError, MeetingError}
    # Which of the two it is depends on who reads first: the greeting's reader says that the other's secret is another.
    said = ("not signed with the secret of this job", "another secret than this")
    assert any(words in str(each) for words in said for each in found), found


def ruining(port, key, way, stop):
    """Delete a key of the meeting, or write over it, as soon as it is there and for as long as it is."""
    store = stranger(port)
    while not stop.wait(0.001):
        with contextlib.suppress(RuntimeError, OSError):  # the first node has ended
            for name in (each.removeprefix("/") for each in store.list_keys()):
                if name.startswith(f"meeting/{key}"):
                    store.delete_key(name) if way == "deleted" else store.set(name, "rubbish")


@pytest.mark.parametrize("way", ["deleted", pytest.param("changed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", ["call", "answer", "offer", "takes", "begins"])
def test_all_launchers_end_whichever_key_a_stranger_ruins(key, way, monkeypatch):
    """Long before they would give each other up."""
    monkeypatch.setattr(nodes, "CONFIRM", 0.3)
    monkeypatch.setattr(nodes, "GREET", 0.3)
    port, stop = free_port(), threading.Event()
    first = at(port, seconds=15)
    thread = threading.Thread(target=ruining, args=(port, key, way, stop))
    thread.start()
    try:
        with ThreadPoolExecutor(2) as threads:
            launchers = [first, at(port, seconds=15)]
            begun = [threads.submit(outcome, each.next_rendezvous) for each in launchers]
            found = [each.result(30) for each in begun]
        failed = [each for each in found if isinstance(each, StrettoError)]
        if not failed:  # all have met before
            return
        for launcher, came_to in zip(launchers, found, strict=True):
            if came_to not in failed:  # it had met the other, which then could not meet it
                wait_for(lambda each=launcher: isinstance(outcome(each.num_nodes_waiting), MeetingError), seconds=10)
        words = ("deleted or changed by somebody else", "not signed with the secret of this job", "with another secret")
        assert any(each in str(error) for each in words for error in failed)
    finally:
        stop.set()
        thread.join()


def test_a_stranger_writes_while_a_job_runs(tmp_path):
    """It ends the job, on two nodes, and the message says why. No pickle is opened."""
    port = free_port()
    temporary = tmp_path / "t"  # what a killed node leaves
    temporary.mkdir()
    environment = {**os.environ, "STRETTO_SECRET": SECRET.text, "TMPDIR": str(temporary)}
    nodes = [Forked([sys.executable, NODE, str(port), str(tmp_path), "late"], environment) for _ in range(2)]

    def after(keys):
        own = {key for key in keys if key.endswith("/torchelastic/role_info/1")}
        if len(own) == 2:  # of both rounds: the second node has told who it is, and waits for the first
            (tmp_path / "go").touch()

    wait_for((tmp_path / "attempt-1").exists, *nodes)  # the job runs
    with writing(port, tmp_path / "made", after=after):
        wait_for(lambda: any(node.poll() is not None for node in nodes))
    goes_on = [rank for rank, node in enumerate(nodes) if node.poll() is None]  # one may wait for the other, MEET
    assert len(goes_on) < 2
    statuses, said = ended(nodes, killed=goes_on)
    assert all(statuses)
    assert any("not signed with the secret of this job" in each for each in said), said
