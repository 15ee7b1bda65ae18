"""Hold back the output of torch.export."""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def output_held_back() -> Iterator[None]:
    """Hold back printed text and torch's logs until the block ends; an exception gets them as a note instead.

    An export that fails prints the graph that it has recorded so far.
    """
    handlers = torch_handlers()
    streams = [sys.stdout, sys.stderr, *(handler.stream for handler in handlers)]
    buffers: list[io.StringIO] = [io.StringIO() for _ in streams]
    try:
        with contextlib.redirect_stdout(buffers[0]), contextlib.redirect_stderr(buffers[1]):
            for handler, buffer in zip(handlers, buffers[2:], strict=True):
                handler.setStream(buffer)
            yield
    except Exception as error:
        if printed := "\n".join(buffer.getvalue().strip() for buffer in buffers).strip():
            error.add_note(printed)
        raise
    else:
        for stream, buffer in zip(streams, buffers, strict=True):
            if buffer.getvalue():
                stream.write(buffer.getvalue())
    finally:
        for handler, stream in zip(handlers, streams[2:], strict=True):
            handler.setStream(stream)


def torch_handlers() -> "list[logging.StreamHandler[Any]]":
    """The plain stream handlers of torch's loggers, which write to a terminal, each once.

    One whose stream is closed has nothing to hold back, and cannot be given another: whoever captured torch's first
    words, as a test runner does, has gone.
    """
    loggers = [logger for name, logger in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "torch"]
    handlers = [handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers]
    plain = [handler for handler in dict.fromkeys(handlers) if type(handler) is logging.StreamHandler]
    return [handler for handler in plain if not getattr(handler.stream, "closed", False)]
