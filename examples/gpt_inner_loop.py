"""The meta-gradient through 2 to 32 AdamW steps of a small GPT, with one step's graph at a time.

    python -m examples.gpt_inner_loop --steps 8

The inner loop trains a GPT of 10.9 M parameters on tokens from four sources. The outer loss is the
loss on new sequences of the first source. The meta-parameters are the sources' weights and the
GPT's initial parameters. The forward pass keeps only a few states (`maml.Problem.snapshots`). The
backward pass computes each step again, attention included.
"""

import argparse
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import maml

SOURCES, RATE = 4, 1e-3
Params = dict[str, Tensor]


class Size(NamedTuple):
    """The sizes of a GPT and of a batch of tokens."""

    width: int = 384
    layers: int = 6
    heads: int = 6
    vocabulary: int = 256
    length: int = 64
    batch: int = 4


TINY = Size(width=8, layers=2, heads=2, vocabulary=11, length=6, batch=4)


class GPT(nn.Module):
    """A decoder of tokens: causal attention and two layers a block, each after a norm, as GPT-2."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu",
                batch_first=True, norm_first=True,
            )
            for _ in range(size.layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[B, L]`` to logits ``[B, L, vocabulary]`` of the next one."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


def draw(size: Size, steps: int, seed: int = 0) -> Params:
    """Return one task: tokens [1, T, B, L + 1], source [1, T, B], query [1, B, L + 1]."""
    generator = torch.Generator().manual_seed(seed)

    def sequences(source: Tensor) -> Tensor:
        # Each token has three possible successors, which depend on the source.
        tokens = [torch.randint(size.vocabulary, source.shape, generator=generator)]
        for _ in range(size.length):
            noise = torch.randint(3, source.shape, generator=generator)
            tokens.append((tokens[-1] * (source + 2) + 5 * source + noise) % size.vocabulary)
        return torch.stack(tokens, -1)

    source = torch.randint(SOURCES, (1, steps, size.batch), generator=generator)
    query = torch.zeros(1, size.batch, dtype=torch.int64)
    return {"tokens": sequences(source), "source": source, "query": sequences(query)}


def begin(net: GPT) -> Params:
    """Return the meta-parameters: a logit for each source's weight, and the GPT's own."""
    own = {name: parameter.detach() for name, parameter in net.named_parameters()}
    return own | {"of sources": own["norm.weight"].new_zeros(SOURCES)}


def losses(net: GPT, params: Params, tokens: Tensor) -> Tensor:
    """Return the mean loss of each sequence, ``[B]``."""
    own = {name: params[name] for name, _ in net.named_parameters()}
    logits = functional_call(net, own, (tokens[:, :-1],)).transpose(1, 2)
    return F.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


def support(net: GPT, params: Params, task: Params, step: int) -> tuple[Tensor, Tensor]:
    """Return the inner loss of a step, the weighted mean over its batch, and each loss."""
    each = losses(net, params, task["tokens"][step])
    weights = SOURCES * params["of sources"].softmax(0)
    return (weights[task["source"][step]] * each).mean(), each


def query(net: GPT, params: Params, task: Params, step: int) -> tuple[Tensor, Tensor]:
    """Return the outer loss, and each sequence's loss."""
    each = losses(net, params, task["query"])
    return each.mean(), each


def problem(net: GPT, steps: int, meta_params: Params) -> maml.Problem:
    """Return the inner problem, which keeps a sixth of its ``steps`` states."""
    return maml.Problem(
        start={n: t for n, t in meta_params.items() if n != "of sources"},
        support=partial(support, net), query=partial(query, net),
        fixed={"of sources": meta_params["of sources"]},
        optimizer="adamw", lr=RATE, steps=steps, snapshots=max(steps // 6, 1),
    )  # fmt: skip


def main() -> None:
    """Learn the weight of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="AdamW steps of the inner loop")
    parser.add_argument("--tiny", action="store_true", help="a GPT of 2,000 parameters")
    options = parser.parse_args()
    net = GPT(size := TINY if options.tiny else Size())
    meta_params = begin(net)
    state = partial(problem, net, options.steps)
    for iteration in range(3):
        found = maml.meta_gradient(state, meta_params, draw(size, options.steps, iteration))
        meta_params["of sources"] -= 0.5 * found.gradients["of sources"].sign()
        shares = [f"{share:.2f}" for share in meta_params["of sources"].softmax(0)]
        print(f"outer loss {found.losses.item():.3f}, shares of the sources {' '.join(shares)}")


if __name__ == "__main__":
    main()
