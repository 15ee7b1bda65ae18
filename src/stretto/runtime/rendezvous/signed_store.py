"""A store whose values are signed with the secret of a job: what anybody else writes into it is never used.

`TCPStore` takes values from whoever reaches its port. Here a value stands behind a signature: HMAC-SHA256 of the name
under which it stands and the value, with a key derived from the secret and the round of the job. Nothing that was
signed for another job, round or name passes for it. Who has not the secret can delete values, or put back an earlier
one of the same name and round; that can keep the job waiting until it ends with an error, and no more.
"""

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto.errors import StrettoError, UsageError

VARIABLE = "STRETTO_SECRET"
SIZE = hashlib.sha256().digest_size  # bytes of a signature
LOOK = 1.0  # seconds of waiting between two calls of `between`
NONCE = 16  # bytes before it, so that no two writings are alike
LEAST = 16  # characters of a secret: who hears signatures can try out shorter ones


class ForgedError(StrettoError):
    """A value in the job's store, under `key`, is not signed with its secret. It was not used."""

    key = ""


@dataclass(frozen=True)
class Secret:
    """What all processes of a job know and nobody else does. It never shows itself.

    Raises UsageError if it is too short to be one.
    """

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.text) < LEAST or not self.text.isprintable():
            raise UsageError(
                f"the secret of a job has {len(self.text)} characters: give at least {LEAST}, all printable; "
                "python -c 'import secrets; print(secrets.token_hex(32))' makes one"
            )

    def key(self, *purpose: str) -> bytes:
        """A key for one purpose only, 32 bytes."""
        return hmac.digest(self.text.encode(), b"stretto" + joined(*(each.encode() for each in purpose)), "sha256")

    @staticmethod
    def new() -> "Secret":
        """One that nobody can guess."""
        return Secret(secrets.token_hex(32))


def given_secret(file: Path | None) -> Secret | None:
    """The secret in a file, else that in the environment; None if there is none. Raises UsageError for a bad file."""
    if file is None:
        text = os.environ.get(VARIABLE, "").strip()
        return Secret(text) if text else None
    try:
        return Secret(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--secret-file {file}: it cannot be read as text: {error}") from None


def joined(*parts: bytes) -> bytes:
    """Some byte strings as one, from which no others can be made."""
    return b"".join(len(each).to_bytes(8, "big") + each for each in parts)


class Signed(Store):
    """Another store, in which each value stands behind its signature; reading one without raises ForgedError.

    `wait` and `check` look at the values, too: nobody else can say that something has happened. torch calls it from
    C++, and does not keep it from being collected: whoever gives it to torch has to.
    """

    timeout: timedelta  # torch's own property, which its annotations leave out

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store = cast(Any, store)  # whose annotations do not say that it takes bytes
        self._key = key
        self._clones: list[Signed] = []
        self.between: Callable[[Sequence[str]], object] = lambda keys: None  # called while it waits for keys
        self.set_timeout(self._store.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        self._await([key], self.timeout)
        return self._open(key, self._store.get(key))

    def peek(self, key: str) -> bytes | None:
        """A value, None if it is not there now; waits for nothing, also where somebody deletes it meanwhile."""
        nobodys = secrets.token_bytes(NONCE)
        found = self._store.compare_set(key, nobodys, nobodys)
        return None if found == nobodys else self._open(key, found)

    def _await(self, keys: Sequence[str], timeout: timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        while True:
            left = max(until - time.monotonic(), 0.0)
            try:
                self._store.wait([*keys], timedelta(seconds=max(min(LOOK, left), 0.001)))
            except DistStoreError:
                if left <= LOOK:
                    raise
                self.between(keys)
            else:
                return

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write a value if another stands there, b"" for none; return the one that stands there now."""
        expected, before = as_bytes(expected_value), b""
        if expected:
            if not self._store.check([key]):
                return expected  # as TCPStore does
            before = self._store.get(key)
            told = self._open(key, before)
            if told != expected:
                return told
        return self._open(key, self._store.compare_set(key, before, self._seal(key, desired_value)))

    def add(self, key: str, value: int) -> int:
        """Add to a number that begins at 0; return the sum."""
        until = time.monotonic() + self.timeout.total_seconds()
        before, total = b"", value
        while time.monotonic() < until:
            wanted = self._seal(key, str(total))
            stored = self._store.compare_set(key, before, wanted)
            if stored == wanted:
                return total
            before, total = stored, int(self._open(key, stored)) + value
        raise DistStoreError(f"the number under {key!r} was changed by others for {self.timeout.total_seconds():.0f} s")

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([*keys])) and all(self.get(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout or self.timeout)
        for key in keys:
            self.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> "Signed":
        """The same store by a connection of its own."""
        made = Signed(self._store.clone(), self._key)
        self._clones.append(made)  # torch holds no reference that keeps Python's part of it
        return made

    def _seal(self, name: str, value: str | bytes) -> bytes:
        nonce, plain = secrets.token_bytes(NONCE), as_bytes(value)
        return nonce + self._signature(name, nonce, plain) + plain

    def _open(self, name: str, sealed: bytes) -> bytes:
        nonce, signature, plain = sealed[:NONCE], sealed[NONCE : NONCE + SIZE], sealed[NONCE + SIZE :]
        if not hmac.compare_digest(signature, self._signature(name, nonce, plain)):
            forged = ForgedError(
                f"the job's store holds a value under {name!r} that is not signed with the secret of this job: a "
                "process with another secret, or a stranger, has written it. It was not used"
            )
            forged.key = name
            raise forged
        return plain

    def _signature(self, name: str, nonce: bytes, value: bytes) -> bytes:
        return hmac.digest(self._key, joined(name.encode(), nonce, value), "sha256")


def of_round(store: Store, secret: Secret, run_id: str) -> Signed:
    """What the processes of a job tell each other in one of its rounds, which `run_id` names."""
    return Signed(PrefixStore(run_id, store), secret.key("round", run_id))


def as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
