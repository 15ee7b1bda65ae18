"""Files and processes: where results may go, and how children start and end. No torch at import.

Files appear whole or not at all (`destinations.py`). A process ends with the one that started it.

Workers, and the processes of a study, are forks of Python's fork server (`fork_server.py`), which imports while the
command does: nobody waits seconds for each worker's torch. Each ends with its starter (`lifeline.py`): the server
holds no end of the pipe that its forks watch. It is deaf to Ctrl-C and SIGTERM, which come to a whole terminal or
job; the command passes each on once. Such children skip `atexit` and `sys.excepthook`; they catch errors themselves.
"""
