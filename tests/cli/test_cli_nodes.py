"""A run on two nodes, which are both this machine: the numbers of one process, and nobody hears the secret."""

import time
from pathlib import Path

import safetensors.torch
import torch

from cli.processes import descendants, listening, start
from runtime.processes import free_port
from stretto.cli import main

SECRET = "correct horse battery staple"
WORDS = ["train", "--model-options.width", "8", "--model-options.depth", "3", "--batch-size", "32", "--steps", "30"]
WORDS += ["--method", "pb", "--evaluations", "3", "--lr", "0.01"]


def test_two_nodes_with_a_secret(tmp_path):
    port = free_port()
    secret = tmp_path / "secret.txt"
    secret.write_text(f"{SECRET}\n")
    there = [*WORDS, "--workers", "2", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--out", "run"]
    (tmp_path / "work").mkdir()
    commands = [start([*there, "--secret-file", str(secret)], tmp_path / "work") for _ in range(2)]
    seen, doors = set(), set()
    try:
        while any(command.poll() is None for command in commands):
            for pid in [each for command in commands for each in (command.pid, *descendants(command.pid))]:
                try:
                    doors |= listening([pid])
                    seen.add(Path(f"/proc/{pid}/cmdline").read_bytes())
                    seen.add(Path(f"/proc/{pid}/environ").read_bytes())
                except OSError:
                    continue
            time.sleep(0.02)  # not a core of its own: what is looked for stays as long as a process
        said = "".join("".join(command.communicate(timeout=60)) for command in commands)
    finally:
        for command in commands:
            command.kill()
    assert [command.returncode for command in commands] == [0, 0], said
    assert doors <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert SECRET not in said
    files = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    assert tmp_path / "work" / "run" / "run.json" in files
    assert not [text for text in (*seen, *(path.read_bytes() for path in files)) if SECRET.encode() in text]
    assert main([*WORDS, "--quiet", "--out", str(tmp_path / "alone")]) == 0
    one, other = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("alone", "work/run"))
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) for key in one)
