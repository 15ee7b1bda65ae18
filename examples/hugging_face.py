"""Train a small GPT-2 of Hugging Face's on English text by pipelined backpropagation, and save it as its own kind.

python examples/hugging_face.py, or on three processes: torchrun --nproc-per-node 3 examples/hugging_face.py
"""

from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import stretto
from stretto.data import load

torch.manual_seed(0)
torch.set_num_threads(1)
text = load("pydoc", context=32)  # bytes of CPython's help topics; y is x one byte further on

config = GPT2Config(vocab_size=text.num_classes, n_embd=48, n_layer=3, n_head=4, n_positions=32,
                    initializer_range=0.06, bos_token_id=0, eos_token_id=0)  # fmt: skip
model = GPT2LMHeadModel(config)
stages = stretto.split(model, 3, example=text.train.x[:16])  # embedding, blocks and head are found; weights stay tied
trainer = stretto.Trainer(
    stages,
    loss=stretto.losses.token_cross_entropy,  # over all tokens; a target of -100 does not count
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95)),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50),
    clip=0.5,
    method="pb",
)
if trainer.rank == 0:
    print(stages.explanation)
for step in range(1, 201):
    batch = torch.randint(0, len(text.train.x), (16,), generator=torch.Generator().manual_seed(step))
    trainer.step(text.train.x[batch], text.train.y[batch])
    if step % 50 == 0:
        result = trainer.evaluate([(text.test.x[:256], text.test.y[:256])])
        if trainer.rank == 0:
            print(f"step {step}: accuracy {result['accuracy']:.1%}   loss {result['loss']:.3f}")
trainer.flush()

gathered = trainer.gather()
if gathered is not None:  # on rank 0, where there are several processes
    model.load_state_dict(stages.model_state(gathered))
    model.eval()
    with TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = GPT2LMHeadModel.from_pretrained(folder)
        x = text.test.x[:4]
        print("loaded again, it says the same:", torch.equal(loaded(x).logits, model(x).logits))
