"""One step's gradients, with mistakes made by hand in plain PyTorch, and what `stretto.diagnose` says of them."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import stretto
from stretto import UsageError
from stretto.analysis.diagnosis.hypotheses import HYPOTHESES
from stretto.cli import main

ROWS, PARTS = 12, 4
TOKENS, WORDS, IGNORED = 6, 11, -100


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(8, 3)).to(dtype)


def examples(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(ROWS, 8, dtype=dtype), torch.randint(0, 3, (ROWS,))


def gradients(model, x, y, loss=functional.cross_entropy):
    model.zero_grad()
    loss(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def weighted(weights, model=None, batch=None, loss=functional.cross_entropy):
    """The gradients of equal parts, each times a weight."""
    model, (x, y) = model or mlp(), batch or examples()
    total = {}
    for weight, a, b in zip(weights, x.chunk(len(weights)), y.chunk(len(weights)), strict=True):
        for name, g in gradients(model, a, b, loss).items():
            total[name] = total.get(name, 0) + weight * g
    return total


def norm(given):
    return math.sqrt(sum(float(g.square().sum()) for g in given.values()))


def clipped(given, bound):
    return {name: g * min(1, bound / (norm(given) + 1e-6)) for name, g in given.items()}


class Tied(nn.Module):
    """Words and their scores share a weight."""

    def __init__(self):
        super().__init__()
        self.words, self.inner, self.norm = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.inner(self.words(tokens)))))


def tokens():
    torch.manual_seed(2)
    x = torch.randint(0, WORDS, (8, TOKENS))
    y = torch.randint(0, WORDS, (8, TOKENS))
    y[:3, 2:] = IGNORED
    return x, y


def token_loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def tied():
    torch.manual_seed(0)
    return Tied().double()


def scaled(factor, *names):
    return {name: g * factor if name in names or not names else g for name, g in weighted([1]).items()}


def said(given, model=None, batch=None, loss=functional.cross_entropy, **options):
    answer = stretto.diagnose(model or mlp(), batch or examples(), loss, given, **options)
    return answer, [each.name for each in answer.hypotheses]


STAGE = ("0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias")
SIMPLE = {
    "scaled": lambda: scaled(1 / PARTS),
    "microbatches-missing": lambda: weighted([0.25, 0.25, 0, 0.25]),
    "microbatches-twice": lambda: weighted([0.25, 0.5, 0.25, 0.25]),
    "frozen": lambda: weighted([1]) | {"1.0.weight": None},
    "decay-coupled": lambda: {n: g + 0.1 * mlp().get_parameter(n).detach() for n, g in weighted([1]).items()},
    "stages-swapped": lambda: (g := weighted([1])) | {"0.0.weight": g["1.0.weight"], "1.0.weight": g["0.0.weight"]},
}


@pytest.mark.parametrize("name", SIMPLE)
def test_a_mistake_is_named(name):
    answer, names = said(SIMPLE[name](), microbatches=PARTS)
    assert (answer.verdict, answer.status, names) == ("explained", 1, [name])
    assert answer.hypotheses[0].residual < 1e-9
    assert all(row.residual < 1e-9 for row in answer.rows)


@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_gradients_are_equal(parts, dtype):
    model, batch = mlp(dtype), examples(dtype)
    given = weighted([1 / parts] * parts, model, batch)
    answer, names = said(given, model, batch, microbatches=PARTS)
    assert (answer.verdict, answer.status, names) == ("equal", 0, [])


def test_the_factor_has_its_name_and_the_stages_are_named():
    answer, _ = said(scaled(1 / PARTS, *STAGE), microbatches=PARTS, cut=["2"])
    assert answer.hypotheses[0].options == {"factor": 0.25, "as": "1 / microbatches"}
    assert answer.sentence.startswith("The gradient of stage 0 of 2 is multiplied by 0.25")
    assert sorted(answer.hypotheses[0].parameters) == sorted(STAGE)


def test_two_mistakes_are_two_entries():
    given = weighted([0, 0.25, 0.25, 0.25]) | {"3.weight": torch.zeros(3, 8, dtype=torch.float64)}
    answer, names = said(given, microbatches=PARTS)
    assert names == ["microbatches-missing", "frozen"]
    assert answer.hypotheses[1].parameters == ["3.weight"]


def test_a_mean_of_means_is_told_apart_from_a_mean_over_tokens():
    given = weighted([1 / PARTS] * PARTS, tied(), tokens(), token_loss)
    answer, names = said(given, tied(), tokens(), token_loss, microbatches=PARTS)
    assert names == ["mean-of-means"]
    assert sum(answer.hypotheses[0].options["shares"]) == pytest.approx(1, abs=1e-5)
    equal, _ = said(gradients(tied(), *tokens(), token_loss), tied(), tokens(), token_loss, microbatches=PARTS)
    assert equal.verdict == "equal"


@pytest.mark.parametrize(("first", "last", "name"), [(0, 1, "tie-missing"), (1, 0, "tie-missing"), (2, 1, "tie-twice")])
def test_uses_of_a_tied_weight(first, last, name):
    untied = tied()
    untied.head.weight = nn.Parameter(untied.words.weight.detach().clone())
    apart = gradients(untied, *tokens(), token_loss)
    given = gradients(tied(), *tokens(), token_loss)
    given["words.weight"] = first * apart["words.weight"] + last * apart["head.weight"]
    answer, names = said(given, tied(), tokens(), token_loss)
    assert names == [name]
    assert answer.hypotheses[0].parameters == ["words.weight"]


def test_a_use_that_is_added_again_after_each_part_is_read_off():
    untied = tied()
    untied.head.weight = nn.Parameter(untied.words.weight.detach().clone())
    total, head = weighted([0.0] * PARTS, tied(), tokens(), token_loss), 0
    x, y = tokens()
    for a, b in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
        share = float((b != IGNORED).sum() / (y != IGNORED).sum())
        for name, g in gradients(untied, a, b, token_loss).items():
            if name == "head.weight":
                head = head + share * g
                total["words.weight"] = total["words.weight"] + head
            else:
                total[name] = total[name] + share * g
    answer, names = said(total, tied(), (x, y), token_loss, microbatches=PARTS)
    assert names == ["tie-twice"]
    assert answer.hypotheses[0].options["times"] == [[1, 4], [1, 3], [1, 2], [1, 1]]


def test_what_looks_the_same_is_said():
    given = gradients(tied(), *tokens(), token_loss)
    given["words.weight"] *= 2
    answer, names = said(given, tied(), tokens(), token_loss)
    assert names == ["tie-twice"]
    assert list(answer.hypotheses[0].same_as) == ["scaled"]
    assert "looks the same as scaled" in answer.sentence


def test_padding_and_shifts():
    x, y = tokens()
    filled = torch.where(y == IGNORED, torch.zeros_like(y), y)
    assert said(gradients(tied(), x, filled, token_loss), tied(), (x, y), token_loss)[1] == ["padding-counted"]
    moved = torch.roll(y, -1, 1)
    moved[:, -1] = IGNORED
    assert said(gradients(tied(), x, moved, token_loss), tied(), (x, y), token_loss)[1] == ["labels-shifted"]


def norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_batch_norms_of_parts_and_in_evaluation():
    batch = examples()
    assert said(gradients(norms(), *batch), norms(), batch, microbatches=PARTS)[0].verdict == "equal"
    given = weighted([0.25] * PARTS, norms())
    assert said(given, norms(), batch, microbatches=PARTS)[1] == ["statistics-by-microbatch"]
    assert said(gradients(norms().eval(), *batch), norms(), batch)[1] == ["evaluation-mode"]


@pytest.mark.parametrize("epsilon", [0, 1e-6])
def test_clipping(epsilon):
    given = weighted([1])
    bound = norm(given) / 3
    right = {name: g * bound / (norm(given) + epsilon) for name, g in given.items()}
    assert said(right, clip=bound)[0].verdict == "equal"
    assert said(given, clip=bound)[1] == ["not-clipped"]
    stages = [{n: g for n, g in given.items() if (n in STAGE) == first} for first in (True, False)]
    answer, names = said(clipped(stages[0], bound) | clipped(stages[1], bound), clip=bound)
    assert names == ["clipped-by-stage"]
    assert answer.hypotheses[0].options["first"][1] == "2.0.weight"
    parts = [weighted([float(i == j) for j in range(2)]) for i in range(2)]
    before = {name: sum(clipped(part, bound)[name] for part in parts) / 2 for name in given}
    assert said(before, clip=bound, replicas=2)[1] == ["clipped-before-averaging"]


def test_a_forward_with_earlier_weights_and_a_backward_with_the_present_ones():
    model, (x, y) = mlp(), examples()
    earlier = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
    present = {name: p.detach().clone() for name, p in model.named_parameters()}
    old = copy.deepcopy(model)
    old.load_state_dict(earlier)
    value = functional.cross_entropy(old(x), y)
    for name, p in old.named_parameters():
        p.data.copy_(present[name])
    value.backward()
    answer, names = said({name: p.grad for name, p in old.named_parameters()}, model, (x, y), earlier=earlier)
    assert names == ["stale"]
    assert "a backward with the present ones" in answer.sentence


def padded_with_0(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def test_a_loss_that_ignores_another_class_and_one_with_fewer_classes_than_words():
    x, y = tokens()
    y[y == 0] = 1
    y[y == IGNORED] = 0
    model = Tied().double()
    right = gradients(model, x, y, padded_with_0)
    assert said(right, model, (x, y), loss=padded_with_0, microbatches=4)[0].verdict == "equal"
    counted = gradients(model, x, y, token_loss)
    assert said(counted, model, (x, y), loss=padded_with_0, microbatches=4)[1] == ["padding-counted"]
    tagger = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 3)).double()
    few = y % 3
    wrong = {
        name: g * (torch.arange(g.numel()).view_as(g) % 2) for name, g in gradients(tagger, x, few, token_loss).items()
    }
    assert said(wrong, tagger, (x, few), loss=token_loss)[0].verdict == "unexplained"


def test_a_few_elements_and_the_first_output_that_differs_are_told():
    model, (x, y) = mlp(), examples()
    given = gradients(model, x, y)
    given["1.0.weight"].view(-1)[-2:] *= 3
    answer = said(given, model, (x, y))[0]
    assert "2 of 64 elements of 1.0.weight (62, 63)" in answer.sentence
    broken = copy.deepcopy(model)
    broken[1][0].weight.data[0] += 1
    outputs = {}
    for name in ("0", "1", "2", "3"):
        broken[int(name)].register_forward_hook(lambda *given, name=name: outputs.update({name: given[-1].detach()}))
    given = gradients(broken, x, y)
    answer = said(given, model, (x, y), activations={f"module.{name}": value for name, value in outputs.items()})[0]
    assert answer.verdict == "unexplained"
    assert "the output of 1 is the first that differs" in answer.sentence
    assert (
        "every output that was given is right"
        in said(given, model, (x, y), activations={"0": outputs["0"]})[0].sentence
    )
    with pytest.raises(UsageError, match=r"the output of 0 in activations is \[3, 8\], and \[12, 8\]"):
        said(given, model, (x, y), activations={"0": outputs["0"][:3]})
    with pytest.raises(UsageError, match="which is no module"):
        said(given, model, (x, y), activations={"nothing": outputs["0"]})
    assert not any(hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}))


def test_stale_weights():
    model, batch = mlp(), examples()
    torch.manual_seed(3)
    earlier = {name: p.detach() + 0.1 * torch.randn_like(p) for name, p in model.named_parameters()}
    old = copy.deepcopy(model)
    old.load_state_dict(earlier)
    assert said(gradients(old, *batch), model, batch, earlier=earlier)[1] == ["stale"]
    old.load_state_dict(dict(model.state_dict()) | {name: earlier[name] for name in STAGE})
    answer, names = said(gradients(old, *batch), model, batch, earlier=earlier)
    assert names == ["stale"]
    assert "before 2.0.weight" in answer.sentence


def test_sums_in_low_precision():
    batch, model = examples(torch.float32), mlp(torch.float32)
    total = {}
    for x, y in zip(batch[0].chunk(PARTS), batch[1].chunk(PARTS), strict=True):
        for name, g in gradients(model, x, y).items():
            total[name] = (total.get(name, 0) + (g / PARTS).bfloat16()).bfloat16()
    given = {name: g.float() for name, g in total.items()}
    answer, names = said(given, model, batch, microbatches=PARTS)
    assert names == ["low-precision"]
    assert answer.hypotheses[0].options == {"dtype": "bf16", "in": "sums"}
    assert said(given, model, batch, microbatches=PARTS, precision=torch.bfloat16)[0].verdict == "equal"


def test_other_draws_of_dropout_are_told_as_noise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 3))
    batch = examples(torch.float32)
    torch.manual_seed(99)
    given = gradients(model, *batch)
    assert said(given, model, batch)[1] == ["dropout-differs"]
    assert said({n: 16 * g for n, g in given.items()}, model, batch, loss_scale=16.0)[1] == [
        "dropout-differs",
        "scaled",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_norm_whose_gradient_is_one_process_s(rank):
    seen = {}
    model = tied()
    model.norm.register_full_backward_hook(lambda module, into, out: seen.update(g=out[0]))
    given = gradients(model, *tokens(), token_loss)
    given["norm.bias"] = seen["g"].tensor_split(2, 1)[rank].flatten(0, 1).sum(0)
    answer, names = said(given, tied(), tokens(), token_loss, tensor=2)
    assert names == ["tensor-sum-missing"]
    assert answer.hypotheses[0].options["rank"] == rank


def make(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def stepped(model, batch, optimizer, change=lambda optimizer: None):
    gradients(model, *batch)
    change(optimizer)
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


UPDATES = {
    None: lambda optimizer: None,
    "decay-twice": lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.2),
    "learning-rate": lambda optimizer: optimizer.param_groups[0].update(lr=0.005),
    "state-lost": lambda optimizer: optimizer.state.clear(),
}


@pytest.mark.parametrize("name", UPDATES)
def test_weights_after_a_step(name, tmp_path):
    model, batch = mlp(), examples()
    optimizer = make(model.parameters())
    stepped(model, batch, optimizer)
    state, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    after = stepped(model, batch, optimizer, UPDATES[name])
    torch.save(state, tmp_path / "state.pt")
    answer, names = said(None, before, batch, after=after, optimizer=make, optimizer_state=tmp_path / "state.pt")
    assert names == ([name] if name else [])
    assert answer.verdict == ("explained" if name else "equal")


def test_none_of_these_says_where_to_look():
    torch.manual_seed(5)
    given = weighted([1]) | {name: torch.randn_like(mlp().get_parameter(name)) for name in STAGE}
    answer, names = said(given)
    assert (answer.verdict, answer.status, names) == ("unexplained", 3, [])
    assert "every gradient up to 1.0.bias differs" in answer.sentence


def test_the_model_and_the_generators_stay_as_they_are():
    model, batch = norms(), examples()
    given = gradients(model, *batch)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    said({name: g * 3 for name, g in given.items()}, model, batch, microbatches=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert model.training


def test_every_hypothesis_has_a_picture_of_two_lines():
    assert len({each.name for each in HYPOTHESES}) >= 22
    for each in HYPOTHESES:
        assert each.picture.startswith("plain ")
        assert len(each.picture.splitlines()) == 2


OWN = """
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
def batch():
    torch.manual_seed(1)
    return torch.randn(12, 8), torch.randint(0, 3, (12,))
