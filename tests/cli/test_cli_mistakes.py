"""A user's mistake: one line on stderr that says what, where and what to do, nothing on stdout, status 2."""

from pathlib import Path

import pytest

from stretto.cli import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(capsys, *words):
    assert main([*words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stretto: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


MISTAKES = {
    "comapre": 'Did you mean "compare"',
    "compare --stpes 3": "Did you mean --steps?",
    "plan --clustr cluster.toml": "unknown option --clustr: did you mean '--cluster'?",  # not a key of that file
    "compare --steps 3.5": "Invalid value for --steps: '3.5' is no whole number",
    "compare --steps x --json": "'x' is no whole number",
    "compare --steps -1": "steps=-1: choose a whole number of at least 1",
    "compare --steps": "requires an argument",
    "compare --lr 0": "lr=0.0: choose a positive number",
    "compare --lr 0.1,x": "Invalid value for --lr: 'x' is no number",
    "compare --lr -0.1": "lr=-0.1",
    "compare --lr": "lr is empty",
    "compare --batch-size 16.5": "'16.5' is no whole number",
    "compare --batch-size 8 8": "batch_size lists 8 twice",
    "compare --seeds 0": "seeds=0",
    "compare --jobs 0": "jobs=0",
    "compare --jobs 1.5": "'1.5' is no whole number",
    "compare --momentum x": "Invalid value for --momentum: 'x' is no number",
    "compare --stages 99": "stages=99, but mlp has 8 blocks: use at most 8 stages",
    "compare --workers 9": "workers=9 for 8 stages: use at most 8 workers",
    "compare --model mpl --json": "unknown model 'mpl': did you mean 'mlp'",
    "train --model decoder": "model 'decoder' has no data: stretto plan plans for it",
    "train --model vgg --model-options.side 64": "the data set says what side would: leave it out",
    "doctor --model gpt3-small": "model 'gpt3-small' has no data",
    "compare --model transformer --data digits": "take one of: mlp, cnn",
    "compare --model-options 3": "write --model-options.NAME VALUE",
    "compare --model-options.widht 3": "did you mean 'width'",
    "compare --model-options.width x": "width='x' must be a whole number",
    "compare --methods gredy": "did you mean 'greedy'",
    "compare --methods chunked(chunks=x)": "chunked(chunks='x'): a whole number of at least 1",
    "compare --methods chunked(chunks=9)": "chunked(chunks=9) on 8 stages: use at most 8 chunks",
    "compare --methods chunked(chunks=": "write it as NAME or NAME(option=value, ...)",
    "compare --methods overlapping(dely=1)": "did you mean 'delay'",
    "compare --methods": "methods is empty",
    "compare --accounting papr": "did you mean 'paper'",
    "compare --precision fp8": "unknown precision 'fp8'",
    "train --precision fp16": "precision='fp16': there is no float16",
    "compare --precision bf16-autocast --methods gpipe,pb": "method pb cannot train under precision='bf16-autocast'",
    "compare nothere.toml": "no configuration file nothere.toml",
    "compare nothere": "no configuration file nothere",
    "compare a.toml b.toml": "2 configuration files (a.toml, b.toml): give one",
    "compare .": "cannot read the configuration file .: Is a directory",
    "compare --out": "requires an argument",
    "compare --storage redis://here": "storage='redis://here': give journal:PATH",
    "compare --size small": "size='small' is one of a study file",
    "train --methods greedy": "Did you mean --method?",
    "train --lr 1,2": "'1,2' is no number",
    "train --seed 1.5": "'1.5' is no whole number",
    "train --device nonsense": "device 'nonsense' cannot be used here: ",
    "train --device meta --json": "device 'meta' holds shapes and no numbers: choose 'auto', or one such as 'cpu'",
    "compare --device nonsense": "device 'nonsense' cannot be used here: ",
    "train --threads 0": "threads=0: choose a whole number from 1 to 1024",
    "compare --threads 1.5": "'1.5' is no whole number",
    "train --method spectrain --optimizer adamw": "take optimizer sgd with momentum 0.9, or a prediction",
    "train --data none.py": "data set 'none.py' is a file: name a function in it, none.py:FUNCTION",
    "plan": "cluster is missing: stretto calibrate measures this machine into cluster.toml, then",
    "train --method gredy --dry-run": "did you mean 'greedy'",
    "train --batch-size 3000 --dry-run": "batch_size=3000, but digits has 1083",
    "show": "a method, a plan or a file",
    "show x.toml": "x.toml is a file: show --plan FILE draws a plan's",
    "show greedy --stages 0": "stages=0: choose a whole number from 1 to",
    "show greedy --stages 9999": "stages=9999",
    "show greedy --stages 2.5": "'2.5' is no whole number",
    "show greedy --microbatches 0": "microbatches=0",
    "show greedy --workers 9 --json": "workers=9 for 4 stages: choose between 1 and 4",
    "show chunked(chunks=9)": "on 4 stages: use at most 4 chunks",
    "show greedy --svg /proc/x.svg": "cannot write to /proc/x.svg",
    "show 1f1b --stages 128 --microbatches 65": "microbatches=65 on 128 stages: choose at most 64",
    "simulate": "method is missing: give one, or --overlay",
    "simulate --overlay nowhere": "no run in nowhere",
    "simulate --overlay nowhere --method pb": "give one of both",
    "simulate --method pb --cluster 8-a100": "cluster=8-a100 without a network: give --model, too",
    "simulate --method pb --model mlp --cluster 8-a100 --latency 1": "latency=1 beside cluster=8-a100",
    "simulate --method pb --model mlp --cluster 9-a100": "no cluster '9-a100'",
    "simulate --method gredy": "did you mean 'greedy'",
    "simulate --method greedy --stages 0": "stages=0: choose a whole number from 1 to",
    "simulate --method greedy --microbatches 9999": "microbatches=9999: choose a whole number from 1 to",
    "simulate --method greedy --workers 5": "workers=5 for 4 stages",
    "simulate --method interleaved --stages 4 --microbatches 5 --forward 1,2": "microbatches=5 on num_workers=2",
    "simulate --method pb --forward 1,2": "forward has 2 times for 4 stages: give one for all, or 4",
    "simulate --method pb --forward x": "Invalid value for --forward: 'x' is no number",
    "simulate --method pb --backward -1": "backward=-1: a time is 0 or more",
    "simulate --method pb --latency -1 --json": "latency=-1: a time is 0 or more",
    "simulate --method pb --latency inf": "latency=inf",
    "simulate --method zb-h1 --weight-gradient 3": "is more than the whole backward of stage 0, 2",
    "simulate --method pb --svg /proc/x.svg": "cannot write to /proc/x.svg",
    "report": "FOLDER requires an argument",
    "report nowhere --json": "nothing to report in nowhere",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_one_clear_message(capsys, words):
    assert MISTAKES[words] in refused(capsys, *words.split())


@pytest.mark.parametrize("verb", ["compare", "train", "plan"])
def test_a_plan_and_a_cluster_are_no_settings(capsys, verb):
    Path("plan.toml").write_text("cluster = 'c'\n[plan]\nmethod = 'pb'\n[predicted]\nby = 'simulation'\n")
    assert (
        f"stretto {verb} takes a file of its own options there: stretto train --plan plan.toml trains the "
        in refused(capsys, verb, "plan.toml")
    )
    Path("cluster.toml").write_text("name = 'here'\n[links.loop]\nbandwidth = 1.0\n")
    assert "is a cluster: stretto plan --cluster cluster.toml plans for it" in refused(capsys, verb, "cluster.toml")


FILES = {
    "stpes = 3": "s.toml: unknown key 'stpes': did you mean 'steps'? Choose from accounting, ",
    "[model_option]\nwidth = 3": "s.toml: unknown key 'model_option': did you mean 'model_options'",
    "[model_options]\nwidht = 3": "did you mean 'width'? Choose from depth, width (with the settings in s.toml)",
    "[model_options]\nwidth = 'a'": "width='a' must be a whole number of at least 1 (with the settings in s.toml)",
    "[model_options]\nwidth = [1, 2]": "only numbers, texts, true and false belong here",
    "[compare]\nsteps = 3": "s.toml: unknown key 'compare'",
    "model_options = 3": "s.toml: model_options = 3: write [model_options] and its options below",
    "model = {a = 1}": "write model = value",
    "model = ['mlp']": "one value, no list, belongs here",
    "steps = 'many'": "Invalid value for steps in s.toml: 'many' is no whole number",
    "steps = 3.5": "'3.5' is no whole number",
    "steps = true": "'True' is no whole number",
    "steps = [1, 2]": "one value, no list",
    "steps = -3": "steps=-3: choose a whole number of at least 1 (with the settings in s.toml)",
    "lr = [0.1, 'x']": "Invalid value for lr in s.toml: 'x' is no number",
    "lr = [[0.1]]": "only numbers, texts",
    "lr = []": "s.toml: lr = []: give at least one value, or leave lr out",
    "lr = [nan]": "lr=nan: choose a positive number",
    "methods = []": "give at least one value",
    "methods = [1]": "unknown method '1'",
    "steps = = 3": "s.toml is no TOML file: Invalid value (at line 1, column 9)",
}


@pytest.mark.parametrize("text", FILES)
def test_mistakes_in_a_file_name_the_file(capsys, tmp_path, text):
    (tmp_path / "s.toml").write_text(text)
    message = refused(capsys, "compare", "s.toml", "--json")
    assert FILES[text] in message
    assert "s.toml" in message


def test_a_file_that_is_no_text(capsys, tmp_path):
    (tmp_path / "s.toml").write_bytes(b"\xff\xfe")
    assert "s.toml is no TOML file" in refused(capsys, "compare", "s.toml")


def test_out_that_cannot_be(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write to file: file is a file" in refused(capsys, "compare", "--out", "file")
    assert "file/x" in refused(capsys, "compare", "--out", "file/x")
    assert "is not empty and holds no study" in refused(capsys, "compare", "--out", ".")
    assert "cannot write to file: file is a file" in refused(capsys, "train", "--out", "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
