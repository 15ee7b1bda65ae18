"""StrettoTrainer against transformers' own Trainer, within 1e-6, and against stretto.Trainer, to the bit."""

import math

import pytest
import torch
from tiny_models import LENGTH, MODELS, SLOW, Examples, arguments, build

import stretto
from late_imports import Late
from pairwise import slow_where
from stretto.methods import table

piped, transformers = Late("stretto.transformers"), Late("transformers")
CLOCKS = ("runtime", "per_second", "preparation_time")
ACCUMULATED = ("gpt2", "llama", "vit")  # kinds whose loss transformers counts over all batches of a step


def history(trainer):
    """The logs without what the clock says."""
    return [{k: v for k, v in entry.items() if not k.endswith(CLOCKS)} for entry in trainer.state.log_history]


def trained(trainer):
    trainer.train()
    return trainer


def both(kind, folder, method="1f1b(microbatches=2)", data=None, given=None, **options):
    """transformers' own Trainer and ours, on the same model and data, after training."""
    data, given = data or {"train_dataset": Examples(kind)}, given or {}
    theirs = trained(transformers.Trainer(build(kind), arguments(folder, **options), **data, **given))
    ours = piped.StrettoTrainer(build(kind), arguments(folder, **options), **data, **given, method=method, stages=2)
    return theirs, trained(ours)


def assert_close(theirs, ours, tolerance=1e-6):
    """Norms of gradients are sums of many squares, and some processors round them further apart."""
    assert len(history(theirs)) == len(history(ours))
    for one, other in zip(history(theirs), history(ours), strict=True):
        assert list(one) == list(other)
        norm, norm_of_other = (entry.get("grad_norm", 0.0) for entry in (one, other))
        assert norm_of_other == pytest.approx(norm, rel=5 * tolerance)
        assert other == pytest.approx(
            {**one, "grad_norm": norm_of_other} if norm else one, rel=tolerance, abs=tolerance
        )
    for (name, one), other in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", slow_where(SLOW.__contains__, MODELS))
