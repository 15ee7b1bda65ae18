"""How the launcher of a single machine meets its workers: a store that listens on the loopback interface only.

torch's own rendezvous listens on every interface, where others can write into it. Other users of this machine reach the
loopback, too: values are signed, with a secret that the launcher hands to its workers.
"""

import socket
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from stretto.runtime.rendezvous.addresses import hosted
from stretto.runtime.rendezvous.signed_store import Secret, of_round

NAME = "stretto"
ADDRESS = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """One node that waits for nobody. Each group of workers has a store of its own, which outlives all of them."""

    use_agent_store = True

    def __init__(self, secret: Secret, timeout: timedelta) -> None:
        self.secret, self._timeout = secret, timeout
        self._run_id = uuid.uuid4().hex
        self._store: Store | None = None
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store, and this node as the first of one."""
        self._store = None  # the former one gives its port back
        self._run_id = uuid.uuid4().hex
        with socket.socket() as listener:
            listener.bind((ADDRESS, 0))
            port = listener.getsockname()[1]
            self._store = of_round(hosted(listener, self._timeout), self.secret, self._run_id)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(ADDRESS, port))

    def get_backend(self) -> str:
        """The name of this rendezvous, for torch's logs."""
        return NAME

    def get_run_id(self) -> str:
        """The round's: nothing that was signed for another is of use."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether `set_closed` or `shutdown` has been called."""
        return self._closed

    def set_closed(self) -> None:
        """No worker is started from now on."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """0: there are no other nodes."""
        return 0

    def shutdown(self) -> bool:
        """Close the store, which gives its port back."""
        self._store, self._closed = None, True
        return True
