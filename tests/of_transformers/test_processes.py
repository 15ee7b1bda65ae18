"""Two processes: the numbers of one, whatever the process; killed and resumed to the bit; folders that others read."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_processes import RUNS, do_all, train, trainer_of
from tiny_models import Examples, arguments, build

from late_imports import Late
from pairwise import slow_where
from runtime.processes import ended, free_port, launch, start
from stretto.errors import UsageError

transformers = Late("transformers")

HERE = Path(__file__).parent
PATH = {
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
}
KINDS = {"1f1b": "LlamaForCausalLM", "pb": "GPT2LMHeadModel"}
QUICK = ("1f1b", "stopped", "refused")
slowly = functools.partial(slow_where, lambda name: name not in QUICK)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Of a name, the folder of its run on one process, and what that came to."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def of(name):
        return folder / name, do_all([name], folder)[name]

    return of


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Of a name, the folder of its run, and what each of two processes returned, which do what is quick or the rest."""
    folder = tmp_path_factory.mktemp("together")

    @functools.cache
    def job(names):
        return launch(1, "on_processes:do_all_on", 2, names, folder, extra=PATH, timeout=200)[0]

    def of(name):
        names = QUICK if name in QUICK else tuple(run for run in RUNS if run not in QUICK)
        return folder / name, [told[name] for told in job(names)]

    return of


@pytest.mark.parametrize("name", slowly(RUNS))
def test_processes_equal_emulation_to_the_bit(name, alone, together):
    one, (first, second) = alone(name)[1], together(name)[1]
    assert first == one
    assert second == {**one, "shape": None}  # predictions are on rank 0


def test_what_one_process_wants_all_do(together):
    assert together("stopped")[1] == [3, 3]


def test_other_data_on_another_process_are_refused(together):
    for message in together("refused")[1]:
        assert message.startswith("rank 1 is given another batch than rank 0: x of step 1 is ")


def test_only_rank_0_writes(together):
    files = {path.name for path in (together("1f1b")[0] / "checkpoint-6").iterdir()}
    assert files == {
        "config.json", "generation_config.json", "model.safetensors", "rng_state.pth", "scheduler.pt", "stretto",
        "trainer_state.json", "training_args.bin",
    }  # fmt: skip


@pytest.mark.parametrize("name", slowly(KINDS))
def test_saved_models_are_whole(name, together, alone):
    kind = getattr(transformers, KINDS[name])
    loaded, expected = (kind.from_pretrained(of(name)[0] / "model") for of in (together, alone))
    assert all(map(torch.equal, loaded.parameters(), expected.parameters()))
    fresh = build(RUNS[name][0])
    assert not any(map(torch.equal, loaded.parameters(), fresh.parameters()))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
@pytest.mark.parametrize("processes", slow_where(lambda processes: processes == "two", ["one", "two"]))
def test_adapters_are_saved_alone(processes, together, alone, tmp_path):
    from peft import PeftModel

    folder = {"one": alone, "two": together}[processes]("adapters")[0] / "model"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    loaded = PeftModel.from_pretrained(build("llama"), folder)
    weights = {name: p for name, p in loaded.named_parameters() if "lora" in name}
    ours = trainer_of("adapters", tmp_path).model.state_dict()
    assert weights.keys() <= ours.keys()
    assert not any(torch.equal(p, ours[name]) for name, p in weights.items())


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("pb", "1f1b")])
def test_killed_on_two_processes_and_resumed_on_one(name, alone, tmp_path):
    """kill -9 after step 5: the other process ends, too; checkpoint-4 goes on to the numbers of an undisturbed run."""
    expected, resumed = alone(name)[1], train_after_a_kill(name, tmp_path)
    assert resumed["logs"][:-1] == expected["logs"][:-1]  # the last one sums up the steps since it went on
    assert resumed["weights"] == expected["weights"]


def train_after_a_kill(name, folder):
    train_killed(name, folder)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]
    (folder / "checkpoint-5").mkdir()  # one that was cut short
    (folder / "checkpoint-5" / "trainer_state.json").write_text("{")
    return train(name, folder, resume=True)


def train_killed(name, folder):
    call = f"train({name!r}, Path({str(folder)!r}), killed=(5, 1))"
    code = f"from pathlib import Path; from on_processes import train; {call}"
    processes = start(2, [sys.executable, "-c", code], extra=PATH)
    statuses, said = ended(processes, 120)
    assert statuses[1] == -9, said[1][-2000:]
    assert statuses[0] != 0


def test_a_checkpoint_of_transformers_own_is_refused(tmp_path):
    theirs = transformers.Trainer(
        build("llama"), arguments(tmp_path, max_steps=1, save_strategy="steps"), train_dataset=Examples("llama")
    )  # saves at its end
    theirs.train()
    with pytest.raises(UsageError, match="written by transformers' own Trainer"):
        trainer_of("1f1b", tmp_path).train(resume_from_checkpoint=True)


def test_without_a_whole_checkpoint_nothing_is_resumed(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(UsageError, match=r"no whole checkpoint \(1 of them were cut short"):
        trainer_of("1f1b", tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_weights_alone_can_be_resumed_too(tmp_path):
    first = trainer_of("1f1b", tmp_path, save_only_model=True, max_steps=4)
    first.train()
    again = trainer_of("1f1b", tmp_path, save_only_model=True, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))


@pytest.mark.slow
def test_started_by_slurm(alone, tmp_path):
    """srun sets variables of its own, of which accelerate sees one process; ours sees two."""
    place = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")} | PATH
    place |= {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    call = f"train('1f1b', Path({str(tmp_path)!r}))"
    code = f"from pathlib import Path; from on_processes import train; print({call}['weights'])"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
            env={**place, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "OMP_NUM_THREADS": "1"},
        )
        for rank in "01"
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [text.splitlines()[-1] for text in said] == [alone("1f1b")[1]["weights"]] * 2
