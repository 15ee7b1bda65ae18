"""What cannot work is refused by name before anything is trained, and batches are joined or refused."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from tiny_models import Examples, arguments, build

import stretto
from late_imports import Late
from runtime.nursery import Forked
from stretto.errors import UsageError
from stretto.losses import token_cross_entropy

piped, transformers = Late("stretto.transformers"), Late("transformers")
minibatch, model_loss = Late("stretto.transformers.minibatch"), Late("stretto.transformers.model_loss")


def trainer(folder, kind="llama", given=None, method="1f1b", stages=2, **options):
    return piped.StrettoTrainer(
        build(kind), arguments(folder, **options), train_dataset=Examples(kind), method=method, stages=stages,
        **(given or {}),
    )  # fmt: skip


ARGUMENTS = [
    ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed=", "pipeline and optimizers of its own"),
    ({"torch_compile": True}, "torch_compile=True", "compile the stages"),
    ({"gradient_checkpointing": True}, "(activation|gradient)_checkpointing=True", r"1f1b\(recompute=True\)"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True", "no labels"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0", "differ from process"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True", "per_device_train_batch_size"),
    ({"bf16_full_eval": True}, "bf16_full_eval=True", "as training does"),
    ({"save_on_each_node": True}, "save_on_each_node=True", "written once"),
    ({"ddp_find_unused_parameters": False}, "ddp_find_unused_parameters=False", "no DistributedDataParallel"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "reduce_lr_on_plateau", "a metric"),
    ({"optim": "lomo"}, "optim='lomo'", "in hooks"),
    ({"optim": "schedule_free_adamw"}, "schedule_free_adamw", "more than once a step"),
]


@pytest.mark.parametrize(
    ("options", "name", "why"), ARGUMENTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_arguments_that_cannot_work_are_named(options, name, why, tmp_path):
    kept = {key: value for key, value in options.items() if key != "deepspeed"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
        args = arguments(tmp_path, **kept)
    args.deepspeed = options.get("deepspeed")  # which is not installed
    with pytest.raises(UsageError, match=f"{name}.*{why}"):
        piped.StrettoTrainer(build("llama"), args, train_dataset=Examples("llama"), stages=2)


def test_float16_is_refused_with_the_reason(tmp_path):
    args = arguments(tmp_path)
    args.fp16 = True
    with pytest.raises(UsageError, match=r"there is no float16.*bf16"):
        piped.StrettoTrainer(build("llama"), args, train_dataset=Examples("llama"), stages=2)


def test_unknown_and_double_arguments_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"clip=\.\.\.\) is set by TrainingArguments\(max_grad_norm"):
        trainer(tmp_path, given={"clip": 1.0})
    with pytest.raises(UsageError, match=r"no argument 'meth0d'.*'method'"):
        trainer(tmp_path, given={"meth0d": 1.0})


def test_methods_that_are_never_called_may_not_be_overridden(tmp_path):
    class Own(piped.StrettoTrainer):
        def compute_loss(self, *args, **given):
            raise AssertionError

    with pytest.raises(UsageError, match=r"Own\.compute_loss is overridden.*compute_loss_func"):
        Own(build("llama"), arguments(tmp_path), train_dataset=Examples("llama"), stages=2)


class Odd(torch.nn.Module):
    """A model of the user's whose loss is none of the known ones."""

    def __init__(self, kind="loss"):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.kind = kind

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x).tanh()
        if self.kind == "tuple":
            return (x,)
        loss = None if labels is None or self.kind == "none" else (x - labels).abs().mean()
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=x)


def numbers():
    return [{"x": torch.randn(4), "labels": torch.randn(4)} for _ in range(8)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("loss", "Odd computes a loss inside its forward, .* that is none that stages know .* compute_loss_func"),
        ("none", "Odd returned no loss for the labels labels: give compute_loss_func"),
        ("tuple", "Odd returns a tuple: StrettoTrainer needs its outputs by name"),
    ],
)
def test_losses_that_are_not_known(kind, message, tmp_path):
    own = piped.StrettoTrainer(Odd(kind), arguments(tmp_path), train_dataset=numbers(), stages=2)
    with pytest.raises(UsageError, match=message):
        own.train()


def test_an_output_layer_of_zeros_hides_no_loss():
    """Each class would have the same logit, and the loss of each token that of the next one."""
    model, ids = build("bert"), torch.arange(3, 23).view(2, 10)
    layer = model.get_output_embeddings()
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight))
    found = model_loss.own_loss(model, {"input_ids": ids}, {"labels": ids}, shifts=False, takes_count=False)
    assert found is token_cross_entropy
    assert not layer.weight.count_nonzero()
    config = transformers.BertConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    tagger = transformers.BertForTokenClassification(config)
    tagger.classifier.weight.data.zero_()
    with pytest.raises(UsageError, match="BertForTokenClassification gives every class the same logit"):
        model_loss.own_loss(tagger, {"input_ids": ids}, {"labels": ids % 2}, shifts=False, takes_count=False)


