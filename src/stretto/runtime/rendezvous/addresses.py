"""Where the launchers of several machines meet: the addresses that HOST:PORT stands for, and who listens there."""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from ipaddress import ip_address
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined] # mypy does not see that it exports them

from stretto.errors import UsageError

KNOCK = 10.0  # seconds in which whoever listens has to answer


class Door(NamedTuple):
    """A numeric address and a port."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def parted(rendezvous: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises UsageError if that is not what it is."""
    host, _, port = rendezvous.rpartition(":")
    if not (host and port.isdecimal()):
        raise UsageError(f"rendezvous={rendezvous!r}: write it as HOST:PORT")
    if not 1 <= int(port) <= 65535:
        raise UsageError(f"rendezvous={rendezvous!r}: a port is a number from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def doors_of(rendezvous: str, *, near: bool) -> tuple[Door, ...]:
    """The addresses that HOST:PORT stands for, those of IPv4 first; `near`: all processes are on this machine.

    Raises UsageError for a name that nobody knows, for one that stands for all interfaces, and where the others of
    several machines would knock at themselves.
    """
    host, port = parted(rendezvous)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"rendezvous={rendezvous!r}: nobody knows the host {host!r} ({error})") from None
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    doors = tuple(dict.fromkeys(Door(str(each[4][0]), port) for each in found))
    addresses = [ip_address(door.address.partition("%")[0]) for door in doors]
    if any(address.is_unspecified for address in addresses):
        raise UsageError(
            f"rendezvous={rendezvous!r} stands for all interfaces: name the one address of the first machine that the "
            "others reach"
        )
    if not near and all(address.is_loopback for address in addresses) and not plainly_loopback(host):
        raise UsageError(
            f"rendezvous={rendezvous!r}: on this machine {host!r} stands for {doors[0].address}, which the others do "
            "not reach; give the address that they reach"
        )
    return doors


def plainly_loopback(host: str) -> bool:
    """Whether a host's name says that it is this machine: localhost, or an address of the loopback."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(doors: Sequence[Door]) -> socket.socket | None:
    """A socket that listens at the first of the doors that is this machine's and free; None if there is none.

    Raises UsageError for a port that only the administrator may use.
    """
    for door in doors:
        listener = socket.socket(socket.AF_INET6 if ":" in door.address else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not kept from it by connections that ended
            listener.bind(door)
            listener.listen()
        except PermissionError:
            listener.close()
            raise UsageError(f"rendezvous={door}: you may not listen there; choose a port from 1024 up") from None
        except OSError:  # another machine's, or another launcher on this one has been faster
            listener.close()
        else:
            return listener
    return None


def hosted(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """A store that listens at a socket's address only. The socket is bound, and the store's own from now on."""
    address, port = listener.getsockname()[:2]
    listener.listen()
    return TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def answers(door: Door) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(door, timeout=KNOCK).close()
    except OSError:
        return False
    return True


def knock(door: Door, timeout: timedelta) -> TCPStore:
    """The store that somebody holds there. Raises RuntimeError if it is none.

    TCPStore waits for an answer without a limit, so it does so in a thread of its own.
    """
    held: Future[TCPStore] = Future()
    threading.Thread(target=connect, args=(door, held), name="stretto-knock", daemon=True).start()
    try:
        store = held.result(KNOCK)
    except TimeoutError:
        raise RuntimeError(f"nothing has been heard from {door} for {KNOCK:.0f} s") from None
    store.set_timeout(timeout)
    return store


def connect(door: Door, held: "Future[TCPStore]") -> None:
    """Connect to the store behind a door, and tell what comes of it."""
    try:
        waits = timedelta(seconds=KNOCK)
        held.set_result(TCPStore(*door, is_master=False, wait_for_workers=False, timeout=waits))
    except RuntimeError as error:
        held.set_exception(error)
