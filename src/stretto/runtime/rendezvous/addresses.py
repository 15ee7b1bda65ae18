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

ANSWER_TIMEOUT = 10.0  # seconds within which whoever listens has to answer
HERE_TIMEOUT = 3.0  # the same on this machine, where another program may have the port


class Address(NamedTuple):
    """A numeric address and a port."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def host_and_port(rendezvous: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises UsageError if that is not what it is."""
    host, _, port = rendezvous.rpartition(":")
    if not (host and port.isdecimal()):
        raise UsageError(f"rendezvous={rendezvous!r}: write it as HOST:PORT")
    if not 1 <= int(port) <= 65535:
        raise UsageError(f"rendezvous={rendezvous!r}: a port is a number from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def addresses_of(rendezvous: str, *, one_machine: bool) -> tuple[Address, ...]:
    """The addresses that HOST:PORT stands for, those of IPv4 first; `one_machine`: all processes are on this one.

    Raises UsageError for a name that nobody knows, for one that stands for all interfaces, and where the others of
    several machines would connect to themselves.
    """
    host, port = host_and_port(rendezvous)
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"rendezvous={rendezvous!r}: nobody knows the host {host!r} ({error})") from None
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    addresses = tuple(dict.fromkeys(Address(str(entry[4][0]), port) for entry in entries))
    numbers = [ip_address(address.address.partition("%")[0]) for address in addresses]
    if any(number.is_unspecified for number in numbers):
        raise UsageError(
            f"rendezvous={rendezvous!r} stands for all interfaces: name the one address of the first machine that the "
            "others reach"
        )
    if not one_machine and all(number.is_loopback for number in numbers) and not plainly_loopback(host):
        raise UsageError(
            f"rendezvous={rendezvous!r}: on this machine {host!r} stands for {addresses[0].address}, which the others "
            "do not reach; give the address that they reach"
        )
    return addresses


def plainly_loopback(host: str) -> bool:
    """Whether a host's name says that it is this machine: localhost, or an address of the loopback."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(addresses: Sequence[Address]) -> socket.socket | None:
    """A socket that listens at the first of the addresses that is this machine's and free; None if there is none.

    Raises UsageError for a port that only the administrator may use.
    """
    for address in addresses:
        listener = socket.socket(socket.AF_INET6 if ":" in address.address else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not kept from it by connections that ended
            listener.bind(address)
            listener.listen()
        except PermissionError:
            listener.close()
            raise UsageError(f"rendezvous={address}: you may not listen there; choose a port from 1024 up") from None
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


def answers(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=ANSWER_TIMEOUT).close()
    except OSError:
        return False
    return True


def is_here(address: Address) -> bool:
    """Whether an address is one of this machine's."""
    with socket.socket(socket.AF_INET6 if ":" in address.address else socket.AF_INET) as probe:
        try:
            probe.bind(address._replace(port=0))
        except OSError:
            return False
    return True


def connect_to_store(address: Address, timeout: timedelta) -> TCPStore:
    """The store that somebody holds there. Raises RuntimeError if it is none.

    TCPStore waits for an answer without a limit, so it does so in a thread of its own.
    """
    held: Future[TCPStore] = Future()
    threading.Thread(target=connect, args=(address, held), name="stretto-connect", daemon=True).start()
    patience = HERE_TIMEOUT if is_here(address) else ANSWER_TIMEOUT
    try:
        store = held.result(patience)
    except TimeoutError:
        raise RuntimeError(f"nothing has been heard from {address} for {patience:.0f} s") from None
    store.set_timeout(timeout)
    return store


def connect(address: Address, held: "Future[TCPStore]") -> None:
    """Connect to the store at an address; the store, or the error, goes into `held`."""
    try:
        waits = timedelta(seconds=ANSWER_TIMEOUT)
        held.set_result(TCPStore(*address, is_master=False, wait_for_workers=False, timeout=waits))
    except RuntimeError as error:
        held.set_exception(error)
