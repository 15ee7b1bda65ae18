"""How the launcher of a single machine meets its workers: a store that listens on the loopback interface only.

torch's own rendezvous listens on every interface, where others can write into it.
"""

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # mypy does not see that it exports them
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "stretto-loopback"
ADDRESS = "127.0.0.1"


class Loopback(RendezvousHandler):
    """One node that waits for nobody. Each group of workers has a store of its own, which outlives all of them."""

    use_agent_store = True

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        self._run_id, self._timeout = run_id, timeout
        self._store: Store | None = None
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store, and this node as the first of one."""
        with socket.socket() as listener:
            listener.bind((ADDRESS, 0))
            listener.listen()
            port = listener.getsockname()[1]
            self._store = None  # the former one gives its port back
            self._store = TCPStore(
                ADDRESS,
                port,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(ADDRESS, port))

    def get_backend(self) -> str:
        """Its name."""
        return NAME

    def get_run_id(self) -> str:
        """The job's."""
        return self._run_id

    def is_closed(self) -> bool:
        """After `set_closed`."""
        return self._closed

    def set_closed(self) -> None:
        """Nothing starts any more."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """There are no others."""
        return 0

    def shutdown(self) -> bool:
        """Give the port back."""
        self._store, self._closed = None, True
        return True


def make(parameters: RendezvousParameters) -> RendezvousHandler:
    """For torch's registry."""
    return Loopback(parameters.run_id, timedelta(seconds=parameters.get_as_int("timeout", 60) or 60))


def register() -> None:
    """Make it known to torch's launcher; once more does no harm."""
    rendezvous_handler_registry.register(NAME, make)