"""
WORDS_ = ["diagnose", "--model", "own.py:build", "--batch", "own.py:batch", "--loss", "cross_entropy", "--gradients"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    scope = {}
    exec(OWN, scope)
    return gradients(scope["build"](), *scope["batch"]())


def stored(given, kind):
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import save

    if kind == "folder":
        save(given, checkpoint_id="saved", no_dist=True)
        return "saved"
    if kind == "index":
        save_file({"0.weight": given["0.weight"]}, "a.safetensors")
        save_file({name: g for name, g in given.items() if name != "0.weight"}, "b.safetensors")
        names = {name: "a.safetensors" if name == "0.weight" else "b.safetensors" for name in given}
        Path("model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        return "."
    save_file(given, "given.safetensors") if kind == "safetensors" else torch.save(given, "given.pt")
    return f"given.{kind}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "pt", "folder", "index"])
def test_the_command_reads_every_kind_of_file(own, kind, capsys):
    file = stored({name: g * 2 for name, g in own.items()}, kind)
    assert main([*WORDS_, file, "--replicas", "2", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] == "explained"
    assert content["hypotheses"][0]["name"] == "scaled"
    assert content["hypotheses"][0]["options"] == {"factor": 2.0, "as": "replicas"}
    assert content["hypotheses"][0]["parameters"] == list(own)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "stages.0."])
def test_names_are_matched_without_what_wrappers_add(own, prefix, capsys):
    file = stored({prefix + name: g for name, g in own.items()}, "safetensors")
    assert main([*WORDS_, file]) == 0
    out = capsys.readouterr().out
    assert "The gradients are those of plain training" in out
    assert f"{prefix}0.weight is 0.weight" in out or f"{prefix}0.bias is 0.bias" in out


def test_the_command_in_words(own, capsys):
    assert main([*WORDS_, stored({name: g / 4 for name, g in own.items()}, "pt"), "--microbatches", "4"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("The gradient of every parameter is multiplied by 0.25, which is 1 / microbatches.")
    assert "not looked for: " in out


def test_the_page_loads_nothing_and_shows_layers_and_pictures(own):
    given = stored({name: g / 4 if name.startswith("0") else g for name, g in own.items()}, "pt")
    assert main([*WORDS_, given, "--microbatches", "4", "--page", "out/page.html"]) == 1
    page = Path("out/page.html").read_text()
    assert page.count('<div class="told"') == 1
    assert page.count('<div class="right"') == 1
    assert "(g0 + g1 + g2 + g3) / 4 / 4" in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_method_says_its_microbatches(own, capsys):
    file = stored({name: g / 4 for name, g in own.items()}, "pt")
    assert main([*WORDS_, file, "--method", "1f1b(microbatches=4)", "--stages", "2"]) == 1
    assert "which is 1 / microbatches" in capsys.readouterr().out
    assert main([*WORDS_, file, "--method", "1f1b(microbatches=4)", "--microbatches", "2"]) == 2
    assert "contradict each other" in capsys.readouterr().err
    assert main([*WORDS_, file, "--method", "2f2b"]) == 2


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["diagnose"], "diagnose needs a model"),
        ([*WORDS_, "none.pt"], "there is no none.pt"),
        ([*WORDS_, "given.pt", "--microbatches", "0"], "microbatches=0"),
        ([*WORDS_, "given.pt", "--microbatches", "99"], "12 examples cannot be cut into 99 parts"),
        ([*WORDS_, "given.pt", "--cut", "blocks.7"], "cut='blocks.7' is no module"),
        ([*WORDS_, "given.pt", "--precision", "bf8"], "precision 'bf8'"),
        ([*WORDS_, "other.pt"], "which is no parameter of the model"),
        ([*WORDS_, "shape.pt"], "is [2, 2], and 0.weight [8, 8]"),
        ([*WORDS_, "object.pt"], "holds more than tensors"),
        ([*WORDS_[:-3], "--gradients", "given.pt", "--loss", "mse_loss"], "the loss got output [12, 3]"),
        ([*WORDS_[:-1], "--after", "given.pt"], "give --optimizer"),
    ],
)
def test_mistakes_of_use(own, words, answer, capsys):
    torch.save(own, "given.pt")
    torch.save({"nothing.weight": own["0.weight"]}, "other.pt")
    torch.save({"0.weight": torch.zeros(2, 2)}, "shape.pt")
    torch.save(torch.nn.Linear(2, 2), "object.pt")
    assert main(words) == 2
    assert answer in capsys.readouterr().err


def test_calls_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="the model is str"):
        stretto.diagnose("model", examples(), functional.cross_entropy, {})
    with pytest.raises(UsageError, match="the batch is a pair"):
        stretto.diagnose(mlp(), examples()[0], functional.cross_entropy, {})
    with pytest.raises(UsageError, match="the model raised"):
        stretto.diagnose(mlp(), (torch.randn(4, 3), examples()[1][:4]), functional.cross_entropy, weighted([1]))
