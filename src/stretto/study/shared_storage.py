"""Where machines that share a study meet: an optuna storage, by its URL."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError, UsageError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

FORMS = "journal:PATH (a file), sqlite:///PATH (a file, of one machine), postgresql://USER:PASSWORD@HOST/NAME"
TRIES = 5  # to open a data base whose tables somebody else is just making
PATIENCE = 60  # seconds that a process waits for another one's transaction
PACKAGES = {"psycopg2": "psycopg2-binary", "psycopg": "psycopg[binary]"}  # where a driver's package has another name


def open_storage(url: str) -> "BaseStorage":
    """Open a storage, which is made if it is not there. Raises UsageError for one that cannot be reached."""
    scheme, _, rest = url.partition(":")
    if scheme not in ("journal", "sqlite") and not scheme.startswith("postgresql"):
        raise UsageError(f"storage={hidden(url)!r}: give {FORMS}")
    try:
        import optuna
    except ImportError as error:
        raise UsageError(f"storage={hidden(url)!r} needs optuna: pip install 'stretto[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if scheme != "journal":
        return data_base(url)
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if not rest or not Path(rest).parent.is_dir():
        raise UsageError(f"storage={hidden(url)!r}: name a file in a folder that is there: journal:PATH")
    return JournalStorage(JournalFileBackend(rest))


def data_base(url: str) -> "BaseStorage":
    """A data base; several processes may open a new one at the same time."""
    from optuna.exceptions import OptunaError
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.pool import NullPool

    lite = url.startswith("sqlite")
    options: dict[str, Any] = {"pool_pre_ping": True}
    if lite:  # connections that no pool keeps are closed when they have done their work
        options = {"connect_args": {"timeout": PATIENCE}, "poolclass": NullPool}
    for left in reversed(range(TRIES)):
        try:
            storage = RDBStorage(url, engine_kwargs=options)
            break
        except ImportError as error:
            module = str(getattr(root(error), "name", None))
            raise UsageError(
                f"storage={hidden(url)!r} needs a driver that is not there, {module}: pip install "
                f"'{PACKAGES.get(module, module)}'"
            ) from error
        except (OptunaError, SQLAlchemyError) as error:
            if left == 0:
                raise UsageError(f"storage={hidden(url)!r} cannot be opened ({short(error)}): give {FORMS}") from error
            time.sleep(0.2)
    if lite:
        one_at_a_time(storage.engine)
    return storage


def one_at_a_time(engine: Any) -> None:
    """Make SQLite's transactions begin with their first read.

    Python's driver begins them with the first write: two processes that read "waiting" would both take a trial.
    """
    from sqlalchemy import event

    def on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself

    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


@contextmanager
def reached(url: str) -> Iterator[None]:
    """Raise StrettoError if a storage cannot be reached any more."""
    from optuna.exceptions import OptunaError

    try:
        yield
    except OptunaError as error:
        raise StrettoError(
            f"storage={hidden(url)!r} cannot be reached any more ({short(error)}): finished runs are kept, the same "
            "command makes the others"
        ) from error


def hidden(text: str) -> str:
    """A URL without its password, for pages and messages; any other text as it is."""
    return re.sub(r"(://[^:/@]*):.*@", r"\1:...@", text)


def short(error: BaseException) -> str:
    """An error in one line."""
    first = root(error)
    return next(iter(str(first).splitlines()), type(first).__name__)


def root(error: BaseException) -> BaseException:
    """The error that an error came of in the first place."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