def test_a_loss_that_does_not_divide_by_the_count(tmp_path):
    def mean(outputs, labels, num_items_in_batch=None):
        return (outputs.logits - labels).abs().mean()

    own = piped.StrettoTrainer(Odd(), arguments(tmp_path), train_dataset=numbers(), stages=2, compute_loss_func=mean)
    with pytest.raises(UsageError, match="does not divide by num_items_in_batch"):
        own.train()


class Changing(torch.nn.Module):
    """A model whose loss is that of classes, but for one habit."""

    def __init__(self, habit):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.habit = habit

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x).tanh()
        loss = None
        if labels is not None:
            smoothed = 0.1 if self.habit == "smoothed in training" and self.training else 0.0
            loss = torch.nn.functional.cross_entropy(x, labels, label_smoothing=smoothed)
            if self.habit == "divides by all":
                loss = loss * (labels != -100).sum() / len(labels)
            if self.habit == "weighs a class":
                loss = loss * (2 if bool((labels == 3).any()) else 1)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=x)


def classes(first, later, number=32):
    return [{"x": torch.randn(4), "labels": (first if index < 24 else later)[index % 4]} for index in range(number)]


@pytest.mark.parametrize(
    ("habit", "labels", "steps"),
    [
        ("smoothed in training", ([0, 1, 2, 0], [0, 1, 2, 0]), 0),
        ("divides by all", ([0, 1, 2, -100], [0, 1, 2, 0]), 0),
        ("divides by all", ([0, 1, 2, 0], [0, 1, 2, -100]), 6),
        ("weighs a class", ([3, 1, 2, 0], [0, 1, 2, 0]), 0),
        (None, ([0, 1, 2, 0], [0, 1, 2, -100]), None),
    ],
)
def test_a_models_own_loss_is_replaced_only_where_it_is_the_same_in_training(habit, labels, steps, tmp_path):
    torch.manual_seed(0)
    model = Changing(habit)
    before = [each.clone() for each in model.parameters()]
    own = piped.StrettoTrainer(
        model, arguments(tmp_path, max_steps=8, train_sampling_strategy="sequential"), train_dataset=classes(*labels),
        stages=2, method="1f1b(microbatches=1)",
    )  # fmt: skip
    if steps is None:
        own.train()
        return
    with pytest.raises(UsageError, match=r"Changing computes a loss .* (in training mode|none that stages know)"):
        own.train()
    assert own.state.global_step == steps
    assert steps or all(map(torch.equal, before, model.parameters()))


def test_labels_are_needed(tmp_path):
    own = piped.StrettoTrainer(Odd(), arguments(tmp_path), train_dataset=[{"x": torch.randn(4)}] * 8, stages=2)
    with pytest.raises(UsageError, match="no labels"):
        own.train()


def test_a_last_minibatch_that_is_too_small(tmp_path):
    few = {"train_dataset": Examples("llama", 10)}
    with pytest.raises(UsageError, match=r"last minibatch of an epoch has 2 examples, .* 4 parts.*drop_last=True"):
        piped.StrettoTrainer(build("llama"), arguments(tmp_path), **few, stages=2).train()
    with pytest.raises(UsageError, match=r"a minibatch has 3 examples, .* 4 parts.*larger per_device_train_batch_size"):
        piped.StrettoTrainer(
            build("llama"), arguments(tmp_path, per_device_train_batch_size=3), **few, stages=2
        ).train()
    piped.StrettoTrainer(build("llama"), arguments(tmp_path, dataloader_drop_last=True), **few, stages=2).train()
    piped.StrettoTrainer(build("llama"), arguments(tmp_path, max_steps=2), **few, stages=2).train()


def test_prompts_are_no_adapters_inside_layers(tmp_path):
    from peft import PromptTuningConfig

    model = build("llama")
    model.peft_config = {"default": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}
    with pytest.raises(UsageError, match="changes the model's inputs before its first stage: use LoRA"):
        piped.StrettoTrainer(model, arguments(tmp_path), stages=2)


def test_schedulers_of_a_whole_optimizer(tmp_path):
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))}
    with pytest.raises(UsageError, match=r"StepLR.*cannot be made again for each stage"):
        piped.StrettoTrainer(model, arguments(tmp_path), train_dataset=Examples("llama"), stages=2, **given)