def test_losses_norms_rates_and_weights_are_those_of_transformers(kind, tmp_path):
    more = {"gradient_accumulation_steps": 2, "max_steps": 3} if kind in ACCUMULATED else {}
    theirs, ours = both(kind, tmp_path, eval_strategy="steps", eval_steps=2, **more, data={
        "train_dataset": Examples(kind), "eval_dataset": Examples(kind, 10, seed=7),
    })  # fmt: skip
    assert_close(theirs, ours)
    assert [entry["step"] for entry in history(ours) if "loss" in entry] == list(range(1, ours.state.max_steps + 1))
    before = build(kind)
    moved = [not torch.equal(p, q) for p, q in zip(before.parameters(), ours.model.parameters(), strict=True)]
    assert moved == [p.requires_grad for p in before.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        {"max_grad_norm": 0.0, "optim": "adafactor", "lr_scheduler_type": "linear"},
        pytest.param(
            {"num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 4, "logging_steps": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"optim": "sgd", "optim_args": "momentum=0.9", "dataloader_drop_last": True,
             "per_device_train_batch_size": 5}, marks=pytest.mark.slow,
        ),
        pytest.param(
            {"train_sampling_strategy": "group_by_length", "data_seed": 3,
             "include_num_input_tokens_seen": "non_padding"}, marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_training_arguments_mean_what_they_mean_there(options, tmp_path):
    assert_close(*both("llama", tmp_path, **options))


def mean_of_squares(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return ((1 - logits) ** 2 * (labels[:, 1:] != -100)).sum() / num_items_in_batch


def test_a_loss_of_the_users_own(tmp_path):
    assert_close(*both("llama", tmp_path, given={"compute_loss_func": mean_of_squares}, gradient_accumulation_steps=2))


def batches_of(kind, folder, **options):
    """The batches in the order in which transformers reads them."""
    reader = transformers.Trainer(build(kind), arguments(folder, **options), train_dataset=Examples(kind))
    loader, epoch = reader.get_train_dataloader(), 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def over_all_labels(logits, labels):
    """As transformers counts for GPT-2: the first label of each text, which is no target, too."""
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def by_hand(kind, loss, folder, method, steps, **options):
    """Losses and weights of stretto.Trainer."""
    args, model = arguments(folder), build(kind, **options)
    inputs = {name: torch.ones(2, LENGTH, dtype=torch.long) for name in ("input_ids", "attention_mask")}

    def adamw(params):
        groups = [{"params": [p for p in params if (p.dim() > 1) == decays]} for decays in (True, False)]
        return torch.optim.AdamW(
            [{**group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)],
            lr=args.learning_rate, eps=args.adam_epsilon, fused=True,
        )  # fmt: skip

    trainer = stretto.Trainer(
        stretto.split(model, 2, example=inputs), loss, adamw, method, example=inputs, clip=0.5, seed=args.seed,
        scheduler=lambda optimizer: transformers.get_scheduler("cosine", optimizer, 2, steps),
    )  # fmt: skip
    reader, losses = batches_of(kind, folder), []
    for _ in range(steps):
        batch = dict(next(reader))
        losses.append(trainer.step({name: batch[name] for name in inputs}, batch["labels"]))
    losses += trainer.flush()
    return [loss for loss in losses if loss is not None], model


OF_ADAMW = [name for name in table.METHODS if name not in ("nesterov", "pipeoptim", "pb-lwp", "spectrain")]
METHODS = ["1f1b", "pb"]
METHODS += [
    pytest.param(method, marks=pytest.mark.slow)
    for method in ("zb-h1(microbatches=2)", "pipedream-2bw(microbatches=2)", *OF_ADAMW)
    if method not in METHODS
]


@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_of_stretto_to_the_bit(method, tmp_path):
    losses, model = by_hand("gpt2", over_all_labels, tmp_path, method, 7, dropout=0.1)
    ours = piped.StrettoTrainer(
        build("gpt2", dropout=0.1), arguments(tmp_path, max_steps=7), train_dataset=Examples("gpt2"), method=method,
        stages=2,
    )  # fmt: skip
    ours.train()
    assert [entry["loss"] for entry in history(ours) if "loss" in entry] == losses
    assert all(map(torch.equal, model.state_dict().values(), ours.model.state_dict().values()))


def test_replicas_divide_each_minibatch(tmp_path):
    theirs, _ = both("llama", tmp_path)
    ours = piped.StrettoTrainer(
        build("llama"), arguments(tmp_path), train_dataset=Examples("llama"), method="1f1b(microbatches=2)", stages=2,
        mesh=stretto.Mesh(data=2),
    )  # fmt: skip
    assert_close(theirs, trained(ours))


def test_bf16_is_autocast(tmp_path):
    theirs, ours = both("llama", tmp_path, bf16=True)
    for one, other in zip(history(theirs), history(ours), strict=True):
        assert other == pytest.approx(one, rel=0.02, abs=0.02)
    assert ours.pipeline.trainer.precision.name == "bf16-autocast"
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_second_training_goes_on_with_the_optimizers_state(tmp_path):
    theirs, ours = both("llama", tmp_path)
    assert_close(trained(theirs), trained(ours))


def test_predictions_and_metrics(tmp_path):
    def metrics(of):
        hits = (of.predictions == of.label_ids) & (of.label_ids != -100)
        return {"hits": float(hits.sum()), "texts": len(of.inputs), "mean": float(of.losses.mean())}

    given = {"compute_metrics": metrics, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    options = {"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1}
    theirs, ours = both("bert", tmp_path, given=given, **options)
    data = Examples("bert", 10, seed=7)
    one, other = (trainer.predict(data) for trainer in (theirs, ours))
    assert (one.predictions == other.predictions).all()
    assert (one.label_ids == other.label_ids).all()
    assert {k: v for k, v in other.metrics.items() if not k.endswith(CLOCKS)} == pytest.approx(
        {k: v for k, v in one.metrics.items() if not k.endswith(CLOCKS)}, rel=1e-6
    )


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param("gpt2", "pb", marks=pytest.mark.slow),
        ("gpt2", "async"),  # of which nothing is known without an optimizer
        ("gpt2", "local"),
        ("gpt2", "spectrain"),  # built on SGD with momentum
        pytest.param("t5", "pb", marks=pytest.mark.slow),
    ],
)
def test_evaluation_without_training(kind, method, tmp_path):
    data = Examples(kind, 6, seed=7)
    theirs = transformers.Trainer(build(kind), arguments(tmp_path))
    ours = piped.StrettoTrainer(build(kind), arguments(tmp_path), method=method, stages=2)
    assert ours.evaluate(data)["eval_loss"] == pytest.approx(theirs.evaluate(data)["eval_loss"], rel=1e-6)
    one, other = theirs.predict(data), ours.predict(data)
    predictions = [each.predictions if kind == "t5" else [each.predictions] for each in (other, one)]
    for logits, expected in zip(*predictions, strict=True):  # t5 also returns what its encoder made
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(expected), rtol=0, atol=1e-5)
    assert math.isfinite(other.metrics["test_loss"])


class Stream(torch.utils.data.IterableDataset):
    """Examples one after the other."""

    def __iter__(self):
        return iter(Examples("llama"))


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["stream", "workers", "optimizers", "model_init"])
def test_what_else_a_trainer_is_given(given, tmp_path):
    results, options = [], {"dataloader_num_workers": 1} if given == "workers" else {}
    for make, own in (
        (transformers.Trainer, {}),
        (piped.StrettoTrainer, {"method": "1f1b(microbatches=2)", "stages": 2}),
    ):
        model, more = build("llama"), {}
        if given == "optimizers":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
            more = {"optimizers": (optimizer, halving(optimizer))}
        elif given == "model_init":
            model, more = None, {"model_init": lambda: build("llama")}
        data = Stream() if given == "stream" else Examples("llama")
        trainer = make(model, arguments(tmp_path, max_steps=3, **options), train_dataset=data, **more, **own)
        for _ in range(1 + (given == "model_init")):  # the second training begins with a new model
            trainer.train()
        results.append(trainer)
    assert_close(*results)


@pytest.mark.slow
def test_shorter_texts_are_padded_for_an_exported_graph(tmp_path):
    data = [dict(Examples("t5")[index]) for index in range(16)]
    texts = [{k: v[: 7 if k == "labels" else 10 - 2 * (n >= 4)] for k, v in row.items()} for n, row in enumerate(data)]
    given = {"train_dataset": texts}
    theirs, ours = both("t5", tmp_path, data=given, train_sampling_strategy="sequential")
    assert ours.pipeline.stages.exported
    assert_close(theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["fully-shard", "local-sgd(every=2)"])
def test_replicas_of_other_kinds(sync, tmp_path):
    ours = piped.StrettoTrainer(
        build("llama"), arguments(tmp_path, per_device_train_batch_size=8), train_dataset=Examples("llama"), stages=2,
        mesh=stretto.Mesh(data=2), sync=sync, method="1f1b(microbatches=2)",
    )  # fmt: skip
    theirs, _ = both("llama", tmp_path, per_device_train_batch_size=8)
    losses = [[entry["loss"] for entry in history(each) if "loss" in entry] for each in (theirs, trained(ours))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6 if sync == "fully-shard" else 0.1)


@pytest.mark.slow
def test_a_stage_without_adapters_has_no_optimizer(tmp_path):
    models = [build("lora", layers=[1]) for _ in range(2)]
    data = {"train_dataset": Examples("lora")}
    theirs = trained(transformers.Trainer(models[0], arguments(tmp_path), **data))
    ours = trained(piped.StrettoTrainer(models[1], arguments(tmp_path), **data, method="1f1b", stages=2))
    assert [optimizer is None for optimizer in ours.pipeline.trainer.optimizers] == [True, False]
    assert_close(theirs, ours)


@pytest.mark.slow
def test_low_precision_with_masters(tmp_path):
    ours = piped.StrettoTrainer(
        build("llama"), arguments(tmp_path), train_dataset=Examples("llama"), stages=2, precision="bf16"
    )  # fmt: skip
    theirs, _ = both("llama", tmp_path)
    for one, other in zip(history(theirs), history(trained(ours)), strict=True):
        assert other == pytest.approx(one, rel=0.05, abs=0.05)
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}


def test_local_methods_train_tied_models(tmp_path):
    """The stage with the loss owns the weight; a head of its own layers is refused with a remedy."""
    model = build("gpt2")
    before = model.lm_head.weight.detach().clone()
    ours = piped.StrettoTrainer(model, arguments(tmp_path, max_steps=2), train_dataset=Examples("gpt2"), method="local")
    ours.train()
    assert len(ours.pipeline.stages) == 2  # unless said otherwise, on one process
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not torch.equal(model.lm_head.weight, before)
    with pytest.raises(
        stretto.UsageError, match="a stage of a model that was traced is one layer: use head='language'"
    ):
        piped.StrettoTrainer(
            build("gpt2"), arguments(tmp_path, max_steps=2), train_dataset=Examples("gpt2"), stages=2,
            method="greedy(share_top=1)",
        ).train()  # fmt: skip
