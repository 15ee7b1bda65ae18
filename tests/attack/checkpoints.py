"""Damaged and hostile checkpoints: `load` raises UsageError with the path and leaves the trainer as it was.

A *damaged* checkpoint is one that a disk or a copy has changed: it is refused, or loads what was saved. A *forged* one
has right sizes and sums: it may load, but only as a checkpoint that could have been saved. Neither has anything
unpickled that its maker chose, nor a file outside its folder read or written.
"""

import copy
import io
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import traceback
import warnings
import zlib
from pathlib import Path

import torch
from torch import nn

import stretto
from attack.protocol import Outcome

SHARE = 40
LIMIT = 300.0
METHODS = [
    "backprop", "1f1b(microbatches=2)", "greedy", "overlapping(delay=1)", "pipedream", "pb", "pb-lwp-sc", "pb-lwpw",
    "pipemare(reschedule=9)", "spectrain", "pipedream-2bw", "pb(warmup=2)",
]  # fmt: skip
opened: list[str] | None = None  # files that are opened, while somebody looks


def watch(event, args):
    """Notes what is opened, listed or removed."""
    if opened is not None and event in (
        "open",
        "os.listdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "shutil.rmtree",
    ):
        opened.extend(os.fspath(arg) for arg in args[:2] if isinstance(arg, str | os.PathLike))


sys.addaudithook(watch)


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


class Case:
    """A configuration, from which trainers are made that are all alike."""

    def __init__(self, draw):
        self.method = draw.choice(METHODS)
        self.stages = draw.choice([2, 3])
        self.adam = draw.random() < 0.4 and self.method not in ("pb-lwp-sc", "spectrain")
        self.norm = draw.random() < 0.4
        self.scheduled = draw.random() < 0.5
        self.replicas = 2 if draw.random() < 0.25 else 1
        self.sync = draw.choice(["all-reduce", "local-sgd(every=2)", "diloco(every=2)"])
        self.precision = "bf16" if draw.random() < 0.2 else None

    def trainer(self, seed, method=None, stages=None, width=4):
        size = stages or self.stages
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = [nn.Sequential(nn.Linear(3 if s == 0 else width, width), nn.Tanh()) for s in range(size - 1)]
            if self.norm:
                made[0].append(nn.BatchNorm1d(width))
            heads = [nn.Linear(width, 2) for _ in made]
            made.append(nn.Linear(width, 2))
        local = (method or self.method).startswith(("greedy", "overlapping"))
        if self.method.startswith("overlapping"):
            heads[0] = None
        kind = torch.optim.AdamW if self.adam else torch.optim.SGD
        options = {} if self.adam else {"momentum": 0.9}
        return stretto.Trainer(
            made, nn.functional.cross_entropy, lambda params: kind(params, lr=0.01, **options), method or self.method,
            heads=[*heads, None] if local else None, precision=self.precision, device="cpu",
            scheduler=(lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)) if self.scheduled else None,
            mesh=stretto.Mesh(data=self.replicas), sync=self.sync if self.replicas > 1 else "all-reduce",
        )  # fmt: skip

    def batches(self, seed, count):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            yield torch.randn(12, 3, generator=generator), torch.randint(2, (12,), generator=generator)

    def __str__(self):
        return f"{self.method}, {self.stages} stages, " + ", ".join(
            [
                "AdamW" if self.adam else "SGD",
                *["BatchNorm"] * self.norm,
                *["StepLR"] * self.scheduled,
                *[f"{self.replicas} replicas, {self.sync}"] * (self.replicas > 1),
                *[str(self.precision)] * bool(self.precision),
            ]
        )


def trained(trainer, batches):
    """All losses and weights that come of going on."""
    told = [trainer.step(x, y) for x, y in batches]
    told.append(trainer.flush())
    return repr(told), {key: value.clone() for key, value in trainer.gather().items()}


def equal(mine, theirs):
    return mine[0] == theirs[0] and all(
        torch.equal(mine[1][key].nan_to_num(), value.nan_to_num()) for key, value in theirs[1].items()
    )