def test_without_the_packages_the_pip_line_is_told():
    code = (
        "import sys\nfrom stretto.options import extras\n"
        "find = extras.find_spec\n"
        "extras.find_spec = lambda name: None if name in ('transformers', 'accelerate') else find(name)\n"
        "try:\n    import stretto.transformers\nexcept Exception as error:\n    print(error)\n"
        "import stretto.trainer.trainer\n"
        "print(*map(sys.modules.get, ('transformers', 'accelerate')))"
    )
    message, modules = Forked([sys.executable, "-c", code], dict(os.environ)).communicate(60)[0].splitlines()
    lacks = "stretto.transformers needs transformers and accelerate, which a plain installation lacks: "
    assert message == lacks + 'pip install "stretto[transformers]"'
    assert modules == "None None"


def test_old_versions_are_told(tmp_path):
    information = tmp_path / "transformers-5.3.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.3.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import stretto.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs transformers 5.12 or newer, and 5.3.0 is installed: pip install --upgrade" in done.stderr


def test_batches_are_padded_to_one_length():
    long = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.ones(1, 3),
        "labels": torch.tensor([[5, 6, 7]]),
    }
    short = {name: value[:, :2] for name, value in long.items()}
    right = minibatch.joined([long, short], minibatch.Padding(token=9))
    assert right["input_ids"].tolist() == [[5, 6, 7], [5, 6, 9]]
    assert right["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert right["labels"].tolist() == [[5, 6, 7], [5, 6, -100]]
    left = minibatch.joined([long, short], minibatch.Padding(left=True))
    assert left["input_ids"].tolist() == [[5, 6, 7], [0, 5, 6]]
    assert left["labels"].tolist() == [[5, 6, 7], [-100, 5, 6]]
    fixed = minibatch.joined([short], minibatch.Padding(lengths={"input_ids": 4, "attention_mask": 4}))
    assert (fixed["input_ids"].shape, fixed["labels"].shape) == ((1, 4), (1, 2))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([{"input_ids": torch.ones(1, 3)}, {"input_ids": torch.ones(1, 2)}], "lengths 3, 2 .* no attention_mask"),
        ([{"odd": torch.ones(1, 3)}, {"odd": torch.ones(1, 2)}], "nothing says how to pad it"),
        ([{"odd": torch.ones(1, 3)}, {"odd": torch.ones(1, 3, 2)}], r"\[1, 3\], \[1, 3, 2\] .* cannot be joined"),
        ([{"one": torch.ones(1)}, {"other": torch.ones(1)}], "different inputs, one and other"),
    ],
)
def test_batches_that_cannot_be_joined(batches, message):
    with pytest.raises(UsageError, match=message):
        minibatch.joined(batches, minibatch.Padding())


def test_longer_batches_than_an_exported_graph_takes():
    with pytest.raises(UsageError, match=r"input_ids has length 5, but .* for length 4.*max_length"):
        minibatch.joined([{"input_ids": torch.ones(2, 5)}], minibatch.Padding(lengths={"input_ids": 4}))


def test_what_is_no_tensor_of_examples():
    with pytest.raises(UsageError, match="'longest', a int"):
        minibatch.tensors_of({"input_ids": torch.ones(2, 3), "longest": 3})
    with pytest.raises(UsageError, match="'longest', a single number"):
        minibatch.tensors_of({"input_ids": torch.ones(2, 3), "longest": torch.tensor(3)})


@pytest.mark.slow
def test_ragged_batches_train_as_in_transformers(tmp_path):
    """Each batch has a length of its own, as dynamic padding gives; a left-padding tokenizer would pad on the left."""
    data = [dict(Examples("llama")[index]) for index in range(16)]

    def collate(rows):
        end = max(int(row["attention_mask"].sum()) for row in rows)
        return {name: torch.stack([row[name] for row in rows])[:, :end] for name in rows[0]}

    data.sort(key=lambda row: int(row["attention_mask"].sum()))
    options = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential", "max_steps": 2}
    given = {"train_dataset": data, "data_collator": collate}
    theirs = transformers.Trainer(build("llama"), arguments(tmp_path, **options), **given)
    ours = piped.StrettoTrainer(build("llama"), arguments(tmp_path, **options), **given, method="1f1b", stages=2)
    theirs.train()
    ours.train()
    assert ours.pipeline.settings.method.options["microbatches"] == 2  # as many as batches of a step
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (theirs, ours)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_options_of_stretto_reach_it(tmp_path):
    ours = trainer(tmp_path, method=stretto.method("gpipe", microbatches=2), given={"timeout": 50, "seed": 7})
    ours.train()
    assert ours.pipeline.trainer.seed == 7
    assert str(ours.pipeline.trainer.method) == "gpipe(microbatches=2)"