# -- damage: (folder, draw, place) -> what was done -------------------------------------------------------------------


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(folder, draw, place):
    file = draw.choice(files(folder))
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 5, 50])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return f"bits of {file.name} flipped"


def truncate(folder, draw, place):
    file = draw.choice(files(folder))
    content = file.read_bytes()
    file.write_bytes(content[: draw.choice([0, 1, len(content) // 2, len(content) - 1])])
    return f"{file.name} cut off"


def extend(folder, draw, place):
    file = draw.choice(files(folder))
    with file.open("ab") as stream:
        stream.write(draw.randbytes(draw.choice([1, 8, 5000])))
    return f"{file.name} made longer"


def delete(folder, draw, place):
    path = draw.choice(sorted(folder.rglob("*")))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return f"{path.relative_to(folder)} deleted"


def rename(folder, draw, place):
    path = draw.choice(sorted(folder.rglob("*")))
    path.rename(path.with_name(draw.choice(["x", path.name + "~", path.name.upper(), "stage-99", ".hidden"])))
    return f"{path.relative_to(folder)} renamed"


def exchange(folder, draw, place):
    paths = draw.sample([each for each in folder.iterdir() if each.is_dir()], 2)
    if draw.random() < 0.5:
        name = draw.choice(
            sorted({each.name for each in paths[0].iterdir()} & {each.name for each in paths[1].iterdir()})
        )
        paths = [path / name for path in paths]
    spare = folder.parent / "spare"
    paths[0].rename(spare)
    paths[1].rename(paths[0])
    spare.rename(paths[1])
    return f"{paths[0].relative_to(folder)} and {paths[1].relative_to(folder)} exchanged"


def empty(folder, draw, place):
    shutil.rmtree(folder)
    if draw.random() < 0.7:
        folder.mkdir()
    elif draw.random() < 0.5:
        folder.write_text("a file")
    return "folder emptied, removed or made a file"


def other_kind(folder, draw, place):
    path = draw.choice(sorted(folder.rglob("*")))
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"x")
    else:
        path.unlink()
        draw.choice(
            [path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(path), lambda: path.symlink_to("/dev/zero")]
        )()
    return f"{path.relative_to(folder)} is of another kind"


def link(folder, draw, place):
    """A file is a link to one outside, which may or may not hold the same."""
    file = draw.choice(files(folder))
    outside = place / "linked"
    content = bytearray(file.read_bytes())
    if draw.random() < 0.7:
        content[draw.randrange(len(content))] ^= 1
    outside.write_bytes(content)
    file.unlink()
    file.symlink_to(outside)
    return f"{file.relative_to(folder)} is a link"


def foreign(folder, draw, place):
    """Parts of another checkpoint of the same kind."""
    other = place / "other"
    paths = [each.relative_to(folder) for each in folder.rglob("*")]
    path = draw.choice([each for each in paths if (other / each).exists()])
    target = folder / path
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    (shutil.copytree if (other / path).is_dir() else shutil.copy)(other / path, target)
    return f"{path} of another checkpoint"


def added(folder, draw, place):
    path = draw.choice([folder, *[each for each in folder.iterdir() if each.is_dir()]])
    (path / draw.choice(["more", "stage-7", "__9_9.distcp", "state.json~"])).write_bytes(draw.randbytes(20))
    return "a file added"


# -- forgery: as damage, with sizes and sums that are right -----------------------------------------------------------

NASTY = [
    None, True, False, 0, -1, 1, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "", "x", "../../outside/secret",
    "/etc/passwd", [], {}, [[]], {"dict": []}, {"dict": [[1]]}, {"tensor": "x"}, {"bytes": "%%%"}, {"dtype": "save"},
    {"tuple": 5}, {"Size": [10**12]}, {"OrderedDict": [[[], []]]}, {"set": [[]]}, "\ud800", "\0", 2**63, 0.5,
    {"tensor": "module.weight", "dtype": "float64", "shape": [10**6, 10**6], "stride": [1, 1]},
    {"tensor": "a", "dtype": "load", "shape": [1], "stride": [1]},
    {"tensor": "a", "dtype": "float32", "shape": [-1], "stride": [1]},
]  # fmt: skip


def places(tree, path=()):
    """All places in a tree of JSON."""
    yield path
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield from places(value, (*path, key))


def edited(tree, draw):
    """The tree with one place made another."""
    path = draw.choice(list(places(tree)))
    if not path:
        return copy.deepcopy(draw.choice(NASTY)), path
    tree = copy.deepcopy(tree)
    at = tree
    for key in path[:-1]:
        at = at[key]
    how = draw.random()
    if how < 0.15:
        del at[path[-1]]
    elif how < 0.25 and isinstance(at, dict):
        at[draw.choice(["more", "../x", ""])] = at.pop(path[-1])
    elif how < 0.35 and isinstance(at[path[-1]], int | float) and not isinstance(at[path[-1]], bool):
        at[path[-1]] = at[path[-1]] + draw.choice([1, -1, 1000])
    else:
        at[path[-1]] = copy.deepcopy(draw.choice(NASTY))
    return tree, path


def seal(folder, manifest=None):
    """Give a manifest the sums that are right."""
    file = folder / "manifest.json"
    content = json.loads(file.read_bytes()) if manifest is None else manifest
    if isinstance(content, dict) and manifest is None:
        content["stages"] = [
            {each.relative_to(stage).as_posix(): [each.stat().st_size, crc(each.read_bytes())] for each in files(stage)}
            for stage in (folder / f"stage-{s}" for s in range(len(content["stages"])))
        ]
    if isinstance(content, dict):
        content.pop("crc32", None)
        content["crc32"] = crc(json.dumps(content, sort_keys=True).encode())
    file.write_text(json.dumps(content), encoding="utf-8", errors="surrogatepass")


def crc(content):
    return f"{zlib.crc32(content):08x}"


def forged_manifest(folder, draw, place):
    content, path = edited(json.loads((folder / "manifest.json").read_bytes()), draw)
    seal(folder, content)
    return f"manifest {'.'.join(map(str, path))} edited"


def forged_state(folder, draw, place):
    stage = draw.choice([each for each in folder.iterdir() if each.is_dir()])
    content, path = edited(json.loads((stage / "state.json").read_bytes()), draw)
    (stage / "state.json").write_text(json.dumps(content), encoding="utf-8", errors="surrogatepass")
    seal(folder)
    return f"{stage.name} {'.'.join(map(str, path))} edited to something else"


def forged_bytes(folder, draw, place):
    stage = draw.choice([each for each in folder.iterdir() if each.is_dir()])
    what = draw.choice([flip, truncate, extend])(stage, draw, place)
    seal(folder)
    return f"{stage.name}: {what}, sums right"


def pickled(folder, draw, place):
    """Something evil where tensors or their description are."""
    stage = draw.choice([each for each in folder.iterdir() if each.is_dir()])
    file = draw.choice([stage / ".metadata", stage / "__0_0.distcp", stage / "state.json", folder / "manifest.json"])
    evil = Evil(place / "unpickled")
    if draw.random() < 0.5:
        file.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, content := io.BytesIO())
        file.write_bytes(content.getvalue())
    if file.name != "manifest.json":
        seal(folder)
    return f"{file.name} is a pickle that runs code"


def outward(folder, draw, place):
    """A manifest that names a file outside, with its right sum."""
    content = json.loads((folder / "manifest.json").read_bytes())
    secret = place / "outside" / "secret"
    name = draw.choice(
        ["../../outside/secret", str(secret), "../../../" + secret.parent.parent.name + "/outside/secret"]
    )
    content["stages"][0][name] = [secret.stat().st_size, crc(secret.read_bytes())]
    seal(folder, content)
    return f"manifest names {name}"


def deep(folder, draw, place):
    stage = draw.choice([folder / "manifest.json", folder / "stage-0" / "state.json"])
    stage.write_text("[" * 100_000 + "]" * 100_000)
    if stage.name == "state.json":
        seal(folder)
    return f"{stage.name} is 100,000 lists in each other"


def duplicated(folder, draw, place):
    """Tensors of another checkpoint of another width, with sums that are right."""
    path = draw.choice([each for each in folder.iterdir() if each.is_dir()])
    for name in draw.choice([(".metadata", "__0_0.distcp"), (".metadata",), ("state.json",), ("__0_0.distcp",)]):
        shutil.copy(place / "wide" / path.name / name, path / name)
    seal(folder)
    return f"{path.name}: tensors of a wider stage"


DAMAGES = [flip, flip, truncate, extend, delete, rename, exchange, empty, other_kind, link, foreign, added]
FORGERIES = [
    forged_manifest, forged_manifest, forged_state, forged_state, forged_state, forged_bytes, pickled, outward, deep,
    duplicated,
]  # fmt: skip


def attack(seed):
    """One checkpoint, damaged or forged, is loaded."""
    global opened
    draw = random.Random(f"checkpoint {seed}")
    here = Case(draw)
    forging = draw.random() < 0.5
    spoil = draw.choice(FORGERIES if forging else DAMAGES)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as temporary:
        warnings.simplefilter("ignore")
        place = Path(temporary)
        (place / "outside").mkdir()
        (place / "outside" / "secret").write_text("a secret")
        first = here.trainer(1)
        trained(first, here.batches(1, 4))
        folder = place / "run"
        first.save(folder, {"note": "of mine", "numbers": [1, 2.5]})
        shutil.copytree(folder, place / "good")
        trained(first, here.batches(2, 1))
        first.save(place / "other")
        if spoil is duplicated:
            wide = here.trainer(1, width=5)
            trained(wide, here.batches(1, 4))
            wide.save(place / "wide")
        what = spoil(folder, draw, place)
        tried = f"seed {seed}: {here}; {what}"
        loads, twin = here.trainer(2), here.trainer(2)
        for trainer in (loads, twin):
            for x, y in here.batches(3, 2):
                trainer.step(x, y)
            trainer.flush()
        before = tree(place)
        opened = []
        try:
            loads.load(folder)
            loaded = True
        except stretto.UsageError as error:
            if str(folder) not in str(error):
                return Outcome(tried, f"no path in the message: {error}")
            loaded = False
        except Exception:  # noqa: BLE001 (told as a failure)
            return Outcome(tried, f"not a UsageError\n{traceback.format_exc()}")
        finally:
            seen, opened = opened, None
        outside = [name for name in seen if Path(os.path.normpath(name)).is_relative_to(place / "outside")]
        if outside:
            return Outcome(tried, f"files outside were touched: {outside}")
        if (place / "unpickled").exists():
            return Outcome(tried, "code of the checkpoint was run")
        if tree(place) != before:
            return Outcome(tried, f"files changed: {sorted(tree(place).items() ^ before.items())}")
        return judged(tried, here, place, loaded, forging, loads, twin)


def judged(tried, here, place, loaded, forging, loads, twin):
    """Whether training goes on as it should."""
    try:
        after = trained(loads, here.batches(4, 3))
    except Exception:  # noqa: BLE001 (told as a failure)
        return Outcome(tried, f"{'loaded' if loaded else 'refused'}, and then\n{traceback.format_exc()}")
    if not loaded:
        same = equal(after, trained(twin, here.batches(4, 3)))
        return Outcome(tried, None if same else "refused, and training goes on otherwise than before", "refused")
    if forging:
        return Outcome(tried, passed="loaded a forgery that could have been saved")
    twin.load(place / "good")
    same = equal(after, trained(twin, here.batches(4, 3)))
    return Outcome(
        tried, None if same else "loaded without a word, and something else than was saved", "loaded what was saved"
    )


def tree(place):
    """All files and what they hold."""
    return {
        str(path): path.read_bytes() if path.is_file() and path.stat().st_size < 10**7 else None
        for path in place.rglob("*")
        if not (path.is_symlink() and not path.exists())
    }
